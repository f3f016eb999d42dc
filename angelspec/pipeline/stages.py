"""The stages of a recipe, in order."""

from __future__ import annotations

from dataclasses import replace

from angelspec.core.recipe import Recipe
from angelspec.pipeline.data_stages import DECONTAMINATE, PACK, PROMPTS, ROLLOUT, TARGET
from angelspec.pipeline.evaluation_stages import evaluate_stage
from angelspec.pipeline.export_stage import export_stage
from angelspec.pipeline.stage import Stage
from angelspec.pipeline.training_stages import training_stages


def stages_of(recipe: Recipe) -> list[Stage]:
    """Target, prompts, decontaminate, rollout (unless answers are given), pack, train, evaluate, export."""
    if recipe.data.responses == "rollout":
        answers = [ROLLOUT, PACK]
    else:
        answers = [replace(PACK, needs=("target", "decontaminate"))]
    return [
        TARGET,
        PROMPTS,
        DECONTAMINATE,
        *answers,
        *training_stages(recipe),
        evaluate_stage(recipe),
        export_stage(recipe),
    ]
