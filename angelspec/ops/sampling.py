"""Temperature sampling from one uniform number per (seed, row, position).

A token's randomness depends on nothing else: not on the batch it is decoded in, not on how many positions one
forward covers. Speculative and plain decoding with one seed therefore draw the same tokens from the same logits,
which turns losslessness at temperature > 0 from a statistical statement into an equality.

Legend: N flattened positions, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit integer
_MIX_A = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_B = -7723592293110705685  # 0x94D049BB133111EB


def _shift_right(value: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def _mix(value: Tensor) -> Tensor:
    """The SplitMix64 finaliser (Steele, Lea, Flood 2014) on int64, with wrap-around arithmetic."""
    value = (value ^ _shift_right(value, 30)) * _MIX_A
    value = (value ^ _shift_right(value, 27)) * _MIX_B
    return value ^ _shift_right(value, 31)


def uniforms(rows: Tensor, positions: Tensor, *, seed: int) -> Tensor:
    """Uniform numbers in [0, 1), a pure function of seed, row and position.

    Args:
        rows: int64 row (request) ids, any shape that broadcasts with ``positions``.
        positions: int64 positions of the tokens to draw, counted in the whole sequence.
        seed: any integer.

    Returns:
        float64 in the broadcast shape, on 2^52 levels (a product with the total then stays below the total).
    """
    signed = (seed & (2**64 - 1)) - (2**64 if seed & 2**63 else 0)
    state = _mix(torch.full((), signed, dtype=torch.int64, device=rows.device) + _GOLDEN)
    state = _mix(state + (rows.to(torch.int64) + 1) * _GOLDEN)
    state = _mix(state + (positions.to(torch.int64) + 1) * _GOLDEN)
    return _shift_right(state, 12).to(torch.float64) * 2.0**-52


def probabilities(logits: Tensor, *, temperature: float, top_p: float = 1.0) -> Tensor:
    """The distribution that is sampled from: softmax(logits / temperature), cut to its nucleus.

    Args:
        logits: [..., V] of any float type.
        temperature: above 0.
        top_p: keep the smallest set of most likely tokens whose mass reaches this (Holtzman et al. 2020); 1 keeps all.

    Returns:
        float32 [..., V], summing to 1.
    """
    probability = torch.softmax(logits.float() / temperature, dim=-1)
    if top_p < 1.0:
        ordered, order = probability.sort(dim=-1, descending=True, stable=True)
        before = ordered.cumsum(dim=-1) - ordered
        dropped = torch.zeros_like(probability, dtype=torch.bool).scatter(-1, order, before >= top_p)
        probability = probability.masked_fill(dropped, 0.0)
        probability = probability / probability.sum(dim=-1, keepdim=True)
    return probability


def sample_tokens(
    logits_NV: Tensor, *, temperature: float, uniform_N: Tensor | None = None, top_p: float = 1.0
) -> Tensor:
    """One token per row of logits: the argmax at temperature 0, else the inverse of the distribution function.

    Args:
        logits_NV: [N, V].
        temperature: 0 or more, in units of the logits.
        uniform_N: float64 [N] from ``uniforms``; needed above temperature 0.
        top_p: see ``probabilities``; no effect at temperature 0.

    Returns:
        int64 [N]. A token of probability 0 is never drawn.

    Raises:
        ValueError: negative temperature, or no uniform numbers where they are needed.
    """
    if temperature < 0:
        raise ValueError(f"temperature {temperature} is negative")
    if temperature == 0:
        return logits_NV.argmax(dim=-1)
    if uniform_N is None:
        raise ValueError("sampling needs uniform_N")
    # Float64: 2^17 tiny probabilities summed in float32 would move the later boundaries.
    cumulative_NV = probabilities(logits_NV, temperature=temperature, top_p=top_p).cumsum(dim=-1, dtype=torch.float64)
    threshold_N1 = uniform_N.to(torch.float64).unsqueeze(-1) * cumulative_NV[:, -1:]
    return torch.searchsorted(cumulative_NV, threshold_N1, right=True).squeeze(-1).clamp_max(logits_NV.shape[-1] - 1)
