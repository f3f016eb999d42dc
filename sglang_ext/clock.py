"""When the parts of a step begin and end: by the host's clock, or on a GPU by events, for which nothing waits.

On a GPU the host is ahead of the device: its clock would tell how long a part takes to launch, and at the next wait how
long everything took that was launched before.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from sglang_ext.metrics import StepTimes


class StepClock(Protocol):
    """Marks moments of the work that is queued."""

    def mark(self) -> Any:
        """This moment of the current stream."""
        ...

    def passed(self, mark: Any) -> bool:
        """Whether the moment has come."""
        ...

    def seconds(self, begin: Any, end: Any) -> float:
        """Between two moments that have passed."""
        ...


class HostClock:
    """Where work is done when it is called for."""

    def mark(self) -> float:
        return time.perf_counter()

    def passed(self, mark: float) -> bool:
        return True

    def seconds(self, begin: float, end: float) -> float:
        return end - begin


class DeviceClock:
    """Where work is queued on a GPU."""

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def passed(self, mark: torch.cuda.Event) -> bool:
        return mark.query()

    def seconds(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return begin.elapsed_time(end) / 1000


def step_clock(device: torch.device | str) -> StepClock:
    """The clock of a device's work."""
    return DeviceClock() if torch.device(device).type == "cuda" else HostClock()


@dataclass(frozen=True, eq=False)
class StepMarks:
    """A step and the moments of its parts, which may be still to come."""

    batch_size: int
    drafted: dict[str, int]
    """Rows by drafter."""
    slots: int
    """Verified, anchors counted."""
    drafting: tuple[Any, Any]
    verifying: tuple[Any, Any]
    """Begin and end."""
    before: Any
    """The end of the step before, where it was the same requests' and nothing came between; else None."""
    plan_seconds: float
    other_seconds: float
    """Of the host."""


@dataclass(frozen=True)
class TimedStep:
    """A step that has passed."""

    batch_size: int
    drafted: dict[str, int]
    slots: int
    times: StepTimes
    taken: float | None
    """From the end of the step before to its own; None: other work lay between."""

    @property
    def rest_seconds(self) -> float | None:
        """What of ``taken`` is neither drafting nor verification."""
        return None if self.taken is None else self.taken - self.times.draft - self.times.verify


class StepTimer:
    """Steps in order, each timed once its last moment has come."""

    def __init__(self, clock: StepClock) -> None:
        self._clock = clock
        self._waiting: deque[StepMarks] = deque()

    def mark(self) -> Any:
        """This moment."""
        return self._clock.mark()

    def add(self, marks: StepMarks) -> None:
        """A step was launched."""
        self._waiting.append(marks)

    def passed(self) -> Iterator[TimedStep]:
        """The steps that have passed since this was asked last."""
        while self._waiting and self._clock.passed(self._waiting[0].verifying[1]):
            marks = self._waiting.popleft()
            yield TimedStep(
                batch_size=marks.batch_size,
                drafted=marks.drafted,
                slots=marks.slots,
                times=StepTimes(
                    draft=self._clock.seconds(*marks.drafting),
                    plan=marks.plan_seconds,
                    verify=self._clock.seconds(*marks.verifying),
                    other=marks.other_seconds,
                ),
                taken=None if marks.before is None else self._clock.seconds(marks.before, marks.verifying[1]),
            )
