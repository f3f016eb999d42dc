"""Estimates against what they estimate."""

import pytest

from angelspec.core.recipe_files import load_recipe
from angelspec.drafters.families import build_drafter
from angelspec.pipeline.estimates import amounts, drafter_parameters


@pytest.mark.parametrize("name", ["tiny-dfly-llama", "tiny-mtp-llama", "tiny-mtp-hy3", "smollm2-mtp-nothink"])
def test_the_parameters_are_the_module_s_but_for_its_norms(name):
    recipe = load_recipe(name)
    matrices = sum(p.numel() for p in build_drafter(recipe.drafter_config()).parameters() if p.ndim > 1)
    estimate = drafter_parameters(recipe)
    assert estimate == pytest.approx(matrices, abs=recipe.drafter_config().hidden_size)


def test_mtp_holds_one_state_of_each_token():
    recipe = load_recipe("smollm2-mtp-nothink")
    assert amounts(recipe).feature_bytes_per_token == 2 * recipe.target.geometry.hidden_size
