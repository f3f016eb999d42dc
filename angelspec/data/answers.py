"""What a rollout asks and what it leaves: prompts, and one JSON line per answer."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from angelspec.core.errors import DataError
from angelspec.core.fingerprint import fingerprint
from angelspec.core.modes import MODES, Mode
from angelspec.core.workloads import WORKLOADS, Workload
from angelspec.data.reasons import Reason, count_reasons


@dataclass(frozen=True, slots=True)
class Prompt:
    """A rendered prompt that waits for an answer."""

    id: str
    """Unique within a rollout."""
    workload: Workload
    tokens: tuple[int, ...]
    """Exactly what a server sends to the model, generation prompt included."""
    group: str = ""
    """Hash shared by everything that grew from one conversation; empty: the hash of ``tokens``."""

    def __post_init__(self) -> None:
        if not self.group:
            object.__setattr__(self, "group", fingerprint(list(self.tokens)))


@dataclass(frozen=True, slots=True)
class AnswerRecord:
    """The answer of the target (or of a server) to one prompt."""

    id: str
    workload: Workload
    prompt_tokens: tuple[int, ...]
    answer_tokens: tuple[int, ...]
    """Includes the stop token that ended it."""
    finish_reason: str
    """stop, length, or what a server said."""
    repeated_share: float
    """Share of the answer's 12-grams that occurred earlier in it."""
    mode: Mode
    sample: int = 0
    """Which of several answers to the same prompt."""
    group: str = ""
    """See ``Prompt.group``."""

    def __post_init__(self) -> None:
        if not self.group:
            object.__setattr__(self, "group", fingerprint(list(self.prompt_tokens)))

    def to_json(self) -> str:
        """One line of JSON, without a line end."""
        value = {name: getattr(self, name) for name in self.__slots__}
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)

    @classmethod
    def from_json(cls, line: str) -> AnswerRecord:
        """Read what ``to_json`` wrote.

        Raises:
            ValueError: no JSON object, or a field is missing, unknown or of the wrong kind (named).
        """
        value = json.loads(line)
        if not isinstance(value, Mapping):
            raise ValueError("not an object")
        return cls._from_mapping(value)

    @classmethod
    def _from_mapping(cls, value: Mapping[str, Any]) -> AnswerRecord:
        names = set(cls.__slots__)
        if unknown := sorted(set(value) - names):
            raise ValueError(f"unknown field {', '.join(unknown)}")
        if missing := sorted(names - {"sample", "group"} - set(value)):
            raise ValueError(f"missing field {', '.join(missing)}")
        if value["workload"] not in WORKLOADS or value["mode"] not in MODES:
            raise ValueError(f"workload '{value['workload']}' or mode '{value['mode']}' is unknown")
        for name in ("prompt_tokens", "answer_tokens"):
            tokens = value[name]
            if not isinstance(tokens, list) or not all(type(token) is int and token >= 0 for token in tokens):
                raise ValueError(f"{name} is no list of token ids")
        return cls(
            **{
                **value,
                "prompt_tokens": tuple(value["prompt_tokens"]),
                "answer_tokens": tuple(value["answer_tokens"]),
            }
        )


def read_answers(paths: Iterable[Path]) -> Iterator[AnswerRecord]:
    """Read rollout shards, in order.

    Raises:
        DataError: a line that is no record (named by file and line); shards are written by angelspec and never
            partly, so this means that one was changed or damaged.
    """
    for path in paths:
        with path.open("r", encoding="utf-8", newline="\n") as stream:
            for number, line in enumerate(stream, start=1):
                try:
                    yield AnswerRecord.from_json(line)
                except ValueError as error:
                    raise DataError(
                        f"{path}:{number}: not a rollout record: {error}",
                        mend="delete this shard and run the recipe again",
                    ) from error


@dataclass(frozen=True)
class SelectedAnswers:
    """Answers that may be trained on, and counts of the others."""

    kept: list[AnswerRecord]
    counts: dict[str, int]
    """Dropped answers by reason."""


def select_answers(
    records: Iterable[AnswerRecord], *, keep_finish_reasons: Sequence[str], max_repeated_share: float
) -> SelectedAnswers:
    """Leave out answers that did not finish, that loop, or that say nothing (a recipe's rollout section)."""
    kept: list[AnswerRecord] = []
    dropped: list[Reason] = []
    for record in records:
        if record.finish_reason not in keep_finish_reasons:
            dropped.append(Reason.ANSWER_UNFINISHED)
        elif record.repeated_share > max_repeated_share:
            dropped.append(Reason.ANSWER_REPEATS)
        elif len(record.answer_tokens) < (2 if record.finish_reason == "stop" else 1):
            dropped.append(Reason.ANSWER_EMPTY)
        else:
            kept.append(record)
    return SelectedAnswers(kept, count_reasons(dropped))
