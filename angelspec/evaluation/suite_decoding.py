"""Decoding the prompts of suites as the settings of a measurement say: by the target, or from its recorded answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from angelspec.decoding.answers import DecodeRun
from angelspec.decoding.proposer import Proposer
from angelspec.decoding.recording import Recording, decode_recorded, record, record_states
from angelspec.decoding.speculative import decode
from angelspec.evaluation.results import MeasureSettings
from angelspec.evaluation.suites import Suite
from angelspec.evaluation.units import cached

if TYPE_CHECKING:
    from angelspec.targets.target import Target, TargetStates

T = TypeVar("T")


def decode_suites(
    target: Target,
    proposer: Proposer,
    suites: Sequence[Suite],
    *,
    settings: MeasureSettings,
    temperature: float,
    progress: Callable[[int], None] | None = None,
) -> DecodeRun:
    """Answer the prompts of some suites, one after another, as the settings say; a suite's prompt i has random
    stream i."""
    return decode(
        target,
        proposer,
        _prompts(suites),
        max_new_tokens=settings.max_new_tokens,
        temperature=temperature,
        seed=settings.seed,
        batch_size=settings.batch_size,
        cut=settings.cut if proposer.depth else None,
        row_ids=_row_ids(suites),
        progress=progress,
    )


class RecordedSuites:
    """Some suites' answers of the target alone, and what drafters would have made of them.

    The target answers at the first ``decode`` that needs it; its answers are kept as a unit, its states in memory.

    Args:
        target: the frozen model.
        suites: the group that is decoded together.
        settings: how to decode.
        temperature: of the answers.
        depth: most proposals of any proposer.
        folder: where finished units are kept; None keeps none.
    """

    def __init__(
        self,
        target: Target,
        suites: Sequence[Suite],
        *,
        settings: MeasureSettings,
        temperature: float,
        depth: int,
        folder: Path | None,
    ) -> None:
        self._target, self._suites, self._settings = target, suites, settings
        self._temperature, self._depth, self._folder = temperature, depth, folder
        self._recording: Recording | None = None
        self._states: tuple[tuple[int, ...], list[TargetStates]] | None = None

    def decode(self, proposer: Proposer, *, progress: Callable[[int], None] | None = None) -> DecodeRun:
        """The answers of ``decode_suites`` with this proposer."""
        if self._recording is None:
            self._recording = self._record()
        if self._states is None or self._states[0] != proposer.layer_ids:
            self._states = None  # the old ones go before the new ones come
            self._states = (
                proposer.layer_ids,
                record_states(self._target, self._recording, layer_ids=proposer.layer_ids),
            )
        return decode_recorded(
            proposer,
            self._recording,
            self._states[1],
            batch_size=self._settings.batch_size,
            cut=self._settings.cut if proposer.depth else None,
            progress=progress,
        )

    def _record(self) -> Recording:
        settings = self._settings
        unit = {
            "unit": "answers",
            **unit_facts(self._target, self._suites, settings, temperature=self._temperature),
            "depth": self._depth,
        }

        def run() -> Recording:
            return record(
                self._target,
                _prompts(self._suites),
                max_new_tokens=settings.max_new_tokens,
                depth=self._depth,
                temperature=self._temperature,
                seed=settings.seed,
                batch_size=settings.batch_size,
                row_ids=_row_ids(self._suites),
            )

        return cached(self._folder, unit, Recording, run)


def in_turns(runners: Sequence[T], *, rounds: int) -> Iterator[T]:
    """Every runner in each round, in reversed order every other round: drift of the machine falls on all alike."""
    for turn in range(rounds):
        yield from runners if turn % 2 == 0 else reversed(runners)


def unit_facts(
    target: Target, suites: Sequence[Suite], settings: MeasureSettings, *, temperature: float
) -> dict[str, Any]:
    """What every unit depends on besides its proposers."""
    return {
        "target": target.digest,
        "dtype": str(target.dtype),
        "device": torch.device(target.device).type,
        "threads": torch.get_num_threads(),
        "suites": [suite.digest for suite in suites],
        "workloads": [prompt.workload for suite in suites for prompt in suite.prompts],
        "temperature": temperature,
        "max_new_tokens": settings.max_new_tokens,
        "batch_size": settings.batch_size,
        "seed": settings.seed,
        "cut": None if settings.cut is None else settings.cut.model_dump(mode="json"),
    }


def _prompts(suites: Sequence[Suite]) -> list[list[int]]:
    return [list(prompt.tokens) for suite in suites for prompt in suite.prompts]


def _row_ids(suites: Sequence[Suite]) -> list[int]:
    """A suite's prompt i has random stream i."""
    return [index for suite in suites for index in range(len(suite.prompts))]
