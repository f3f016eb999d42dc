"""What steps and requests came to, told at once to the information page, to Prometheus and to each request's record."""

from __future__ import annotations

from angelspec.core.bundle import PLAIN
from sglang_ext.metrics import Counters, StepTimes
from sglang_ext.outcome import Outcome
from sglang_ext.prometheus import Exporter
from sglang_ext.requests import ServedRequest


class Ledger:
    """Where the worker enters what happened.

    Args:
        exporter: to Prometheus; None: it is not asked for.
    """

    def __init__(self, exporter: Exporter | None) -> None:
        self.counters = Counters()
        self._exporter = exporter

    def step(self, outcome: Outcome) -> None:
        """A step that is learnt from, but for the rows whose request had ended before it."""
        report = self.counters.step(outcome.report.without(outcome.ended))
        rows = [known for row, known in enumerate(outcome.rows) if row not in outcome.ended]
        for known, name, drafted, kept, number in zip(
            rows, report.routes, report.drafted, report.verified, report.committed, strict=True
        ):
            known.record.add(
                name or PLAIN, committed=number, drafted=drafted if name else 0, verified=kept if name else 0
            )
        if self._exporter is not None:
            self._exporter.step(report, [known.workload for known in rows])

    def time(self, times: StepTimes) -> None:
        """Where the time of a step went."""
        self.counters.time(times)
        if self._exporter is not None:
            self._exporter.time(times)

    def finish(self, known: ServedRequest) -> None:
        """A request ended."""
        self.counters.finish(known)
        if self._exporter is not None:
            self._exporter.finish(known)

    def fall_back(self, reason: str) -> None:
        """A row could not be drafted for as it should have been."""
        self.counters.fall_back(reason)
        if self._exporter is not None:
            self._exporter.fall_back(reason)
