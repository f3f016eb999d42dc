"""The most probable tokens of each row, found through block maxima.

A row's K largest entries lie in its K blocks of largest maximum. Block maxima are one vectorised pass; a direct
``topk`` or ``argmax`` over a vocabulary is scalar work, five times as long on a CPU.

Shapes: R rows, V vocabulary, K tokens, G blocks, C candidates.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 64
"""Columns per block: short enough that a few blocks are cheap to search, long enough to fill vector registers."""


class TopTokens(NamedTuple):
    """The K largest logits of each row, in no particular order, and the tokens that have them."""

    logits_RK: Tensor
    tokens_RK: Tensor


def top_tokens(logits_RV: Tensor, *, count: int) -> TopTokens:
    """Return the ``count`` largest entries of each row; which of several equal ones is unspecified, as in ``topk``."""
    num_blocks = logits_RV.shape[1] // BLOCK
    if 4 * count > num_blocks:
        return TopTokens(*logits_RV.topk(count, 1, sorted=False))
    whole_RGB, rest_RC = _blocks(logits_RV)
    chosen_RK = whole_RGB.amax(2).topk(count, 1, sorted=False).indices
    candidates_RC = whole_RGB.gather(1, chosen_RK[:, :, None].expand(-1, -1, BLOCK)).flatten(1)
    top_RK, places_RK = torch.cat([candidates_RC, rest_RC], 1).topk(count, 1, sorted=False)
    in_rest_RK = places_RK >= candidates_RC.shape[1]
    block_RK = chosen_RK.gather(1, (places_RK // BLOCK).clamp(max=count - 1))
    tokens_RK = torch.where(
        in_rest_RK,
        places_RK - candidates_RC.shape[1] + num_blocks * BLOCK,
        block_RK * BLOCK + places_RK % BLOCK,
    )
    return TopTokens(top_RK, tokens_RK)


def first_maximum(logits_RV: Tensor) -> Tensor:
    """Return the lowest index of each row's maximum, [R], as ``argmax`` does."""
    num_blocks = logits_RV.shape[1] // BLOCK
    if num_blocks == 0:
        return logits_RV.argmax(1)
    whole_RGB, rest_RC = _blocks(logits_RV)
    peak_R, block_R = whole_RGB.amax(2).max(1)
    block_RB = whole_RGB[torch.arange(len(whole_RGB), device=whole_RGB.device), block_R]
    token_R = block_R * BLOCK + block_RB.argmax(1)
    if rest_RC.shape[1] == 0:
        return token_R
    rest_peak_R, place_R = rest_RC.max(1)
    return torch.where(rest_peak_R > peak_R, num_blocks * BLOCK + place_R, token_R)


def _blocks(logits_RV: Tensor) -> tuple[Tensor, Tensor]:
    """Return views: whole blocks [R,G,BLOCK], and the columns that do not fill one."""
    whole = logits_RV.shape[1] // BLOCK * BLOCK
    return logits_RV[:, :whole].unflatten(1, (-1, BLOCK)), logits_RV[:, whole:]
