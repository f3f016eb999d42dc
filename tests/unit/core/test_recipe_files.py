"""A recipe's errors name the key and what is allowed, before any model is loaded."""

from __future__ import annotations

import json
import re

import pytest

from angelspec.core.errors import RecipeError
from angelspec.core.recipe_files import (
    RECIPE_FILE,
    apply_override,
    check_recipe,
    load_recipe,
    merge,
    recipe_text,
    run_command,
)
from angelspec.core.recipe_resolution import unused_token_ids

NAME = "smollm2-dfly-nothink"


def refusal(*overrides: str, name: str = NAME) -> str:
    with pytest.raises(RecipeError) as caught:
        load_recipe(name, overrides=overrides)
    return str(caught.value)


@pytest.mark.parametrize(
    ("override", "key", "allowed"),
    [
        ("training.optimizer.learning_rte=1", "training.optimizer.learning_rte", "did you mean 'learning_rate'"),
        ("drafter.mask_token_id=49152", "drafter.mask_token_id", "0..49151"),
        ("drafter.mask_token_id=-1", "drafter.mask_token_id", "0..49151"),
        ("drafter.mask_token_id=2", "drafter.mask_token_id", "occurs in the data; allowed: 3..16"),
        ("drafter.layer_ids=[1,9,40]", "drafter.layer_ids", "0..29"),
        ("drafter.layer_ids=[9,1]", "drafter.layer_ids", "not sorted"),
        ("drafter.layer_ids=[1,1,9]", "drafter.layer_ids", "twice"),
        ("drafter.block_size=1", "drafter.block_size", "2 or more"),
        ("drafter.block_size=0", "drafter.block_size", "2 or more"),
        ("drafter.hidden_size=512", "drafter.hidden_size", "576"),
        ("mode=low-think", "mode: 'low-think' is not allowed", "allowed: no-think, high-think"),
        ("target.name=smollm3", "target.name", "smollm2-135m-instruct"),
        ("target.mode_family=qwen4", "mode family 'qwen4'", "did you mean 'qwen3'"),
        ("training.stages.0.objective={}", "training.stages.0.objective", "no loss term is positive"),
        ("rollout.samples_per_prompt=2", "rollout", "temperature 0"),
        ("training.rows_per_step=3", "training", "multiple"),
        ("format_version=x", "format_version", "allowed: 1"),
        ("format_version=7", "format_version", "allowed: 1"),
        ("pack.max_document_tokens=4096", "pack.max_document_tokens", "9 to pack.row_length (512)"),
        ("pack.max_document_tokens=8", "pack.max_document_tokens", "9 to pack.row_length (512)"),
        ("rollout.keep_finish_reasons=[]", "rollout.keep_finish_reasons", "at least 1"),
        ("training.workloads=[]", "training.workloads", "at least 1"),
        ("training.optimizer.betas=[5, 9]", "training.optimizer.betas.0", "less than 1"),
        ("training.optimizer.learning_rate=.inf", "training.optimizer.learning_rate", "finite"),
        ("training.stages.cold-start.epochs=.inf", "epochs", "finite"),
        ("training.stages.cold-start.objective.lk=.nan", "objective.lk", "finite"),
        ("evaluation.temperatures=[.nan]", "evaluation.temperatures.0", "finite"),
        ("data.role_map.model=asistant", "data.role_map.model", "did you mean 'assistant'"),
        ("data.train.0.name=code", "data.train", "two sources are called 'code'"),
        ("data.train.0.source=filee:/x", "data.train.chat.source", "did you mean 'file'"),
        ("data.train.0.source=train.jsonl", "data.train.chat.source", "builtin:…, file:…, hf:…"),
        ("base=tiny-dfly-llama", "'base' belongs to the file", "a recipe of your own"),
        ("presets.quick.mode=x", "'presets' belongs to the file", "--preset"),
        ("name=2024-13-45", "the value is no YAML", "month"),
    ],
)
def test_refuses_by_key_and_allowed_values(override, key, allowed):
    message = refusal(override)
    assert key in message
    assert allowed in message


