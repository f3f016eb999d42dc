"""Plans the steps of running requests: estimates, costs and D-cut put together.

A server makes three calls a step:

    step = planner.begin(requests)              # whom to draft for, and with which drafter
    step = planner.cut(step, confidences)       # which of the drafted proposals to verify
    planner.observe(step, accepted)             # what came of it; may come steps later, in order

and ``open`` / ``close`` around a request's life. A planner reads no clock and draws no random number: planners that are
told the same decide the same, so every rank of an engine may hold one of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from angelspec.core.bundle import Bundle
from angelspec.core.calibration import Calibration, evidence
from angelspec.core.estimates import Estimates, ProbeBudget
from angelspec.core.step_costs import StepCosts
from angelspec.core.workloads import Workload
from angelspec.ops.dcut import slot_budget
from angelspec.ops.step_plan import (
    CostCurves,
    DraftPlan,
    Row,
    fixed_cut,
    plan_drafting,
    plan_verification,
    rows_per_drafter,
)

_STARVED_AFTER = 4
"""A row that was drafted for so many times in a row without a verified proposal is owed one."""
_PROBE_GAP = 16
"""Steps between two probes of a request with the same drafter."""
_PLAIN_EVERY = 256
"""Steps after which one is decoded plainly where all were drafted for: what plain decoding takes is otherwise only
foretold, and it is what drafting must beat."""
_PROBE_SLOTS = 0.5
"""What a probe verifies beyond its first proposal, in the time that it drafted."""


@dataclass(frozen=True)
class Probe:
    """A row that is drafted for, or by another drafter, only to learn."""

    cost: float
    """Tokens that it costs before any of its proposals is verified."""
    paid: float
    """Tokens that were paid for it when it was planned: what it was expected to cost in all, less what it brings."""
    owed: int
    """Proposals that are verified in any case: what they cost is to be in proportion to what drafting cost."""


@dataclass(frozen=True)
class Step:
    """One step on its way."""

    requests: tuple[str, ...]
    """In batch order."""
    drafters: tuple[str | None, ...]
    """Per row; None decodes plainly."""
    plan: DraftPlan
    """What was expected before probes were added."""
    probes: Mapping[int, Probe] = field(default_factory=dict)
    """By row."""
    slot_price: float = 0.0
    """What the time of one more verified slot is worth, in tokens."""
    evidence: tuple[Sequence[float], ...] = ()
    """Per row, of the drafted confidences; empty for a plain row."""
    kept: tuple[int, ...] = ()
    """Verified proposals per row."""
    ratio: float = 1.0
    """The keep ratio that won."""

    @property
    def rows_by_drafter(self) -> dict[str, list[int]]:
        """Batch indices by drafter."""
        rows: dict[str, list[int]] = {}
        for index, name in enumerate(self.drafters):
            if name is not None:
                rows.setdefault(name, []).append(index)
        return rows


@dataclass
class _Request:
    drafters: tuple[str, ...]
    forced: bool
    ratio: float | None
    unverified: int = 0


_GONE = _Request((), False, None)
"""A request that was closed while its step was on the way: nothing of it is verified."""


class StepPlanner:
    """Decides the steps of one engine.

    Args:
        costs: measured parts of a step.
        estimates: acceptance of every request; this planner opens and closes its requests.
        depths: proposals per draft, by drafter.
        ratios: the grid of D-cut; None: every number of slots.
        probes: pays for drafting where it does not pay by itself; None: the default budget.
    """

    def __init__(
        self,
        costs: StepCosts,
        estimates: Estimates,
        *,
        depths: Mapping[str, int],
        ratios: Sequence[float] | None = None,
        probes: ProbeBudget | None = None,
    ) -> None:
        self._curves = CostCurves(costs, depth=max(depths.values(), default=0))
        self._estimates, self._depths, self._ratios = estimates, dict(depths), ratios
        self._probes = ProbeBudget() if probes is None else probes
        self._requests: dict[str, _Request] = {}
        self._since_plain = 0

    @classmethod
    def of(cls, bundle: Bundle, costs: StepCosts) -> StepPlanner:
        """The planner of a bundle, with costs measured on this machine."""
        estimates = Estimates(bundle.depths, measured=bundle.measured, calibrations=bundle.calibrations)
        return cls(costs, estimates, depths=bundle.depths, ratios=bundle.dcut.ratios)

    @property
    def calibrations(self) -> dict[str, Calibration]:
        """What has been learnt about the confidences of the drafters that were verified at all."""
        learnt = {name: self._estimates.calibration(name) for name in self._depths}
        return {name: calibration for name, calibration in learnt.items() if calibration.outcomes}

    def use(self, costs: StepCosts) -> None:
        """Plan by these costs from the next step on; what was learnt about requests stays."""
        self._curves = CostCurves(costs, depth=max(self._depths.values(), default=0))

    def open(
        self,
        request: str,
        *,
        workload: Workload,
        drafters: Sequence[str],
        forced: bool = False,
        ratio: float | None = None,
    ) -> None:
        """A request begins.

        Args:
            request: its id, unique among running requests.
            workload: whose peers it starts from.
            drafters: those that may serve it; empty: it decodes plainly.
            forced: every step is drafted for, whether it pays or not.
            ratio: a keep ratio for this request's rows; None: the best one. 1 switches the cut off.
        """
        self._requests[request] = _Request(tuple(drafters), forced and bool(drafters), ratio)
        self._estimates.open(request, workload=workload, drafters=drafters)

    def close(self, request: str) -> None:
        """A request ended or was aborted; one that is not known is ignored."""
        self._requests.pop(request, None)
        self._estimates.close(request)

    def begin(self, requests: Sequence[str]) -> Step:
        """Whom to draft for in the next step of these requests."""
        self._since_plain += 1
        if self._since_plain > _PLAIN_EVERY and not any(self._requests[request].forced for request in requests):
            self._since_plain = 0
            nobody = (None,) * len(requests)
            return Step(tuple(requests), nobody, DraftPlan(nobody, float(len(requests)), None))
        rows = [
            Row({name: self._estimates.survivals(request, name) for name in known.drafters}, known.forced, known.ratio)
            for request, known in ((request, self._requests[request]) for request in requests)
        ]
        plan = plan_drafting(rows, costs=self._curves, ratios=self._ratios)
        step = Step(tuple(requests), plan.drafters, plan)
        self._probes.earn(plan.expected_tokens, batch_size=len(rows))
        step = self._with_probes(step)
        if not step.rows_by_drafter:
            self._since_plain = 0
        return step

    def cut(self, step: Step, confidences: Sequence[Sequence[float]]) -> Step:
        """Which of the drafted proposals to verify.

        Args:
            confidences: per row of the batch, those of its proposals; empty for a plain row.

        Returns:
            The step with ``kept`` and ``ratio``.
        """
        evidences = tuple(evidence(raw) for raw in confidences)
        acceptance, depths, owed, ratios = [], [], [], []
        for index, (request, name) in enumerate(zip(step.requests, step.drafters, strict=True)):
            known = self._requests.get(request, _GONE)
            name = None if known is _GONE else name
            acceptance.append(self._estimates.acceptance(request, name, evidences[index]) if name is not None else [])
            depths.append(self._depths[name] if name is not None else 0)
            starved = int(name is not None and known.unverified >= _STARVED_AFTER)
            owed.append(step.probes[index].owed if index in step.probes else starved)
            ratios.append(known.ratio)
        counts = {name: len(rows) for name, rows in step.rows_by_drafter.items()}
        for ratio in sorted({ratio for ratio in ratios if ratio is not None}):
            rows = [index for index, own in enumerate(ratios) if own == ratio]
            kept = fixed_cut([acceptance[i] for i in rows], depths=[depths[i] for i in rows], ratio=ratio)
            for index, number in zip(rows, kept, strict=True):
                acceptance[index] = acceptance[index][:number]
                depths[index] = owed[index] = number
        decision = plan_verification(
            acceptance, depths=depths, drafted=counts, costs=self._curves, ratios=self._ratios, owed=owed
        )
        kept = tuple(decision.kept_B.tolist())
        for request, name, number in zip(step.requests, step.drafters, kept, strict=True):
            if name is not None and request in self._requests:
                known = self._requests[request]
                known.unverified = 0 if number else known.unverified + 1
        return replace(step, evidence=evidences, kept=kept, ratio=decision.ratio)

    def observe(self, step: Step, accepted: Sequence[int | None]) -> None:
        """What came of a step: accepted proposals per row (the bonus token not counted).

        None for a row whose request had ended before: nothing is learnt from it.
        """
        for index, (request, name) in enumerate(zip(step.requests, step.drafters, strict=True)):
            number = accepted[index]
            if number is None:
                continue
            if name is None:
                self._estimates.observe_plain(request)
                continue
            self._estimates.observe(request, name, step.evidence[index], verified=step.kept[index], accepted=number)
        for index, probe in step.probes.items():
            cost = probe.cost + step.kept[index] * step.slot_price
            self._probes.spend(cost - (accepted[index] or 0) - probe.paid)

    # --------------------------------------------------------------------------------------------- probes

    def _with_probes(self, step: Step) -> Step:
        """Try other drafters than the plan's as far as the budget goes: those that a request never had, then those
        that it had longest ago."""
        plan, batch = step.plan, len(step.requests)
        verify = self._curves.verify(batch)
        if not plan.seconds or verify is None or not self._depths:
            return step
        rate = plan.expected_tokens / plan.seconds
        price = rate * float(verify[-1] - verify[0]) / (len(verify) - 1)
        candidates = []
        for index, request in enumerate(step.requests):
            for name in self._requests[request].drafters:
                never, idle = self._estimates.last_drafted(request, name)
                if name != step.drafters[index] and (never or idle >= _PROBE_GAP):
                    candidates.append((not never, -idle, index, name))
        drafters, probes = list(step.drafters), {}
        for _, _, index, name in sorted(candidates):
            if index in probes:
                continue
            request, instead = step.requests[index], drafters[index]
            without, planned, probing = (
                self._curves.draft(rows_per_drafter([*drafters[:index], one, *drafters[index + 1 :]]))
                for one in (None, instead, name)
            )
            if without is None or planned is None or probing is None:
                break
            affordable = _PROBE_SLOTS * rate * (probing - without) / price if price > 0 else float("inf")
            owed = self._bound(request, name)
            if owed is None:
                owed = int(min(1 + max(affordable, 0.0), self._depths[name]))
            forgone = self._worth(request, instead, price=price) if instead is not None else 0.0
            cost = rate * (probing - planned) + forgone
            paid = max(cost - self._worth(request, name, price=price, owed=owed), 0.0)
            if not self._probes.affords(paid):
                break
            self._probes.spend(paid)
            drafters[index], probes[index] = name, Probe(cost, paid, owed)
        return replace(step, drafters=tuple(drafters), probes=probes, slot_price=price)

    def _bound(self, request: str, drafter: str) -> int | None:
        """Proposals of a draft that the request's own keep ratio has verified; None: it has none."""
        ratio = self._requests[request].ratio
        return None if ratio is None else slot_budget(ratio, batch_size=1, offered=self._depths[drafter] + 1) - 1

    def _worth(self, request: str, drafter: str, *, price: float, owed: int = 0) -> float:
        """Expected tokens of a draft less the price of its verified slots."""
        survivals, bound = self._estimates.survivals(request, drafter), self._bound(request, drafter)
        if bound is not None:
            return sum(survival - price for survival in survivals[:bound])
        return sum(survival - price for k, survival in enumerate(survivals) if k < owed or survival > price)
