"""D-cut: which proposals of a batch are worth verifying (arXiv 2607.14647).

With confidence c_{r,t} of row r's proposal t, the survival s_{r,k} = prod_{t<=k} c_{r,t} estimates the chance that
proposal k is committed, and s_{r,0} = 1 stands for the anchor's slot, which is always verified. Row r was offered at
most D_r proposals: the depth of its drafter, 0 where it decodes plainly. A keep ratio rho of the grid buys
K_rho = max(B, ceil(rho * sum_r (D_r + 1))) slots; they go to the largest survivals of the whole batch, ties to the
shallower position, so that each row keeps a prefix. U(rho) is the sum of the kept survivals, the expected committed
tokens, and the ratio with the largest U(rho) / C(B, K_rho) wins, C being the measured seconds of a step.

Two additions. The grid may be every number of slots instead of a few ratios. And rows may be *owed* proposals: those
are verified whatever their survival and are part of every budget (a probe, or a row whose cut was switched off).

Only deterministic drafts with target-only acceptance make any such cut lossless.

Legend: B batch rows, K proposals (the largest D_r).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

RATIOS: tuple[float, ...] = (0.25, 0.5, 0.75, 1.0)
"""The grid of keep ratios (arXiv 2607.14647)."""
FALLBACK_RATIO = 0.75
"""The keep ratio where no cost was measured."""


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


def slot_budget(ratio: float, *, batch_size: int, offered: int) -> int:
    """K_rho: verified slots of the batch, anchors counted.

    Args:
        offered: sum of D_r + 1 over the rows.
    """
    slots = ratio * offered
    return max(batch_size, math.ceil(round(slots, 9)))  # rounded: 0.1 * 30 is 3.0000000000000004


def cut(survival_BK: Tensor, *, ratio: float, depths_B: Tensor | None = None, owed_B: Tensor | None = None) -> Cut:
    """Keep the largest survivals of the batch within the budget of ``ratio``.

    Args:
        survival_BK: from ``survivals``; non-increasing along each row.
        ratio: in (0, 1].
        depths_B: int64, D_r; None: K for every row.
        owed_B: int64, proposals per row that are kept in any case, as far as they exist; None: none.

    Raises:
        ValueError: ratio out of range.
    """
    if not 0 < ratio <= 1:
        raise ValueError(f"keep ratio {ratio} must lie in (0, 1]")
    ranked = _rank(survival_BK, depths_B=depths_B, owed_B=owed_B)
    return ranked.keep(ranked.budget(ratio), ratio=ratio)


def choose_cut(
    survival_BK: Tensor,
    *,
    seconds: Callable[[int, int], float | None],
    ratios: Sequence[float] | None = RATIOS,
    depths_B: Tensor | None = None,
    owed_B: Tensor | None = None,
) -> Cut:
    """The cut of the grid with the most expected tokens per second.

    Args:
        survival_BK: from ``survivals``.
        seconds: ``(batch size, verified slots of the batch) -> measured seconds of a whole step``, or None where
            nothing comparable was measured; one None makes the fallback ratio win, since a rate is then unknown.
        ratios: the grid; None: every number of slots. Among equal rates the larger number of slots wins.
        depths_B: see ``cut``.
        owed_B: see ``cut``.
    """
    ranked = _rank(survival_BK, depths_B=depths_B, owed_B=owed_B)
    if ratios is None:
        grid = [(slots, slots / ranked.offered if ranked.offered else 1.0) for slots in ranked.all_budgets]
    else:
        grid = sorted((ranked.budget(ratio), ratio) for ratio in ratios)
    assert grid, "the grid of ratios is empty"
    best: tuple[float, int, float] | None = None
    for slots, ratio in grid:
        cost = seconds(ranked.batch_size, slots)
        if cost is None:
            return ranked.keep(ranked.budget(FALLBACK_RATIO), ratio=FALLBACK_RATIO)
        rate = ranked.expected_tokens(slots) / cost
        if best is None or rate >= best[0]:
            best = (rate, slots, ratio)
    assert best is not None
    return ranked.keep(best[1], ratio=best[2])


@dataclass(frozen=True)
class _Ranked:
    """The proposals of a batch in the order in which a growing budget keeps them."""

    batch_size: int
    offered: int
    rows: Tensor
    """int64 [existing proposals]: the row of each."""
    gained: list[float]
    """By number of kept proposals, the sum of their survivals."""
    num_owed: int

    @property
    def all_budgets(self) -> range:
        """Every number of slots that differs from the others."""
        return range(self.batch_size + self.num_owed, self.batch_size + len(self.gained))

    def budget(self, ratio: float) -> int:
        """Slots that ``ratio`` buys: never fewer than the anchors and what is owed, nor more than exist."""
        asked = slot_budget(ratio, batch_size=self.batch_size, offered=self.offered)
        return min(max(asked, self.batch_size + self.num_owed), self.batch_size + len(self.gained) - 1)

    def expected_tokens(self, slots: int) -> float:
        return self.batch_size + self.gained[slots - self.batch_size]

    def keep(self, slots: int, *, ratio: float) -> Cut:
        kept_B = torch.bincount(self.rows[: slots - self.batch_size], minlength=self.batch_size)
        return Cut(ratio, kept_B, self.expected_tokens(slots))


def _rank(survival_BK: Tensor, *, depths_B: Tensor | None, owed_B: Tensor | None) -> _Ranked:
    batch, depth = survival_BK.shape
    order_BK, num_owed = survival_BK, 0
    if owed_B is not None:
        position_K = torch.arange(depth, device=survival_BK.device)
        owed_BK = (position_K < owed_B.unsqueeze(1)) & (survival_BK >= 0)
        order_BK = survival_BK.masked_fill(owed_BK, 2.0)  # before any survival
        num_owed = int(owed_BK.sum())
    # Position-major and stable: among equal survivals the shallower position comes first, then the lower row.
    ordered, order = order_BK.t().reshape(-1).sort(descending=True, stable=True)
    order = order[ordered >= 0]
    gained = survival_BK.t().reshape(-1)[order].double().cumsum(dim=0)
    offered = batch * (depth + 1) if depths_B is None else batch + int(depths_B.sum())
    return _Ranked(batch, offered, order % max(batch, 1), [0.0, *gained.tolist()], num_owed)


def cut_reference(
    survival_rows: Sequence[Sequence[float]], *, ratio: float, depths: Sequence[int], owed: Sequence[int] | None = None
) -> list[int]:
    """``cut`` in the words of its definition: existing slots sorted by (survival, position, row); kept per row."""
    batch = len(survival_rows)
    owed = [0] * batch if owed is None else owed
    slots = [(-3.0, 0, row) for row in range(batch)]
    slots += [
        (-2.0 if position <= owed[row] else -survival, position, row)
        for row, survivals_K in enumerate(survival_rows)
        for position, survival in enumerate(survivals_K, start=1)
        if survival >= 0
    ]
    offered = sum(depth + 1 for depth in depths)
    budget = max(batch, math.ceil(round(ratio * offered, 9)), sum(key <= -2 for key, _, _ in slots))
    kept = [0] * batch
    for _, position, row in sorted(slots)[:budget]:
        kept[row] += position > 0
    return kept
