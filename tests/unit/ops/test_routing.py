"""Which experts a token goes to, and with what weight."""

import torch

from angelspec.core.drafter_config import MoeConfig
from angelspec.ops.routing import choose_experts


def moe(**changes):
    base = {"num_experts": 4, "experts_per_token": 2, "intermediate_size": 8, "router_scale": 3.0}
    return MoeConfig(**{**base, **changes})


LOGITS = torch.tensor([[0.0, 2.0, -1.0, 1.0]])


def test_sigmoid_scores_divided_by_their_sum_and_scaled():
    expert, weight = choose_experts(LOGITS, None, moe=moe())
    assert sorted(expert[0].tolist()) == [1, 3]
    scores = torch.sigmoid(torch.tensor([2.0, 1.0]))
    torch.testing.assert_close(weight[0].sort(descending=True).values, 3.0 * scores / scores.sum())


def test_a_bias_chooses_and_never_weighs():
    bias = torch.tensor([0.0, -5.0, 0.0, 5.0], requires_grad=True)
    logits = LOGITS.clone().requires_grad_(True)
    expert, weight = choose_experts(logits, bias, moe=moe())
    assert expert[0].tolist() == [3, 0]
    scores = torch.sigmoid(torch.tensor([1.0, 0.0]))
    torch.testing.assert_close(weight[0], 3.0 * scores / scores.sum())
    (weight * torch.tensor([[1.0, 2.0]])).sum().backward()
    assert bias.grad is None and (logits.grad != 0).tolist() == [[True, False, False, True]]


def test_softmax_scores_as_they_are():
    expert, weight = choose_experts(LOGITS, None, moe=moe(router_score="softmax", normalise_routes=False))
    torch.testing.assert_close(weight, 3.0 * LOGITS.softmax(-1).gather(-1, expert))


def test_scores_of_zero_stay_finite():
    logits = torch.full((2, 4), -200.0, requires_grad=True)
    _, weight = choose_experts(logits, None, moe=moe())
    weight.sum().backward()
    assert torch.isfinite(weight).all() and torch.isfinite(logits.grad).all()
