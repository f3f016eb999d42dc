"""Root-mean-square normalisation in the form of Hugging Face's Llama and Qwen.

Shapes: N flattened positions, D channels.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F


def rms_norm_reference(states: Tensor, weight_D: Tensor, *, eps: float) -> Tensor:
    """Normalise the last axis: float32 statistics, cast back to the input's dtype, then times the weight."""
    wide = states.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight_D * normed.to(states.dtype)


class _RMSNorm(torch.autograd.Function):
    """The reference in fewer passes over memory; keeps the input and one number per position."""

    @staticmethod
    def forward(ctx, states: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        channels = states.shape[-1]
        scale = torch.linalg.vector_norm(states, dim=-1, keepdim=True).square_().div_(channels).add_(eps).rsqrt_()
        ctx.save_for_backward(states, weight_D, scale)
        return (states * scale).mul_(weight_D)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        states, weight_D, scale = ctx.saved_tensors
        channels = weight_D.shape[0]
        product = grad * states
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = scale.reshape(-1) @ product.reshape(-1, channels)
        if not ctx.needs_input_grad[0]:
            return None, grad_weight, None
        inner = (product @ weight_D).unsqueeze(-1).mul_(scale.pow(3)).div_(channels)
        # the product's memory is used again: fresh pages cost more than the arithmetic
        grad_states = torch.mul(grad, weight_D, out=product).mul_(scale).addcmul_(states, inner, value=-1)
        return grad_states, grad_weight, None


def fused_rms_norm(states: Tensor, weight_D: Tensor, *, eps: float) -> Tensor:
    """The same by torch, rounded once, after the weight."""
    return F.rms_norm(states, weight_D.shape, weight_D, eps)


def rms_norm(states: Tensor, weight_D: Tensor, *, eps: float) -> Tensor:
    """:func:`rms_norm_reference` in fewer passes: our own where states and weight are float32, torch's one kernel on a
    GPU where no gradient is asked for (a draft is many small norms, and their launches cost more than their work).

    Args:
        states: [..., D].
        weight_D: [D].
        eps: added to the mean square.
    """
    if states.dtype == weight_D.dtype == torch.float32:
        return _RMSNorm.apply(states, weight_D, eps)
    if states.is_cuda and states.dtype == weight_D.dtype and not torch.is_grad_enabled():
        return fused_rms_norm(states, weight_D, eps=eps)
    return rms_norm_reference(states, weight_D, eps=eps)