@pytest.mark.parametrize(
    ("override", "key", "allowed"),
    [
        (
            "drafter.algorithm=mtpp",
            "drafter.algorithm",
            "did you mean 'mtp'?); allowed: dflash, dflare, dspark, dfly, mtp",
        ),
        ("drafter.num_depth=3", "drafter.num_depth: unknown key", "did you mean 'num_depths'"),
        ("drafter.block_size=4", "drafter.block_size: unknown key", "num_depths, mlp, moe"),
        ("drafter.moe.num_expert=3", "drafter.moe.num_expert: unknown key", "did you mean 'num_experts'"),
        ("drafter.num_depths=0", "drafter.num_depths", "greater than or equal to 1"),
        ("drafter.num_depths=511", "pack.row_length", "more than drafter.num_depths + 1 (512)"),
        ("drafter.mlp=moe", "drafter", "moe belongs to mlp 'moe'"),
        (
            "training.stages.cold-start.objective.slot_weights=[1,2]",
            "cold-start.objective.slot_weights",
            "each of the 3",
        ),
        ("training.stages.cold-start.objective.top_k=50000", "cold-start.objective.top_k", "allowed: 1..49152"),
        ("training.stages.cold-start.objective.confidence=1", "cold-start.objective.confidence", "allowed: 0"),
        ("training.on_policy=maybe", "training.on_policy", "boolean"),
        ("training.sequence_parallel=2", "training.sequence_parallel", "allowed: 1, 3, 9"),
    ],
)
def test_mtp_refuses_by_key_and_allowed_values(override, key, allowed):
    message = refusal(override, name="smollm2-mtp-nothink")
    assert key in message
    assert allowed in message


def test_a_block_drafter_knows_no_depths_and_no_layer_of_the_target():
    assert "drafter.num_depths: unknown key" in refusal("drafter.num_depths=3")
    assert "allowed: the folder of a drafter" in refusal("drafter.initial_checkpoint=target")
    assert "no confidence head" in refusal("training.stages.cold-start.objective.confidence=1")
    assert "allowed: 1" in refusal("training.sequence_parallel=3")


def test_a_drafter_of_another_family_starts_from_its_own_defaults(tmp_path):
    changed = load_recipe(NAME, overrides=["drafter.algorithm=mtp", "drafter.num_depths=2"])
    assert (changed.drafter_config().algorithm, changed.verify_width) == ("mtp", 3)
    (tmp_path / "mine.yaml").write_text("base: smollm2-dfly-nothink\nname: mine\ndrafter: {algorithm: mtp}\n")
    assert load_recipe(str(tmp_path / "mine.yaml")).drafter.num_depths == 3
    kept = load_recipe(NAME, overrides=["drafter.algorithm=dflash"])
    assert (kept.drafter.num_layers, kept.verify_width) == (2, 8)
    weights = "training.stages.cold-start.objective.slot_weights=null"
    back = load_recipe("smollm2-mtp-nothink", overrides=["drafter.algorithm=dflash", "drafter.num_layers=1", weights])
    assert (back.drafter.num_layers, back.drafter.num_taps) == (1, 5)


def test_mtp_is_resolved_from_its_target_and_round_trips(tmp_path):
    import yaml

    resolved = load_recipe("hy3-mtp-nothink")
    config = resolved.drafter_config()
    assert (config.hidden_size, config.num_heads, config.mlp, config.target_layer_ids) == (4096, 64, "moe", ())
    path = tmp_path / "resolved.yaml"
    path.write_text(yaml.safe_dump(resolved.model_dump(mode="json"), sort_keys=False))
    assert load_recipe(str(path)) == resolved


def test_a_mode_the_target_has_not():
    message = refusal("target.mode_family=plain", "mode=high-think")
    assert "mode:" in message
    assert "allowed: no-think" in message


def test_all_problems_are_named_at_once():
    message = refusal("drafter.block_sise=4", "rollout.temprature=1")
    assert "block_size" in message
    assert "temperature" in message


