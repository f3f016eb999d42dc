"""RMSNorm: the fused form against the reference and against transformers."""

import pytest
import torch
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from angelspec.ops.norm import fused_rms_norm, rms_norm, rms_norm_reference


def test_fused_equals_reference_in_value_and_gradient():
    torch.manual_seed(0)
    states, weight = torch.randn(3, 5, 16, requires_grad=True), torch.randn(16, requires_grad=True)
    upstream = torch.randn(3, 5, 16)
    results = []
    for norm in (rms_norm, rms_norm_reference):
        out = norm(states, weight, eps=1e-3)
        results.append((out.detach(), *torch.autograd.grad(out, (states, weight), upstream)))
    for fused, reference in zip(*results, strict=True):
        torch.testing.assert_close(fused, reference, rtol=1e-5, atol=1e-5)


def test_gradient_by_finite_differences():
    torch.manual_seed(1)
    states = torch.randn(2, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(6, dtype=torch.float64, requires_grad=True)
    from angelspec.ops.norm import _RMSNorm

    assert torch.autograd.gradcheck(lambda s, w: _RMSNorm.apply(s, w, 1e-2), (states, weight))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_transformers(dtype):
    torch.manual_seed(2)
    module = Qwen3RMSNorm(32, eps=1e-6).to(dtype)
    module.weight.data.copy_(torch.randn(32))
    states = torch.randn(7, 32, dtype=dtype) * 5
    torch.testing.assert_close(rms_norm(states, module.weight, eps=1e-6), module(states))


def test_zero_states_stay_finite():
    states = torch.zeros(2, 4, requires_grad=True)
    rms_norm(states, torch.ones(4), eps=1e-6).sum().backward()
    assert torch.isfinite(states.grad).all()


@pytest.mark.parametrize(("dtype", "apart"), [(torch.float32, 1e-6), (torch.bfloat16, 1 / 64)])
def test_torch_s_own_norm_is_the_reference_but_for_one_rounding(dtype, apart):
    """What a GPU uses without gradients: it rounds after the weight, the reference before it, too."""
    generator = torch.Generator().manual_seed(0)
    states, weight = torch.randn(5, 3, 64, generator=generator).to(dtype), torch.rand(64, generator=generator).to(dtype)
    fused = fused_rms_norm(states, weight, eps=1e-5)
    assert fused.dtype == dtype
    torch.testing.assert_close(fused, rms_norm_reference(states, weight, eps=1e-5), rtol=apart, atol=apart / 8)
