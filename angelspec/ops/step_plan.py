"""The plan of one step of a mixed batch: who is drafted for and by whom, then which drafts are verified.

Phase 1, before drafting, knows only estimates of each row's mean survivals. It looks for the assignment of rows to
drafters with the most expected tokens per second,

    U / C = (B + sum of the K - B largest survivals of assigned rows) / (sum_d draft_d(n_d) + verify(B, K)),

over the assignment and K. Plain decoding of the whole batch is one of the candidates. Exhaustive search is out of the
question, so rows are ranked by what they are worth beyond their own cost at the best rate known so far, and the best
prefix of that ranking is taken, for each set of drafters that may be active (a drafter that no row uses costs nothing).

Phase 2, after drafting, has this step's confidences; what drafting cost is spent and stands in C whatever is cut.

Legend: B rows, K proposals.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from angelspec.core.costs import RATIOS
from angelspec.core.step_costs import StepCosts
from angelspec.ops.dcut import Cut, choose_cut, cut, survivals


@dataclass(frozen=True)
class Row:
    """What phase 1 must know about one row."""

    survivals: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Estimated S_1 .. S_D by drafter that may serve the row; empty: it must decode plainly."""
    forced: bool = False
    """Whether the row must be drafted for (by the best of its drafters), whatever it costs."""


@dataclass(frozen=True)
class DraftPlan:
    """Phase 1's decision."""

    drafters: tuple[str | None, ...]
    """Per row; None decodes plainly."""
    expected_tokens: float
    """U of the step, if it goes as estimated."""
    seconds: float | None
    """C of the step, if it goes as estimated; None where costs are not known."""

    @property
    def drafted(self) -> dict[str, int]:
        """Rows by drafter."""
        counts: dict[str, int] = {}
        for name in self.drafters:
            if name is not None:
                counts[name] = counts.get(name, 0) + 1
        return counts


class CostCurves:
    """Looks up step costs quickly: the seconds of every number of slots, once per batch size.

    Args:
        costs: measured parts.
        depth: the largest depth of a drafter.
    """

    def __init__(self, costs: StepCosts, *, depth: int) -> None:
        self.costs = costs
        self._depth = depth
        self._verify: dict[int, np.ndarray | None] = {}
        self._draft: dict[tuple[str, int], float | None] = {}

    def verify(self, batch_size: int) -> np.ndarray | None:
        """Seconds by slots beyond the anchors, from 0 to the largest depth for every row; None if not known."""
        if batch_size not in self._verify:
            slots = range(batch_size, batch_size * (self._depth + 1) + 1)
            seconds = [self.costs.verify_seconds(batch_size, number) for number in slots]
            self._verify[batch_size] = None if None in seconds else np.array(seconds)
        return self._verify[batch_size]

    def draft(self, drafted: Mapping[str, int]) -> float | None:
        """Seconds of everything but verification, 0 if no row is drafted for; None if not known."""
        total = 0.0
        for name, rows in drafted.items():
            key = (name, rows)
            if key not in self._draft:
                self._draft[key] = self.costs.draft_seconds(name, rows)
            if self._draft[key] is None:
                return None
            total += self._draft[key]
        rows = sum(drafted.values())
        return total + (self.costs.step_seconds + self.costs.row_seconds * rows if rows else 0.0)

    def seconds(self, drafted: Mapping[str, int]) -> Callable[[int, int], float | None]:
        """``(batch size, slots) -> seconds`` of a whole step with these drafted rows, as ``choose_cut`` asks it."""
        draft = self.draft(drafted)

        def lookup(batch_size: int, slots: int) -> float | None:
            verify = self.verify(batch_size)
            return None if draft is None or verify is None else draft + float(verify[slots - batch_size])

        return lookup


# --------------------------------------------------------------------------------------- phase 1: drafting


def plan_drafting(rows: Sequence[Row], *, costs: CostCurves) -> DraftPlan:
    """Whom to draft for, and with which drafter.

    Where a cost is not known, only forced rows are drafted for.

    Args:
        rows: the batch, in order; equal input gives an equal plan on every rank.
        costs: of the machine.
    """
    batch = len(rows)
    verify = costs.verify(batch)
    forced = [_most_expected(row) if row.forced else None for row in rows]
    best = _evaluate(rows, forced, costs=costs, verify=verify)
    if best.seconds is None or verify is None:
        return best
    names = sorted({name for row in rows if not row.forced for name in row.survivals})
    for active in _subsets(names):
        for _ in range(2):  # the second time at the rate that the first one found
            found = _best_prefix(rows, active, forced, best=best, costs=costs, verify=verify)
            if _rate(found) <= _rate(best):
                break
            best = found
    return best


