"""Costs follow what served steps take."""

from __future__ import annotations

import pytest

from angelspec.core.step_costs import DraftPoint, StepCosts, VerifyPoint
from sglang_ext.cost_tracking import CostTracker

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


def serve(tracker: CostTracker, steps: int, *, verify: float, draft: float, rest: float) -> None:
    for step in range(steps):
        size, wide = (1, 4, 8)[step % 3], (1, 4, 8)[step % 2]
        drafted = {} if wide == 1 else {("mtp", "dfly")[step % 2]: size}
        took = sum(PROFILED.draft_seconds(name, rows) or 0.0 for name, rows in drafted.items())
        tracker.observe(
            size,
            drafted=drafted,
            slots=size * wide,
            draft_seconds=draft * took,
            verify_seconds=verify * (PROFILED.verify_seconds(size, size * wide) or 0.0),
            rest_seconds=rest * size,
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
    tracker.observe(1, drafted={}, slots=1, draft_seconds=0.0, verify_seconds=60.0, rest_seconds=None)
    assert (tracker.current().verify_seconds(1, 1) or 0.0) < 0.054 * 1.1


def test_what_slows_wide_steps_alone_leaves_plain_ones_as_they_are() -> None:
    tracker = CostTracker(PROFILED)
    for step in range(96):
        slots = 4 if step % 8 == 0 else 32
        took = (PROFILED.verify_seconds(4, slots) or 0.0) * (1.0 if slots == 4 else 1.6)
        tracker.observe(4, drafted={}, slots=slots, draft_seconds=0.0, verify_seconds=took, rest_seconds=None)
    costs = tracker.current()
    assert costs.verify_seconds(4, 4) == pytest.approx(0.05 + 0.004 * 4)
    assert costs.verify_seconds(4, 32) == pytest.approx(1.6 * (0.05 + 0.004 * 32))


def test_drafters_that_always_draft_together_are_corrected_together() -> None:
    tracker = CostTracker(PROFILED)
    both = {"mtp": 1, "dfly": 8}
    for _ in range(96):
        tracker.observe(9, drafted=both, slots=9, draft_seconds=1.5 * 0.051, verify_seconds=0.086, rest_seconds=None)
    costs = tracker.current()
    assert costs.draft_seconds("mtp", 1) == pytest.approx(1.5 * 0.010, rel=0.01)
    assert costs.draft_seconds("dfly", 8) == pytest.approx(1.5 * 0.041, rel=0.01)
