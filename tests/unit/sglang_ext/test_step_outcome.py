"""A step teaches nothing about requests that had ended before it."""

from __future__ import annotations

from types import SimpleNamespace

from angelspec.ops.step_plan import DraftPlan
from angelspec.ops.step_planner import Step
from sglang_ext.metrics import StepReport
from sglang_ext.outcome import Outcome


def request(outputs: int, *, finished: bool = False, retracted: bool = False) -> SimpleNamespace:
    req = SimpleNamespace(output_ids=[0] * outputs, finished=lambda: finished, is_retracted=retracted)
    return SimpleNamespace(req=req)


def outcome(rows: list[SimpleNamespace]) -> Outcome:
    names = ("dfly",) * len(rows)
    step = Step(tuple(map(str, range(len(rows)))), names, DraftPlan(names, 4.0, None), kept=(3,) * len(rows))
    report = StepReport(routes=names, drafted=[7] * len(rows), verified=[3] * len(rows), committed=[4] * len(rows))
    return Outcome(step, rows, report, outputs=[5] * len(rows))


def test_a_request_that_ended_before_the_step_is_left_out() -> None:
    rows = [request(9), request(5), request(5)]
    launched = outcome(rows)
    assert launched.ends(rows[0])
    assert not launched.ends(rows[1])
    assert launched.accepted == [3, None, 3]
    assert launched.report.without(launched.ended).committed == [4, 4]


def test_a_request_of_no_row_changes_nothing() -> None:
    launched = outcome([request(9)])
    assert not launched.ends(request(1))
    assert launched.accepted == [3]


def test_tokens_that_the_engine_drops_teach_nothing() -> None:
    """Of a request that ended with its first token, or was retracted, while the step was on its way."""
    dropped = [request(5, finished=True), request(5, retracted=True)]
    taken = [request(5), request(9, finished=True), request(9, retracted=True)]
    launched = outcome([*dropped, *taken])
    launched.leave_out_dropped()
    assert launched.accepted == [None, None, 3, 3, 3]
