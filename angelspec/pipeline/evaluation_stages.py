"""The stage that measures the trained drafter by decoding with it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from angelspec.core.fingerprint import fingerprint
from angelspec.core.recipe import Recipe
from angelspec.core.recipe_files import run_command
from angelspec.data.conversation_files import read_conversations
from angelspec.decoding.proposers import drafter_proposer
from angelspec.drafters.experts import keeps_float32
from angelspec.drafters.families import Drafter, build_drafter
from angelspec.evaluation.report import REPORT_FILE
from angelspec.pipeline.data_stages import rendering_inputs
from angelspec.pipeline.estimates import amounts
from angelspec.pipeline.measuring import (
    drafter_description,
    lookup_description,
    lookup_proposer,
    measure_settings,
    measured_report,
    save_report,
    suites_of,
)
from angelspec.pipeline.requirements import target_bytes
from angelspec.pipeline.stage import Estimate, Stage, StageOutput, Work
from angelspec.pipeline.training_stages import WEIGHTS, stage_name
from angelspec.training.metrics import FILE_NAME as METRICS


def _last_training(recipe: Recipe) -> str:
    return stage_name(recipe, len(recipe.training.stages) - 1)


def trained_drafter(work: Work) -> Drafter:
    """The run's drafter as it is exported."""
    return exported_drafter(work.recipe, work.before[_last_training(work.recipe)].folder / WEIGHTS)


def exported_drafter(recipe: Recipe, path: Path) -> Drafter:
    """The recipe's drafter with these weights, rounded as they are exported."""
    drafter = build_drafter(recipe.drafter_config())
    weights = load_file(path)
    dtype = getattr(torch, recipe.export.dtype)
    drafter.load_state_dict(
        {name: tensor if keeps_float32(name) else tensor.to(dtype).float() for name, tensor in weights.items()}
    )
    return drafter.eval().requires_grad_(False)


def _run_evaluate(work: Work) -> StageOutput:
    recipe = work.recipe
    work.session.release_features()
    target = work.target(recipe.evaluation.dtype)
    suites = suites_of(
        read_conversations(work.before["prompts"].folder / "evaluation.jsonl"),
        target,
        recipe,
        names=[source.name for source in recipe.data.evaluation],
        limit=recipe.evaluation.prompts_per_suite,
        quarantine=work.folder / "quarantine.jsonl",
        say=work.progress.say,
    )
    lookup = lookup_proposer(recipe)
    drafter = drafter_proposer(
        trained_drafter(work), target=target, name=recipe.name, shortlist=recipe.evaluation.shortlist
    )
    report = measured_report(
        target,
        [drafter, lookup],
        suites,
        recipe=recipe,
        settings=measure_settings(recipe),
        exact_target=lambda: work.target("float32"),
        folder=work.folder,
        progress=work.progress,
        title=recipe.name,
        commands=(run_command(recipe),),
        descriptions={
            drafter.name: f"{drafter_description(recipe.drafter_config())}, "
            f"{amounts(recipe).drafter_parameters / 1e6:.1f}M parameters, {recipe.export.dtype}",
            lookup.name: lookup_description(recipe),
        },
    )
    save_report(report, work.folder, metrics=training_logs(work), consecutive=True)
    counts = [result.model_dump(mode="json", exclude={"seconds", "total_seconds"}) for result in report.results]
    exact = [result.model_dump(mode="json") for result in report.exactness]
    return StageOutput(
        fingerprint([counts, exact]), {"report": REPORT_FILE, "exact": all(r.exact for r in report.exactness)}
    )


def training_logs(work: Work) -> dict[str, Path]:
    """The logs of the run's training, by stage."""
    return {
        stage.name: work.before[stage_name(work.recipe, index)].folder / METRICS
        for index, stage in enumerate(work.recipe.training.stages)
    }


def _evaluate_inputs(recipe: Recipe) -> Mapping[str, Any]:
    return {
        "evaluation": recipe.evaluation.model_dump(mode="json"),
        **rendering_inputs(recipe),
        "max_prompt_tokens": recipe.data.max_prompt_tokens,
        "max_bad_fraction": recipe.data.max_bad_fraction,
        "export_dtype": recipe.export.dtype,
        "name": recipe.name,
    }


def _precisions(recipe: Recipe) -> set[str]:
    """Of the targets that a run holds once it has measured: nothing that it loaded is let go."""
    answered = {recipe.rollout.dtype} if recipe.data.responses == "rollout" else set()
    compared = {"float32"} if recipe.evaluation.exactness_prompts else set()
    return {recipe.target.dtype, recipe.evaluation.dtype, *answered, *compared}


def evaluate_stage(recipe: Recipe) -> Stage:
    """Measure by speculative decoding."""
    return Stage(
        name="evaluate",
        does="measure acceptance by speculative decoding, beside prompt lookup and plain decoding",
        needs=("target", "prompts", *(stage_name(recipe, i) for i in range(len(recipe.training.stages)))),
        inputs=_evaluate_inputs,
        run=_run_evaluate,
        estimate=lambda recipe: Estimate(
            does=f"decode {', '.join(source.name for source in recipe.data.evaluation)} at temperatures "
            f"{', '.join(f'{t:g}' for t in recipe.evaluation.temperatures)}, up to {recipe.evaluation.max_new_tokens} "
            f"tokens, in {recipe.evaluation.dtype}",
            memory_bytes=target_bytes(recipe, *_precisions(recipe)),
        ),
    )
