"""The result of a load test: settings, every window, and the cells that are computed from them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from angelspec.core.acceptance import AcceptanceCounts, pool
from angelspec.core.errors import DataError
from angelspec.core.files import read_json, write_json_atomic
from angelspec.serving.answers import EngineCounters, EngineState
from angelspec.serving.intervals import Ratio, paired_ratio

_STRICT = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)
CONTROL = "control"
"""Name of the choice that is a server without the extension."""
RESULT_FILE = "serve-bench.json"

DEFINITIONS: Mapping[str, str] = MappingProxyType(
    {
        "concurrency": "users at a time; each sends its next prompt when its last answer has ended (closed loop)",
        "window": "from the moment when every user has had one answer (warm-up) to the moment when the first of them "
        "finds no prompt left; the prefix cache is emptied before it",
        "tokens/s": "answer tokens that arrive in a window over its seconds, all users together, prefill included; "
        "over repeats: all tokens over all seconds",
        "speedup": "tokens/s over that of plain decoding (route ar) in the same repeat: geometric mean over repeats, "
        "with a 95 % t interval of the paired logarithms; one repeat gives no interval",
        "per-user speed": "answer tokens after a request's first event over the time they took, over all requests",
        "time to first token": "from sending a request to its first token, median over requests; over repeats: mean",
        "against plain": "per-user speed and time to first token over plain decoding's of the same repeat, with means "
        "and intervals as for the speedup",
        "accepted length": "tokens committed per verify step, bonus included, plain steps too, pooled over all steps",
        "kept ratio": "verified slots over drafted slots, anchors counted, pooled over all steps",
        "share of speculative steps": "verify steps that were drafted for over all verify steps, of all requests",
        "control": "another server, without the extension, in turns with the others and without labels",
        "†": "a window was shorter than the minimum",
        "‡": "requests of a window failed; see the list of faults",
    }
)


class Choice(BaseModel):
    """One way of serving that is measured."""

    model_config = _STRICT

    name: str
    route: str | None
    """None: no label is sent (the control)."""
    dcut: str = "auto"
    """auto, off or a keep ratio."""


class PromptSet(BaseModel):
    """Prompts that are measured together."""

    model_config = _STRICT

    name: str
    source: str
    prompts: int
    workloads: dict[str, int]
    digest: str
    """Of the messages, in order."""


class BenchSettings(BaseModel):
    """How it was measured."""

    model_config = _STRICT

    concurrency: tuple[int, ...]
    requests: int = Field(ge=1)
    """Measured requests per window, the warm-up's besides; see ``window_requests``."""
    requests_per_user: int = Field(2, ge=2)
    """Of every window at the least, so that windows of many users last as long as those of one."""
    max_tokens: int = Field(ge=1)
    """Longest answer; shorter ones end by themselves."""
    temperature: float = Field(ge=0)
    repeats: int = Field(ge=1)
    seed: int
    """Of the order of the prompts, and of every request."""
    mode: str | None
    """Thinking mode that the template is asked for; None: the template's default."""
    minimum_seconds: float = Field(gt=0)
    """A shorter window is marked."""

    def window_requests(self, concurrency: int) -> int:
        """Measured requests of a window."""
        return max(self.requests, self.requests_per_user * concurrency)

    @property
    def window_text(self) -> str:
        """The same in words."""
        return f"{self.requests} requests, at least {self.requests_per_user} per user"


class Window(BaseModel):
    """One window."""

    model_config = _STRICT

    traffic: str
    """Name of the prompt set."""
    concurrency: int
    choice: str
    repeat: int
    place: int
    """Place in the order of its round."""
    seconds: float
    tokens: int
    requests: int
    stopped: int
    user_tokens_per_second: float | None
    first_token_median: float | None
    acceptance: AcceptanceCounts
    """Of its requests, the warm-up's not counted; empty without the extension."""
    speculative_steps: int
    """Verify steps that were drafted for."""
    failures: tuple[str, ...]
    counters: EngineCounters | None
    """Of the engine, over the whole window with its warm-up; None: no extension, or it did not say."""
    too_short: bool
    cache_emptied: bool
    """Whether the prefix cache was empty at its beginning."""

    @property
    def tokens_per_second(self) -> float | None:
        return self.tokens / self.seconds if self.seconds > 0 and self.tokens else None


class Cell(BaseModel):
    """One choice at one concurrency on one prompt set."""

    model_config = _STRICT

    traffic: str
    concurrency: int
    choice: str
    windows: int
    tokens_per_second: float | None
    speedup: float | None
    """Against plain decoding."""
    speedup_low: float | None
    speedup_high: float | None
    user_tokens_per_second: float | None
    user_speedup: Ratio | None = None
    """Of the per-user speed, against plain decoding."""
    first_token_seconds: float | None
    first_token_ratio: Ratio | None = None
    """Of the time to the first token to plain decoding's."""
    accepted_length: float | None
    kept_ratio: float | None
    speculative_share: float | None
    too_short: int
    """Windows shorter than the minimum."""
    failures: int
    """Requests that failed."""

    @property
    def marks(self) -> str:
        """† and ‡ where they apply; see ``DEFINITIONS``."""
        return ("†" if self.too_short else "") + ("‡" if self.failures else "")


