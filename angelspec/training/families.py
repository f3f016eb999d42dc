"""Which step and which held-out measure train a drafter: the one place of training that tells the families apart."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from angelspec.core.drafter_config import DrafterConfig
from angelspec.core.recipe import TrainingSection
from angelspec.drafters.families import Drafter
from angelspec.training.block_held_out import BlockHeldOut
from angelspec.training.block_step import BlockStep
from angelspec.training.distributed import Ranks
from angelspec.training.features import FeatureSource
from angelspec.training.held_out import HeldOutAcceptance
from angelspec.training.mtp_held_out import MtpHeldOut
from angelspec.training.mtp_step import MtpStep
from angelspec.training.steps import TrainingStep

if TYPE_CHECKING:
    from angelspec.data.dataset import PackedRows

WITHOUT_EFFECT = frozenset(
    {
        "tracker", "log_every", "save_every", "keep_checkpoints", "sharding", "sequence_parallel", "recompute_depths",
    }
)  # fmt: skip
"""Training values that change no weight, or its last bits only."""
_ONCE_NAMED = {"max_nonfinite_steps": 5, "rows_per_micro_batch": 2}
"""Values without effect that fingerprints have always held: they hold the default, whatever the recipe says, so that
finished trainings keep their names."""
_ONLY_BLOCKS = ("anchors_per_row",)
_ONLY_MTP = ("on_policy", "recompute_depths", "sequence_parallel")


def training_step(
    drafter: Drafter,
    *,
    rows: PackedRows,
    features: FeatureSource,
    embedding_VD: Tensor,
    head_VD: Tensor,
    anchors_per_row: int,
    on_policy: bool,
    recompute_depths: bool,
    seed: int,
    compute_dtype: torch.dtype,
    timed: bool,
    ranks: Ranks | None = None,
) -> TrainingStep:
    """The forward step of a drafter's family; see ``BlockStep`` and ``MtpStep`` for the arguments."""
    given = {
        "rows": rows, "features": features, "embedding_VD": embedding_VD, "head_VD": head_VD,
        "compute_dtype": compute_dtype, "timed": timed,
    }  # fmt: skip
    if drafter.config.family == "mtp":
        return MtpStep(drafter, **given, on_policy=on_policy, recompute=recompute_depths, ranks=ranks)
    return BlockStep(drafter, **given, anchors_per_row=anchors_per_row, seed=seed)


def held_out_measure(
    drafter: Drafter,
    *,
    rows: PackedRows,
    features: FeatureSource,
    embedding_VD: Tensor,
    head_VD: Tensor,
    num_anchors: int,
    seed: int,
    ranks: Ranks,
) -> HeldOutAcceptance:
    """The held-out measure of a drafter's family; see ``HeldOutAcceptance``."""
    family = MtpHeldOut if drafter.config.family == "mtp" else BlockHeldOut
    return family(
        drafter,
        rows=rows,
        features=features,
        embedding_VD=embedding_VD,
        head_VD=head_VD,
        num_anchors=num_anchors,
        seed=seed,
        ranks=ranks,
    )


def what_training_reads(section: TrainingSection, config: DrafterConfig) -> dict[str, Any]:
    """A training section as plain data for fingerprints, without the values that this drafter's family never reads.

    A value that another family gained must not rerun a finished training.
    """
    unread = _ONLY_BLOCKS if config.family == "mtp" else _ONLY_MTP
    described = section.model_dump(mode="json", exclude=set(unread))
    if described["features"] == "disk":  # the same numbers as in memory
        described["features"] = "memory"
    for stage in described["stages"]:
        if stage["objective"]["slot_weights"] is None:
            del stage["objective"]["slot_weights"]
    return described | _ONCE_NAMED
