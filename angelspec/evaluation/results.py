"""The records of a measurement: counts and seconds; every rate is divided from them when it is shown."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Self

from pydantic import BaseModel, ConfigDict, Field

from angelspec.core.acceptance import AcceptanceCounts, repeated_ngram_share
from angelspec.decoding.answers import Decoded
from angelspec.decoding.speculative import CutPolicy

NGRAM = 12
"""Length of the n-grams whose repetition says how much an answer loops."""
_STRICT = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=())


class MeasureSettings(BaseModel):
    """How answers are decoded; all of it is part of a unit's fingerprint."""

    model_config = _STRICT

    temperatures: tuple[float, ...] = Field(min_length=1)
    max_new_tokens: int = Field(ge=1)
    batch_size: int = Field(ge=1)
    seed: int = 0
    cut: CutPolicy | None = None
    """D-cut on each step's proposals; None verifies all."""

    def rows_together(self, prompts: int) -> int:
        """Requests in a batch where there are so many prompts."""
        return min(self.batch_size, prompts)


class AnswerGroup(BaseModel):
    """Additive counters over some answers."""

    model_config = _STRICT

    answers: int = 0
    tokens: int = 0
    """Tokens of the answers, the one sampled by prefill included."""
    ngrams: int = 0
    repeated_ngrams: int = 0
    """12-grams of an answer that occurred earlier in the same answer."""
    counts: AcceptanceCounts = AcceptanceCounts()

    @classmethod
    def of(cls, answers: Iterable[Decoded], *, depth: int) -> Self:
        """Count answers, however they ended."""
        group = cls()
        for answer in answers:
            ngrams = max(0, len(answer.tokens) - NGRAM + 1)
            group += cls(
                answers=1,
                tokens=len(answer.tokens),
                ngrams=ngrams,
                repeated_ngrams=round(repeated_ngram_share(answer.tokens, n=NGRAM) * ngrams),
                counts=answer.counts(depth=depth),
            )
        return group

    def __add__(self, other: Self) -> Self:
        return type(self)(
            answers=self.answers + other.answers,
            tokens=self.tokens + other.tokens,
            ngrams=self.ngrams + other.ngrams,
            repeated_ngrams=self.repeated_ngrams + other.repeated_ngrams,
            counts=self.counts + other.counts,
        )

    @property
    def repeated_share(self) -> float | None:
        """Share of 12-grams that repeat; None without any."""
        return self.repeated_ngrams / self.ngrams if self.ngrams else None


class WorkloadGroups(BaseModel):
    """A suite's answers of one workload, by how they ended."""

    model_config = _STRICT

    workload: str
    finished: AnswerGroup = AnswerGroup()
    """Answers that ended by a stop token."""
    unfinished: AnswerGroup = AnswerGroup()
    """Answers cut at the token limit; they loop more often, which flatters every drafter."""


class SuiteResult(BaseModel):
    """One proposer on one suite at one temperature."""

    model_config = _STRICT

    suite: str
    temperature: float
    proposer: str
    depth: int
    groups: tuple[WorkloadGroups, ...]
    """One per workload in the suite."""
    seconds: dict[str, float]
    """Wall seconds by component of the reference loop; of suites decoded together, by their shares of the steps."""
    total_seconds: float

    def pooled(self, *, finished: bool, workload: str | None = None) -> AnswerGroup:
        """The counters of finished or unfinished answers, of one workload or of all."""
        total = AnswerGroup()
        for group in self.groups:
            if workload in (None, group.workload):
                total += group.finished if finished else group.unfinished
        return total


class SpeedResult(BaseModel):
    """Speed of the reference loop with one proposer and of plain decoding, same prompts, turn by turn."""

    model_config = _STRICT

    suite: str
    temperature: float
    proposer: str
    prompts: int
    rounds: int
    tokens: int
    """Answer tokens of all rounds."""
    seconds: float
    plain_tokens: int
    plain_seconds: float

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def plain_tokens_per_second(self) -> float:
        return self.plain_tokens / self.plain_seconds


class Divergence(BaseModel):
    """Where an output first differs from plain decoding."""

    model_config = _STRICT

    prompt_id: str
    position: int
    """Index in the answer."""
    plain_token: int | None
    """None: plain decoding had ended."""
    speculative_token: int | None
    top2_gap: float
    """Difference of the target's two largest logits there: a near-zero gap is a tie broken by rounding."""


class ExactnessResult(BaseModel):
    """Speculative against plain decoding, token for token."""

    model_config = _STRICT

    proposer: str
    temperature: float
    dtype: str
    """Precision of the target; only float32 is expected to be identical."""
    prompts: int
    tokens: int
    """Tokens of plain decoding that were compared."""
    identical: int
    """Prompts whose whole answers are equal."""
    first_divergence: Divergence | None = None

    @property
    def exact(self) -> bool:
        return self.identical == self.prompts


class StepTimes(BaseModel):
    """The parts of a verify step with one drafter while a whole batch is running, summed over the measured steps."""

    model_config = _STRICT

    proposer: str
    temperature: float
    batch_size: int = Field(ge=1)
    steps: int = Field(ge=1)
    draft_seconds: float
    """Drafting, and handing the target's states to the drafter."""
    verify_seconds: float
    """The target's forward over the proposals, vocabulary head included."""
    sample_seconds: float
    """Choosing the target's tokens and comparing the proposals with them."""

    @property
    def seconds_per_step(self) -> float:
        """T_draft + T_verify + T_sample of one step of the whole batch."""
        return (self.draft_seconds + self.verify_seconds + self.sample_seconds) / self.steps


class ShortlistResult(BaseModel):
    """What a shortlist of M candidates per slot costs and gains."""

    model_config = _STRICT

    size: int | None
    """M; None: the whole vocabulary (exact)."""
    counts: AcceptanceCounts
    draft_seconds: float
    total_seconds: float
    tokens: int

    @property
    def draft_seconds_per_step(self) -> float | None:
        """Seconds of drafting per verified block (a batch's step counts once per row); None: there was none."""
        steps = self.counts.verify_steps
        return self.draft_seconds / steps if steps else None
