"""MTP's parts that need no parity: initial weights, what the configuration refuses, the experts' own gradients."""

import pytest
import torch
from mtp_builders import MOE, tiny_mtp, tiny_mtp_config
from pydantic import TypeAdapter, ValidationError

from angelspec.core.drafter_config import BlockDrafterConfig, DrafterConfig, MoeConfig, MtpDrafterConfig
from angelspec.drafters.experts import ExpertMLP
from angelspec.drafters.families import build_drafter
from angelspec.drafters.mtp import MtpDrafter
from angelspec.drafters.mtp_reference import mlp_reference


@pytest.mark.parametrize("mlp", ["dense", "moe"])
def test_fresh_weights_follow_the_seed(mlp):
    first, again, other = (build_drafter(tiny_mtp_config(mlp)).initialise(seed=seed) for seed in (1, 1, 2))
    assert isinstance(first, MtpDrafter)
    same = [key for key, value in first.state_dict().items() if torch.equal(value, other.state_dict()[key])]
    assert all(torch.equal(value, again.state_dict()[key]) for key, value in first.state_dict().items())
    assert all(key.endswith(("norm.weight", "expert_bias")) for key in same)
    assert 0.015 < first.eh_proj.weight.std() < 0.025
    assert first.num_parameters == sum(parameter.numel() for parameter in first.parameters())


def test_names_are_those_of_public_checkpoints():
    attention = [f"midlayer.self_attn.{name}.weight" for name in ("q_proj", "k_proj", "v_proj", "o_proj")]
    norms = ["midlayer.self_attn.q_norm.weight", "midlayer.self_attn.k_norm.weight"]
    shared = ["enorm.weight", "hnorm.weight", "eh_proj.weight", "final_layernorm.weight"]
    shared += ["midlayer.input_layernorm.weight", "midlayer.post_attention_layernorm.weight", *attention]
    dense = [f"midlayer.mlp.{name}_proj.weight" for name in ("gate", "up", "down")]
    experts = [f"midlayer.mlp.experts_{name}_proj" for name in ("gate", "up", "down")]
    experts += ["midlayer.mlp.router.gate.weight", "midlayer.mlp.expert_bias"]
    experts += [f"midlayer.mlp.shared_mlp.{name}_proj.weight" for name in ("gate", "up", "down")]
    assert sorted(MtpDrafter(tiny_mtp_config()).state_dict()) == sorted(shared + norms + dense)
    assert sorted(MtpDrafter(tiny_mtp_config(qk_norm=False)).state_dict()) == sorted(shared + dense)
    assert sorted(MtpDrafter(tiny_mtp_config("moe")).state_dict()) == sorted(shared + norms + experts)
    shapes = {key: tuple(value.shape) for key, value in MtpDrafter(tiny_mtp_config("moe")).state_dict().items()}
    assert shapes["midlayer.mlp.experts_gate_proj"] == (5, 20, 12)
    assert shapes["midlayer.mlp.experts_down_proj"] == (5, 12, 20)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target_hidden_size": 24}, "embedding and vocabulary head are the target's"),
        ({"mlp": "moe", "moe": None}, "belongs to mlp 'moe'"),
        ({"moe": MOE}, "belongs to mlp 'moe'"),
        ({"num_depths": 0}, "num_depths"),
        ({"num_kv_heads": 3}, "no multiple"),
        ({"block_size": 4}, "block_size"),
    ],
)
def test_what_a_configuration_refuses(changes, message):
    with pytest.raises(ValidationError, match=message):
        tiny_mtp_config(**changes)


def test_more_experts_than_there_are():
    with pytest.raises(ValidationError, match="exceeds num_experts"):
        MoeConfig(num_experts=2, experts_per_token=3, intermediate_size=4)


def test_the_family_tells_configurations_apart():
    adapter = TypeAdapter(DrafterConfig)
    for config in (tiny_mtp_config("moe"), tiny_mtp_config()):
        assert config.algorithm == "mtp" and config.num_proposals == 3 and config.target_layer_ids == ()
        again = adapter.validate_json(config.model_dump_json())
        assert again == config and isinstance(again, MtpDrafterConfig)
    assert BlockDrafterConfig.model_fields["family"].default == "block"
    with pytest.raises(ValidationError, match="family"):
        adapter.validate_python({**tiny_mtp_config().model_dump(), "family": "eagle"})


def test_experts_equal_every_expert_weighed():
    """Also where one expert gets all tokens and others none."""
    mlp = tiny_mtp("moe").midlayer.mlp
    assert isinstance(mlp, ExpertMLP)
    for count in (1, 7, 40):
        states = torch.randn(count, 20, requires_grad=True)
        residual = torch.randn(count, 20)
        results = []
        for out in (mlp(residual, states, None), residual + mlp_reference(mlp, states)):
            weights = [states, *mlp.parameters()]
            results.append((out, *torch.autograd.grad(out.square().sum(), weights)))
        for ours, theirs in zip(*results, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        mlp.expert_bias.copy_(torch.tensor([-9.0, 9.0, -9.0, 9.0, -9.0]))
    states = torch.randn(6, 20)
    torch.testing.assert_close(mlp(torch.zeros(6, 20), states, None), mlp_reference(mlp, states), rtol=1e-4, atol=1e-5)
    gradient = torch.autograd.grad(mlp(torch.zeros(6, 20), states, None).sum(), mlp.experts_up_proj)[0]
    assert gradient.flatten(1).any(1).tolist() == [False, True, False, True, False]


def test_the_router_computes_in_float32():
    """A bfloat16 drafter chooses the experts that its float32 self chooses from the same states."""
    mlp = tiny_mtp("moe").midlayer.mlp
    states = torch.randn(50, 20).bfloat16()
    expected = mlp.router(states.float())
    mlp.to(torch.bfloat16)
    with torch.no_grad():
        mlp.router.gate.weight.data = mlp.router.gate.weight.data.float()
    logits = mlp.router(states)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, states.float() @ mlp.router.gate.weight.T)
    assert (logits - expected).abs().max() < 0.05 * expected.abs().max()
