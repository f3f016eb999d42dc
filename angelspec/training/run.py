"""From a recipe's sections to a running loop: features, step, held-out measure, ranks and identity put together."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from angelspec.core.drafter_config import DrafterConfig
from angelspec.core.errors import CheckpointError
from angelspec.core.fingerprint import fingerprint
from angelspec.core.recipe import TrainingSection
from angelspec.drafters.families import Drafter, build_drafter
from angelspec.training.checkpoints import Checkpoints
from angelspec.training.distributed import Ranks, connect, equalise, shard, share_rows
from angelspec.training.families import WITHOUT_EFFECT, held_out_measure, training_step, what_training_reads
from angelspec.training.features import (
    FeatureSource,
    MemoryFeatures,
    OnlineFeatures,
    Progress,
    row_fingerprints,
    write_shards,
)
from angelspec.training.loop import Report, TrainingResult, train
from angelspec.training.precision import product_dtype

if TYPE_CHECKING:
    from angelspec.data.dataset import PackedRows
    from angelspec.targets.target import Target


def make_features(
    section: TrainingSection,
    target: Target,
    rows: PackedRows,
    *,
    layer_ids: tuple[int, ...],
    folder: Path,
    ranks: Ranks | None = None,
    progress: Progress | None = None,
) -> FeatureSource:
    """The feature source that ``training.features`` names; features are held and stored in the target's dtype."""
    if section.features == "online":
        return OnlineFeatures(target, rows, layer_ids=layer_ids)
    if section.features == "memory":
        return MemoryFeatures(target, rows, layer_ids=layer_ids, dtype=target.dtype, progress=progress)
    return write_shards(
        target,
        rows,
        layer_ids=layer_ids,
        folder=folder,
        dtype=target.dtype,
        ranks=ranks,
        progress=progress,
    )


def run_identity(
    section: TrainingSection,
    config: DrafterConfig,
    *,
    target_digest: str,
    train_rows: PackedRows,
    held_out_rows: PackedRows,
    initial: dict[str, torch.Tensor] | None = None,
) -> str:
    """Name of everything the weights of a run depend on. What only changes speed or reporting is left out."""
    described = what_training_reads(section, config)
    # the loop compares the rows of a step over all ranks
    described = {key: value for key, value in described.items() if key not in {*WITHOUT_EFFECT, "rows_per_step"}}
    start: Any = None
    if initial is not None:
        start = {name: [list(t.shape), float(t.double().sum())] for name, t in sorted(initial.items())}
    return fingerprint(
        {
            "training": described,
            "drafter": config.model_dump(mode="json"),
            "target": target_digest,
            "train": [row_fingerprints(train_rows), _mask_digest(train_rows)],
            "held_out": [row_fingerprints(held_out_rows), _mask_digest(held_out_rows)],
            "start": start,
        }
    )


def _mask_digest(rows: PackedRows) -> str:
    return hashlib.sha256(rows.loss_mask_RT.contiguous().numpy().tobytes()).hexdigest()[:16]


def new_drafter(
    config: DrafterConfig,
    *,
    seed: int,
    initial: dict[str, torch.Tensor] | None = None,
    device: str = "cpu",
) -> Drafter:
    """Fresh weights, or those of an existing drafter of the same configuration, in float32.

    Raises:
        CheckpointError: the given weights don't fit; by name.
    """
    drafter = build_drafter(config)
    drafter.initialise(seed=seed)
    if initial is not None:
        mine = drafter.state_dict()
        wrong = sorted(set(mine) ^ set(initial)) + sorted(
            key for key in set(mine) & set(initial) if mine[key].shape != initial[key].shape
        )
        if wrong:
            raise CheckpointError(
                f"the initial checkpoint does not fit this drafter: {', '.join(wrong[:8])}",
                mend="set drafter.* to the checkpoint's configuration, or drop drafter.initial_checkpoint",
            )
        drafter.load_state_dict(initial)
    return drafter.float().to(device)


