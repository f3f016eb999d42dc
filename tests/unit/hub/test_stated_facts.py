"""A checkpoint states what loaders need. What contradicts itself is in the table of ``test_refused``."""

from __future__ import annotations

import json

import pytest
from hub_builders import exported_drafter, plain_card, run
from safetensors import safe_open

from angelspec.core.manifest import DrafterManifest
from angelspec.core.recipe_files import load_recipe
from angelspec.hub.publish import prepare
from angelspec.hub.stated_facts import contradictions
from angelspec.pipeline.probe import tensor_problems


def test_an_export_is_in_order(tree):
    assert contradictions(tree, DrafterManifest.read(tree)) == []


@pytest.mark.parametrize(
    "key", ["architectures", "block_size", "sample_from_anchor", "mask_token_id", "target_layer_ids", "rope_theta",
            "rope_parameters", "dtype", "torch_dtype", "target_num_hidden_layers"]
)  # fmt: skip
def test_what_is_not_stated_is_named(tree, key):
    config = json.loads((tree / "config.json").read_text())
    del config[key]
    (tree / "config.json").write_text(json.dumps(config))
    assert f"config.json does not state {key}" in contradictions(tree, DrafterManifest.read(tree))


def test_what_chooses_experts_may_be_float32(tmp_path):
    folder = exported_drafter(tmp_path / "moe", recipe=load_recipe("tiny-mtp-hy3"))
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        kinds = {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118 (no mapping)
    assert set(kinds.values()) == {"BF16", "F32"}, kinds
    checks = {"the tensors": tensor_problems}
    with prepare(folder, license="apache-2.0", base_model=None, write_card=plain_card, checks=checks) as publication:
        assert publication.manifest.drafter.mlp == "moe"


@pytest.mark.parametrize(("content", "words"), [("{", "is no JSON"), ("[]", "holds no object"), (None, "is missing")])
def test_a_broken_configuration_gets_no_card(tree, content, words):
    path = tree / "config.json"
    path.unlink() if content is None else path.write_text(content)
    result = run("checkpoint", "card", tree)
    assert result.exit_code == 2 and f"config.json {words}" in result.output
