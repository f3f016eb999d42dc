"""Estimates against what they estimate."""

import pytest
import torch

from angelspec.core.recipe_files import load_recipe
from angelspec.drafters.families import build_drafter
from angelspec.pipeline.data_stages import ROLLOUT
from angelspec.pipeline.estimates import amounts, drafter_parameters
from angelspec.pipeline.evaluation_stages import evaluate_stage
from angelspec.training.features import bytes_per_row


@pytest.mark.parametrize("name", ["tiny-dfly-llama", "tiny-mtp-llama", "tiny-mtp-hy3", "smollm2-mtp-nothink"])
def test_the_parameters_are_the_module_s_but_for_its_norms(name):
    recipe = load_recipe(name)
    matrices = sum(p.numel() for p in build_drafter(recipe.drafter_config()).parameters() if p.ndim > 1)
    estimate = drafter_parameters(recipe)
    assert estimate == pytest.approx(matrices, abs=recipe.drafter_config().hidden_size)


def test_mtp_holds_one_state_of_each_token():
    recipe = load_recipe("smollm2-mtp-nothink")
    assert amounts(recipe).feature_bytes_per_token == 2 * recipe.target.geometry.hidden_size


def test_features_are_held_in_the_target_s_precision():
    recipe = load_recipe("tiny-dfly-llama")
    held = bytes_per_row(1, hidden_size=64, num_taps=3, dtype=getattr(torch, recipe.target.dtype))
    assert (recipe.target.dtype, amounts(recipe).feature_bytes_per_token) == ("float32", held)


@pytest.mark.parametrize(
    ("overrides", "bytes_each"),
    [
        ((), 2 + 4),
        (("evaluation.dtype=bfloat16",), 2 + 4),
        (("evaluation.dtype=bfloat16", "evaluation.exactness_prompts=0"), 2),
        (("evaluation.dtype=bfloat16", "evaluation.exactness_prompts=0", "rollout.dtype=float32"), 2 + 4),
        (("target.dtype=float32", "rollout.dtype=float32"), 4),
    ],
)
def test_the_evaluation_counts_every_target_that_the_run_holds(overrides, bytes_each):
    recipe = load_recipe("smollm2-dfly-nothink", overrides=overrides)
    assert evaluate_stage(recipe).estimate(recipe).memory_bytes == bytes_each * 134_515_008


def test_a_rollout_for_weeks_is_better_done_by_a_server():
    large = load_recipe("qwen3-8b-dfly-nothink")
    note = ROLLOUT.estimate(large).note
    assert "at 1,000 tokens/s" in note and "rollout.backend=endpoint" in note
    assert ROLLOUT.estimate(load_recipe("smollm2-dfly-nothink")).note == ""
