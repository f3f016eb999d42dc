"""The most probable tokens of each row: a few through block maxima, thousands through a threshold.

A row's K largest entries lie in its K blocks of largest maximum. Block maxima are one vectorised pass; a direct
``topk`` or ``argmax`` over a vocabulary is scalar work, five times as long on a CPU. Of ten thousand tokens nobody
needs the order, nor a list: the value that so many reach is enough, and counting who reaches a value is vectorised too.

Shapes: R rows, V vocabulary, K tokens, G blocks, C candidates (or columns of a tile).
"""

from __future__ import annotations

import math
from statistics import NormalDist

import torch
from torch import Tensor

from angelspec.objectives.channels import TopTokens

BLOCK = 64
"""Columns per block: short enough that a few blocks are cheap to search, long enough to fill vector registers."""
_TILE_COLUMNS = 8192
_SAMPLED_COLUMNS = 2048
"""Columns from which a row's mean and spread are guessed."""
_SECANT_STEPS = 6
"""Steps after which every second one goes to the next entry; without equal entries about so many are enough."""
_MOST_COUNTS = 24
"""Counting passes after which a row is sorted instead."""


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


def top_threshold(logits_RV: Tensor, *, count: int) -> Tensor:
    """Return values t, [R], that exactly ``count`` entries of each row reach: ``(logits >= t).sum() == count``.

    Where several entries share the ``count``-th place, t is their value, and more than ``count`` reach it. A row with a
    NaN gets some value.

    On a CPU: secant steps on the number of entries that reach t, started as if they were normally distributed, inside a
    bracket that every count narrows; where equal entries stop them, from the bracket's upper end to the next entry
    below. An accelerator sorts.
    """
    num_rows, num_columns = logits_RV.shape
    if count >= num_columns:
        return logits_RV.amin(1)
    if logits_RV.device.type != "cpu" or num_rows == 0 or num_columns < 2 * BLOCK:
        return _sorted_threshold(logits_RV, count=count)
    wanted, normal = float(count), NormalDist()
    quantile = normal.inv_cdf(1.0 - count / num_columns)
    std_R, mean_R = torch.std_mean(logits_RV[:, :: max(1, num_columns // _SAMPLED_COLUMNS)], 1)
    guess_R = mean_R + quantile * std_R
    slope_R = -num_columns * normal.pdf(quantile) / std_R.clamp_min(1e-30)  # of the number that reaches the guess
    low_R, high_R = torch.full_like(guess_R, -math.inf), torch.full_like(guess_R, math.inf)
    found_R = torch.full_like(guess_R, math.nan)
    last_guess_R, last_reached_R, is_next_entry = guess_R, None, False
    scratch_RC = torch.empty(num_rows, min(num_columns, _TILE_COLUMNS), dtype=logits_RV.dtype)
    for number in range(_MOST_COUNTS):
        reached_R = _count_reaching(logits_RV, guess_R, scratch_RC)
        hits_R = reached_R >= wanted if is_next_entry else reached_R == wanted
        found_R = torch.where(found_R.isnan() & hits_R, guess_R, found_R)
        if not found_R.isnan().any():
            return found_R
        low_R = torch.where(reached_R >= wanted, guess_R.maximum(low_R), low_R)
        high_R = torch.where(reached_R < wanted, guess_R.minimum(high_R), high_R)
        if last_reached_R is not None:
            secant_R = (reached_R - last_reached_R) / (guess_R - last_guess_R)
            slope_R = torch.where((secant_R < 0) & secant_R.isfinite(), secant_R, slope_R)
        last_guess_R, last_reached_R = guess_R, reached_R
        is_next_entry = number >= _SECANT_STEPS and number % 2 == 0
        if is_next_entry:
            guess_R = _next_below(logits_RV, high_R)
        else:
            guess_R = guess_R + (wanted - reached_R) / slope_R
            middle_R = low_R + 0.5 * (high_R - low_R)
            outside_R = (guess_R <= low_R) | (guess_R >= high_R)
            guess_R = torch.where(outside_R & middle_R.isfinite(), middle_R, guess_R)
    rest_R = found_R.isnan()
    found_R[rest_R] = _sorted_threshold(logits_RV[rest_R], count=count)
    return found_R


def _count_reaching(logits_RV: Tensor, threshold_R: Tensor, scratch_RC: Tensor) -> Tensor:
    total_R = torch.zeros_like(threshold_R)
    for start in range(0, logits_RV.shape[1], scratch_RC.shape[1]):
        part = logits_RV[:, start : start + scratch_RC.shape[1]]
        # a float result, unlike a bool one, is compared and summed in vector registers
        total_R += torch.ge(part, threshold_R[:, None], out=scratch_RC[:, : part.shape[1]]).sum(1)
    return total_R


def _next_below(logits_RV: Tensor, bound_R: Tensor) -> Tensor:
    """The largest entry of each row that is less than its bound."""
    return logits_RV.masked_fill(logits_RV >= bound_R[:, None], -math.inf).amax(1)


def _sorted_threshold(logits_RV: Tensor, *, count: int) -> Tensor:
    return logits_RV.topk(count, 1, sorted=False).values.amin(1)


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