class BenchResult(BaseModel):
    """A load test."""

    model_config = _STRICT

    kind: Literal["serve-bench"] = "serve-bench"
    created: str
    url: str
    control_url: str | None
    engine_version: str
    control_version: str | None
    engine: EngineState | None
    """None: the measured server has no extension."""
    engine_arguments: dict[str, Any]
    """SGLang's arguments that decide speed."""
    control_arguments: dict[str, Any] | None
    hardware: str
    command: str
    settings: BenchSettings
    baseline: str
    """Choice that the others are compared with."""
    choices: tuple[Choice, ...]
    prompt_sets: tuple[PromptSet, ...]
    windows: tuple[Window, ...]
    cells: tuple[Cell, ...]
    definitions: dict[str, str] = Field(default_factory=lambda: dict(DEFINITIONS))

    def cell(self, *, traffic: str, concurrency: int, choice: str) -> Cell | None:
        """One cell; None: not measured."""
        key = (traffic, concurrency, choice)
        return next((c for c in self.cells if (c.traffic, c.concurrency, c.choice) == key), None)

    @property
    def planned_windows(self) -> int:
        """Windows of the whole measurement."""
        rounds = self.settings.repeats * len(self.prompt_sets) * len(self.settings.concurrency)
        return rounds * len(self.choices)

    def with_window(self, window: Window) -> Self:
        """The result with one more window, its cells computed anew."""
        windows = (*self.windows, window)
        cells = tuple(cells_of(windows, baseline=self.baseline))
        return self.model_copy(update={"windows": windows, "cells": cells})

    @property
    def faults(self) -> list[str]:
        """What is wrong with the measurement, one sentence each."""
        return self.faults_of([choice.name for choice in self.choices])

    def faults_of(self, choices: Collection[str]) -> list[str]:
        """What is wrong with the measurement of some choices, one sentence each."""
        said = []
        if len(self.windows) < self.planned_windows:
            said.append(f"broken off after {len(self.windows)} of {self.planned_windows} windows")
        for window in (window for window in self.windows if window.choice in choices):
            where = f"{window.traffic}, concurrency {window.concurrency}, {window.choice}, repeat {window.repeat + 1}"
            if window.too_short:
                least = self.settings.minimum_seconds
                said.append(f"{where}: the window took {window.seconds:.1f} s, the minimum is {least:g} s")
            if not window.cache_emptied:
                said.append(f"{where}: the prefix cache could not be emptied before it")
            if window.counters is not None and window.counters.nan_rows:
                rows = window.counters.nan_rows
                said.append(f"{where}: {rows} row(s) were decoded plainly because their drafter was not finite")
            if window.failures:
                said.append(f"{where}: {len(window.failures)} request(s) failed, first: {window.failures[0]}")
        return said

    def save(self, folder: Path) -> Path:
        """Write ``serve-bench.json``."""
        path = folder / RESULT_FILE
        write_json_atomic(path, self.model_dump(mode="json"))
        return path

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a saved result.

        Raises:
            DataError: no such file, or not a result of this kind.
        """
        try:
            return cls.model_validate(read_json(path))
        except (OSError, ValueError, ValidationError) as error:
            raise DataError(
                f"{path} is no result of `angelspec bench serve`: {error}", mend=f"give {RESULT_FILE} or its folder"
            ) from error


def cells_of(windows: Sequence[Window], *, baseline: str) -> list[Cell]:
    """Windows joined over repeats, each choice against the baseline of the same repeat."""
    keys = list(dict.fromkeys((w.traffic, w.concurrency, w.choice) for w in windows))
    return [_cell(windows, *key, baseline=baseline) for key in keys]


def _cell(windows: Sequence[Window], traffic: str, concurrency: int, choice: str, *, baseline: str) -> Cell:
    def of(name: str) -> dict[int, Window]:
        return {w.repeat: w for w in windows if (w.traffic, w.concurrency, w.choice) == (traffic, concurrency, name)}

    ours, plain = of(choice), of(baseline)
    repeats = sorted(ours)

    def against_plain(figure: Callable[[Window], float | None]) -> Ratio | None:
        return paired_ratio(
            [figure(ours[r]) for r in repeats], [figure(plain[r]) if r in plain else None for r in repeats]
        )

    ratio = against_plain(lambda window: window.tokens_per_second)
    members = [ours[r] for r in repeats]
    seconds = sum(w.seconds for w in members)
    tokens = sum(w.tokens for w in members)
    acceptance = pool(w.acceptance for w in members)
    speculative = sum(w.speculative_steps for w in members)
    return Cell(
        traffic=traffic,
        concurrency=concurrency,
        choice=choice,
        windows=len(members),
        tokens_per_second=tokens / seconds if seconds > 0 and tokens else None,
        speedup=ratio.value if ratio else None,
        speedup_low=ratio.low if ratio else None,
        speedup_high=ratio.high if ratio else None,
        user_tokens_per_second=_over_requests(members),
        user_speedup=against_plain(lambda window: window.user_tokens_per_second),
        first_token_ratio=against_plain(lambda window: window.first_token_median),
        first_token_seconds=_mean([w.first_token_median for w in members]),
        accepted_length=acceptance.mean_accepted_length,
        kept_ratio=acceptance.kept_ratio,
        speculative_share=speculative / acceptance.verify_steps if acceptance.verify_steps else None,
        too_short=sum(w.too_short for w in members),
        failures=sum(len(w.failures) for w in members),
    )


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def _over_requests(windows: Sequence[Window]) -> float | None:
    known = [(w.user_tokens_per_second, w.requests) for w in windows if w.user_tokens_per_second is not None]
    total = sum(count for _, count in known)
    return sum(value * count for value, count in known) / total if total else None
