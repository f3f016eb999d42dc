"""What decoding returns, and the one rule by which a committed run of tokens ends an answer."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import torch

from angelspec.core.acceptance import AcceptanceCounts, count_steps

FinishReason = Literal["stop", "length"]
COMPONENTS: tuple[str, ...] = ("prefill", "draft", "verify", "sample", "features")
"""prefill: target over prompts; draft: proposals (and the cut); verify: target over proposals; sample: choosing and
comparing tokens; features: handing target states to the drafter."""


@dataclass
class Decoded:
    """One answer and the verify steps that made it."""

    tokens: list[int] = field(default_factory=list)
    """The answer, the stop token included; nothing stands behind a stop token."""
    finish_reason: FinishReason | None = None
    """``stop``: a stop token was committed; ``length``: the token limit was reached first."""
    accepted: list[int] = field(default_factory=list)
    """Per verify step: accepted proposals, none behind a stop token counted."""
    proposed: list[int] = field(default_factory=list)
    """Per verify step: proposals verified."""
    drafted: list[int] = field(default_factory=list)
    """Per verify step: proposals drafted, before any cut."""
    committed: list[int] = field(default_factory=list)
    """Per verify step: tokens added to the answer; fewer than accepted + 1 only where the answer ended."""

    def counts(self, *, depth: int) -> AcceptanceCounts:
        """This answer's acceptance counters; ``depth`` is the drafter's full number of proposals."""
        return count_steps(self.accepted, self.proposed, self.drafted, depth=depth, committed=self.committed)


@dataclass(frozen=True)
class DecodeRun:
    """The answers of one call, in the order of the prompts."""

    answers: list[Decoded]
    seconds: dict[str, float]
    """Wall seconds by component of ``COMPONENTS``; what is missing to ``total_seconds`` is bookkeeping."""
    total_seconds: float


def accept_tokens(
    tokens: Sequence[int], *, stop_token_ids: Collection[int], room: int
) -> tuple[list[int], FinishReason | None]:
    """The part of a committed run that belongs to the answer, and why the answer ends there, if it does.

    Args:
        tokens: the run, in order; at least one.
        stop_token_ids: the first of them in the run ends the answer and is its last token.
        room: tokens that the answer may still take; at least 1.
    """
    for index, token in enumerate(tokens[:room]):
        if token in stop_token_ids:
            return list(tokens[: index + 1]), "stop"
    return list(tokens[:room]), "length" if len(tokens) >= room else None


class Stopwatch:
    """Adds up wall seconds by component; waits for the device's queue at both ends of each span."""

    def __init__(self, device: torch.device | str) -> None:
        self._device = torch.device(device)
        self.seconds = dict.fromkeys(COMPONENTS, 0.0)
        self._started = time.perf_counter()

    @contextmanager
    def span(self, component: str) -> Iterator[None]:
        """Time what runs inside."""
        self._wait()
        started = time.perf_counter()
        yield
        self._wait()
        self.seconds[component] += time.perf_counter() - started

    def total(self) -> float:
        """Seconds since this stopwatch was made."""
        self._wait()
        return time.perf_counter() - self._started

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
