"""Every public layout of an MTP layer gives the same drafter, bit for bit, and damage in it has a name."""

import json
import re
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from mtp_builders import MOE, tiny_mtp
from safetensors.torch import load_file, save_file

from angelspec.cli.main import cli
from angelspec.core.errors import CheckpointError
from angelspec.core.geometry import TargetGeometry
from angelspec.drafters.checkpoint import (
    convert_checkpoint,
    examine_checkpoint,
    inspect_checkpoint,
    load_drafter,
    save_drafter,
)
from angelspec.drafters.initial_weights import load_target_layer

QWEN3 = {
    "fc.weight": "eh_proj.weight", "pre_fc_norm_embedding.weight": "enorm.weight",
    "pre_fc_norm_hidden.weight": "hnorm.weight", "norm.weight": "final_layernorm.weight",
}  # fmt: skip


def assert_same(loaded, drafter):
    assert loaded.config == drafter.config
    assert loaded.state_dict().keys() == drafter.state_dict().keys()
    for key, value in drafter.state_dict().items():
        assert torch.equal(loaded.state_dict()[key], value), key


def codes(path, **arguments):
    return [(problem.code, problem.key) for problem in inspect_checkpoint(path, **arguments)]


def target_config(drafter) -> dict:
    """As a target of the drafter's own shape would have it."""
    config = drafter.config
    written = {
        "hidden_size": 20, "intermediate_size": 28, "num_hidden_layers": 8, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 6, "vocab_size": 50, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 128, "rope_theta": 500.0, "dtype": "float32", "tie_word_embeddings": False,
    }  # fmt: skip
    if config.mlp == "dense":
        return {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", **written}
    return {
        "architectures": ["HYV3ForCausalLM"], "model_type": "hy_v3", **written, "num_experts": 5,
        "num_experts_per_tok": 2, "num_shared_experts": 1, "moe_intermediate_size": 12, "router_scaling_factor": 1.7,
    }  # fmt: skip


def write_target(folder: Path, drafter, *, shards: int = 1, extra=None, **changes) -> Path:
    """A folder with the target's configuration, some tensors and a tokenizer file."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**target_config(drafter), **changes}))
    (folder / "tokenizer.json").write_text("{}")
    tensors = {"model.embed_tokens.weight": torch.randn(50, 20), "lm_head.weight": torch.randn(50, 20)}
    tensors |= {f"model.layers.{layer}.input_layernorm.weight": torch.randn(20) for layer in range(8)}
    tensors |= {"model.norm.weight": torch.randn(20), **(extra or {})}
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    places = {}
    for number in range(shards):
        name = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        part = dict(list(tensors.items())[number::shards])
        save_file(part, folder / name)
        places |= dict.fromkeys(part, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return folder


def edit(path: Path, change) -> None:
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


@pytest.mark.parametrize("changes", [{}, {"qk_norm": False}, {"num_depths": 5}])
@pytest.mark.parametrize("mlp", ["dense", "moe"])
def test_our_format(mlp, changes, tmp_path):
    drafter = tiny_mtp(mlp, **changes)
    folder = save_drafter(drafter, tmp_path / "export")
    assert inspect_checkpoint(folder) == []
    assert_same(load_drafter(folder).drafter, drafter)
    assert "embed_tokens.weight" not in load_file(folder / "model.safetensors")


@pytest.mark.parametrize(
    "changes",
    [
        {"router_score": "softmax"},
        {"normalise_routes": False},
        {"selection_bias": False},
        {"num_shared_experts": 0},
        {"num_shared_experts": 2},
    ],
)
def test_mixtures_by_public_keys_alone(changes, tmp_path):
    """AngelSpec's own loader does not know our section: the public keys say all but the number of depths."""
    drafter = tiny_mtp("moe", moe=MOE.model_copy(update=changes))
    folder = save_drafter(drafter, tmp_path / "export")
    config = json.loads((folder / "config.json").read_text())
    del config["angelspec"]
    (folder / "config.json").write_text(json.dumps(config))
    assert_same(load_drafter(folder).drafter, drafter)
    assert any("num_depths is not stated; 3" in note for note in examine_checkpoint(folder).notes)
    assert load_drafter(folder, overrides={"num_depths": 2}).config.num_depths == 2


@pytest.mark.parametrize("prefix", ["", "draft_model.", "module.draft_model."])
@pytest.mark.parametrize("mlp", ["dense", "moe"])
def test_angelspecs_own_files(mlp, prefix, tmp_path):
    """Its pickles and its configuration: wrapper prefixes, the embedding beside, no word on the target's depth."""
    drafter = tiny_mtp(mlp)
    tensors = {f"{prefix}{key}": value for key, value in drafter.state_dict().items()}
    embedding = torch.randn(50, 20)
    tensors[f"{prefix}embed_tokens.weight"] = embedding
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    config = {
        **target_config(drafter), "architectures": ["MTPDraftModel"], "model_type": "mtp", "mlp_type": mlp,
        "num_hidden_layers": 1, "qk_norm": True, "target_hidden_size": 20, "tie_lm_head": True,
        "mtp_ce_loss_scaling_factor": 0.1,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert codes(tmp_path) == [("config-key-missing", "target_num_hidden_layers")]
    loaded = load_drafter(tmp_path, overrides={"target_num_layers": 8}, embedding_VD=embedding)
    assert_same(loaded.drafter, drafter)
    with pytest.raises(CheckpointError, match="is not the target's embedding"):
        load_drafter(tmp_path, overrides={"target_num_layers": 8}, embedding_VD=embedding + 1)
    config["tie_lm_head"] = False
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert ("unsupported", "tie_lm_head") in codes(tmp_path)


def test_vllms_names_of_angelspecs_layer(tmp_path):
    drafter = tiny_mtp("moe")
    folder = save_drafter(drafter, tmp_path / "export")
    tensors = {key.replace("midlayer.", "layers.0."): value for key, value in drafter.state_dict().items()}
    save_file(tensors, folder / "model.safetensors")
    assert_same(load_drafter(folder).drafter, drafter)


def test_hy3_layout(tmp_path):
    drafter = tiny_mtp("moe")
    target = write_target(tmp_path / "target", drafter)
    folder = save_drafter(drafter, tmp_path / "served", dialect="hy3", target_folder=target)
    tensors = load_file(folder / "model.safetensors")
    assert all(key.startswith("model.layers.8.") for key in tensors)
    ours = drafter.state_dict()
    for expert in range(5):
        for kind in ("gate", "up", "down"):
            matrix = tensors[f"model.layers.8.mlp.experts.{expert}.{kind}_proj.weight"]
            assert torch.equal(matrix, ours[f"midlayer.mlp.experts_{kind}_proj"][expert].T)
    for public, native in {
        "eh_proj.weight": "eh_proj.weight", "final_layernorm.weight": "final_layernorm.weight",
        "self_attn.q_norm.weight": "midlayer.self_attn.q_norm.weight",
        "mlp.router.gate.weight": "midlayer.mlp.router.gate.weight", "mlp.expert_bias": "midlayer.mlp.expert_bias",
        "mlp.shared_mlp.up_proj.weight": "midlayer.mlp.shared_mlp.up_proj.weight",
    }.items():  # fmt: skip
        assert torch.equal(tensors[f"model.layers.8.{public}"], ours[native])
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["HYV3ForCausalLM"] and config["num_hidden_layers"] == 8
    assert config["num_nextn_predict_layers"] == 1 and config["_mtp_spec_layer"] == 8
    assert codes(folder) == []
    assert_same(load_drafter(folder).drafter, drafter)


@pytest.mark.parametrize("shards", [1, 3])
def test_qwen3_layout_is_a_full_copy(shards, tmp_path):
    drafter = tiny_mtp("dense")
    target = write_target(tmp_path / "target", drafter, shards=shards)
    before = {path.name: path.read_bytes() for path in target.iterdir()}
    folder = save_drafter(drafter, tmp_path / "served", dialect="qwen3", target_folder=target)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert not (folder / "model.safetensors").exists() and (folder / "tokenizer.json").exists()
    everything = {}
    for name in set(index["weight_map"].values()):
        part = load_file(folder / name)
        assert all(index["weight_map"][key] == name for key in part)
        everything |= part
    assert everything.keys() == index["weight_map"].keys()
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in everything.values())
    ours = drafter.state_dict()
    layer = {key.removeprefix("mtp."): value for key, value in everything.items() if key.startswith("mtp.")}
    assert len(layer) == len(ours)
    for public, value in layer.items():
        native = QWEN3.get(public, public.replace("layers.0.", "midlayer."))
        assert torch.equal(value, ours[native]), public
    assert json.loads((folder / "config.json").read_text())["num_nextn_predict_layers"] == 1
    assert codes(folder) == []
    assert_same(load_drafter(folder).drafter, drafter)
    # the target itself is untouched, also when its copy is replaced
    with pytest.raises(CheckpointError, match="no drafter export"):  # what holds a whole target is not replaced
        save_drafter(tiny_mtp("dense", seed=4), folder, dialect="qwen3", target_folder=target)
    assert {path.name: path.read_bytes() for path in target.iterdir()} == before
    with pytest.raises(CheckpointError, match="has an MTP layer already"):
        save_drafter(drafter, tmp_path / "twice", dialect="qwen3", target_folder=folder)


@pytest.mark.parametrize(("mlp", "dialect"), [("dense", "qwen3"), ("moe", "hy3")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_there_and_back_keeps_every_bit(mlp, dialect, dtype, tmp_path):
    drafter = tiny_mtp(mlp)
    target = write_target(tmp_path / "target", drafter)
    ours = save_drafter(drafter, tmp_path / "ours", dtype=dtype)
    public = convert_checkpoint(ours, tmp_path / "public", dialect=dialect, target_folder=target)
    back = convert_checkpoint(public, tmp_path / "back", dialect="angelspec")
    first, last = load_file(ours / "model.safetensors"), load_file(back / "model.safetensors")
    assert first.keys() == last.keys()
    for key, value in first.items():
        assert value.dtype == last[key].dtype and torch.equal(value, last[key]), key
    assert (ours / "config.json").read_text() == (back / "config.json").read_text()
    assert codes(ours) == codes(public) == []


def test_what_chooses_experts_keeps_float32(tmp_path):
    drafter = tiny_mtp("moe")
    folder = save_drafter(drafter, tmp_path / "export", dtype=torch.bfloat16)
    tensors = load_file(folder / "model.safetensors")
    wide = sorted(key for key, value in tensors.items() if value.dtype == torch.float32)
    assert wide == ["midlayer.mlp.expert_bias", "midlayer.mlp.router.gate.weight"]
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    loaded = load_drafter(folder, dtype=torch.bfloat16).drafter
    assert loaded.midlayer.mlp.router.gate.weight.dtype == torch.float32
    assert torch.equal(loaded.midlayer.mlp.expert_bias, drafter.midlayer.mlp.expert_bias)
    assert loaded.eh_proj.weight.dtype == torch.bfloat16


def test_what_a_dialect_cannot_say_is_refused(tmp_path):
    moe, dense = tiny_mtp("moe"), tiny_mtp("dense")
    target = write_target(tmp_path / "target", dense)
    hy3 = write_target(tmp_path / "hy3", moe)
    for drafter, dialect, folder, message in [
        (moe, "qwen3", target, "dialect 'qwen3' can't express an MTP drafter with mlp 'moe'"),
        (dense, "hy3", hy3, "dialect 'hy3' can't express an MTP drafter with mlp 'dense'"),
        (dense, "dflash", None, "use one of: angelspec, qwen3"),
        (tiny_mtp("dense", qk_norm=False), "qwen3", target, "qk_norm false"),
        (dense, "qwen3", None, "no target was given"),
        (dense, "qwen3", tmp_path / "nowhere", "no readable config.json"),
        (tiny_mtp("dense", num_heads=2), "qwen3", target, "num_heads is 4 by public keys but 2"),
        (tiny_mtp("moe", moe=MOE.model_copy(update={"router_scale": 2.0})), "hy3", hy3, "moe is"),
    ]:
        with pytest.raises(CheckpointError, match=re.escape(message)):
            save_drafter(drafter, tmp_path / "export", dialect=dialect, target_folder=folder)
        assert not (tmp_path / "export").exists()
    (target / "model.safetensors").rename(target / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="no safetensors"):
        save_drafter(dense, tmp_path / "export", dialect="qwen3", target_folder=target)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hy3", "target"]


def test_damaged_experts_have_their_public_names(tmp_path):
    drafter = tiny_mtp("moe")
    target = write_target(tmp_path / "target", drafter)
    folder = save_drafter(drafter, tmp_path / "served", dialect="hy3", target_folder=target)
    name = "model.layers.8.mlp.experts.{}.{}_proj.weight"

    def damage(tensors):
        del tensors[name.format(3, "gate")]
        tensors[name.format(1, "up")] = torch.ones(3, 20)
        tensors[name.format(2, "down")][0, 1] = float("inf")
        tensors["model.layers.8.mlp.router.gate.weight"] = torch.ones(4, 20)
        tensors["model.layers.8.self_attn.q_project.weight"] = tensors.pop("model.layers.8.self_attn.q_proj.weight")
        tensors["model.layers.8.enorm.weight"][3] = float("nan")

    edit(folder / "model.safetensors", damage)
    assert sorted(codes(folder)) == [
        ("misshapen-tensor", "midlayer.mlp.router.gate.weight"),
        ("misshapen-tensor", name.format(1, "up")),
        ("missing-tensor", "midlayer.self_attn.q_proj.weight"),
        ("missing-tensor", name.format(3, "gate")),
        ("non-finite", "enorm.weight"),
        ("non-finite", name.format(2, "down")),
        ("unexpected-tensor", "midlayer.self_attn.q_project.weight"),
    ]
    with pytest.raises(CheckpointError, match=re.escape(f"{name.format(3, 'gate')} is missing")):
        load_drafter(folder)


def test_too_few_experts_are_misshapen(tmp_path):
    drafter = tiny_mtp("moe")
    target = write_target(tmp_path / "target", drafter)
    folder = save_drafter(drafter, tmp_path / "served", dialect="hy3", target_folder=target)

    def damage(tensors):
        for key in [key for key in tensors if ".experts.4." in key]:
            del tensors[key]

    edit(folder / "model.safetensors", damage)
    assert sorted(codes(folder)) == [
        ("misshapen-tensor", f"midlayer.mlp.experts_{kind}_proj") for kind in ("down", "gate", "up")
    ]


def test_native_tensors_are_judged_by_name(tmp_path):
    folder = save_drafter(tiny_mtp("dense"), tmp_path / "export")

    def damage(tensors):
        tensors["midlayer.mlp.gate_project.weight"] = tensors.pop("midlayer.mlp.gate_proj.weight")
        tensors["hidden_proj.weight"] = torch.randn(20, 24)
        tensors["hnorm.weight"] = torch.ones(7)

    edit(folder / "model.safetensors", damage)
    assert sorted(codes(folder)) == [
        ("misshapen-tensor", "hnorm.weight"),
        ("missing-tensor", "midlayer.mlp.gate_proj.weight"),
        ("unexpected-tensor", "hidden_proj.weight"),
        ("unexpected-tensor", "midlayer.mlp.gate_project.weight"),
    ]


def test_bare_files_are_judged_as_files(tmp_path):
    drafter = tiny_mtp("moe")
    bare = tmp_path / "bare.safetensors"
    save_file(drafter.state_dict(), bare)
    assert codes(bare) == []
    target = write_target(tmp_path / "target", drafter)
    served = save_drafter(drafter, tmp_path / "served", dialect="hy3", target_folder=target)
    bare.write_bytes((served / "model.safetensors").read_bytes())
    assert codes(bare) == []
    edit(bare, lambda tensors: tensors.update({"model.layers.8.strange": torch.ones(1)}))
    assert codes(bare) == [("unexpected-tensor", "midlayer.strange")]


def own_layer(drafter, dialect, tmp_path):
    """Tensors of the drafter as its target would hold them."""
    shape = write_target(tmp_path / "shape", drafter)
    served = save_drafter(drafter, tmp_path / "source", dialect=dialect, target_folder=shape)
    found = {}
    for path in served.glob("*.safetensors"):
        found |= {key: value for key, value in load_file(path).items() if key.startswith(("mtp.", "model.layers.8."))}
    return found


@pytest.mark.parametrize(("mlp", "dialect"), [("dense", "qwen3"), ("moe", "hy3")])
def test_warm_start_from_the_targets_own_layer(mlp, dialect, tmp_path, monkeypatch):
    drafter = tiny_mtp(mlp)
    layer = own_layer(drafter, dialect, tmp_path)
    if dialect == "hy3":  # copies of the target's own tensors, as some checkpoints carry them
        layer["model.layers.8.embed_tokens.weight"] = torch.randn(50, 20)
        layer["model.layers.8.shared_head.head.weight"] = torch.randn(50, 20)
    target = write_target(tmp_path / "target", drafter, shards=2, extra=layer, num_nextn_predict_layers=1)
    weights = load_target_layer(target, drafter.config)
    assert weights.keys() == drafter.state_dict().keys()
    for key, value in drafter.state_dict().items():
        assert weights[key].dtype == torch.float32 and torch.equal(weights[key], value), key
    assert load_target_layer(target, drafter.config.model_copy(update={"num_depths": 1})).keys() == weights.keys()
    wider = tiny_mtp(mlp, num_heads=8).config
    with pytest.raises(CheckpointError, match="num_heads is 4 there, 8 here"):
        load_target_layer(target, wider)


def test_a_target_without_a_layer_says_so(tmp_path):
    drafter = tiny_mtp("moe")
    target = write_target(tmp_path / "target", drafter, shards=2)
    assert codes(target) == [("no-mtp-layer", "config.json")]
    with pytest.raises(CheckpointError, match="without an MTP layer"):
        load_target_layer(target, drafter.config)
    other = write_target(tmp_path / "llama", drafter, architectures=["LlamaForCausalLM"])
    with pytest.raises(CheckpointError, match="'LlamaForCausalLM' is no drafter"):
        load_target_layer(other, drafter.config)
    (target / "model-00001-of-00002.safetensors").write_bytes(b"")
    assert codes(target) == [("empty-file", "model-00001-of-00002.safetensors")]


def test_a_layer_at_the_wrong_place_and_several_layers(tmp_path):
    drafter = tiny_mtp("moe")
    layer = own_layer(drafter, "hy3", tmp_path)
    target = write_target(tmp_path / "nine", drafter, extra=layer, num_hidden_layers=9)
    assert codes(target) == [("config-conflict", "num_hidden_layers")]
    both = {**layer, **{key.replace("layers.8.", "layers.9."): value.clone() for key, value in layer.items()}}
    target = write_target(tmp_path / "two", drafter, extra=both)
    assert codes(target)[0] == ("unsupported", "num_nextn_predict_layers")


def test_the_target_must_fit(tmp_path):
    drafter = tiny_mtp("dense")
    folder = save_drafter(drafter, tmp_path / "export")
    facts = {
        "architecture": "qwen3", "hidden_size": 20, "intermediate_size": 28, "num_layers": 8, "num_heads": 4,
        "num_kv_heads": 2, "head_dim": 6, "vocab_size": 50, "rms_norm_eps": 1e-5, "max_position_embeddings": 128,
        "tied_head": True, "rope": drafter.config.rope,
    }  # fmt: skip
    assert codes(folder, geometry=TargetGeometry(**facts)) == []
    other = TargetGeometry(**{**facts, "num_layers": 9, "vocab_size": 51})
    assert codes(folder, geometry=other) == [("target-differs", "target_num_layers"), ("target-differs", "vocab_size")]


def test_from_the_command_line(tmp_path):
    drafter = tiny_mtp("dense")
    target = write_target(tmp_path / "target", drafter)
    ours = save_drafter(drafter, tmp_path / "ours")
    arguments = ["checkpoint", "convert", str(ours), str(tmp_path / "served"), "--to", "qwen3"]
    assert CliRunner().invoke(cli, arguments).exit_code != 0
    result = CliRunner().invoke(cli, [*arguments, "--target", str(target)])
    assert result.exit_code == 0, result.output
    result = CliRunner().invoke(cli, ["checkpoint", "check", str(tmp_path / "served")])
    assert result.exit_code == 0 and "only mtp.* is read" in result.output
    assert_same(load_drafter(tmp_path / "served").drafter, drafter)
