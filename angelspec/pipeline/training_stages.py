"""Stages that train: one per training stage of the recipe, each starting from the best weights before it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from angelspec.core.errors import CheckpointError, Interrupted
from angelspec.core.files import expanded
from angelspec.core.fingerprint import fingerprint
from angelspec.core.recipe import TARGET_LAYER, Recipe, TrainingSection
from angelspec.drafters.checkpoint import LoadedDrafter
from angelspec.drafters.initial_weights import load_start, load_target_layer
from angelspec.pipeline.data_stages import packed_rows
from angelspec.pipeline.estimates import amounts
from angelspec.pipeline.stage import Estimate, Stage, StageOutput, Work
from angelspec.training.distributed import announced_ranks
from angelspec.training.families import WITHOUT_EFFECT, what_training_reads
from angelspec.training.metrics import read_metrics
from angelspec.training.run import make_features, train_drafter, trained_weights

WEIGHTS = "drafter.safetensors"
"""The stage's best weights, in float32 and our key names."""


def section_of(recipe: Recipe, index: int) -> TrainingSection:
    """The training section of one stage alone, with row order and anchors of its own."""
    training = recipe.training
    return training.model_copy(update={"stages": (training.stages[index],), "seed": training.seed + index})


def stage_name(recipe: Recipe, index: int) -> str:
    """The pipeline stage of a training stage."""
    return f"train-{recipe.training.stages[index].name}"


def training_stages(recipe: Recipe) -> list[Stage]:
    """One pipeline stage per training stage."""
    return [_training_stage(recipe, index) for index in range(len(recipe.training.stages))]


def _training_stage(recipe: Recipe, index: int) -> Stage:
    previous = () if index == 0 else (stage_name(recipe, index - 1),)

    def inputs(recipe: Recipe) -> Mapping[str, Any]:
        start = recipe.drafter.initial_checkpoint if index == 0 else None
        config = recipe.drafter_config()
        training = what_training_reads(section_of(recipe, index), config)
        rows = recipe.training.rows_per_step * announced_ranks() // recipe.training.sequence_parallel
        initial = None
        if start is not None:
            initial = start if start == TARGET_LAYER else _tensors_digest(_loaded_start(recipe).drafter.state_dict())
        return {
            "drafter": config.model_dump(mode="json"),
            "target_dtype": recipe.target.dtype,
            "training": {
                **{key: value for key, value in training.items() if key not in {*WITHOUT_EFFECT, "stages"}},
                "rows_per_step": rows,
            },
            "stage": training["stages"][0],
            "initial": initial,
        }

    def run(work: Work) -> StageOutput:
        return _run(work, index)

    stage = recipe.training.stages[index]
    length = f"{stage.epochs:g} epochs" if stage.steps is None else f"{stage.steps} steps"
    terms = {
        key: value for key, value in stage.objective.model_dump().items() if isinstance(value, float) and value > 0
    }
    named = ", ".join(key for key in terms if key in ("ce", "kl", "tv", "l1", "lk", "end_to_end_tv", "confidence"))

    def estimate(recipe: Recipe) -> Estimate:
        sizes = amounts(recipe)
        tokens = None
        if sizes.row_tokens is not None and stage.epochs is not None:
            tokens = int(sizes.row_tokens * stage.epochs)
        held = sizes.feature_bytes if recipe.training.features == "memory" else 0
        return Estimate(
            does=f"{length} of {named} ({stage.objective.weights_in_words}), "
            f"{sizes.drafter_parameters / 1e6:.1f}M parameters, features {recipe.training.features}",
            tokens=tokens,
            disk_bytes=sizes.drafter_parameters * 12 * (recipe.training.keep_checkpoints + 1)
            + ((sizes.feature_bytes or 0) if recipe.training.features == "disk" else 0),
            memory_bytes=None if held is None else sizes.training_memory_bytes + sizes.target_bytes + held,
        )

    return Stage(
        name=stage_name(recipe, index),
        does=f"train the drafter: {length} of {named}",
        needs=("target", "pack", *previous),
        inputs=inputs,
        run=run,
        estimate=estimate,
        by_all_ranks=True,
    )


