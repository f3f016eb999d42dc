"""Temperature sampling by an exponential race, one race per (seed, row, position).

Every token of the vocabulary draws a time from the exponential distribution, divided by its probability; the first to
arrive is the sample (Gumbel-max in other words). The times depend on seed, row, position and token alone: not on the
batch, not on how many positions one forward covers. Speculative and plain decoding with one seed therefore draw the
same tokens from the same logits, which turns losslessness at temperature > 0 from a statistical statement into an
equality. A race also forgives rounding: logits that differ in their last bits change the winner only where two tokens
arrive at almost the same time, while the inverse of the distribution function changes it at every boundary of the tail.

Legend: N flattened positions, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit integer
_MIX_A = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_B = -7723592293110705685  # 0x94D049BB133111EB
_GOLDEN32 = -1640531535  # 0x9E3779B1 as a signed 32-bit integer
_MIX32_A = -2048144789  # 0x85EBCA6B
_MIX32_B = -1028477387  # 0xC2B2AE35


def _shift_right(value: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def _mix(value: Tensor) -> Tensor:
    """The SplitMix64 finaliser (Steele, Lea, Flood 2014) on int64, with wrap-around arithmetic."""
    value = (value ^ _shift_right(value, 30)) * _MIX_A
    value = (value ^ _shift_right(value, 27)) * _MIX_B
    return value ^ _shift_right(value, 31)


def stream_keys(rows: Tensor, positions: Tensor, *, seed: int) -> Tensor:
    """Random 64-bit keys, a pure function of seed, row and position.

    Args:
        rows: int64 row (request) ids, any shape that broadcasts with ``positions``.
        positions: int64 positions of the tokens to draw, counted in the whole sequence.
        seed: any integer.

    Returns:
        int64 in the broadcast shape.
    """
    signed = (seed & (2**64 - 1)) - (2**64 if seed & 2**63 else 0)
    state = _mix(torch.full((), signed, dtype=torch.int64, device=rows.device) + _GOLDEN)
    state = _mix(state + (rows.to(torch.int64) + 1) * _GOLDEN)
    return _mix(state + (positions.to(torch.int64) + 1) * _GOLDEN)


def race_times(key_N: Tensor, *, vocab_size: int) -> Tensor:
    """Exponential times of mean 1, float32 [N, V], from ``stream_keys``: a counter-based hash of key and token id."""
    low_N1 = key_N.to(torch.int32).unsqueeze(-1)
    high_N1 = (key_N >> 32).to(torch.int32).unsqueeze(-1)
    token_V = torch.arange(vocab_size, dtype=torch.int32, device=key_N.device)
    hashed_NV = _mix32(_mix32(token_V * _GOLDEN32 + low_N1) ^ high_N1)
    uniform_NV = (hashed_NV & 0x7FFFFFFF).float() * 2.0**-31 + 2.0**-32
    # log1p keeps the early arrivals, which decide, exact to their last bit; no time is infinite.
    return -torch.log1p(-uniform_NV.clamp_(max=1 - 2.0**-24))


def _mix32(value: Tensor) -> Tensor:
    """MurmurHash3's 32-bit finaliser (Appleby) on int32, with wrap-around arithmetic; overwrites its argument."""
    for bits, factor in ((16, _MIX32_A), (13, _MIX32_B)):
        value ^= (value >> bits) & ((1 << (32 - bits)) - 1)
        value *= factor
    value ^= (value >> 16) & 0xFFFF
    return value


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


def sample_tokens(logits_NV: Tensor, *, temperature: float, key_N: Tensor | None = None, top_p: float = 1.0) -> Tensor:
    """One token per row of logits: the argmax at temperature 0, else the winner of the row's race.

    Args:
        logits_NV: [N, V].
        temperature: 0 or more, in units of the logits.
        key_N: int64 [N] from ``stream_keys``; needed above temperature 0.
        top_p: see ``probabilities``; no effect at temperature 0.

    Returns:
        int64 [N]. A token of probability 0 is never drawn.

    Raises:
        ValueError: negative temperature, or no keys where they are needed.
    """
    if temperature < 0:
        raise ValueError(f"temperature {temperature} is negative")
    if temperature == 0:
        return logits_NV.argmax(dim=-1)
    if key_N is None:
        raise ValueError("sampling needs key_N")
    probability_NV = probabilities(logits_NV, temperature=temperature, top_p=top_p)
    return (probability_NV / race_times(key_N, vocab_size=logits_NV.shape[-1])).argmax(dim=-1)
