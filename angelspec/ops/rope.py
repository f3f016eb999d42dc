"""Rotary position embedding: half-split (NeoX, Llama) rotation, every scaling rule that transformers knows.

Shapes: C head channels, E rotated pairs (C / 2 when the whole head is rotated).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from angelspec.core.errors import TargetError
from angelspec.core.geometry import Rope


@dataclass
class _RopeArguments:
    """What transformers' rope rules read from a model configuration."""

    head_dim: int
    max_position_embeddings: int
    rope_parameters: dict[str, Any] = field(default_factory=dict)
    num_attention_heads: int = 1

    @property
    def hidden_size(self) -> int:
        """Read to derive the head width, which is given."""
        return self.head_dim

    def standardize_rope_params(self) -> None:
        """Called by the rules; ours are already in one spelling."""


def inverse_frequencies(rope: Rope, *, head_dim: int, max_position_embeddings: int) -> tuple[Tensor, float]:
    """Angular steps per position, and the factor that some rules put on cos and sin.

    Rules that change with the sequence length (dynamic, longrope) are taken at the length the target was trained
    for: a drafter's keys are cached, so its frequencies must not move while an answer grows.

    Args:
        rope: in angelspec's spelling.
        head_dim: channels per head, of which ``partial_rotary_factor`` are rotated.
        max_position_embeddings: the target's.

    Returns:
        float32 [E] and the attention factor.

    Raises:
        TargetError: unknown scaling rule, or an argument of the rule is missing.
    """
    rotated = rope.rotated_channels(head_dim)
    if rotated < 2 or rotated % 2:
        raise TargetError(
            f"partial_rotary_factor {rope.partial_rotary_factor} rotates {rotated} of {head_dim} channels; "
            "an even number of at least 2 is needed"
        )
    with torch.device("cpu"):  # also where a module is built on the meta device
        return _frequencies(rope, rotated, head_dim, max_position_embeddings)


def _frequencies(rope: Rope, rotated: int, head_dim: int, max_position_embeddings: int) -> tuple[Tensor, float]:
    if rope.type == "default":
        exponents = torch.arange(0, rotated, 2, dtype=torch.int64).float() / rotated
        return 1.0 / (rope.theta**exponents), 1.0
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    if rope.type not in ROPE_INIT_FUNCTIONS:
        raise TargetError(
            f"rope type '{rope.type}' is unknown", mend=f"use one of: default, {', '.join(sorted(ROPE_INIT_FUNCTIONS))}"
        )
    parameters = {
        "original_max_position_embeddings": max_position_embeddings,
        **rope.scaling,
        "rope_type": rope.type,
        "rope_theta": rope.theta,
        "partial_rotary_factor": rope.partial_rotary_factor,
    }
    arguments = _RopeArguments(head_dim, max_position_embeddings, parameters)
    try:
        frequencies_E, factor = ROPE_INIT_FUNCTIONS[rope.type](arguments, torch.device("cpu"))
    except KeyError as error:
        raise TargetError(
            f"rope type '{rope.type}' lacks its argument {error}", mend="give it in rope_scaling or rope_parameters"
        ) from error
    except (TypeError, ValueError) as error:
        raise TargetError(
            f"rope type '{rope.type}' can't take its arguments {rope.scaling}: {error}",
            mend="correct rope_scaling or rope_parameters",
        ) from error
    return frequencies_E.float(), float(factor)


def rotation(positions: Tensor, frequencies_E: Tensor, *, factor: float = 1.0) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every position's angles.

    Args:
        positions: integer [...].
        frequencies_E: from :func:`inverse_frequencies`.
        factor: its attention factor.

    Returns:
        two float32 tensors [..., E].
    """
    angles = positions.unsqueeze(-1).float() * frequencies_E
    return angles.cos() * factor, angles.sin() * factor


def rotate_reference(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first 2E channels, channel i with channel i + E; the rest passes through.

    Args:
        states: [..., C].
        cos, sin: broadcastable to [..., E].
    """
    pairs = cos.shape[-1]
    first, second, rest = states[..., :pairs], states[..., pairs : 2 * pairs], states[..., 2 * pairs :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


def _rotate_into(out: Tensor, states: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    pairs = cos.shape[-1]
    first, second = states[..., :pairs], states[..., pairs : 2 * pairs]
    torch.mul(first, cos, out=out[..., :pairs]).addcmul_(second, sin, value=-sign)
    torch.mul(second, cos, out=out[..., pairs : 2 * pairs]).addcmul_(first, sin, value=sign)
    if 2 * pairs < states.shape[-1]:
        out[..., 2 * pairs :] = states[..., 2 * pairs :]
    return out


class _Rotate(torch.autograd.Function):
    """The reference without temporaries; its gradient is the rotation by the opposite angle."""

    @staticmethod
    def forward(ctx, states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        shape = torch.broadcast_shapes(states.shape[:-1], cos.shape[:-1])
        ctx.expanded_from = None if shape == states.shape[:-1] else states.shape
        return _rotate_into(states.new_empty((*shape, states.shape[-1])), states, cos, sin, 1.0)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        grad_states = _rotate_into(torch.empty_like(grad), grad, cos, sin, -1.0)
        if ctx.expanded_from is not None:
            grad_states = grad_states.sum_to_size(ctx.expanded_from)
        return grad_states, None, None


def rotate(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """:func:`rotate_reference` in fewer passes; no gradient to ``cos`` and ``sin``.

    Leading axes of ``states`` of size one are rotated to every position of ``cos`` (one vector, many positions).
    """
    return _Rotate.apply(states, cos.to(states.dtype), sin.to(states.dtype))
