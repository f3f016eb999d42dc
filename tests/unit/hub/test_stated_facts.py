"""A checkpoint states what loaders need, and its files do not contradict each other."""

from __future__ import annotations

import json
import shutil

import pytest
from safetensors.torch import load_file, save_file

from angelspec.core.manifest import DrafterManifest
from angelspec.hub.stated_facts import contradictions


@pytest.fixture
def tree(drafter, tmp_path):
    shutil.copytree(drafter, tmp_path / "drafter")
    return tmp_path / "drafter"


def found(tree, changes=None, manifest=None) -> list[str]:
    config = json.loads((tree / "config.json").read_text())
    for key, value in (changes or {}).items():
        config[key] = value
    (tree / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return contradictions(tree, manifest or DrafterManifest.read(tree))


def test_an_export_is_in_order(tree):
    assert found(tree) == []


@pytest.mark.parametrize(
    "key", ["architectures", "block_size", "sample_from_anchor", "mask_token_id", "target_layer_ids", "rope_theta",
            "rope_parameters", "dtype", "torch_dtype", "target_num_hidden_layers"]
)  # fmt: skip
def test_what_is_not_stated_is_named(tree, key):
    assert f"config.json does not state {key}" in found(tree, {key: None})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_theta": 5e5}, "rope_theta is given as"),
        ({"rope_theta": 5e5, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, "the manifest's"),
        ({"dtype": "float32"}, "dtype is 'float32' in config.json, but the tensors are bfloat16"),
        ({"torch_dtype": "torch.float16"}, "torch_dtype is 'torch.float16'"),
    ],
)
def test_contradictions_are_named(tree, changes, message):
    assert any(message in item for item in found(tree, changes)), found(tree, changes)


def test_tensors_of_two_kinds(tree):
    tensors = load_file(tree / "model.safetensors")
    name = next(iter(tensors))
    save_file({**tensors, name: tensors[name].float()}, tree / "model.safetensors")
    assert "dtype is 'bfloat16' in config.json, but the tensors are bfloat16, float32" in found(tree)


@pytest.mark.parametrize(
    "content", [b"", b"\x00" * 4, b"\xff" * 64, b"\x02\x00\x00\x00\x00\x00\x00\x00{}extra", b"x" * 900]
)
def test_what_is_no_safetensors_file(tree, content):
    (tree / "model.safetensors").write_bytes(content)
    assert found(tree), content


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mode": "high-think"}, "the manifest and its recipe disagree on the mode"),
        ({"algorithm": "dflash"}, "disagree on the algorithm"),
    ],
)
def test_a_manifest_that_contradicts_itself(tree, changes, message):
    manifest = DrafterManifest.read(tree).model_copy(update=changes)
    assert any(message in item for item in found(tree, manifest=manifest))


def test_a_manifest_of_another_target(tree):
    manifest = DrafterManifest.read(tree)
    geometry = manifest.target.geometry.model_copy(update={"vocab_size": 999})
    manifest = manifest.model_copy(update={"target": manifest.target.model_copy(update={"geometry": geometry})})
    assert "the manifest: vocab_size is 320 but the target has 999" in found(tree, manifest=manifest)
