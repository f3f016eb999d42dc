"""Progress of long stages: bars with rate and time left on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, ProgressColumn, SpinnerColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress
from rich.progress import Task as RichTask
from rich.text import Text

_LINE_SECONDS = 15.0
_WIDTH_OF_A_FILE = 140


def table_console() -> Console:
    """Standard output for tables: as wide as the terminal, or wide enough not to cut cells where there is none."""
    console = Console()
    return console if console.is_terminal else Console(width=_WIDTH_OF_A_FILE)


class _Rate(ProgressColumn):
    def render(self, task: RichTask) -> Text:
        speed = task.finished_speed or task.speed
        unit = task.fields.get("unit", "")
        return Text("" if speed is None else f"{_short(speed)} {unit}/s")


class Meter:
    """One running task; call it with the amount done so far."""

    def __init__(self, progress: Progress, name: str, total: float | None, unit: str) -> None:
        self._progress, self._name, self._total, self._unit = progress, name, total, unit
        self._started = self._last_line = time.monotonic()
        self._first: float | None = None
        self._task = (
            progress.bars.add_task(name, total=total, unit=unit, note="") if progress.bars is not None else None
        )

    def __call__(self, done: float, *, total: float | None = None, note: str = "") -> None:
        """Report ``done`` units so far; the first call fixes where this session began (a resumed task is not fast)."""
        if self._first is None:
            self._first = done
            self._started = time.monotonic()
        if total is not None:
            self._total = total
        if self._task is not None:
            self._progress.bars.update(self._task, completed=done, total=self._total, note=note)
            return
        now = time.monotonic()
        if now - self._last_line >= _LINE_SECONDS:
            self._last_line = now
            self._progress.say(self._line(done, now, note))

    def _line(self, done: float, now: float, note: str) -> str:
        rate = (done - (self._first or 0)) / max(now - self._started, 1e-9)
        parts = [f"  {self._name}: {_short(done)}"]
        if self._total:
            parts[0] += f" of {_short(self._total)} {self._unit}"
            if rate > 0:
                parts.append(f"{_clock((self._total - done) / rate)} left")
        parts.insert(1, f"{_short(rate)} {self._unit}/s")
        return ", ".join(parts + ([note] if note else []))

    def close(self) -> None:
        """Remove the bar."""
        if self._task is not None:
            self._progress.bars.remove_task(self._task)


class Progress:
    """Where progress is shown. ``quiet`` shows nothing."""

    def __init__(self, console: Console | None = None, *, quiet: bool = False) -> None:
        self.console = console or Console(stderr=True, quiet=quiet)
        self.bars = (
            RichProgress(
                SpinnerColumn(), TextColumn("{task.description}"), BarColumn(bar_width=28),
                TextColumn("{task.percentage:>3.0f}%"), _Rate(), TimeRemainingColumn(),
                TextColumn("{task.fields[note]}"),
                console=self.console, transient=True,
            )
            if self.console.is_terminal and not quiet
            else None
        )  # fmt: skip

    @contextmanager
    def running(self) -> Iterator[None]:
        """Bars are drawn inside this context."""
        if self.bars is None:
            yield
        else:
            with self.bars:
                yield

    @contextmanager
    def meter(self, name: str, *, total: float | None, unit: str) -> Iterator[Meter]:
        """One task."""
        meter = Meter(self, name, total, unit)
        try:
            yield meter
        finally:
            meter.close()

    def say(self, text: str) -> None:
        """Print one line above the bars."""
        self.console.print(text, highlight=False, soft_wrap=True, markup=False)


def _short(value: float) -> str:
    for limit, suffix in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            return f"{value / (limit if suffix != 'k' else 1e3):.1f}{suffix}"
    return f"{value:.0f}" if value >= 10 or value == int(value) else f"{value:.1f}"


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
