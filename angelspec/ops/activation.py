"""The gate of a SwiGLU layer (Shazeer, arXiv 2002.05202)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F


def gated_silu_reference(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up``, elementwise."""
    return F.silu(gate) * up


class _GatedSilu(torch.autograd.Function):
    """The reference, keeping only its two inputs for the backward pass."""

    @staticmethod
    def forward(ctx, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        grad_up = F.silu(gate).mul_(grad)
        grad_gate = torch.ops.aten.silu_backward(grad * up, gate)
        return grad_gate, grad_up


def gated_silu(gate: Tensor, up: Tensor) -> Tensor:
    """:func:`gated_silu_reference` with one temporary less in memory."""
    return _GatedSilu.apply(gate, up)
