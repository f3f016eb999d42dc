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
        "tiny-dfly-llama", "tiny-dfly-qwen3", "tiny-dfly-hy3", "smollm2-mtp-nothink", "smollm2-mtp-highthink",
        "qwen3-8b-mtp-nothink", "hy3-mtp-nothink", "hy3-mtp-highthink", "tiny-mtp-llama", "tiny-mtp-qwen3",
        "tiny-mtp-hy3",
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
            if config.family == "mtp":
                assert (config.mlp, config.num_depths) == ("dense", 3)
            else:
                assert (config.num_layers, len(config.target_layer_ids), config.block_size) == (2, 3, 8)
            assert not load_recipe(name).export.include_embedding


def test_mtp_starts_with_lk_on_the_top_10000_and_ends_end_to_end():
    for name in NAMES:
        if "-mtp-" not in name or name.startswith("tiny"):
            continue
        recipe = load_recipe(name)
        cold, last = (stage.objective for stage in recipe.training.stages)
        # fresh weights of the embedded target learn faster by the hybrid form (recipes/LOG.md)
        form = "hybrid" if name.startswith("smollm2") else "alpha"
        assert (cold.lk, cold.lk_form, cold.top_k, cold.renormalise) == (1.0, form, 10_000, True)
        assert (last.end_to_end_tv, last.lk, last.ce) == (1.0, 0.0, 0.0)
        assert recipe.training.on_policy
        assert {source.workload or source.name for source in recipe.data.train} >= {"chat"}


def test_hy3_is_trained_on_from_its_own_layer():
    for name in ("hy3-mtp-nothink", "hy3-mtp-highthink"):
        recipe = load_recipe(name)
        assert recipe.drafter.initial_checkpoint == "target"
        moe = recipe.drafter_config().moe
        assert (moe.num_experts, moe.experts_per_token, moe.intermediate_size) == (192, 8, 1536)
        assert (moe.router_scale, moe.router_score, moe.selection_bias) == (2.826, "sigmoid", True)


def test_the_reference_is_up_to_date():
    from angelspec.core.recipe_reference import recipe_reference

    written = (resource_folder("recipes") / "README.md").read_text(encoding="utf-8")
    assert written == recipe_reference(), "run: angelspec recipe reference > recipes/README.md"