def train_drafter(
    section: TrainingSection,
    config: DrafterConfig,
    *,
    target: Target,
    train_rows: PackedRows,
    held_out_rows: PackedRows,
    folder: Path,
    initial: dict[str, torch.Tensor] | None = None,
    features: Mapping[str, FeatureSource] | None = None,
    held_out_seed: int | None = None,
    ranks: Ranks | None = None,
    report: Report | None = None,
    feature_report: Progress | None = None,
) -> TrainingResult:
    """Train a drafter on packed rows, or go on where an earlier call in the same folder stopped.

    Args:
        section: the recipe's training section.
        config: the drafter.
        target: frozen; gives features, embedding and head.
        folder: of the run; see ``loop.train``. Features on disk go into ``folder/features``.
        initial: weights to start from.
        features: of ``train`` and ``held-out`` rows, where they were made before (see ``make_features``); None: as
            ``section.features`` says.
        held_out_seed: of the held-out anchors; None: ``section.seed``. Runs that are compared need the same.
        ranks: this process among several; None: as the launcher's environment says.
        report: called after every step.
        feature_report: called while features are computed.

    Raises:
        TrainingError, CheckpointError, DataError, MissingRequirement: see ``loop.train`` and ``features``.
    """
    ranks = connect(str(target.device)) if ranks is None else ranks
    ranks = share_rows(ranks, section.sequence_parallel)
    drafter = new_drafter(config, seed=section.seed, initial=initial, device=str(target.device))
    equalise(drafter, ranks)
    if section.sharding == "shard":
        shard(drafter, ranks)
    sources = features or {
        name: make_features(
            section,
            target,
            rows,
            layer_ids=config.target_layer_ids,
            folder=folder / "features" / name,
            ranks=ranks,
            progress=feature_report,
        )
        for name, rows in (("train", train_rows), ("held-out", held_out_rows))
    }
    embedding_VD = target.embedding_VD.detach()
    head_VD = target.head_VD.detach()
    step = training_step(
        drafter,
        rows=train_rows,
        features=sources["train"],
        embedding_VD=embedding_VD,
        head_VD=head_VD.to(product_dtype(section, target.device)),
        anchors_per_row=section.anchors_per_row,
        on_policy=section.on_policy,
        recompute_depths=section.recompute_depths,
        ranks=ranks,
        seed=section.seed,
        compute_dtype=product_dtype(section, target.device),
        timed=target.device.type == "cpu",
    )
    evaluate = held_out_measure(
        drafter,
        rows=held_out_rows,
        features=sources["held-out"],
        embedding_VD=embedding_VD,
        head_VD=head_VD.float() if head_VD.device.type == "cpu" else head_VD,
        num_anchors=section.held_out_anchors,
        seed=section.seed if held_out_seed is None else held_out_seed,
        ranks=ranks,
    )
    run_id = run_identity(
        section,
        config,
        target_digest=target.digest,
        train_rows=train_rows,
        held_out_rows=held_out_rows,
        initial=initial,
    )
    return train(
        section,
        model=drafter,
        step=step,
        evaluate=evaluate,
        folder=folder,
        run_id=run_id,
        ranks=ranks,
        report=report,
    )


def trained_weights(
    folder: Path, config: DrafterConfig, *, which: Literal["best", "last"] = "best"
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Weights of a run's best (or last) checkpoint, and its record.

    Raises:
        CheckpointError: there is no checkpoint, or it can't be read.
    """
    store = Checkpoints(folder / "checkpoints", run_id=None)
    snapshot = (store.best() if which == "best" else None) or store.latest()
    if snapshot is None:
        raise CheckpointError(f"{store.folder} holds no checkpoint yet", mend="train first")
    model = build_drafter(config)
    tensors = {"model": dict(model.state_dict())}
    store.load(snapshot, tensors)
    return tensors["model"], asdict(snapshot)
