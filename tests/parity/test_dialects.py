"""Every public dialect of a block drafter gives the same drafter."""

import json
import pickle

import pytest
import torch
from drafter_builders import COMBINATIONS, tiny_drafter, tiny_rows
from safetensors.torch import load_file, save_file

from angelspec.core.errors import CheckpointError
from angelspec.drafters.checkpoint import examine_checkpoint, inspect_checkpoint, load_drafter, save_drafter

ZLAB = {
    "context_proj.weight": "fc.weight",
    "context_norm.weight": "hidden_norm.weight",
    "final_norm.weight": "norm.weight",
}


def outputs(drafter):
    rows = tiny_rows(drafter.config)
    states = drafter(rows.taps_RTF, **rows.inputs())
    return [item for item in (states.corrected_AKD, states.markov_AKR, states.confidence_AK) if item is not None]


def assert_same(loaded, drafter):
    assert loaded.config == drafter.config
    for key, value in drafter.state_dict().items():
        assert torch.equal(loaded.state_dict()[key], value), key
    for ours, theirs in zip(outputs(loaded), outputs(drafter), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def public_config(config, **changes):
    """As AngelSpec's own JSONs are: rope in one spelling, T under num_target_layers, no block size."""
    written = {
        "hidden_size": 20, "intermediate_size": 28, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 6, "vocab_size": 50, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 128, "rope_theta": 500.0, "num_target_layers": 3, "target_hidden_size": 20,
        "target_num_hidden_layers": 8, "target_layer_ids": [1, 3, 6], "mask_token_id": 49,
    }  # fmt: skip
    written.update(changes)
    return {key: value for key, value in written.items() if value is not None}


PUBLISHED = {
    "dflash": {"architectures": ["DFlashDraftModel"], "model_type": "dflash"},
    "dflare": {"architectures": ["DFlashDraftModel"], "model_type": "dflash", "model_arch": "dflare"},
    "dspark": {
        "architectures": ["DSparkDraftModel"], "markov_rank": 8, "markov_head_type": "vanilla",
        "enable_confidence_head": True, "confidence_head_with_markov": True, "sample_from_anchor": False,
    },
    "dfly": {
        "architectures": ["Qwen3DFlyModel"], "model_type": "qwen3", "enable_hidden_correction": True,
        "hidden_correction_intermediate_size": 24,
    },
}  # fmt: skip


@pytest.mark.parametrize("prefix", ["", "draft_model.", "module.", "module.draft_model.", "module.module."])
@pytest.mark.parametrize("name", COMBINATIONS)
def test_public_pickles_and_prefixes(name, prefix, tmp_path):
    drafter = tiny_drafter(name)
    tensors = {f"{prefix}{key}": value for key, value in drafter.state_dict().items()}
    tensors[f"{prefix}embed_tokens.weight"] = torch.randn(50, 20)
    tensors[f"{prefix}lm_head.weight"] = torch.randn(50, 20)
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    (tmp_path / "config.json").write_text(json.dumps(public_config(drafter.config, block_size=4, **PUBLISHED[name])))
    assert_same(load_drafter(tmp_path).drafter, drafter)
    assert any("lm_head.weight is ignored" in note for note in examine_checkpoint(tmp_path).notes)


@pytest.mark.parametrize(
    "spelling",
    [
        {"architectures": ["DSparkDraftModel"], "model_arch": "dfly"},
        {"architectures": ["Qwen3TreeDSparkDFlareModel"]},
        {"hidden_correction_intermediate_size": None},
    ],
)
def test_legacy_spellings_of_dfly(spelling, tmp_path):
    drafter = tiny_drafter("dfly", correction_intermediate_size=20)
    save_file(drafter.state_dict(), tmp_path / "model.safetensors")
    changes = {**PUBLISHED["dfly"], "hidden_correction_intermediate_size": 20, **spelling}
    (tmp_path / "config.json").write_text(json.dumps(public_config(drafter.config, block_size=4, **changes)))
    assert_same(load_drafter(tmp_path).drafter, drafter)


def test_unused_heads_beside_a_correction_are_ignored_with_a_note(tmp_path):
    drafter = tiny_drafter("dfly")
    tensors = {**drafter.state_dict(), "markov_head.markov_w1.weight": torch.ones(50, 8)}
    save_file(tensors, tmp_path / "model.safetensors")
    changes = {**PUBLISHED["dfly"], "block_size": 4}
    (tmp_path / "config.json").write_text(json.dumps(public_config(drafter.config, **changes)))
    assert_same(load_drafter(tmp_path).drafter, drafter)
    assert any("markov_w1.weight is ignored" in note for note in examine_checkpoint(tmp_path).notes)
    dflash = tiny_drafter("dflash")
    save_file(
        {**dflash.state_dict(), "markov_head.markov_w1.weight": torch.ones(50, 8)}, tmp_path / "model.safetensors"
    )
    changes = {**PUBLISHED["dflash"], "block_size": 4}
    (tmp_path / "config.json").write_text(json.dumps(public_config(dflash.config, **changes)))
    assert [problem.code for problem in inspect_checkpoint(tmp_path)] == ["unexpected-tensor"]


def test_zlab_dflash(tmp_path):
    """Names fc, hidden_norm, norm; facts only under dflash_config; num_target_layers is the target's depth."""
    drafter = tiny_drafter("dflash")
    tensors = {ZLAB.get(key, key): value for key, value in drafter.state_dict().items()}
    save_file(tensors, tmp_path / "model.safetensors")
    nested = {"mask_token_id": 49, "target_layer_ids": [1, 3, 6]}
    config = public_config(
        drafter.config, **PUBLISHED["dflash"], block_size=4, mask_token_id=None, target_layer_ids=None,
        target_num_hidden_layers=None, num_target_layers=8, dflash_config=nested,
    )  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert_same(load_drafter(tmp_path).drafter, drafter)
    duplicate = {**tensors, "context_proj.weight": tensors["fc.weight"] + 1}
    save_file(duplicate, tmp_path / "model.safetensors")
    assert ("duplicate-tensor", "context_proj.weight") in [(p.code, p.key) for p in inspect_checkpoint(tmp_path)]


def test_layer_ids_follow_the_rule_where_they_are_not_stated(tmp_path):
    drafter = tiny_drafter("dflash", target_layer_ids=(1, 3, 5))
    save_file(drafter.state_dict(), tmp_path / "model.safetensors")
    config = public_config(drafter.config, **PUBLISHED["dflash"], block_size=4, target_layer_ids=None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert_same(load_drafter(tmp_path).drafter, drafter)


def test_exports_carry_exactly_the_servers_names(tmp_path):
    """SGLang ignores names it does not know, so the tables are compared whole."""
    layer = [
        "input_layernorm", "mlp.down_proj", "mlp.gate_proj", "mlp.up_proj", "post_attention_layernorm",
        "self_attn.k_norm", "self_attn.k_proj", "self_attn.o_proj", "self_attn.q_norm", "self_attn.q_proj",
        "self_attn.v_proj",
    ]  # fmt: skip
    backbone = {f"layers.{i}.{part}.weight" for i in range(3) for part in layer}
    backbone |= {"fc.weight", "hidden_norm.weight", "norm.weight"}
    dflash = save_drafter(tiny_drafter("dflash"), tmp_path / "dflash", dialect="dflash")
    assert set(load_file(dflash / "model.safetensors")) == backbone
    config = json.loads((dflash / "config.json").read_text())
    assert config["architectures"] == ["DFlashDraftModel"] and config["block_size"] == 4
    assert config["num_target_layers"] == config["dflash_config"]["num_target_layers"] == 8
    assert_same(load_drafter(dflash).drafter, tiny_drafter("dflash"))

    dspark = save_drafter(tiny_drafter("dspark"), tmp_path / "dspark", dialect="dspark")
    heads = {"markov_head.markov_w1.weight", "markov_head.markov_w2.weight", "confidence_head.proj.weight",
             "confidence_head.proj.bias"}  # fmt: skip
    assert set(load_file(dspark / "model.safetensors")) == backbone | heads
    config = json.loads((dspark / "config.json").read_text())
    assert config["architectures"] == ["Qwen3DSparkModel"] and config["sample_from_anchor"] is False
    assert config["markov_rank"] == 8 and config["markov_head_type"] == "vanilla"
    assert config["block_size"] == 3  # proposals, under this name
    assert_same(load_drafter(dspark).drafter, tiny_drafter("dspark"))


@pytest.mark.parametrize("name", COMBINATIONS)
def test_native_export_reads_the_same_without_our_section(name, tmp_path):
    """AngelSpec's own loader does not know our section: the public keys alone must say everything."""
    drafter = tiny_drafter(name)
    folder = save_drafter(drafter, tmp_path / name)
    config = json.loads((folder / "config.json").read_text())
    del config["angelspec"]
    (folder / "config.json").write_text(json.dumps(config))
    assert_same(load_drafter(folder).drafter, drafter)


def dspark_problems(tmp_path, **changes):
    drafter = tiny_drafter("dspark")
    save_file(drafter.state_dict(), tmp_path / "model.safetensors")
    config = public_config(drafter.config, block_size=4, **{**PUBLISHED["dspark"], **changes})
    (tmp_path / "config.json").write_text(json.dumps(config))
    return [(problem.code, problem.key) for problem in inspect_checkpoint(tmp_path)]


def test_dspark_markov_keys(tmp_path):
    nested = {"markov_rank": 8, "markov_head_type": "vanilla"}
    assert dspark_problems(tmp_path) == []
    assert dspark_problems(tmp_path, markov_rank=None, markov_head_type=None, dflash_config=nested) == []
    assert dspark_problems(tmp_path, markov_rank=4, dflash_config=nested) == [("config-conflict", "markov_rank")]
    assert dspark_problems(tmp_path, markov_rank=0) == [("config-value", "markov_rank")]
    assert dspark_problems(tmp_path, markov_head_type="foo") == [("unsupported", "markov_head_type")]
    assert dspark_problems(tmp_path, markov_rank=None) == [("config-key-missing", "markov_rank")]
    assert dspark_problems(tmp_path, sample_from_anchor=None) == [("config-key-missing", "sample_from_anchor")]
    assert dspark_problems(tmp_path, sample_from_anchor=True)[0] == ("unsupported", "sample_from_anchor")


def dflash_problems(tmp_path, **changes):
    drafter = tiny_drafter("dflash")
    save_file(drafter.state_dict(), tmp_path / "model.safetensors")
    config = public_config(drafter.config, **{"block_size": 4, **PUBLISHED["dflash"], **changes})
    (tmp_path / "config.json").write_text(json.dumps(config))
    return [(problem.code, problem.key) for problem in inspect_checkpoint(tmp_path)]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"mask_token_id": 50}, ("config-value", "mask_token_id")),
        ({"mask_token_id": -1}, ("config-value", "mask_token_id")),
        ({"target_layer_ids": [1, 9, 40], "target_num_hidden_layers": 36}, ("config-value", "target_layer_ids")),
        ({"target_layer_ids": [1, 1, 6]}, ("config-value", "target_layer_ids")),
        ({"target_layer_ids": [6, 3, 1]}, ("config-value", "target_layer_ids")),
        ({"num_target_layers": 32, "target_num_hidden_layers": 36}, ("config-conflict", "num_target_layers")),
        ({"block_size": 0}, ("config-value", "block_size")),
        ({"block_size": 1}, ("config-value", "block_size")),
        ({"block_size": 16, "dflash_config": {"block_size": 8}}, ("config-conflict", "block_size")),
        ({"block_size": None}, ("config-key-missing", "block_size")),
        ({"architectures": ["DFlashDraftMode"]}, ("unsupported", "architectures")),
        ({"architectures": None}, ("config-key-missing", "architectures")),
        ({"fusion_type": "gated_sum"}, ("unsupported", "fusion_type")),
        ({"draft_vocab_size": 32}, ("unsupported", "draft_vocab_size")),
        ({"rope_theta": 500.0, "rope_parameters": {"rope_theta": 100.0}}, ("config-conflict", "rope")),
    ],
)  # fmt: skip
def test_wrong_configurations_are_named(changes, expected, tmp_path):
    assert dflash_problems(tmp_path, **changes) == [expected]


