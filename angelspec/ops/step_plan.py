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

from angelspec.core.step_costs import StepCosts
from angelspec.ops.dcut import Cut, choose_cut, cut, slot_budget, survivals


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

    def seconds(self, batch_size: int, *, drafted: Mapping[str, int]) -> Callable[[int, int], float | None]:
        """``(batch size, slots) -> seconds`` of a whole step with these drafted rows, as ``choose_cut`` asks it."""
        draft, verify = self.draft(drafted), self.verify(batch_size)
        if draft is None or verify is None:
            return lambda _, slots: None
        whole = (draft + verify).tolist()
        return lambda _, slots: whole[slots - batch_size]


# --------------------------------------------------------------------------------------- phase 1: drafting


def plan_drafting(rows: Sequence[Row], *, costs: CostCurves, ratios: Sequence[float] | None = None) -> DraftPlan:
    """Whom to draft for, and with which drafter.

    Where a cost is not known, only forced rows are drafted for.

    Args:
        rows: the batch, in order; equal input gives an equal plan on every rank.
        costs: of the machine.
        ratios: the grid that D-cut will choose from; None: every number of slots.
    """
    return _Search(rows, costs=costs, ratios=ratios).best()


class _Search:
    """Phase 1 for one batch. N: drafters, in the order of their names; a choice of -1 is plain decoding."""

    def __init__(self, rows: Sequence[Row], *, costs: CostCurves, ratios: Sequence[float] | None) -> None:
        self._batch, self._costs, self._ratios = len(rows), costs, ratios
        self._verify = costs.verify(len(rows))
        self._names = sorted({name for row in rows for name in row.survivals})
        self._depths = [max(len(row.survivals.get(name, ())) for row in rows) for name in self._names]
        self._survival_NBK = np.zeros((len(self._names), len(rows), max(self._depths, default=0)))
        self._allowed_NB = np.zeros((len(self._names), len(rows)), dtype=bool)
        for n, name in enumerate(self._names):
            for b, row in enumerate(rows):
                if name in row.survivals:
                    self._survival_NBK[n, b, : len(row.survivals[name])] = row.survivals[name]
                    self._allowed_NB[n, b] = True
        forced_B = np.array([row.forced for row in rows], dtype=bool) & self._allowed_NB.any(axis=0)
        self._free_B = ~forced_B & self._allowed_NB.any(axis=0)
        most = np.where(self._allowed_NB, self._survival_NBK.sum(axis=2), -1.0)
        self._forced_B = np.where(forced_B, most.argmax(axis=0) if self._names else 0, -1)

    def best(self) -> DraftPlan:
        best = self._evaluate(self._forced_B)
        if best.seconds is None or not self._free_B.any():
            return best
        for active in _subsets(range(len(self._names))):
            for _ in range(2):  # the second time at the rate that the first one found
                found = max((self._evaluate(choice_B) for choice_B in self._candidates(active, best)), key=_rate)
                if _rate(found) <= _rate(best):
                    break
                best = found
        return best

    def _candidates(self, active: Sequence[int], best: DraftPlan) -> list[np.ndarray]:
        """Assignments of the rows that are worth most, at the rate of the best plan, to the active drafters."""
        rate, verify = _rate(best), self._verify
        assert verify is not None
        slot_price = rate * float(verify[-1] - verify[0]) / max(len(verify) - 1, 1)
        worth_NB = np.full((len(active), self._batch), -np.inf)
        for i, n in enumerate(active):
            one, all_rows = (self._costs.draft({self._names[n]: rows}) for rows in (1, self._batch))
            if one is None or all_rows is None:
                return [self._forced_B]
            row_price = rate * (all_rows - one) / max(self._batch - 1, 1)
            gain_B = np.maximum(self._survival_NBK[n] - slot_price, 0.0).sum(axis=1) - row_price
            worth_NB[i] = np.where(self._allowed_NB[n] & self._free_B, gain_B, -np.inf)
        worth_B, drafter_B = worth_NB.max(axis=0), np.asarray(active)[worth_NB.argmax(axis=0)]
        order = np.argsort(-worth_B, kind="stable")
        possible, paying = int((worth_B > -np.inf).sum()), int((worth_B > 0).sum())
        candidates = []
        for count in sorted({min(1, possible), (paying + 1) // 2, paying, possible} - {0}):
            choice_B = self._forced_B.copy()
            choice_B[order[:count]] = drafter_B[order[:count]]
            candidates.append(choice_B)
        return candidates or [self._forced_B]

    def _evaluate(self, choice_B: np.ndarray) -> DraftPlan:
        """The plan of an assignment at its best K."""
        batch, counts = self._batch, np.bincount(choice_B[choice_B >= 0], minlength=len(self._names)).tolist()
        drafters = tuple(self._names[n] if n >= 0 else None for n in choice_B.tolist())
        draft = self._costs.draft({name: rows for name, rows in zip(self._names, counts, strict=True) if rows})
        if draft is None or self._verify is None:
            return DraftPlan(drafters, float(batch), None)
        rows = np.flatnonzero(choice_B >= 0)
        ranked = np.sort(self._survival_NBK[choice_B[rows], rows].ravel())[::-1]
        tokens = batch + np.concatenate(([0.0], np.cumsum(ranked)))
        seconds = draft + self._verify[: len(tokens)]
        if self._ratios is None:
            best = int(np.argmax(tokens / seconds))
        else:
            offered = batch + sum(rows * depth for rows, depth in zip(counts, self._depths, strict=True))
            budgets = {slot_budget(ratio, batch_size=batch, offered=offered) - batch for ratio in self._ratios}
            best = max(sorted(budgets), key=lambda slots: tokens[slots] / seconds[slots])
        return DraftPlan(drafters, float(tokens[best]), float(seconds[best]))


def _rate(plan: DraftPlan) -> float:
    return plan.expected_tokens / plan.seconds if plan.seconds is not None else 0.0


def _subsets(items: Sequence[int]) -> list[tuple[int, ...]]:
    if len(items) > 3:
        return [*((item,) for item in items), tuple(items)]
    return [subset for size in range(1, len(items) + 1) for subset in itertools.combinations(items, size)]


# ----------------------------------------------------------------------------------- phase 2: verification


def plan_verification(
    acceptance: Sequence[Sequence[float]],
    *,
    depths: Sequence[int],
    drafted: Mapping[str, int],
    costs: CostCurves,
    ratios: Sequence[float] | None = None,
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
    return choose_cut(
        survival_BK,
        seconds=costs.seconds(len(acceptance), drafted=drafted),
        ratios=ratios,
        depths_B=depths_B,
        owed_B=owed_B,
    )


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
