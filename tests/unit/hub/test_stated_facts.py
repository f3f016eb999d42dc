"""A checkpoint states what loaders need, and its files do not contradict each other."""

from __future__ import annotations

import json
import shutil

import pytest
from click.testing import CliRunner
from hub_builders import exported_drafter, plain_card
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from angelspec.cli.main import cli
from angelspec.core.errors import CheckpointError
from angelspec.core.manifest import DrafterManifest
from angelspec.core.recipe_files import load_recipe
from angelspec.hub.publish import prepare
from angelspec.hub.stated_facts import contradictions
from angelspec.pipeline.probe import tensor_problems


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
        ({"dtype": "float32"}, "config.json states two dtypes: bfloat16, float32"),
        ({"torch_dtype": "torch.float16"}, "config.json states two dtypes: bfloat16, float16"),
    ],
)
def test_contradictions_are_named(tree, changes, message):
    assert any(message in item for item in found(tree, changes)), found(tree, changes)


def publishing(tree):
    """What publish says to a checkpoint, but for drafting with it."""
    checks = {"the tensors": tensor_problems}
    return prepare(tree, license="apache-2.0", base_model=None, write_card=plain_card, checks=checks)


def refusal(tree) -> str:
    with pytest.raises(CheckpointError) as caught, publishing(tree):
        pass
    return str(caught.value)


def test_a_dtype_that_is_not_the_tensors(tree):
    found(tree, {"dtype": "float32", "torch_dtype": "float32"})
    assert "config.json says float32 but the tensors are bfloat16" in refusal(tree)


def test_tensors_of_two_kinds(tree):
    tensors = load_file(tree / "model.safetensors")
    name = next(iter(tensors))
    save_file({**tensors, name: tensors[name].float()}, tree / "model.safetensors")
    assert "config.json says bfloat16 but the tensors are bfloat16, float32" in refusal(tree)
    found(tree, {"torch_dtype": "float32"})
    assert "config.json states two dtypes: bfloat16, float32" in refusal(tree)


def test_what_chooses_experts_may_be_float32(tmp_path):
    folder = exported_drafter(tmp_path / "moe", recipe=load_recipe("tiny-mtp-hy3"))
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        kinds = {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118 (no mapping)
    assert set(kinds.values()) == {"BF16", "F32"}, kinds
    with publishing(folder) as publication:
        assert publication.manifest.drafter.mlp == "moe"


@pytest.mark.parametrize("content", [b"\x00" * 4, b"\xff" * 64, b"\x02\x00\x00\x00\x00\x00\x00\x00{}extra", b"x" * 900])
def test_what_is_no_safetensors_file(tree, content):
    (tree / "model.safetensors").write_bytes(content)
    assert "model.safetensors" in refusal(tree).partition("problem(s)")[2], content


def test_weights_of_no_bytes(tree):
    (tree / "model.safetensors").write_bytes(b"")
    assert "model.safetensors is empty" in refusal(tree)


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


@pytest.mark.parametrize(("content", "words"), [("{", "is no JSON"), ("[]", "holds no object"), (None, "is missing")])
def test_a_broken_configuration_is_named_by_every_command(tree, content, words):
    path = tree / "config.json"
    path.unlink() if content is None else path.write_text(content)
    assert f"config.json {words}" in refusal(tree)
    result = CliRunner().invoke(cli, ["checkpoint", "card", str(tree)])
    assert result.exit_code == 2 and f"config.json {words}" in result.output