def _best_prefix(
    rows: Sequence[Row],
    active: Sequence[str],
    forced: Sequence[str | None],
    *,
    best: DraftPlan,
    costs: CostCurves,
    verify: np.ndarray,
) -> DraftPlan:
    batch, rate = len(rows), _rate(best)
    slot_price = rate * float(verify[-1] - verify[0]) / max(len(verify) - 1, 1)
    prices = {}
    for name in active:
        all_rows, one_row = costs.draft({name: batch}), costs.draft({name: 1})
        if all_rows is None or one_row is None:
            return best
        prices[name] = rate * (all_rows - one_row) / max(batch - 1, 1)
    ranked = []
    for index, row in enumerate(rows):
        offers = [
            (sum(max(s - slot_price, 0.0) for s in row.survivals[name]) - prices[name], name)
            for name in active
            if name in row.survivals
        ]
        if offers and not row.forced:
            worth, name = max(offers)
            ranked.append((-worth, index, name))
    ranked.sort()
    paying = sum(worth < 0 for worth, _, _ in ranked)
    found = best
    for count in sorted({*_powers(len(ranked)), paying, (paying + 1) // 2, len(ranked)} - {0}):
        drafters = list(forced)
        for _, index, name in ranked[:count]:
            drafters[index] = name
        candidate = _evaluate(rows, drafters, costs=costs, verify=verify)
        if _rate(candidate) > _rate(found):
            found = candidate
    return found


def _evaluate(
    rows: Sequence[Row], drafters: Sequence[str | None], *, costs: CostCurves, verify: np.ndarray | None
) -> DraftPlan:
    """The best K for an assignment."""
    plan = DraftPlan(tuple(drafters), float(len(rows)), None)
    draft = costs.draft(plan.drafted)
    if draft is None or verify is None:
        return plan
    offered = [s for row, name in zip(rows, drafters, strict=True) if name is not None for s in row.survivals[name]]
    gained = np.concatenate(([0.0], np.cumsum(np.sort(offered)[::-1])))
    tokens, seconds = len(rows) + gained, draft + verify[: len(gained)]
    best = int(np.argmax(tokens / seconds))
    return DraftPlan(plan.drafters, float(tokens[best]), float(seconds[best]))


def _rate(plan: DraftPlan) -> float:
    return plan.expected_tokens / plan.seconds if plan.seconds is not None else 0.0


def _most_expected(row: Row) -> str | None:
    return max(sorted(row.survivals), key=lambda name: sum(row.survivals[name]), default=None)


def _subsets(names: Sequence[str]) -> list[tuple[str, ...]]:
    if len(names) > 3:
        return [*((name,) for name in names), tuple(names)]
    return [subset for size in range(1, len(names) + 1) for subset in itertools.combinations(names, size)]


def _powers(most: int) -> list[int]:
    return [2**exponent for exponent in range(most.bit_length()) if 2**exponent <= most]


# ----------------------------------------------------------------------------------- phase 2: verification


def plan_verification(
    acceptance: Sequence[Sequence[float]],
    *,
    depths: Sequence[int],
    drafted: Mapping[str, int],
    costs: CostCurves,
    ratios: Sequence[float] | None = RATIOS,
    owed: Sequence[int] | None = None,
) -> Cut:
    """Which drafts to verify.

    Args:
        acceptance: per row, the calibrated chance of each proposal given those before it; empty for a plain row.
        depths: D_r per row, 0 for a plain row.
        drafted: rows by drafter, for the cost.
        costs: of the machine.
        ratios: the grid of D-cut; None: every number of slots.
        owed: proposals per row that are verified whatever they are worth.
    """
    survival_BK, depths_B = _tensors(acceptance, depths)
    owed_B = None if owed is None or not any(owed) else torch.tensor(owed, dtype=torch.int64)
    return choose_cut(survival_BK, seconds=costs.seconds(drafted), ratios=ratios, depths_B=depths_B, owed_B=owed_B)


def fixed_cut(acceptance: Sequence[Sequence[float]], *, depths: Sequence[int], ratio: float) -> list[int]:
    """Proposals kept per row at one keep ratio; arguments as for ``plan_verification``."""
    survival_BK, depths_B = _tensors(acceptance, depths)
    return cut(survival_BK, ratio=ratio, depths_B=depths_B).kept_B.tolist()


def _tensors(acceptance: Sequence[Sequence[float]], depths: Sequence[int]) -> tuple[Tensor, Tensor]:
    width = max(map(len, acceptance), default=0)
    padded = [[*row, *[0.0] * (width - len(row))] for row in acceptance]
    confidence_BK = torch.tensor(padded, dtype=torch.float32).view(len(padded), width)
    lengths_B = torch.tensor([len(row) for row in acceptance], dtype=torch.int64)
    return survivals(confidence_BK, lengths_B=lengths_B), torch.tensor(depths, dtype=torch.int64)
