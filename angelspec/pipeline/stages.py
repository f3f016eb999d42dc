"""The stages of a recipe, in order."""

from __future__ import annotations

from dataclasses import replace

from angelspec.core.recipe import DataSection, Recipe
from angelspec.pipeline.data_stages import DECONTAMINATE, PACK, ROLLOUT, TARGET, prompts_stage
from angelspec.pipeline.evaluation_stages import evaluate_stage
from angelspec.pipeline.export_stage import export_stage
from angelspec.pipeline.stage import Stage
from angelspec.pipeline.training_stages import training_stages


def stages_of(recipe: Recipe, *, data: DataSection | None = None) -> list[Stage]:
    """Target, prompts, decontaminate, rollout (unless answers are given), pack, train, evaluate, export.

    Args:
        recipe: resolved.
        data: its data section with every dataset at one commit (``HubCommits.pin``); None: as the recipe names them.
    """
    if recipe.data.responses == "rollout":
        answers = [ROLLOUT, PACK]
    else:
        answers = [replace(PACK, needs=("target", "decontaminate"))]
    return [
        TARGET,
        prompts_stage(data or recipe.data),
        DECONTAMINATE,
        *answers,
        *training_stages(recipe),
        evaluate_stage(recipe),
        export_stage(recipe),
    ]
