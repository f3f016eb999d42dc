"""Every recipe in the repository resolves, is planned for a mode its target has, and keeps to the paper's facts."""

from __future__ import annotations

import pytest

from angelspec.core.locations import resource_folder
from angelspec.core.recipe_files import list_recipes, load_recipe

NAMES = [summary.name for summary in list_recipes()]


def test_there_is_a_file_for_each_promised_recipe():
    promised = {
        "smollm2-dfly-nothink", "smollm2-dfly-highthink", "smollm2-dflash-nothink", "smollm2-dflare-nothink",
        "smollm2-dspark-nothink", "qwen3-8b-dfly-nothink", "qwen3-8b-dflash-nothink", "qwen3-8b-dspark-nothink",
        "qwen3-8b-dfly-highthink", "hy3-dfly-nothink", "hy3-dfly-highthink", "hy3-dflash-nothink",
        "tiny-dfly-llama", "tiny-dfly-qwen3", "tiny-dfly-hy3",
    }  # fmt: skip
    assert promised <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_resolves_with_every_preset(name):
    summary = next(s for s in list_recipes() if s.name == name)
    assert summary.path.stem == name
    for preset in (None, *summary.presets):
        recipe = load_recipe(name, preset=preset)
        config = recipe.drafter_config()
        assert config.algorithm in name
        assert recipe.mode.replace("-", "") in name or name.startswith("tiny")


def test_only_the_embedded_recipes_promise_a_quick_preset():
    for summary in list_recipes():
        assert ("quick" in summary.presets) == summary.name.startswith("smollm2-"), summary.name


def test_every_file_is_listed_or_abstract():
    stems = {path.stem for path in resource_folder("recipes").glob("*.yaml")}
    assert {stem for stem in stems if not stem.startswith("base-")} == set(NAMES)


def test_embedded_drafters_are_the_promised_shape():
    for name in NAMES:
        if name.startswith("smollm2-"):
            config = load_recipe(name).drafter_config()
            assert (config.num_layers, len(config.target_layer_ids), config.block_size) == (2, 3, 8)
            assert not load_recipe(name).export.include_embedding


def test_the_reference_is_up_to_date():
    from angelspec.core.recipe_reference import recipe_reference

    written = (resource_folder("recipes") / "README.md").read_text(encoding="utf-8")
    assert written == recipe_reference(), "run: angelspec recipe reference > recipes/README.md"
