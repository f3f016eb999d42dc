import pytest
import torch
from torch import nn
from training_builders import mtp_config

from angelspec.core.recipe import OptimizerSection
from angelspec.drafters.families import build_drafter
from angelspec.training.optimisers import Muon, Optimiser, group_parameters, orthogonalise


class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.Module()
        layer.q_proj = nn.Linear(8, 12, bias=False)
        layer.k_proj = nn.Linear(8, 12, bias=False)
        layer.norm = nn.Parameter(torch.ones(8))
        self.layers = nn.ModuleList([layer])
        self.context_proj = nn.Linear(8, 8, bias=True)
        self.layer_fusion_weights = nn.Parameter(torch.zeros(2, 3))
        self.markov_head = nn.Module()
        self.markov_head.markov_w1 = nn.Embedding(5, 4)
        self.frozen = nn.Parameter(torch.zeros(3, 3), requires_grad=False)


def filled(seed=0):
    torch.manual_seed(seed)
    model = Tiny()
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.randn_like(parameter)
    return model


def test_muon_takes_the_matrices_of_mtp_s_layer_and_no_experts():
    for mlp, inside in (("dense", {"gate_proj", "up_proj", "down_proj"}), ("moe", {"shared_mlp"})):
        groups = {g.rule: g.names for g in group_parameters(build_drafter(mtp_config(mlp)), use_muon=True)}
        assert all(name.startswith("midlayer.") for name in groups["muon"])
        assert {"q_proj", "k_proj", "v_proj", "o_proj", *inside} <= {
            part for n in groups["muon"] for part in n.split(".")
        }
        assert "eh_proj.weight" in groups["adamw"]
        assert all("norm" in name for name in groups["adamw-no-decay"])
        assert not any("experts_" in name for name in groups["muon"])


def test_groups_follow_the_rule_and_leave_nothing_out():
    by_rule = {group.rule: set(group.names) for group in group_parameters(Tiny(), use_muon=True)}
    assert by_rule == {
        "muon": {"layers.0.q_proj.weight", "layers.0.k_proj.weight"},
        "adamw": {"context_proj.weight"},
        "adamw-no-decay": {
            "layers.0.norm",
            "context_proj.bias",
            "layer_fusion_weights",
            "markov_head.markov_w1.weight",
        },
    }
    assert "muon" not in {group.rule for group in group_parameters(Tiny(), use_muon=False)}


@pytest.mark.parametrize("shape", [(12, 30), (30, 12), (16, 16)])
def test_orthogonalised_singular_values_are_near_one(shape):
    x = torch.randn(3, *shape, generator=torch.Generator().manual_seed(1))
    values = torch.linalg.svdvals(orthogonalise(x, dtype=torch.float32))
    assert values.min() > 0.3 and values.max() < 1.4
    assert torch.linalg.svdvals(x).max() > 3, "the input was not orthogonal already"


def test_muon_moves_as_torch_s_muon_does():
    weights = [torch.randn(12, 8, generator=torch.Generator().manual_seed(i)) for i in range(2)]
    ours, theirs = ([nn.Parameter(w.clone()) for w in weights] for _ in range(2))
    mine = Muon(ours, lr=0.02, momentum=0.9, weight_decay=0.1)
    reference = torch.optim.Muon(
        theirs, lr=0.02, momentum=0.9, weight_decay=0.1, nesterov=True, adjust_lr_fn="match_rms_adamw"
    )
    for step in range(3):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn(12, 8, generator=torch.Generator().manual_seed(10 * step + 7))
            b.grad = a.grad.clone()
        mine.step()
        reference.step()
    for a, b, start in zip(ours, theirs, weights, strict=True):
        assert (a - b).abs().max() < 0.03 * (a - start).abs().max()  # both iterate in bf16


def test_factor_scales_every_rate_and_frozen_parameters_stay():
    model = filled()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimiser = Optimiser(model, OptimizerSection(name="muon"))
    optimiser.set_factor(0.0)
    optimiser.step()
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())
    optimiser.set_factor(1.0)
    optimiser.step()
    moved = {name for name, p in model.named_parameters() if not torch.equal(before[name], p)}
    assert moved == set(before) - {"frozen"}


def test_no_decay_group_does_not_shrink_without_gradient():
    model = filled()
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.zero_()
    with torch.no_grad():
        model.layer_fusion_weights.fill_(1.0)
    optimiser = Optimiser(model, OptimizerSection(weight_decay=0.5, learning_rate=0.1))
    before = model.context_proj.weight.detach().clone()
    optimiser.step()
    assert torch.equal(model.layer_fusion_weights, torch.ones(2, 3))
    assert torch.allclose(model.context_proj.weight, before * 0.95)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_state_round_trip_continues_bit_for_bit(name):
    section = OptimizerSection(name=name)
    model = filled()
    optimiser = Optimiser(model, section)
    optimiser.step()
    saved = {key: value.clone() for key, value in optimiser.state_tensors().items()}
    twin = filled()
    twin.load_state_dict(model.state_dict())
    other = Optimiser(twin, section)
    other.create_state()
    restored = other.state_tensors()
    assert restored.keys() == saved.keys()
    for key, value in restored.items():
        value.copy_(saved[key])
    for o, m in ((optimiser, model), (other, twin)):
        for parameter in m.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.full_like(parameter, 0.3)
        o.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


def test_creating_a_state_moves_no_parameter_and_keeps_what_there_is():
    model = filled()
    before = [p.detach().clone() for p in model.parameters()]
    optimiser = Optimiser(model, OptimizerSection(name="muon"))
    optimiser.create_state()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert set(optimiser.state_tensors()) >= {"layers.0.q_proj.weight/momentum_buffer", "context_proj.weight/exp_avg"}
    optimiser.step()
    moments = optimiser.state_tensors()["context_proj.weight/exp_avg"].clone()
    optimiser.create_state()
    assert moments.any() and torch.equal(moments, optimiser.state_tensors()["context_proj.weight/exp_avg"])
