"""What happened is told to counters, Prometheus and requests alike."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from angelspec.core.request_label import RequestRecord
from angelspec.ops.step_plan import DraftPlan
from angelspec.ops.step_planner import Step
from sglang_ext.ledger import Ledger
from sglang_ext.metrics import StepReport, StepTimes
from sglang_ext.outcome import Outcome


class Heard:
    """An exporter that remembers its calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *values: self.calls.append((name, values))


def request(workload: str, outputs: int = 5) -> SimpleNamespace:
    record = RequestRecord(why="", workload=workload, mode=None)
    return SimpleNamespace(req=SimpleNamespace(output_ids=[0] * outputs), record=record, workload=workload)


def launched(*rows: SimpleNamespace) -> Outcome:
    names = ("dfly", None, "mtp")[: len(rows)]
    step = Step(tuple(map(str, range(len(rows)))), names, DraftPlan(names, 4.0, None), kept=(3, 0, 2)[: len(rows)])
    report = StepReport(
        routes=names,
        drafted=[7, 0, 3][: len(rows)],
        verified=[3, 0, 2][: len(rows)],
        committed=[4, 1, 1][: len(rows)],
        graphed=True,
    )
    return Outcome(step, list(rows), report, outputs=[5] * len(rows))


@pytest.mark.parametrize("exported", [True, False])
def test_a_step_counts_for_the_rows_that_still_ran(exported):
    heard = Heard()
    ledger = Ledger(heard if exported else None)
    rows = [request("code"), request("chat"), request("math")]
    outcome = launched(*rows)
    assert not outcome.ends(rows[2])  # it had ended before
    ledger.step(outcome)
    counted = ledger.counters
    assert (counted.steps, counted.mixed_steps, counted.cut_steps, counted.graphed_steps) == (1, 1, 1, 1)
    assert (counted.drafted_slots, counted.verified_slots, counted.committed_tokens) == (9, 5, 5)
    assert [row.record.metadata.verify_steps for row in rows] == [1, 1, 0]
    assert [row.record.metadata.route for row in rows[:2]] == ["dfly", "ar"]
    assert [(name, values[1]) for name, values in heard.calls] == ([("step", ["code", "chat"])] if exported else [])


@pytest.mark.parametrize("exported", [True, False])
def test_times_ends_and_fallbacks_reach_both(exported):
    heard = Heard()
    ledger = Ledger(heard if exported else None)
    rows = [request("code")]
    ledger.step(launched(*rows))
    times = StepTimes(draft=1.0, plan=2.0, verify=3.0, other=4.0)
    ledger.time(times)
    ledger.fall_back("lost states")
    ledger.finish(rows[0])
    assert ledger.counters.verify_seconds == 3.0
    assert ledger.counters.fallbacks == {"lost states": 1}
    assert ledger.counters.requests == {("dfly", "code"): 1}
    told = [("time", (times,)), ("fall_back", ("lost states",)), ("finish", (rows[0],))]
    assert heard.calls[1:] == (told if exported else [])
