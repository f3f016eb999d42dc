"""The costs that steps are planned by: renewed when they have drifted, by the first rank's word."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from angelspec.core.step_costs import DraftPoint, StepCosts, VerifyPoint
from sglang_ext.clock import TimedStep
from sglang_ext.live_costs import LiveCosts
from sglang_ext.metrics import Counters, StepTimes

MEASURED = StepCosts(
    drafting={"dfly": (DraftPoint(rows=1, seconds=0.01), DraftPoint(rows=8, seconds=0.04))},
    verification=tuple(
        VerifyPoint(batch_size=1, slots=slots, seconds=0.04 + 0.002 * (slots - 1)) for slots in (1, 4, 8)
    ),
)


def plain_step(seconds: float) -> TimedStep:
    times = StepTimes(draft=0.0, plan=0.0, verify=seconds, other=0.0)
    return TimedStep(1, {}, 1, times, seconds)


def serve(costs: LiveCosts, steps: int, seconds: float) -> list[int]:
    """The steps after which the costs were renewed."""
    renewed = []
    for step in range(1, steps + 1):
        costs.observe(plain_step(seconds))
        if costs.renewed():
            renewed.append(step)
    return renewed


def rank(*, first: bool = True, told: StepCosts | None = None) -> SimpleNamespace:
    return SimpleNamespace(is_first=first, agree=lambda value: value if first else told)


def test_costs_follow_a_slower_machine_now_and_then():
    costs = LiveCosts(MEASURED, ranks=rank(), counters=Counters())
    assert serve(costs, 40, 0.08) == [16]  # it did not drift any further
    assert costs.measured is MEASURED
    assert costs.current.seconds(1, drafted={}, slots=1) == pytest.approx(0.08, rel=0.03)


def test_costs_that_stay_true_are_not_renewed():
    costs = LiveCosts(MEASURED, ranks=rank(), counters=Counters())
    assert serve(costs, 40, 0.04) == []
    assert costs.current is MEASURED


def test_another_rank_takes_what_the_first_says():
    told = MEASURED.model_copy()
    other = LiveCosts(MEASURED, ranks=rank(first=False, told=told), counters=Counters())
    assert serve(other, 16, 0.08) == [16]
    assert other.current is told


def test_how_far_it_was_off_is_counted_but_for_interruptions():
    counters = Counters()
    costs = LiveCosts(MEASURED, ranks=rank(), counters=counters)
    costs.observe(plain_step(0.05))
    costs.observe(plain_step(5.0))
    assert (counters.costed_seconds, counters.misjudged_seconds) == (pytest.approx(0.05), pytest.approx(0.01))


def test_without_measured_costs_nothing_is_learnt():
    counters = Counters()
    costs = LiveCosts(None, ranks=rank(), counters=counters)
    assert serve(costs, 40, 0.08) == []
    assert costs.current is None and counters.costed_seconds == 0