def test_the_caller_can_state_what_a_config_lacks(tmp_path):
    assert dflash_problems(tmp_path, block_size=None, target_num_hidden_layers=None) == [
        ("config-key-missing", "block_size"),
        ("config-key-missing", "target_num_hidden_layers"),
    ]
    loaded = load_drafter(tmp_path, overrides={"block_size": 4, "target_num_layers": 8})
    assert_same(loaded.drafter, tiny_drafter("dflash"))


def test_a_config_that_describes_another_target_is_refused_by_shape(tmp_path):
    """As the hub's Qwen3-8B DFly, whose newest config.json is that of Hy3."""
    problems = dflash_problems(tmp_path, hidden_size=32, vocab_size=60)
    assert ("misshapen-tensor", "context_proj.weight") in problems


def test_a_pickle_with_code_is_not_run(tmp_path):
    class Bomb:
        def __reduce__(self):
            return (print, ("executed",))

    with (tmp_path / "pytorch_model.bin").open("wb") as stream:
        pickle.dump({"fc.weight": Bomb()}, stream)
    (problem, *_) = inspect_checkpoint(tmp_path / "pytorch_model.bin")
    assert problem.code == "unsafe-pickle"
    torch.save(tiny_drafter("dflash").state_dict(), tmp_path / "pytorch_model.bin")
    content = (tmp_path / "pytorch_model.bin").read_bytes()
    (tmp_path / "pytorch_model.bin").write_bytes(content[: len(content) // 2])
    (problem, *_) = inspect_checkpoint(tmp_path / "pytorch_model.bin")
    assert problem.code == "truncated"
    with pytest.raises(CheckpointError):
        load_drafter(tmp_path)


def test_our_section_and_the_public_keys_must_agree(tmp_path):
    folder = save_drafter(tiny_drafter("dfly"), tmp_path / "export")
    config = json.loads((folder / "config.json").read_text())
    config["rms_norm_eps"] = 1e-6
    (folder / "config.json").write_text(json.dumps(config))
    assert [(p.code, p.key) for p in inspect_checkpoint(folder)] == [("config-conflict", "rms_norm_eps")]
