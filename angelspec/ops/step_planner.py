"""Plans the steps of running requests: estimates, costs and D-cut put together.

A server makes three calls a step:

    step = planner.begin(requests)              # whom to draft for, and with which drafter
    step = planner.cut(step, confidences)       # which of the drafted proposals to verify
    planner.observe(step, accepted)             # what came of it; may come steps later, in order

and ``open`` / ``close`` around a request's life. A planner reads no clock and draws no random number: planners that are
told the same decide the same, so every rank of an engine may hold one of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from angelspec.core.costs import RATIOS
from angelspec.core.estimates import Estimates, ProbeBudget
from angelspec.core.step_costs import StepCosts
from angelspec.core.workloads import Workload
from angelspec.ops.step_plan import CostCurves, DraftPlan, Row, fixed_cut, plan_drafting, plan_verification

_STARVED_AFTER = 4
"""A row that was drafted for so many times in a row without a verified proposal is owed one."""


@dataclass(frozen=True)
class Step:
    """One step on its way."""

    requests: tuple[str, ...]
    """In batch order."""
    drafters: tuple[str | None, ...]
    """Per row; None decodes plainly."""
    plan: DraftPlan
    """What was expected before probes were added."""
    probes: frozenset[int] = frozenset()
    """Rows that are drafted for only to learn."""
    confidences: tuple[tuple[float, ...], ...] = ()
    """Per row, as drafted; empty for a plain row."""
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
        depths: dict[str, int],
        ratios: Sequence[float] | None = RATIOS,
        probes: ProbeBudget | None = None,
    ) -> None:
        self._curves = CostCurves(costs, depth=max(depths.values(), default=0))
        self._estimates, self._depths, self._ratios = estimates, dict(depths), ratios
        self._probes = ProbeBudget() if probes is None else probes
        self._requests: dict[str, _Request] = {}

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
        rows = [
            Row({name: self._estimates.survivals(request, name) for name in known.drafters}, known.forced)
            for request, known in ((request, self._requests[request]) for request in requests)
        ]
        plan = plan_drafting(rows, costs=self._curves)
        step = Step(tuple(requests), plan.drafters, plan)
        self._probes.earn(plan.expected_tokens, batch_size=len(rows))
        return self._with_probe(step)

    def cut(self, step: Step, confidences: Sequence[Sequence[float]]) -> Step:
        """Which of the drafted proposals to verify.

        Args:
            confidences: per row of the batch, those of its proposals; empty for a plain row.

        Returns:
            The step with ``kept`` and ``ratio``.
        """
        acceptance, depths, owed, ratios = [], [], [], []
        for index, (request, name, raw) in enumerate(zip(step.requests, step.drafters, confidences, strict=True)):
            known = self._requests[request]
            acceptance.append(self._estimates.acceptance(request, name, raw) if name is not None else [])
            depths.append(self._depths[name] if name is not None else 0)
            owed.append(int(name is not None and (index in step.probes or known.unverified >= _STARVED_AFTER)))
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
            if name is not None:
                known = self._requests[request]
                known.unverified = 0 if number else known.unverified + 1
        return replace(
            step, confidences=tuple(tuple(raw) for raw in confidences), kept=kept, ratio=decision.ratio
        )

    def observe(self, step: Step, accepted: Sequence[int]) -> None:
        """What came of a step: accepted proposals per row (the bonus token not counted)."""
        for index, (request, name) in enumerate(zip(step.requests, step.drafters, strict=True)):
            if name is None:
                self._estimates.observe_plain(request)
                continue
            self._estimates.observe(
                request, name, step.confidences[index], verified=step.kept[index], accepted=accepted[index]
            )
        if step.probes:
            slots = len(step.requests) + sum(step.kept)
            without = slots - sum(step.kept[index] for index in step.probes)
            cost = self._probe_tokens(step, slots=slots, slots_without=without)
            if cost is not None:
                self._probes.settle(cost=cost, accepted=sum(accepted[index] for index in step.probes))

    # --------------------------------------------------------------------------------------------- probes

    def _with_probe(self, step: Step) -> Step:
        """Add the plain row that waits longest for a probe, if the budget affords it."""
        waiting = [
            (self._estimates.never_drafted(request, name), self._estimates.idle_steps(request, name), -index, name)
            for index, request in enumerate(step.requests)
            if step.drafters[index] is None
            for name in self._requests[request].drafters
        ]
        if not waiting:
            return step
        _, _, minus_index, name = max(waiting)
        index = -minus_index
        drafters = (*step.drafters[:index], name, *step.drafters[index + 1 :])
        probed = replace(step, drafters=drafters, probes=frozenset({index}))
        slots = len(step.requests)
        cost = self._probe_tokens(probed, slots=slots + 1, slots_without=slots)
        return probed if cost is not None and self._probes.affords(cost) else step

    def _probe_tokens(self, step: Step, *, slots: int, slots_without: int) -> float | None:
        """What the time of a step's probes is worth, in tokens at the rate of the plan without them."""
        if not step.plan.seconds:
            return None
        batch = len(step.requests)
        counts = {name: len(rows) for name, rows in step.rows_by_drafter.items()}
        with_probes = self._curves.seconds(counts)(batch, slots)
        without = self._curves.seconds(step.plan.drafted)(batch, slots_without)
        if with_probes is None or without is None:
            return None
        return (with_probes - without) * step.plan.expected_tokens / step.plan.seconds
