"""What the engine tells Prometheus, by name and label."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from angelspec.core.request_label import RequestRecord
from sglang_ext.metrics import StepReport, StepTimes
from sglang_ext.prometheus import Exporter

prometheus = pytest.importorskip("prometheus_client")


@pytest.fixture
def exporter() -> Iterator[Exporter]:
    exporter = Exporter()
    yield exporter
    for metric in vars(exporter).values():
        prometheus.REGISTRY.unregister(metric)


def value(name: str, **labels: str) -> float | None:
    return prometheus.REGISTRY.get_sample_value(f"angelspec_{name}", labels)


def test_rows_are_counted_by_route_and_workload(exporter: Exporter) -> None:
    report = StepReport(routes=["dfly", None, "dfly"], drafted=[7, 0, 7], verified=[3, 0, 0], committed=[4, 1, 1])
    for _ in range(2):
        exporter.step(report, ["code", "chat", "math"])
    names = ("committed_tokens", "verify_steps", "drafted_slots", "verified_slots")
    for route, workload, expected in (
        ("dfly", "code", [8, 2, 16, 8]),
        ("ar", "chat", [2, 2, 2, 2]),
        ("dfly", "math", [2, 2, 16, 2]),
    ):
        assert [value(f"{name}_total", route=route, workload=workload) for name in names] == expected
    assert value("verify_steps_total", route="mtp", workload="code") is None


def test_the_keep_ratio_is_that_of_steps_which_draft(exporter: Exporter) -> None:
    exporter.step(StepReport(routes=["dfly", None], drafted=[7, 0], verified=[3, 0], committed=[1, 1]), ["code"] * 2)
    exporter.step(StepReport(routes=[None], drafted=[0], verified=[0], committed=[1]), ["code"])
    assert value("keep_ratio_count") == 1
    assert value("keep_ratio_sum") == pytest.approx(5 / 9)


def test_times_ends_and_fallbacks(exporter: Exporter) -> None:
    exporter.time(StepTimes(draft=0.1, plan=0.2, verify=0.3, other=0.4))
    parts = ("draft", "plan", "verify", "other")
    assert [value("step_seconds_sum", part=part) for part in parts] == [0.1, 0.2, 0.3, 0.4]
    record = RequestRecord(why="", workload="code", mode=None)
    exporter.finish(SimpleNamespace(record=record, workload="code"))
    record.add("mtp", committed=2, drafted=3, verified=3)
    exporter.finish(SimpleNamespace(record=record, workload="code"))
    assert [value("requests_total", route=route, workload="code") for route in ("ar", "mtp")] == [1, 1]
    exporter.fall_back("draft not finite")
    assert value("fallback_rows_total", reason="draft not finite") == 1
