"""The record of a measurement: counts and seconds, written as JSON.

Every rate is divided from them when it is shown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from angelspec.core.errors import DataError
from angelspec.core.files import write_text_atomic
from angelspec.core.modes import Mode
from angelspec.core.workloads import WORKLOADS
from angelspec.evaluation.machine import Machine, package_versions
from angelspec.evaluation.results import (
    AnswerGroup,
    ExactnessResult,
    MeasureSettings,
    ShortlistResult,
    SpeedResult,
    StepTimes,
    SuiteResult,
)

REPORT_FILE = "report.json"
FORMAT_VERSION = 1
_STRICT = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=())

DEFINITIONS: Mapping[str, str] = MappingProxyType(
    {
        "accepted length": "mean accepted length (MAL): tokens committed per verify step, bonus token included, "
        "pooled: all tokens of verify steps / all verify steps. 1 is plain decoding. The token sampled after the "
        "prompt is not counted.",
        "p_k": "cumulative acceptance: share of verify steps whose proposals 1 to k were all accepted, over steps that "
        "verified the drafter's full depth: a cut step says nothing about what was cut, nor does one in which prompt "
        "lookup found no match.",
        "finished / unfinished": "answers that ended by a stop token / were cut at the token limit. Unfinished answers "
        "stand apart because they loop more often, which flatters every drafter.",
        "repeated 12-grams": "share of an answer's 12-grams that occurred earlier in the same answer, pooled.",
        "kept ratio": "verified slots / drafted slots, anchors counted (D-cut); 100 % without a cut.",
        "prompt lookup": "a drafter without weights: what followed the last occurrence of the longest suffix (up to "
        "the given number of tokens) of prompt and answer.",
        "speed-up": "tokens/s of the reference loop with the drafter / tokens/s of the same loop without one, same "
        "prompts, in turns in one process. The loop is written to be read; serving engines are faster on both sides.",
        "step time": "draft + verify + sample of one step of a whole batch in the reference loop, pooled over steps in "
        "which every row runs: drafting (with handing over the target's states), the target's forward over the "
        "proposals, choosing tokens and comparing. Bookkeeping is left out.",
        "break-even": "a drafter is as fast as MTP when accepted length / step time is the same for both; it needs the "
        "accepted length of MTP x its own step time / MTP's step time (arXiv 2607.25852, section 5).",
        "exact": "answers equal, token for token, to plain decoding of one request at a time, same random streams.",
    }
)
"""What each figure means; written into every report."""


class TargetFacts(BaseModel):
    """The target that was sped up."""

    model_config = _STRICT

    name: str
    digest: str
    """Content hash of weights, configuration, tokenizer and template."""
    dtype: str


class DrafterFacts(BaseModel):
    """One column of the tables."""

    model_config = _STRICT

    name: str
    description: str
    depth: int
    """Proposals per step."""
    identity: dict[str, Any]
    """What its proposals depend on."""


class SuiteFacts(BaseModel):
    """One row of the tables."""

    model_config = _STRICT

    name: str
    prompts: int
    digest: str


class Report(BaseModel):
    """Everything measured about some drafters of one target in one mode."""

    model_config = _STRICT

    format_version: Literal[1] = FORMAT_VERSION
    title: str
    created: str = Field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    """UTC, ISO 8601."""
    target: TargetFacts
    mode: Mode
    machine: Machine
    versions: dict[str, str] = Field(default_factory=package_versions)
    settings: MeasureSettings
    commands: tuple[str, ...]
    """How to get these figures again."""
    definitions: dict[str, str] = Field(default_factory=lambda: dict(DEFINITIONS))
    drafters: tuple[DrafterFacts, ...]
    suites: tuple[SuiteFacts, ...]
    results: tuple[SuiteResult, ...]
    speed: tuple[SpeedResult, ...] = ()
    exactness: tuple[ExactnessResult, ...] = ()
    shortlist: tuple[ShortlistResult, ...] = ()
    step_times: tuple[StepTimes, ...] = ()
    """For the break-even with MTP; measured side by side."""
    notes: tuple[str, ...] = ()
    """What limits these figures, in sentences."""

    def pooled(
        self,
        drafter: str,
        *,
        temperature: float,
        finished: bool = True,
        suites: Sequence[str] | None = None,
        workloads: Sequence[str] | None = None,
    ) -> AnswerGroup:
        """Counters of one drafter over some suites and workloads (None: all)."""
        total = AnswerGroup()
        for result in self.results:
            if (result.proposer, result.temperature) != (drafter, temperature):
                continue
            if suites is not None and result.suite not in suites:
                continue
            for workload in [None] if workloads is None else workloads:
                total += result.pooled(finished=finished, workload=workload)
        return total

    @property
    def temperatures(self) -> tuple[float, ...]:
        """Measured temperatures, ascending."""
        return tuple(sorted({result.temperature for result in self.results}))

    @property
    def workloads(self) -> tuple[str, ...]:
        """Measured workloads, in the order of ``WORKLOADS``."""
        present = {group.workload for result in self.results for group in result.groups}
        return tuple(workload for workload in WORKLOADS if workload in present)

    def save(self, folder: Path) -> Path:
        """Write ``report.json``."""
        path = folder / REPORT_FILE
        write_text_atomic(path, self.model_dump_json(indent=2) + "\n")
        return path

    @classmethod
    def load(cls, path: Path) -> Report:
        """Read a ``report.json``.

        Raises:
            DataError: no report of this version (named).
        """
        try:
            return cls.model_validate_json(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise DataError(f"{path} is no report: {error}", mend="write it again by measuring") from error
