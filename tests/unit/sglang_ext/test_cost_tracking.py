"""Costs follow what served steps take."""

from __future__ import annotations

import pytest

from angelspec.core.step_costs import DraftPoint, StepCosts, VerifyPoint
from sglang_ext.clock import StepMarks, StepTimer, TimedStep
from sglang_ext.cost_tracking import CostTracker
from sglang_ext.metrics import StepTimes

PROFILED = StepCosts(
    drafting={
        "mtp": (DraftPoint(rows=1, seconds=0.010), DraftPoint(rows=8, seconds=0.017)),
        "dfly": (DraftPoint(rows=1, seconds=0.020), DraftPoint(rows=8, seconds=0.041)),
    },
    verification=tuple(
        VerifyPoint(batch_size=size, slots=size * wide, seconds=0.05 + 0.004 * size * wide)
        for size in (1, 4, 8)
        for wide in (1, 4, 8)
    ),
)


def step(size: int, *, slots: int, drafted: dict, draft: float = 0.0, verify: float, rest: float | None) -> TimedStep:
    taken = None if rest is None else draft + verify + rest
    return TimedStep(size, drafted, slots, StepTimes(draft=draft, plan=0.0, verify=verify, other=0.0), taken)


def serve(tracker: CostTracker, steps: int, *, verify: float, draft: float, rest: float) -> None:
    for number in range(steps):
        size, wide = (1, 4, 8)[number % 3], (1, 4, 8)[number % 2]
        drafted = {} if wide == 1 else {("mtp", "dfly")[number % 2]: size}
        took = sum(PROFILED.draft_seconds(name, rows) or 0.0 for name, rows in drafted.items())
        verified = verify * (PROFILED.verify_seconds(size, size * wide) or 0.0)
        tracker.observe(
            step(size, slots=size * wide, drafted=drafted, draft=draft * took, verify=verified, rest=rest * size)
        )


def test_nothing_seen_changes_nothing() -> None:
    tracker = CostTracker(PROFILED)
    assert not tracker.drifted()
    assert tracker.current() == PROFILED


def test_parts_are_scaled_and_the_rest_is_added() -> None:
    tracker = CostTracker(PROFILED)
    serve(tracker, 90, verify=1.5, draft=0.8, rest=0.001)
    assert tracker.drifted()
    costs = tracker.current()
    assert costs.verify_seconds(4, 16) == pytest.approx(1.5 * (0.05 + 0.004 * 16) + 0.004)
    assert costs.draft_seconds("dfly", 8) == pytest.approx(0.8 * 0.041)
    assert not tracker.drifted()


def test_old_times_are_forgotten() -> None:
    tracker = CostTracker(PROFILED)
    serve(tracker, 120, verify=3.0, draft=3.0, rest=0.0)
    serve(tracker, 240, verify=1.0, draft=1.0, rest=0.0)
    assert tracker.current().verify_seconds(8, 64) == pytest.approx(0.05 + 0.004 * 64, rel=0.02)


def test_a_pause_counts_for_little() -> None:
    tracker = CostTracker(PROFILED)
    serve(tracker, 60, verify=1.0, draft=1.0, rest=0.0)
    tracker.observe(step(1, slots=1, drafted={}, verify=60.0, rest=None))
    assert (tracker.current().verify_seconds(1, 1) or 0.0) < 0.054 * 1.1


def test_what_slows_wide_steps_alone_leaves_plain_ones_as_they_are() -> None:
    tracker = CostTracker(PROFILED)
    for number in range(96):
        slots = 4 if number % 8 == 0 else 32
        took = (PROFILED.verify_seconds(4, slots) or 0.0) * (1.0 if slots == 4 else 1.6)
        tracker.observe(step(4, slots=slots, drafted={}, verify=took, rest=None))
    costs = tracker.current()
    assert costs.verify_seconds(4, 4) == pytest.approx(0.05 + 0.004 * 4)
    assert costs.verify_seconds(4, 32) == pytest.approx(1.6 * (0.05 + 0.004 * 32))


def test_plain_steps_of_graphs_are_not_foretold_by_the_scale_of_wide_ones() -> None:
    graphed = PROFILED.model_copy(update={"tiers": (8, 16, 32, 64)})
    tracker = CostTracker(graphed)
    plain, wide = (graphed.verify_seconds(4, slots) or 0.0 for slots in (4, 32))
    for number in range(96):
        slots, took = (4, plain) if number % 8 == 0 else (32, 2 * wide)
        tracker.observe(step(4, slots=slots, drafted={}, verify=took, rest=None))
    assert tracker.current().verify_seconds(4, 4) == pytest.approx(plain)
    assert tracker.current().verify_seconds(4, 32) == pytest.approx(2 * wide, rel=0.01)


def test_a_drafter_of_unknown_costs_teaches_nothing_of_the_others() -> None:
    tracker = CostTracker(PROFILED)
    tracker.observe(step(8, slots=64, drafted={"mtp": 4, "new": 4}, draft=9.0, verify=0.05, rest=None))
    assert tracker.current().draft_seconds("mtp", 4) == PROFILED.draft_seconds("mtp", 4)


def test_drafters_that_always_draft_together_are_corrected_together() -> None:
    tracker = CostTracker(PROFILED)
    both = {"mtp": 1, "dfly": 8}
    for _ in range(96):
        tracker.observe(step(9, slots=9, drafted=both, draft=1.5 * 0.051, verify=0.086, rest=None))
    costs = tracker.current()
    assert costs.draft_seconds("mtp", 1) == pytest.approx(1.5 * 0.010, rel=0.01)
    assert costs.draft_seconds("dfly", 8) == pytest.approx(1.5 * 0.041, rel=0.01)


class Device:
    """A clock whose moments come when it is told so."""

    def __init__(self) -> None:
        self.now = 0.0

    def mark(self) -> float:
        return self.now + 10.0  # behind what is queued already

    def passed(self, mark: float) -> bool:
        return mark <= self.now

    def seconds(self, begin: float, end: float) -> float:
        return end - begin


def test_a_step_is_timed_when_its_end_has_come_and_by_the_device_alone() -> None:
    timer = StepTimer(device := Device())

    def launch(at: float, before: float | None) -> None:
        timer.add(
            StepMarks(
                2, {"mtp": 2}, 8, (at, at + 1.0), (at + 1.5, at + 4.0), before, plan_seconds=0.1, other_seconds=0.2
            )
        )

    launch(0.0, None)
    launch(5.0, 4.0)
    assert list(timer.passed()) == []
    device.now = 4.0
    (first,) = timer.passed()
    assert (first.times.draft, first.times.verify, first.taken, first.rest_seconds) == (1.0, 2.5, None, None)
    device.now = 9.0
    (second,) = timer.passed()
    assert (second.taken, second.rest_seconds) == (5.0, 1.5)
    assert list(timer.passed()) == []