def _run(work: Work, index: int) -> StageOutput:
    recipe = work.recipe
    section, config = section_of(recipe, index), recipe.drafter_config()
    target = work.target(recipe.target.dtype)
    rows = packed_rows(work)
    if section.workloads is not None:
        rows = {name: part.only(workloads=section.workloads) for name, part in rows.items()}
    initial, before = None, None
    if index > 0:
        before = work.before[stage_name(recipe, index - 1)]
        initial = load_file(before.folder / WEIGHTS)
    elif recipe.drafter.initial_checkpoint is not None:
        initial = _initial_weights(work)
    features = work.session.features(
        key=fingerprint(
            [work.before["pack"].output.digest, list(config.target_layer_ids), section.features, recipe.target.dtype]
        ),
        make=lambda: _features(work, section, config.target_layer_ids, rows),
    )
    with work.progress.meter(stage_name(recipe, index), total=None, unit="steps") as meter:
        result = train_drafter(
            section,
            config,
            target=target,
            train_rows=rows["train"],
            held_out_rows=rows["held-out"],
            folder=work.folder,
            initial=initial,
            features=features,
            held_out_seed=recipe.training.seed,
            ranks=work.session.ranks,
            report=lambda done, total, note: meter(done, total=total, note=note),
        )
    if result.status == "interrupted":
        raise Interrupted(f"training stopped at step {result.step}; its checkpoint is saved")
    weights, _ = trained_weights(work.folder, config)
    length = result.best_accepted_length
    chosen = section.stages[0].name
    if before is not None and (before.output.summary["held_out_accepted_length"] or 0.0) > (length or 0.0):
        # The end-to-end stage may lose on the held-out rows; the run keeps the best weights it has had.
        weights, length = initial, before.output.summary["held_out_accepted_length"]
        chosen = before.output.summary["chosen_from"]
        work.progress.say(f"  no gain over '{chosen}': its weights are kept")
    elif before is None and initial is not None and (start := _length_at_start(work.folder)) > (length or 0.0):
        work.progress.say(
            f"  warning: the drafter that it started from has a held-out accepted length of {start:.3f} on these rows, "
            f"the trained one {length:.3f}: lower training.stages.{chosen}.learning_rate_scale, or train longer"
        )
    if work.session.ranks.is_first:
        save_file({name: tensor.contiguous() for name, tensor in weights.items()}, work.folder / WEIGHTS)
    trained = rows["train"].summary()
    summary = {
        "steps": result.step,
        "best_step": result.best_step,
        "held_out_accepted_length": length,
        "chosen_from": chosen,
        "skipped_steps": result.skipped_steps,
        "supervised_positions": result.supervised_positions,
        "target_tokens": trained["supervised_tokens"],
        "workloads": trained["documents_by_workload"],
    }
    work.progress.say(
        f"  {result.step} steps; held-out accepted length {length:.3f} (weights of '{chosen}')"
        + (f"; {result.skipped_steps} non-finite steps skipped" if result.skipped_steps else "")
    )
    return StageOutput(_tensors_digest(weights), summary)


def _length_at_start(folder: Path) -> float:
    """Held-out accepted length before the first step; 0: it was not measured."""
    measured = (event for event in read_metrics(folder) if event["kind"] == "held_out" and event["step"] == 0)
    return next((event["accepted_length"] for event in measured), 0.0)


def _features(
    work: Work, section: TrainingSection, layer_ids: tuple[int, ...], rows: Mapping[str, Any]
) -> dict[str, Any]:
    target = work.target(work.recipe.target.dtype)
    captured = fingerprint([list(layer_ids), work.recipe.target.dtype])
    made = {}
    for name, packed in rows.items():
        with work.progress.meter(f"features of {name} rows", total=len(packed), unit="rows") as meter:
            made[name] = make_features(
                section,
                target,
                packed,
                layer_ids=layer_ids,
                folder=work.before["pack"].folder / "features" / captured / name,
                ranks=work.session.ranks,
                progress=lambda done, total, meter=meter: meter(done, total=total),
            )
    return made


def _loaded_start(recipe: Recipe) -> LoadedDrafter:
    start = expanded(recipe.drafter.initial_checkpoint)
    return load_start(start, recipe.drafter_config(), geometry=recipe.target.geometry)


def _initial_weights(work: Work) -> dict[str, Tensor]:
    """What the recipe starts from, if that is a drafter of this target; another mode's is welcome, and named."""
    recipe, start = work.recipe, work.recipe.drafter.initial_checkpoint
    if start == TARGET_LAYER:
        return load_target_layer(work.target(recipe.target.dtype).folder, recipe.drafter_config())
    found = _loaded_start(recipe)
    if (manifest := found.manifest) is not None:
        ours, theirs = work.before["target"].output.digest, manifest.target.digest
        if ours != theirs:
            raise CheckpointError(
                f"the drafter in {start} was trained for {manifest.target.name} of {manifest.target.source} "
                f"({theirs[:16]}), not for {recipe.target.source} ({ours[:16]})",
                mend="set target.* to that target, or drop drafter.initial_checkpoint",
            )
        if manifest.mode != recipe.mode:
            work.progress.say(f"  starts from a drafter of {manifest.mode} answers; this one is for {recipe.mode}")
    return dict(found.drafter.state_dict())


def _tensors_digest(tensors: Mapping[str, Tensor]) -> str:
    content = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        content.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        content.update(tensor.detach().cpu().contiguous().view(-1).numpy().tobytes())
    return content.hexdigest()[:32]
