"""D-cut: which proposals of a batch are worth verifying (arXiv 2607.14647).

With confidence c_{i,t} of request i's proposal t, the survival s_{i,k} = prod_{t<=k} c_{i,t} estimates the chance that
proposal k is committed, and s_{i,0} = 1 stands for the anchor's slot, which is always verified. A keep ratio rho of
the grid buys K_rho = max(B, ceil(rho * B * (D + 1))) slots; they go to the largest survivals of the whole batch, ties
to the shallower position, so that each row keeps a prefix. U(rho) is the sum of the kept survivals, the expected
committed tokens, and the ratio with the largest U(rho) / C(B, K_rho) wins, C being the measured seconds of a step.

Only deterministic drafts with target-only acceptance make any such cut lossless.

Legend: B batch rows, K proposals (the depth D).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from angelspec.core.costs import FALLBACK_RATIO, RATIOS


@dataclass(frozen=True)
class Cut:
    """One decision for one batch."""

    ratio: float
    """The keep ratio that was applied."""
    kept_B: Tensor
    """int64: proposals kept per row (the anchor's slot not counted)."""
    expected_tokens: float
    """U: expected committed tokens of the step, one bonus per row included."""


def survivals(confidence_BK: Tensor, *, lengths_B: Tensor | None = None) -> Tensor:
    """Survival products of each row's proposals, non-increasing along a row.

    Args:
        confidence_BK: acceptance estimates; values outside [0, 1] are clamped, NaN counts as 0.
        lengths_B: int64, proposals that exist per row; None: all K.

    Returns:
        float32 [B, K]; -1 where no proposal exists, which no cut keeps.
    """
    survival_BK = torch.nan_to_num(confidence_BK.float(), nan=0.0).clamp(0.0, 1.0).cumprod(dim=1)
    if lengths_B is None:
        return survival_BK
    exists_BK = torch.arange(survival_BK.shape[1], device=survival_BK.device) < lengths_B.unsqueeze(1)
    return survival_BK.masked_fill(~exists_BK, -1.0)


def slot_budget(ratio: float, *, batch_size: int, depth: int) -> int:
    """K_rho: verified slots of the batch, anchors counted."""
    slots = ratio * batch_size * (depth + 1)
    return max(batch_size, math.ceil(round(slots, 9)))  # rounded: 0.1 * 30 is 3.0000000000000004


def cut(survival_BK: Tensor, *, ratio: float) -> Cut:
    """Keep the largest survivals of the batch within the budget of ``ratio``.

    Args:
        survival_BK: from ``survivals``; non-increasing along each row.
        ratio: in (0, 1].

    Raises:
        ValueError: ratio out of range.
    """
    if not 0 < ratio <= 1:
        raise ValueError(f"keep ratio {ratio} must lie in (0, 1]")
    batch, depth = survival_BK.shape
    budget = slot_budget(ratio, batch_size=batch, depth=depth) - batch
    # Position-major and stable: among equal survivals the shallower position comes first, then the lower row.
    flat = survival_BK.t().reshape(-1)
    ordered, order = flat.sort(descending=True, stable=True)
    winners = order[:budget][ordered[:budget] >= 0]
    kept_B = torch.bincount(winners % batch, minlength=batch) if batch else flat.new_zeros(0, dtype=torch.int64)
    return Cut(ratio, kept_B, batch + float(flat[winners].double().sum()))


def choose_cut(
    survival_BK: Tensor,
    *,
    seconds: Callable[[int, int], float | None],
    ratios: Sequence[float] = RATIOS,
) -> Cut:
    """The cut of the grid with the most expected tokens per second.

    Args:
        survival_BK: from ``survivals``.
        seconds: ``(batch size, verified slots of the batch) -> measured seconds of a whole step``, or None where
            nothing comparable was measured; one None makes the fallback ratio win, since a rate is then unknown.
        ratios: the grid; among equal rates the larger ratio wins.
    """
    batch, depth = survival_BK.shape
    best: tuple[float, float, Cut] | None = None
    for ratio in ratios:
        cost = seconds(batch, slot_budget(ratio, batch_size=batch, depth=depth))
        if cost is None:
            return cut(survival_BK, ratio=FALLBACK_RATIO)
        candidate = cut(survival_BK, ratio=ratio)
        key = (candidate.expected_tokens / cost, ratio)
        if best is None or key > best[:2]:
            best = (*key, candidate)
    assert best is not None, "the grid of ratios is empty"
    return best[2]


def cut_reference(survival_rows: Sequence[Sequence[float]], *, ratio: float, depth: int) -> list[int]:
    """``cut`` in the words of its definition: existing slots sorted by (survival, position, row); kept per row."""
    batch = len(survival_rows)
    slots = [(-1.0, 0, row) for row in range(batch)]
    slots += [
        (-survival, position, row)
        for row, survivals_K in enumerate(survival_rows)
        for position, survival in enumerate(survivals_K, start=1)
        if survival >= 0
    ]
    budget = max(batch, math.ceil(round(ratio * batch * (depth + 1), 9)))
    kept = [0] * batch
    for _, position, row in sorted(slots)[:budget]:
        kept[row] += position > 0
    return kept
