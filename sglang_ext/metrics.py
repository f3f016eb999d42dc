"""What the engine counts: steps and where their time goes, routes, cuts and fallbacks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from angelspec.core.bundle import PLAIN


@dataclass(frozen=True)
class StepReport:
    """One decode step."""

    routes: Sequence[str | None]
    """Drafter per row; None: plain."""
    drafted: Sequence[int]
    verified: Sequence[int]
    """Proposals per row."""
    committed: Sequence[int]
    graphed: bool = False
    """Whether the verification ran from a CUDA graph."""
    reasons: Mapping[int, str] = field(default_factory=dict)
    """By row, why its request is decoded plainly from now on."""

    def without(self, rows: Container[int]) -> StepReport:
        """The same without some rows."""
        left = [row for row in range(len(self.routes)) if row not in rows]
        parts = (self.routes, self.drafted, self.verified, self.committed)
        return StepReport(*([part[row] for row in left] for part in parts), graphed=self.graphed)


@dataclass(frozen=True)
class StepTimes:
    """Where one decode step's time went, in seconds."""

    draft: float
    plan: float
    """Learning from the step before, choosing drafters and cuts, and packing what is verified; of the host."""
    verify: float
    """The target's forward, drawing, accepting, and keeping states."""
    other: float


@dataclass
class Counters:
    """Sums since the engine started."""

    steps: int = 0
    speculative_steps: int = 0
    mixed_steps: int = 0
    """Steps with more than one route."""
    cut_steps: int = 0
    """Steps in which some drafted proposal was not verified."""
    graphed_steps: int = 0
    """Steps whose verification ran from a CUDA graph."""
    draft_seconds: float = 0.0
    plan_seconds: float = 0.0
    verify_seconds: float = 0.0
    other_seconds: float = 0.0
    costed_seconds: float = 0.0
    """Of the steps whose cost was foretold and that followed at once upon another one of the same requests."""
    misjudged_seconds: float = 0.0
    """Of these, by how much each was foretold too long or too short."""
    drafted_slots: int = 0
    verified_slots: int = 0
    committed_tokens: int = 0
    prefills: int = 0
    """Rows of prefill steps."""
    prefix_hits: int = 0
    """Prefills that began behind a cached prefix."""
    continued_chunks: int = 0
    """Prefills that went on where the one before ended."""
    prefilled_again: int = 0
    """Prefills of requests that had been decoding: they were retracted."""
    fallbacks: Counter[str] = field(default_factory=Counter)
    """Rows by reason."""
    requests: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Finished requests by (route, workload)."""

    def step(self, report: StepReport) -> StepReport:
        """Count a step; returns it. One whose every row was left out counts for nothing."""
        if not report.routes:
            return report
        self.steps += 1
        routes = set(report.routes)
        self.speculative_steps += routes != {None}
        self.mixed_steps += len(routes) > 1
        self.cut_steps += any(kept < number for kept, number in zip(report.verified, report.drafted, strict=True))
        self.graphed_steps += report.graphed
        rows = len(report.routes)
        self.drafted_slots += rows + sum(report.drafted)
        self.verified_slots += rows + sum(report.verified)
        self.committed_tokens += sum(report.committed)
        return report

    def time(self, times: StepTimes) -> None:
        """Add up a step's times."""
        self.draft_seconds += times.draft
        self.plan_seconds += times.plan
        self.verify_seconds += times.verify
        self.other_seconds += times.other

    def cost(self, *, foretold: float, taken: float) -> None:
        """Compare what a step was to cost, in seconds, with what it took."""
        self.costed_seconds += taken
        self.misjudged_seconds += abs(foretold - taken)

    def prefill(self, *, start: int, continues: bool, again: bool) -> None:
        """Count a row of a prefill step."""
        self.prefills += 1
        self.prefix_hits += bool(start) and not continues
        self.continued_chunks += continues
        self.prefilled_again += again and not continues

    def fall_back(self, reason: str) -> None:
        """A row could not be drafted for as it should have been."""
        self.fallbacks[reason] += 1

    def finish(self, request: Any) -> None:
        """A request ended."""
        metadata = request.record.metadata
        self.requests[metadata.route if metadata.verify_steps else PLAIN, request.workload] += 1

    def as_dict(self) -> dict[str, Any]:
        """For the server's information page."""
        return {
            **{item.name: getattr(self, item.name) for item in fields(self)},
            "nan_rows": self.fallbacks["draft not finite"],
            "fallbacks": dict(self.fallbacks),
            "requests": {f"{route}/{workload}": number for (route, workload), number in self.requests.items()},
        }
