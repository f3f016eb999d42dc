"""What a server says, typed: answers, pieces of streams, and the state of the engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from angelspec.core.bundle import WorkloadAcceptance, route_names
from angelspec.core.calibration import Calibration
from angelspec.core.request_label import RequestMetadata
from angelspec.core.step_costs import StepCosts
from angelspec.serving.failures import ServingError

_WIRE = ConfigDict(frozen=True, extra="ignore", use_attribute_docstrings=True)
"""A newer server may say more than this client reads."""


@dataclass(frozen=True)
class Piece:
    """One token of an answer, as text."""

    text: str
    """Empty while a character is incomplete."""
    position: int
    """0: the target's own token; k >= 1: accepted proposal number k of its block."""


@dataclass(frozen=True)
class Usage:
    """Token counts of one request."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None = None
    """Of the prompt, those that were taken from the prefix cache; None: not reported."""


@dataclass(frozen=True)
class ChatChunk:
    """What one event of a chat stream brings."""

    text: str = ""
    """New text of the answer."""
    reasoning: str = ""
    """New text of the reasoning, where the server separates it."""
    pieces: tuple[Piece, ...] = ()
    """New tokens; empty where they were not asked for, or the server has no extension."""
    metadata: RequestMetadata | None = None
    """State of the whole request so far; None as for ``pieces``."""
    usage: Usage | None = None
    """Of the whole request, in the last event."""
    finish_reason: str | None = None
    """stop, length, abort, ...; None while it runs."""
    seconds: float = 0.0
    """Since the request was sent."""


@dataclass(frozen=True)
class ChatAnswer:
    """A whole answer, or as much of it as came."""

    text: str = ""
    reasoning: str = ""
    pieces: tuple[Piece, ...] = ()
    metadata: RequestMetadata | None = None
    usage: Usage | None = None
    finish_reason: str | None = None
    """None: it did not end."""
    first_token_seconds: float | None = None
    """From sending to the first text; None: not streamed, or no text came."""
    seconds: float = 0.0
    """From sending to the last event."""


@dataclass(frozen=True)
class GenerateChunk:
    """What one event of a native stream brings."""

    text: str
    """New text."""
    answer: GenerateAnswer
    """All that came so far."""


@dataclass(frozen=True)
class GenerateAnswer:
    """An answer of the native endpoint, or as much of it as came."""

    text: str = ""
    output_ids: tuple[int, ...] = ()
    positions: tuple[int, ...] = ()
    """One per output token, as ``Piece.position``; empty: the server has no extension."""
    metadata: RequestMetadata | None = None
    usage: Usage | None = None
    finish_reason: str | None = None
    first_token_seconds: float | None = None
    seconds: float = 0.0
    meta_info: Mapping[str, Any] = field(default_factory=dict)
    """All that the server says about the request (log-probabilities among it)."""


# -------------------------------------------------------------------------------------------- engine state


class ServedDrafter(BaseModel):
    """A drafter inside a running server."""

    model_config = _WIRE

    name: str
    algorithm: str | None = None
    family: str
    mode: str
    depth: int
    source: str = ""

    @property
    def aliases(self) -> tuple[str, ...]:
        """Every name that a route may use."""
        return route_names(self.name, algorithm=self.algorithm, family=self.family)


class EngineCounters(BaseModel):
    """Running totals since the server's start; subtract two to get a window.

    None has a default: one that the engine calls by another name must not read as zero.
    """

    model_config = _WIRE

    steps: int
    """Decoding steps of the whole batch."""
    speculative_steps: int
    """Those in which at least one row was drafted for."""
    draft_seconds: float
    plan_seconds: float
    verify_seconds: float
    other_seconds: float
    mixed_steps: int
    """Steps whose rows had different drafters or none."""
    cut_steps: int
    """Steps that verified less than was drafted."""
    costed_seconds: float
    """Of the steps whose cost was foretold."""
    misjudged_seconds: float
    """Of these, by how much each was foretold too long or too short."""
    nan_rows: int
    """Rows whose drafter gave no finite number, and that were decoded plainly."""

    def __sub__(self, earlier: EngineCounters) -> EngineCounters:
        ours, theirs = self.model_dump(), earlier.model_dump()
        return EngineCounters(**{key: ours[key] - theirs[key] for key in ours})


class EngineState(BaseModel):
    """What the extension says of itself."""

    model_config = _WIRE

    bundle: str
    target: str = ""
    mode_family: str
    speculation: Literal["on", "off"]
    drafters: tuple[ServedDrafter, ...]
    acceptance: tuple[WorkloadAcceptance, ...] = ()
    """What the bundle says of the drafters: from their own evaluation, or measured for it."""
    costs: StepCosts | None = None
    """As measured when it started; None: it plans by none."""
    calibrations: dict[str, Calibration] = Field(default_factory=dict)
    """By drafter, learnt from what was verified since the start."""
    draft_bytes_per_token: int = 0
    ratios: tuple[float, ...] | None = None
    """The grid of keep ratios; None: every number of slots."""
    counters: EngineCounters

    @property
    def target_digest(self) -> str | None:
        """Content hash of the target; None: not told."""
        return self.costs.measured_for.target if self.costs and self.costs.measured_for else None

    def without_places(self) -> EngineState:
        """The same with folders by their names alone, for other eyes."""
        drafters = tuple(one.model_copy(update={"source": _place_name(one.source)}) for one in self.drafters)
        return self.model_copy(update={"target": _place_name(self.target), "drafters": drafters})


def _place_name(source: str) -> str:
    """The last part of a path, as bundles write one; a hub's name as it is."""
    return PurePath(source).name if source.startswith(("/", "~", ".")) else source


@dataclass(frozen=True)
class ServerInfo:
    """What a server says of itself."""

    version: str
    """SGLang's."""
    model: str
    """Path of the target."""
    engine: EngineState | None
    """None: the server runs without the extension (plain SGLang)."""
    arguments: Mapping[str, Any]
    """Everything else: SGLang's resolved arguments."""

    def extension(self, url: str) -> EngineState:
        """The extension's state; raises ServingError if the server at ``url`` runs without it."""
        if self.engine is None:
            raise ServingError(f"{url} runs without angelspec's extension", mend="start it with `angelspec serve`")
        return self.engine
