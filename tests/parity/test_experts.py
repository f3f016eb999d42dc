"""Grouped products of a mixture of experts against the loop over experts."""

import pytest
import torch

from angelspec.core.drafter_config import MoeConfig
from angelspec.drafters import experts
from angelspec.drafters.experts import ExpertMLP, routed_sum, routed_sum_reference

NUM_EXPERTS, HIDDEN, WIDTH = 6, 24, 16


def _case(*, tokens, per_token, unused=(), dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    used = [expert for expert in range(NUM_EXPERTS) if expert not in unused]
    chosen = [torch.randperm(len(used), generator=generator)[:per_token] for _ in range(tokens)]
    expert_NM = torch.tensor(used)[torch.stack(chosen)] if tokens else torch.empty(0, per_token, dtype=torch.int64)
    weight_NM = torch.rand(tokens, per_token, generator=generator).requires_grad_()
    matrices = [
        normal(NUM_EXPERTS, HIDDEN, WIDTH),
        normal(NUM_EXPERTS, HIDDEN, WIDTH),
        normal(NUM_EXPERTS, WIDTH, HIDDEN),
    ]
    return normal(tokens, HIDDEN), expert_NM, weight_NM, *matrices


def _run(routed, case, *, dtype):
    leaves = [tensor for tensor in case if tensor.requires_grad]
    sum_ND = routed(*case, dtype=dtype)
    factors = torch.linspace(-1, 1, sum_ND.numel()).view_as(sum_ND)
    return sum_ND, torch.autograd.grad((sum_ND * factors).sum(), leaves)


@pytest.mark.parametrize(
    "tokens, per_token, unused", [(40, 2, ()), (9, 3, (0, 5)), (1, 1, (0, 1, 2, 3, 4)), (0, 2, ())]
)
def test_sum_and_gradients_are_those_of_the_loop(tokens, per_token, unused):
    case = _case(tokens=tokens, per_token=per_token, unused=unused)
    fast, slow = (_run(routed, case, dtype=torch.float32) for routed in (routed_sum, routed_sum_reference))
    torch.testing.assert_close(fast[0], slow[0])
    for one, other in zip(fast[1], slow[1], strict=True):
        torch.testing.assert_close(one, other)
    if tokens:
        assert fast[0].abs().max() > 0.1, "the experts answered nothing: the test tests nothing"


def test_products_in_another_dtype(dtype=torch.bfloat16):
    case = _case(tokens=30, per_token=2)
    fast, slow = (_run(routed, case, dtype=dtype) for routed in (routed_sum, routed_sum_reference))
    assert fast[0].dtype == torch.float32
    assert [gradient.dtype for gradient in fast[1]] == [torch.float32] * 5
    torch.testing.assert_close(fast[0], slow[0], atol=2e-2, rtol=2e-2)
    exact = routed_sum_reference(*case, dtype=torch.float32)
    assert not torch.equal(fast[0], exact)


@pytest.mark.parametrize("width, path", [(16, "routed_sum"), (6, "routed_sum_reference")])
def test_matrices_that_a_grouped_product_refuses_go_expert_by_expert(monkeypatch, width, path):
    taken = []
    for name in ("routed_sum", "routed_sum_reference"):
        inner = getattr(experts, name)
        monkeypatch.setattr(experts, name, lambda *a, n=name, f=inner, **k: taken.append(n) or f(*a, **k))
    moe = MoeConfig(num_experts=4, experts_per_token=2, intermediate_size=width)
    torch.manual_seed(0)
    mlp = ExpertMLP(HIDDEN, moe)
    for parameter in mlp.parameters():
        torch.nn.init.normal_(parameter)
    states = torch.randn(2, 5, HIDDEN)
    answer = mlp(torch.zeros_like(states), states, None)
    assert taken == [path]
    assert answer.shape == states.shape and answer.isfinite().all()