def test_check_recipe_gives_the_text_instead_of_raising():
    assert check_recipe(NAME) == []
    assert "unknown recipe" in check_recipe("smollm2-dfly-nothnk")[0]
    assert "smollm2-dfly-nothink" in check_recipe("smollm2-dfly-nothnk")[0]


def test_precedence_is_base_file_preset_override(tmp_path):
    (tmp_path / "low.yaml").write_text(
        "base: smollm2-dfly-nothink\nname: low\nrollout: {max_new_tokens: 11, batch_size: 3}\n"
        "presets: {small: {rollout: {max_new_tokens: 5}}}\n"
    )
    file = str(tmp_path / "low.yaml")
    assert load_recipe(file).rollout.max_new_tokens == 11
    assert load_recipe(file, preset="small").rollout.max_new_tokens == 5
    assert load_recipe(file, preset="small").rollout.batch_size == 3
    assert load_recipe(file, preset="small", overrides=["rollout.max_new_tokens=2"]).rollout.max_new_tokens == 2


def test_bases_in_a_circle_are_named(tmp_path):
    (tmp_path / "a.yaml").write_text("base: b\n")
    (tmp_path / "b.yaml").write_text("base: a\n")
    with pytest.raises(RecipeError, match="circle: a -> b -> a"):
        load_recipe(str(tmp_path / "a.yaml"))


def test_override_reaches_list_items_by_name_and_index():
    document = {"training": {"stages": [{"name": "one", "steps": 1}, {"name": "two", "steps": 2}]}}
    changed = apply_override(document, "training.stages.two.steps=7")
    assert changed["training"]["stages"][1]["steps"] == 7
    assert document["training"]["stages"][1]["steps"] == 2
    assert apply_override(document, "training.stages.0.steps=7")["training"]["stages"][0]["steps"] == 7
    with pytest.raises(RecipeError, match="no item 'three'"):
        apply_override(document, "training.stages.three.steps=7")
    with pytest.raises(RecipeError, match="not of the form"):
        apply_override(document, "training.stages")


def test_merge_replaces_lists_and_merges_mappings():
    assert merge({"a": {"x": 1, "y": [1]}}, {"a": {"y": [2]}}) == {"a": {"x": 1, "y": [2]}}


def test_resolved_recipe_round_trips_as_yaml(tmp_path):
    import yaml

    resolved = load_recipe(NAME)
    path = tmp_path / "resolved.yaml"
    path.write_text(yaml.safe_dump(resolved.model_dump(mode="json"), sort_keys=False))
    assert load_recipe(str(path)) == resolved


def _folder(tmp_path, **config):
    base = {
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 6,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 12, "eos_token_id": 9, "rope_theta": 5e5,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps({**base, **config}))
    (tmp_path / "tokenizer.json").write_text(
        json.dumps(
            {
                "model": {"vocab": {chr(97 + i): i for i in range(8)}},
                "added_tokens": [{"id": 9, "special": True}, {"id": 10, "special": True}],
            }
        )
    )
    return tmp_path


def test_a_folder_target_gives_geometry_and_unused_ids(tmp_path):
    folder = _folder(tmp_path)
    assert unused_token_ids(folder, 12) == (8, 11, 10)
    recipe = load_recipe(
        NAME, overrides=["target.name=null", f"target.source=folder:{folder}", "target.mode_family=smollm2"]
    )
    assert recipe.target.geometry.rope.theta == 5e5
    assert recipe.drafter.mask_token_id == 8
    message = refusal(
        "target.name=null", f"target.source=folder:{folder}", "target.mode_family=smollm2", "drafter.mask_token_id=3"
    )
    assert "occurs in the data; allowed: 8, 10..11" in message


def test_a_folder_without_config_is_named(tmp_path):
    assert "config.json" in refusal("target.name=null", f"target.source=folder:{tmp_path}")


