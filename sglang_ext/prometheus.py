"""The counters as Prometheus metrics, beside SGLang's own (``--enable-metrics``, ``GET /metrics``).

The scheduler's process writes them; SGLang has set ``PROMETHEUS_MULTIPROC_DIR`` by then, so its page shows them.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from angelspec.core.bundle import PLAIN
from sglang_ext.metrics import StepReport, StepTimes

_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)


class Exporter:
    """Feeds Prometheus from steps and finished requests."""

    def __init__(self) -> None:
        from prometheus_client import Counter, Histogram  # after the directory of all processes is known

        by_route = ("route", "workload")
        self._requests = Counter("angelspec_requests", "Finished requests", by_route)
        self._tokens = Counter("angelspec_committed_tokens", "Tokens committed by verification", by_route)
        self._steps = Counter("angelspec_verify_steps", "Verification steps of rows", by_route)
        self._drafted = Counter("angelspec_drafted_slots", "Slots that could be verified, anchors counted", by_route)
        self._verified = Counter("angelspec_verified_slots", "Slots that were verified, anchors counted", by_route)
        self._seconds = Histogram("angelspec_step_seconds", "Where a step's time goes", ("part",), buckets=_SECONDS)
        self._ratio = Histogram(
            "angelspec_keep_ratio", "Verified over drafted slots of a step", buckets=[i / 8 for i in range(1, 9)]
        )
        self._fallbacks = Counter("angelspec_fallback_rows", "Rows that could not be drafted for", ("reason",))

    def step(self, report: StepReport, workloads: list[str]) -> None:
        """One decode step; ``workloads`` by row."""
        rows = zip(report.routes, workloads, report.drafted, report.verified, report.committed, strict=True)
        for route, workload, drafted, verified, committed in rows:
            labels = (route or PLAIN, workload)
            self._steps.labels(*labels).inc()
            self._tokens.labels(*labels).inc(committed)
            self._drafted.labels(*labels).inc(drafted + 1)
            self._verified.labels(*labels).inc(verified + 1)
        if any(report.drafted):
            count = len(report.routes)
            self._ratio.observe((count + sum(report.verified)) / (count + sum(report.drafted)))

    def time(self, times: StepTimes) -> None:
        """Where the time of one decode step went."""
        for part, seconds in asdict(times).items():
            self._seconds.labels(part).observe(seconds)

    def finish(self, request: Any) -> None:
        """A request ended."""
        self._requests.labels(request.record.metadata.route, request.workload).inc()

    def fall_back(self, reason: str) -> None:
        """A row could not be drafted for."""
        self._fallbacks.labels(reason).inc()
