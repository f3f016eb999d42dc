"""Drafter checkpoints: saved, loaded, and judged by name (B20, B21)."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from drafter_builders import COMBINATIONS, tiny_config, tiny_drafter
from safetensors.torch import load_file, save_file

from angelspec.core.errors import CheckpointError
from angelspec.core.geometry import TargetGeometry
from angelspec.core.manifest import DrafterManifest, TargetIdentity, TrainingRecord
from angelspec.core.recipe_files import load_recipe
from angelspec.drafters import checkpoint
from angelspec.drafters.checkpoint import (
    convert_checkpoint,
    examine_checkpoint,
    inspect_checkpoint,
    load_drafter,
    save_drafter,
)
from angelspec.drafters.families import build_drafter

TARGET = {
    "architecture": "llama", "hidden_size": 20, "intermediate_size": 28, "num_layers": 8, "num_heads": 4,
    "num_kv_heads": 2, "head_dim": 6, "vocab_size": 50, "rms_norm_eps": 1e-5, "max_position_embeddings": 128,
    "tied_head": True, "rope": tiny_config().rope,
}  # fmt: skip


@pytest.fixture
def export(tmp_path) -> Path:
    return save_drafter(tiny_drafter("dfly"), tmp_path / "export")


def codes(path, **arguments):
    return [(problem.code, problem.key) for problem in inspect_checkpoint(path, **arguments)]


def edit_weights(folder: Path, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def edit_config(folder: Path, **changes) -> None:
    config = json.loads((folder / "config.json").read_text())
    config.update(changes)
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value != "DROP"}))


@pytest.mark.parametrize("name", COMBINATIONS)
def test_saved_and_loaded_is_the_same(name, tmp_path):
    drafter = tiny_drafter(name)
    folder = save_drafter(drafter, tmp_path / name)
    assert inspect_checkpoint(folder) == []
    loaded = load_drafter(folder)
    assert loaded.config == drafter.config and loaded.manifest is None
    assert all(parameter.requires_grad for parameter in loaded.drafter.parameters())
    for key, value in drafter.state_dict().items():
        assert torch.equal(loaded.drafter.state_dict()[key], value), key
    assert torch.equal(loaded.drafter.rotation(torch.arange(5))[0], drafter.rotation(torch.arange(5))[0])


def test_combinations_without_a_public_name_round_trip(tmp_path):
    changes = {"head": "correction", "correction_intermediate_size": 8, "confidence_head": True}
    drafter = tiny_drafter("dflash", **changes)
    folder = save_drafter(drafter, tmp_path / "odd")
    assert load_drafter(folder).config == drafter.config
    with pytest.raises(CheckpointError, match="dialect 'dflash' can't express"):
        save_drafter(drafter, tmp_path / "public", dialect="dflash")


def test_bfloat16_export_states_its_own_dtype(tmp_path):
    folder = save_drafter(tiny_drafter("dfly"), tmp_path / "half", dtype=torch.bfloat16)
    config = json.loads((folder / "config.json").read_text())
    assert config["dtype"] == config["torch_dtype"] == "bfloat16"
    assert {value.dtype for value in load_file(folder / "model.safetensors").values()} == {torch.bfloat16}
    assert codes(folder) == []
    edit_config(folder, torch_dtype="float32")
    assert codes(folder) == [("dtype-differs", "dtype")]
    load_drafter(folder)


def test_config_states_the_slot_convention_and_both_places(export):
    config = json.loads((export / "config.json").read_text())
    for place in (config, config["dflash_config"]):
        assert place["block_size"] == 4 and place["sample_from_anchor"] is False
        assert place["mask_token_id"] == 49 and place["target_layer_ids"] == [1, 3, 6]
        assert "num_target_layers" in place
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 500.0
    assert "embed_tokens.weight" not in load_file(export / "model.safetensors")


def test_no_embedding_unless_asked_and_then_it_is_compared(tmp_path):
    embedding = torch.randn(50, 20)
    folder = save_drafter(tiny_drafter("dfly"), tmp_path / "with", embedding_VD=embedding)
    load_drafter(folder, embedding_VD=embedding)
    assert any("embed_tokens.weight is ignored" in note for note in examine_checkpoint(folder).notes)
    with pytest.raises(CheckpointError, match="is not the target's embedding"):
        load_drafter(folder, embedding_VD=embedding + 1)
    load_drafter(folder, embedding_VD=embedding.bfloat16())  # of a target that was loaded rounded
    rounded = save_drafter(tiny_drafter("dfly"), tmp_path / "rounded", dtype=torch.bfloat16, embedding_VD=embedding)
    load_drafter(rounded, embedding_VD=embedding)
    with pytest.raises(CheckpointError, match="is not the target's embedding"):
        load_drafter(rounded, embedding_VD=embedding * 1.1)


def test_a_renamed_a_misshapen_a_nan_and_a_lost_tensor_are_all_named(export):
    def damage(tensors):
        tensors["layers.0.mlp.gate_project.weight"] = tensors.pop("layers.0.mlp.gate_proj.weight")
        tensors["final_norm.weight"] = torch.ones(7)
        tensors["layers.1.self_attn.q_proj.weight"][2, 3] = float("nan")
        del tensors["hidden_correction.down_proj.weight"]

    edit_weights(export, damage)
    assert sorted(codes(export)) == [
        ("misshapen-tensor", "final_norm.weight"),
        ("missing-tensor", "hidden_correction.down_proj.weight"),
        ("missing-tensor", "layers.0.mlp.gate_proj.weight"),
        ("non-finite", "layers.1.self_attn.q_proj.weight"),
        ("unexpected-tensor", "layers.0.mlp.gate_project.weight"),
    ]
    with pytest.raises(CheckpointError) as caught:
        load_drafter(export)
    for text in ("final_norm.weight is [7], by config.json it should be [20]", "1 of 480 values", "gate_project"):
        assert text in str(caught.value)


def test_damaged_files_are_told_apart(export, tmp_path):
    good = (export / "model.safetensors").read_bytes()
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:ab12\nsize 5\n"
    cases = {
        "truncated": good[:-16], "extra-bytes": good + b"abcd", "empty-file": b"", "lfs-pointer": pointer,
        "unreadable": b"not a tensor file at all",
    }  # fmt: skip
    for code, content in {**cases, "truncated ": good[:20], "truncated  ": good[:5]}.items():
        bare = tmp_path / "bare.safetensors"
        bare.write_bytes(content)
        (export / "model.safetensors").write_bytes(content)
        for path in (bare, export):
            (problem,) = inspect_checkpoint(path)
            assert problem.code == code.strip(), (problem, code)
    (export / "model.safetensors").write_bytes(good[:-16])
    assert "16 bytes are missing" in inspect_checkpoint(export)[0].detail
    with pytest.raises(CheckpointError, match="Git LFS pointer"):
        (export / "model.safetensors").write_bytes(pointer)
        load_drafter(export)


def test_a_bare_file_is_judged_as_a_file(export, tmp_path):
    bare = tmp_path / "bare.safetensors"
    shutil.copy(export / "model.safetensors", bare)
    found = examine_checkpoint(bare)
    assert found.problems == [] and "no config.json" in found.notes[0]
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        load_drafter(bare)
    save_file({"fc.weight": torch.full((2, 2), float("inf")), "strange": torch.ones(1)}, bare)
    assert codes(bare) == [("unexpected-tensor", "strange"), ("non-finite", "context_proj.weight")]


def test_folders_without_what_they_need(export, tmp_path):
    assert codes(tmp_path / "nowhere") == [("not-found", "nowhere")]
    gone = tmp_path / "latest"
    gone.symlink_to(tmp_path / "deleted")
    assert codes(gone) == [("not-found", "latest")] and "deleted" in inspect_checkpoint(gone)[0].detail
    (export / "config.json").rename(export / "config.json.bak")
    assert codes(export) == [("config-missing", "config.json")]
    (export / "model.safetensors").rename(export / ".model.safetensors.tmp")
    assert codes(export)[0] == ("no-weights", "model.safetensors")
    (export / ".model.safetensors.tmp").rename(export / "model.safetensors")
    (export / "config.json").write_text("{")
    assert codes(export) == [("config-unreadable", "config.json")]


def test_two_sets_of_weights_are_never_chosen_from(export):
    torch.save({}, export / "pytorch_model.bin")
    assert [code for code, _ in codes(export)] == ["ambiguous-weights"]


def test_shards_are_followed(export):
    tensors = load_file(export / "model.safetensors")
    half = sorted(tensors)[::2]
    save_file({key: tensors[key] for key in half}, export / "model-1.safetensors")
    save_file({key: value for key, value in tensors.items() if key not in half}, export / "model-2.safetensors")
    (export / "model.safetensors").unlink()
    index = {"weight_map": {key: f"model-{1 if key in half else 2}.safetensors" for key in tensors}}
    (export / "model.safetensors.index.json").write_text(json.dumps(index))
    assert codes(export) == []
    (export / "model-2.safetensors").unlink()
    assert codes(export) == [("shard-missing", "model-2.safetensors")]


def test_the_target_must_fit(export):
    assert codes(export, geometry=TargetGeometry(**TARGET)) == []
    other = TargetGeometry(**{**TARGET, "num_layers": 9, "vocab_size": 51})
    assert codes(export, geometry=other) == [("target-differs", "target_num_layers"), ("target-differs", "vocab_size")]


@pytest.mark.parametrize("place", ["between the renames", "behind them"])
def test_an_export_that_was_killed_while_it_replaced_another_is_made_again(export, tmp_path, monkeypatch, place):
    inner = Path.rename

    def killed(*arguments, **keywords):
        raise KeyboardInterrupt

    def rename(self, target):
        if Path(target) == export:
            killed()
        return inner(self, target)

    with monkeypatch.context() as patch:
        if place == "behind them":
            patch.setattr(checkpoint.shutil, "rmtree", killed)
        else:
            patch.setattr(Path, "rename", rename)
        with pytest.raises(KeyboardInterrupt):
            save_drafter(tiny_drafter("dfly", seed=5), export)
    again = tiny_drafter("dfly", seed=6)
    for _ in range(2):
        save_drafter(again, export)
    assert torch.equal(load_drafter(export).drafter.final_norm.weight, again.final_norm.weight)
    assert [path.name for path in export.parent.iterdir() if "old" in path.name] == []


def test_an_export_replaces_an_export_and_nothing_else(export, tmp_path):
    save_drafter(tiny_drafter("dflash"), export)
    assert load_drafter(export).config.algorithm == "dflash"
    assert [path.name for path in tmp_path.iterdir()] == ["export"]
    other = tmp_path / "diary"
    other.mkdir()
    (other / "today.txt").write_text("kept")
    with pytest.raises(CheckpointError, match="no drafter export"):
        save_drafter(tiny_drafter("dflash"), other)
    assert (other / "today.txt").read_text() == "kept"
    (other / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    with pytest.raises(CheckpointError, match="no drafter export"):
        save_drafter(tiny_drafter("dflash"), other)
    with pytest.raises(CheckpointError, match="export exists"):
        convert_checkpoint(export, export, dialect="angelspec")
    with pytest.raises(CheckpointError, match="today.txt exists"):
        convert_checkpoint(export, other / "today.txt", dialect="angelspec")
    assert sorted(path.name for path in other.iterdir()) == ["config.json", "today.txt"]


def test_an_export_that_fails_to_take_its_place_leaves_the_old_one(export, monkeypatch):
    before = (export / "model.safetensors").read_bytes()
    rename = Path.rename

    def broken(self, target):
        if Path(target) == export and self.name.endswith(".tmp") and ".old." not in self.name:
            raise OSError("the disk is gone")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", broken)
    with pytest.raises(OSError, match="the disk is gone"):
        save_drafter(tiny_drafter("dflash"), export)
    assert (export / "model.safetensors").read_bytes() == before
    assert [path.name for path in export.parent.iterdir()] == ["export"]


def test_non_finite_weights_are_not_exported(tmp_path):
    drafter = tiny_drafter("dfly")
    with torch.no_grad():
        drafter.final_norm.weight[0] = float("inf")
    with pytest.raises(CheckpointError, match=r"final_norm\.weight"):
        save_drafter(drafter, tmp_path / "export")
    assert list(tmp_path.iterdir()) == []


def test_conversion_keeps_tensors_and_dtype(tmp_path):
    drafter = tiny_drafter("dflash")
    ours = save_drafter(drafter, tmp_path / "ours", dtype=torch.bfloat16)
    public = convert_checkpoint(ours, tmp_path / "public", dialect="dflash")
    assert "fc.weight" in load_file(public / "model.safetensors")
    back = convert_checkpoint(public, tmp_path / "back", dialect="angelspec")
    first, last = load_file(ours / "model.safetensors"), load_file(back / "model.safetensors")
    assert first.keys() == last.keys() and all(torch.equal(first[key], last[key]) for key in first)
    assert (ours / "config.json").read_text() == (back / "config.json").read_text()


@pytest.mark.parametrize("name", ["tiny-dfly-llama", "tiny-mtp-qwen3", "tiny-mtp-hy3"])
def test_the_manifest_travels_and_must_agree(name, tmp_path):
    recipe = load_recipe(name)
    target, config = recipe.target, recipe.drafter_config()
    manifest = DrafterManifest(
        angelspec_version="0.1.0", algorithm=config.algorithm, mode=recipe.mode, drafter=config,
        target=TargetIdentity(
            name=target.name, source=target.source, digest="ab12", mode_family=target.mode_family,
            geometry=target.geometry,
        ),
        recipe=recipe, training=TrainingRecord(steps=1, supervised_positions=1, target_tokens=1),
    )  # fmt: skip
    folder = save_drafter(build_drafter(config).initialise(seed=0), tmp_path / "export", manifest=manifest)
    assert load_drafter(folder, geometry=target.geometry).manifest == manifest
    edit_config(folder, rms_norm_eps=0.5, angelspec="DROP")
    assert codes(folder) == [("manifest-differs", "rms_norm_eps")]


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"hidden_size": "20", "head_dim": "DROP"}, "hidden_size"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": "4x", "rope_theta": 1e4}}, "rope"),
        ({"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}}, "rope"),
    ],
)
def test_a_value_of_another_kind_is_named(export, changes, found):
    edit_config(export, angelspec="DROP", **changes)
    assert found in [key for _, key in codes(export)], codes(export)


def test_of_a_model_that_is_no_drafter_no_weight_is_read(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    save_file({"model.embed_tokens.weight": torch.zeros(3, 2)}, tmp_path / "model.safetensors")
    assert codes(tmp_path) == [("unsupported", "architectures")]
    assert examine_checkpoint(tmp_path).tensors == {}


def test_the_target_says_how_deep_it_is_where_the_file_does_not(export):
    geometry = TargetGeometry(**TARGET)
    edit_config(export, angelspec="DROP", target_num_hidden_layers="DROP", num_target_layers=3)
    found = examine_checkpoint(export, geometry=geometry)
    assert found.config.target_num_layers == geometry.num_layers
