"""An MTP layer inside a real (tiny) target: the target stays what it was, and the layer is found again."""

import json
import shutil

import pytest
import torch
from mtp_builders import MOE, fitting_mtp
from safetensors.torch import save_file
from target_builders import fresh_target, tiny_target, user

from angelspec.drafters.checkpoint import inspect_checkpoint, load_drafter, save_drafter
from angelspec.drafters.initial_weights import load_target_layer
from angelspec.drafters.mtp_layouts import public_tensors
from angelspec.drafters.target_copy import LAYER_FILE, copy_target


def layer_like(target, mlp):
    """A drafter whose layer has the shape of the target's own layers."""
    geometry = target.geometry
    shape = {
        key: getattr(geometry, key)
        for key in ("intermediate_size", "num_heads", "num_kv_heads", "head_dim", "rms_norm_eps", "rope")
    }
    moe = MOE.model_copy(
        update={"num_experts": 4, "intermediate_size": geometry.intermediate_size // 2, "router_scale": 2.826}
    )
    return fitting_mtp(geometry, mlp, moe=moe if mlp == "moe" else None, **shape)


def answers(target):
    tokens = target.render(user("What is a drafter?"), mode=target.mode_family.modes[0], add_generation_prompt=True)
    with torch.no_grad():
        return target.model(input_ids=torch.tensor([tokens])).logits


def test_a_qwen3_export_is_still_the_target(tmp_path):
    target = tiny_target("qwen3")
    drafter = layer_like(target, "dense")
    folder = save_drafter(drafter, tmp_path / "served", dialect="qwen3", target_folder=target.folder)
    assert inspect_checkpoint(folder, target.geometry) == []
    again = fresh_target("qwen3", source=f"folder:{folder}")
    assert torch.equal(answers(again), answers(target))
    loaded = load_drafter(folder, embedding_VD=target.embedding_VD).drafter
    for key, value in drafter.state_dict().items():
        assert torch.equal(loaded.state_dict()[key], value), key


@pytest.mark.parametrize("as_transformers_has_it", [False, True])
def test_hy3_with_a_layer_of_its_own_is_a_warm_start(as_transformers_has_it, tmp_path):
    target = tiny_target("hy3")
    drafter = layer_like(target, "moe")
    folder = tmp_path / "own"
    folder.mkdir()
    tensors = public_tensors(drafter.state_dict(), drafter.config, "hy3")
    if as_transformers_has_it:  # its names in memory, which differ from those of the published files
        spellings = {
            "mlp.router.gate.": "mlp.gate.", "expert_bias": "e_score_correction_bias", "shared_mlp": "shared_experts",
        }  # fmt: skip
        for ours, theirs in spellings.items():
            tensors = {key.replace(ours, theirs): value for key, value in tensors.items()}
    save_file({key: value.contiguous() for key, value in tensors.items()}, folder / LAYER_FILE)
    copy_target(target.folder, folder)
    shutil.copy(target.folder / "config.json", folder / "config.json")
    weights = load_target_layer(folder, drafter.config)
    for key, value in drafter.state_dict().items():
        assert torch.equal(weights[key], value), key
    again = fresh_target("hy3", source=f"folder:{folder}")
    assert torch.equal(answers(again), answers(target))


def test_what_is_copied_is_the_targets_folder(tmp_path):
    target = tiny_target("qwen3")
    folder = save_drafter(
        layer_like(target, "dense"), tmp_path / "served", dialect="qwen3", target_folder=target.folder
    )
    theirs = {path.name for path in target.folder.iterdir() if not path.name.startswith(".")}
    ours = {path.name for path in folder.iterdir()}
    assert theirs - ours == {"model.safetensors"}
    assert ours - theirs == {"model-target.safetensors", LAYER_FILE, "model.safetensors.index.json"}
    config, before = (json.loads((place / "config.json").read_text()) for place in (folder, target.folder))
    assert {
        key: value for key, value in config.items() if key not in ("angelspec", "num_nextn_predict_layers")
    } == before
