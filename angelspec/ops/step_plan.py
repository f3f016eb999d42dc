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
from collections import Counter
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
    ratio: float | None = None
    """A keep ratio that phase 2 is bound to for this row; None: the best one."""


def rows_per_drafter(drafters: Sequence[str | None]) -> dict[str, int]:
    """How many rows each drafter has; None is plain decoding."""
    return dict(Counter(name for name in drafters if name is not None))


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
        return rows_per_drafter(self.drafters)


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
        self._draft: dict[tuple[tuple[str, int], ...], float | None] = {}

    def verify(self, batch_size: int) -> np.ndarray | None:
        """Seconds by slots beyond the anchors, from 0 to the largest depth for every row; None if not known."""
        if batch_size not in self._verify:
            slots = range(batch_size, batch_size * (self._depth + 1) + 1)
            seconds = self.costs.verify_curve(batch_size, slots)
            self._verify[batch_size] = None if seconds is None else np.array(seconds)
        return self._verify[batch_size]

    def draft(self, drafted: Mapping[str, int]) -> float | None:
        """See ``StepCosts.drafting_seconds``."""
        key = tuple(sorted(drafted.items()))
        if key not in self._draft:
            self._draft[key] = self.costs.drafting_seconds(drafted)
        return self._draft[key]

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
        deepest = max(self._depths, default=0)
        offers = [[row.survivals.get(name, ()) for row in rows] for name in self._names]
        padded = [[[*offer, *[0.0] * (deepest - len(offer))] for offer in of_name] for of_name in offers]
        nothing = [[0.0] * deepest] * len(rows)  # last, where the choice of -1 finds it
        self._survival_NBK = np.array([*padded, nothing])
        self._rows_B = np.arange(len(rows))
        self._allowed_NB = np.array(
            [[name in row.survivals for row in rows] for name in self._names], dtype=bool
        ).reshape(len(self._names), len(rows))
        served_B = self._allowed_NB.any(axis=0)
        forced_B = np.array([row.forced for row in rows], dtype=bool) & served_B
        self._free_B = ~forced_B & served_B
        self._forced_B = np.full(len(rows), -1)
        if forced_B.any():
            most_NB = np.where(self._allowed_NB, self._survival_NBK[:-1].sum(axis=2), -1.0)
            self._forced_B = np.where(forced_B, most_NB.argmax(axis=0), -1)
        ratio_B = [row.ratio for row in rows]
        self._bound = {
            ratio: np.array([own == ratio for own in ratio_B])
            for ratio in sorted({r for r in ratio_B if r is not None})
        }
        self._unbound_B = np.array([own is None for own in ratio_B], dtype=bool)
        self._row_seconds_N = [self._row_seconds(name) for name in self._names]
        self._found: dict[bytes, _Option] = {}
        self._worth: tuple[float, np.ndarray] = (0.0, np.empty(0))

    def best(self) -> DraftPlan:
        best = self._evaluate(self._forced_B)
        if best.rate and self._free_B.any():
            for active in _subsets(range(len(self._names))):
                for _ in range(2):  # the second time at the rate that the first one found
                    candidates = self._candidates(active, best.rate)
                    found = max((self._evaluate(choice_B) for choice_B in candidates), key=lambda option: option.rate)
                    if found.rate <= best.rate:
                        break
                    best = found
        drafters = tuple(self._names[n] if n >= 0 else None for n in best.choice_B.tolist())
        return DraftPlan(drafters, best.expected_tokens, best.expected_tokens / best.rate if best.rate else None)

    def _row_seconds(self, name: str) -> float | None:
        """What one more row costs to draft for, on average."""
        one, all_rows = (self._costs.draft({name: rows}) for rows in (1, self._batch))
        return None if one is None or all_rows is None else (all_rows - one) / max(self._batch - 1, 1)

    def _candidates(self, active: Sequence[int], rate: float) -> list[np.ndarray]:
        """Assignments of the rows that are worth most, at a rate, to the active drafters."""
        if any(self._row_seconds_N[n] is None for n in active):
            return [self._forced_B]
        worth_NB = self._worth_at(rate)[list(active)]
        worth_B, drafter_B = worth_NB.max(axis=0), np.array(active)[worth_NB.argmax(axis=0)]
        order = (-worth_B).argsort(kind="stable")
        possible, paying = int((worth_B > -np.inf).sum()), int((worth_B > 0).sum())
        candidates = []
        for count in sorted({min(1, possible), (paying + 1) // 2, paying, possible} - {0}):
            choice_B = self._forced_B.copy()
            choice_B[order[:count]] = drafter_B[order[:count]]
            candidates.append(choice_B)
        return candidates or [self._forced_B]

    def _worth_at(self, rate: float) -> np.ndarray:
        """[N, B]: tokens that drafting for a row gains beyond the price of its own time; -inf where it may not be."""
        if self._worth[0] != rate:
            verify = self._verify
            assert verify is not None
            slot_price = rate * float(verify[-1] - verify[0]) / max(len(verify) - 1, 1)
            row_price_N = rate * np.array([seconds or 0.0 for seconds in self._row_seconds_N])
            profit_NBK = self._survival_NBK[:-1] - slot_price
            gain_NB = np.maximum(profit_NBK, 0.0).sum(axis=2)
            for ratio, mask_B in self._bound.items():
                for n, depth in enumerate(self._depths):
                    kept = slot_budget(ratio, batch_size=1, offered=depth + 1) - 1
                    gain_NB[n, mask_B] = profit_NBK[n, mask_B, :kept].sum(axis=1)
            gain_NB -= row_price_N[:, None]
            self._worth = rate, np.where(self._allowed_NB & self._free_B, gain_NB, -np.inf)
        return self._worth[1]

    def _evaluate(self, choice_B: np.ndarray) -> _Option:
        """An assignment at its best K, rows that are bound to a ratio at theirs."""
        key = choice_B.tobytes()
        if key not in self._found:
            self._found[key] = self._evaluated(choice_B)
        return self._found[key]

    def _evaluated(self, choice_B: np.ndarray) -> _Option:
        batch, choices = self._batch, choice_B.tolist()
        counts = [choices.count(n) for n in range(len(self._names))]
        draft = self._costs.draft({name: rows for name, rows in zip(self._names, counts, strict=True) if rows})
        if draft is None or self._verify is None:
            return _Option(choice_B, float(batch), 0.0)
        gains_BK = self._survival_NBK[choice_B, self._rows_B]
        depth_B = np.array([*self._depths, 0])[choice_B]
        bound_tokens, bound_slots = self._bound_share(gains_BK, depth_B)
        gains = gains_BK[self._unbound_B].ravel()
        gains.sort()
        slots = int((choice_B[self._unbound_B] >= 0).sum()) * self._survival_NBK.shape[2]
        tokens = np.empty(slots + 1)
        tokens[0] = batch + bound_tokens
        tokens[1:] = gains[::-1][:slots]
        tokens = tokens.cumsum()
        rates = tokens / (draft + self._verify[bound_slots : bound_slots + slots + 1])
        if self._ratios is None:
            best = int(rates.argmax())
        else:
            least = batch + bound_slots
            offered = least + int(depth_B[self._unbound_B].sum())
            budgets = {max(slot_budget(ratio, batch_size=batch, offered=offered), least) for ratio in self._ratios}
            best = max(sorted(budget - least for budget in budgets), key=lambda slots: rates[slots])
        return _Option(choice_B, float(tokens[best]), float(rates[best]))

    def _bound_share(self, gains_BK: np.ndarray, depth_B: np.ndarray) -> tuple[float, int]:
        """Expected tokens and slots of what is verified of bound rows, whatever it costs; see ``fixed_cut``."""
        tokens, slots = 0.0, 0
        for ratio, mask_B in self._bound.items():
            rows, offered = int(mask_B.sum()), int(depth_B[mask_B].sum())
            kept = slot_budget(ratio, batch_size=rows, offered=rows + offered) - rows
            tokens += float(np.sort(gains_BK[mask_B].ravel())[::-1][:kept].sum())
            slots += kept
        return tokens, slots


@dataclass(frozen=True, eq=False)
class _Option:
    """An assignment of the rows."""

    choice_B: np.ndarray
    expected_tokens: float
    rate: float
    """Expected tokens per second; 0 where costs are not known."""


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
