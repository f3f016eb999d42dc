import pytest
import torch
from mtp_builders import tiny_mtp
from safetensors.torch import load_file, save_file
from training_builders import CE, DEPTHS, ToyTarget, mtp_config, pattern_rows, section, tiny_config

from angelspec.core.errors import CheckpointError
from angelspec.core.known_targets import KNOWN_TARGETS
from angelspec.core.recipe import TrainingStage
from angelspec.drafters.checkpoint import load_drafter
from angelspec.training import export
from angelspec.training.run import new_drafter, train_drafter, trained_weights

GEOMETRY = KNOWN_TARGETS["tiny-llama"].geometry


def trained(folder, **changes):
    settings = section(
        stages=(TrainingStage(name="cold", objective=CE, steps=6),), evaluate_every=2, keep_checkpoints=1,
        held_out_anchors=16, **changes,
    )  # fmt: skip
    train_drafter(
        settings, tiny_config(), target=ToyTarget(), train_rows=pattern_rows(4), held_out_rows=pattern_rows(2, seed=8),
        folder=folder,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_export_is_the_chosen_checkpoint_rounded_once(tmp_path, dtype):
    trained(tmp_path / "run")
    for which in ("best", "last"):
        folder = export.export_run(
            tmp_path / "run", tiny_config(), tmp_path / which, dtype=dtype, which=which, geometry=GEOMETRY
        )
        loaded = load_drafter(folder, geometry=GEOMETRY, dtype=dtype)
        weights, record = trained_weights(tmp_path / "run", tiny_config(), which=which)
        assert record["step"] == 6 or which == "best"
        for name, tensor in loaded.drafter.state_dict().items():
            assert tensor.dtype == dtype and torch.equal(tensor, weights[name].to(dtype))
        assert not any("embed_tokens" in name for name in load_file(folder / "model.safetensors"))


def test_an_export_that_does_not_load_back_is_refused(tmp_path, monkeypatch):
    drafter = new_drafter(tiny_config(), seed=0)
    original = export.save_drafter

    def careless(drafter, folder, **settings):
        original(drafter, folder, **settings)
        file = folder / "model.safetensors"
        tensors = load_file(file)
        tensors["final_norm.weight"][3] += 1
        save_file(tensors, file, metadata={"format": "pt"})

    monkeypatch.setattr(export, "save_drafter", careless)
    with pytest.raises(CheckpointError, match=r"does not load back as it was: final_norm\.weight"):
        export.export_drafter(drafter, tmp_path / "out", dtype=torch.float32)


def test_a_run_without_a_checkpoint_says_so(tmp_path):
    with pytest.raises(CheckpointError, match="holds no checkpoint yet"):
        export.export_run(tmp_path, tiny_config(), tmp_path / "out", dtype=torch.float32)


@pytest.mark.parametrize("mlp", ["dense", "moe"])
def test_mtp_is_exported_as_it_was_trained(tmp_path, mlp):
    config = mtp_config(mlp)
    settings = section(stages=(TrainingStage(name="cold", objective=DEPTHS, steps=2),), held_out_anchors=16)
    result = train_drafter(
        settings, config, target=ToyTarget(), train_rows=pattern_rows(4), held_out_rows=pattern_rows(2, seed=8),
        folder=tmp_path / "run",
    )  # fmt: skip
    assert result.best_accepted_length >= 1.0
    folder = export.export_run(tmp_path / "run", config, tmp_path / "out", dtype=torch.float32, geometry=GEOMETRY)
    loaded = load_drafter(folder, geometry=GEOMETRY)
    weights, _ = trained_weights(tmp_path / "run", config)
    assert loaded.config == config and set(loaded.drafter.state_dict()) == set(weights)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in loaded.drafter.state_dict().items())


def test_what_chooses_experts_is_exported_as_it_is(tmp_path):
    drafter = tiny_mtp("moe")
    stored = load_file(export.export_drafter(drafter, tmp_path / "out", dtype=torch.bfloat16) / "model.safetensors")
    (router,) = (tensor for name, tensor in stored.items() if name.endswith("router.gate.weight"))
    assert torch.equal(router, drafter.midlayer.mlp.router.gate.weight)
    assert stored["eh_proj.weight"].dtype == torch.bfloat16