def test_the_command_of_a_run_is_one_that_gives_it_again(tmp_path):
    assert run_command(load_recipe(NAME)) == f"angelspec recipe run {NAME}"
    assert run_command(load_recipe(NAME, preset="quick")) == f"angelspec recipe run {NAME} --preset quick"
    changed = load_recipe(NAME, overrides=["training.seed=1"])
    assert run_command(changed) == f"angelspec recipe run {RECIPE_FILE}"
    (tmp_path / RECIPE_FILE).write_text(recipe_text(changed))
    assert load_recipe(str(tmp_path / RECIPE_FILE)) == changed


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            "training: {rows_per_step: 8}\ntraining: {log_every: 3}\n",
            r"'training' stands twice .* \(lines 4 and 5\)",
        ),
        ("presets: {quick: }\n", "presets.quick is a mapping of changes, not None"),
        ("presets: [quick]\n", "presets is a mapping of names to changes"),
        ("presets: {quick: {base: tiny-dfly-qwen3}}\n", "presets.quick.base: a preset can't change this"),
        ("drafter: {algorithm: mtp, num_layers: 2}\n", "drafter.num_layers: unknown key"),
    ],
)
def test_what_a_file_says_is_never_dropped(tmp_path, text, told):
    path = tmp_path / "mine.yaml"
    path.write_text(f"base: smollm2-dfly-nothink\nname: mine\ndescription: mine\n{text}")
    with pytest.raises(RecipeError, match=told):
        load_recipe(str(path), preset="quick" if "presets" in text else None)


def test_a_key_stated_with_another_family_is_kept_whatever_the_base_says(tmp_path):
    base = tmp_path / "eight.yaml"
    base.write_text("base: smollm2-dfly-nothink\nname: eight\ndescription: x\ndrafter: {num_heads: 3}\n")
    child = tmp_path / "mtp.yaml"
    child.write_text("base: eight.yaml\nname: child\ndescription: x\ndrafter: {algorithm: mtp, num_heads: 3}\n")
    assert load_recipe(str(child)).drafter.num_heads == 3
    assert load_recipe(str(base), overrides=["drafter.algorithm=mtp", "drafter.num_heads=3"]).drafter.num_heads == 3
    assert load_recipe(str(base), overrides=["drafter.algorithm=mtp"]).drafter.num_heads == 9  # the target's


def test_a_base_is_looked_for_beside_its_recipe(tmp_path, monkeypatch):
    (tmp_path / "base.yaml").write_text("base: tiny-dfly-llama\nname: base\ndescription: the right one\n")
    (tmp_path / "mine.yaml").write_text("base: base.yaml\nname: mine\n")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "base.yaml").write_text("base: tiny-dfly-llama\nname: base\ndescription: the wrong one\n")
    monkeypatch.chdir(elsewhere)
    assert load_recipe("../mine.yaml").description == "the right one"


def test_a_temperature_named_twice_counts_once():
    assert load_recipe(NAME, overrides=["evaluation.temperatures=[0, 1, 0]"]).evaluation.temperatures == (0.0, 1.0)


def test_a_login_in_an_address_is_refused_before_it_is_published():
    message = refusal("rollout.endpoint_url=http://jane:s3cret@host/v1")
    assert "endpoint_key_variable" in message


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["evaluation.max_new_tokens=8192"], "evaluation.max_new_tokens: 8192 tokens leave no room"),
        (["rollout.max_new_tokens=9000"], "allowed: below 8192"),
        (["drafter.head_dim=7"], "drafter.head_dim: 7 channels, of which 7 are rotated in pairs"),
        (["rollout.keep_finish_reasons=[stop, eos]"], "answers of backend local end by stop, length, loop, not 'eos'"),
        (["rollout.backend=endpoint", "rollout.endpoint_url=localhost:8000/v1"], "begins with neither http://"),
        (["training.stages.cold-start.name=end/2"], "training.stages.cold-start.name"),
        (["training.stages.²=1"], "no item '²'"),
    ],
)
def test_what_could_not_work_is_refused_before_anything_runs(overrides, told):
    with pytest.raises(RecipeError, match=re.escape(told)):
        load_recipe(NAME, overrides=overrides)


def test_answers_that_are_given_need_no_room():
    load_recipe(NAME, overrides=["rollout.max_new_tokens=9000", "data.responses=given"])


def test_a_section_that_is_none_is_named():
    assert "drafter" in refusal("drafter=5")
