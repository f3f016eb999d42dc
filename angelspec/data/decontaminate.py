"""Leave out training conversations that share text with an evaluation example.

Texts are compared as raw tokens, one message at a time, without template or special tokens. Two texts overlap if they
share ``n`` contiguous tokens, or, where one is shorter than that, if they are equal as a whole.

Every window of n tokens is one 64-bit polynomial hash, computed for whole batches at once; a hit is confirmed on the
tokens themselves, so that a collision drops nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from angelspec.data.conversation import Conversation
from angelspec.data.reasons import Reason, Rejection

Tokenise = Callable[[list[str]], list[list[int]]]
"""Token ids of each text, special tokens neither added nor needed."""

_BATCH = 1024
_FILTER_BITS = 22
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True)
class Overlap:
    """A training conversation and the evaluation example it shares text with."""

    conversation: Conversation
    evaluation_id: str
    evaluation_source: str
    detail: str

    def rejection(self) -> Rejection:
        """As a refused row."""
        return Rejection(
            self.conversation.file, self.conversation.line, Reason.CONTAMINATED, self.detail, self.conversation.id
        )


@dataclass
class Decontaminated:
    """Training conversations that share nothing with the evaluation, and the others."""

    kept: list[Conversation] = field(default_factory=list)
    dropped: list[Overlap] = field(default_factory=list)

    @property
    def counts(self) -> dict[str, dict[str, int]]:
        """Dropped conversations by training source and, within it, by the evaluation source that was hit."""
        counts: dict[str, dict[str, int]] = {}
        for overlap in self.dropped:
            hits = counts.setdefault(overlap.conversation.source, {})
            hits[overlap.evaluation_source] = hits.get(overlap.evaluation_source, 0) + 1
        return counts


def decontaminate(
    train: Sequence[Conversation],
    evaluation: Sequence[Conversation],
    *,
    tokenise: Tokenise,
    n: int,
    on_rows: Callable[[int], None] | None = None,
) -> Decontaminated:
    """Drop every training conversation of which some text overlaps an evaluation example.

    Args:
        train: their user turns, tool results and, where given, answers and reasoning are compared; system turns are
            not, because many conversations share one.
        evaluation: compared likewise.
        tokenise: the target's tokenizer.
        n: contiguous tokens that count as an overlap.
        on_rows: called with the number of conversations just compared, for progress.
    """
    index = _Index([list(row) for row in _texts(evaluation, tokenise)], n=n)
    result = Decontaminated()
    for start in range(0, len(train), _BATCH):
        batch = train[start : start + _BATCH]
        hits = index.find(list(_texts(batch, tokenise)))
        for number, conversation in enumerate(batch):
            if (hit := hits.get(number)) is None:
                result.kept.append(conversation)
                continue
            example, shared = evaluation[hit.owner], f"{n} contiguous tokens" if hit.window else "a whole short text"
            detail = f"shares {shared} with '{example.id}' of {example.source}"
            result.dropped.append(Overlap(conversation, example.id, example.source, detail))
        if on_rows is not None:
            on_rows(len(batch))
    return result


def _texts(conversations: Sequence[Conversation], tokenise: Tokenise) -> Iterator[list[np.ndarray]]:
    """Per conversation, the tokens of each text that is compared."""
    texts: list[str] = []
    counts: list[int] = []
    for conversation in conversations:
        before = len(texts)
        for message in conversation.messages:
            if message.role != "system":
                texts += [text for text in (message.content, message.reasoning) if text]
        counts.append(len(texts) - before)
    tokens = iter(tokenise(texts) if texts else [])
    for count in counts:
        yield [np.asarray(next(tokens), dtype=np.uint32) for _ in range(count)]


@dataclass(frozen=True, slots=True)
class _Hit:
    owner: int
    window: bool


class _Flat:
    """Texts one behind another, with the hash of every window that lies inside one text."""

    def __init__(self, texts_by_owner: Sequence[Sequence[np.ndarray]], *, n: int) -> None:
        texts = [(owner, text) for owner, texts in enumerate(texts_by_owner) for text in texts if len(text)]
        self.texts = texts
        lengths = np.array([len(text) for _, text in texts], dtype=np.int64)
        self.tokens = np.concatenate([text for _, text in texts]) if texts else np.zeros(0, np.uint32)
        self.owner = np.repeat(np.array([owner for owner, _ in texts], dtype=np.int64), lengths)
        text_of = np.repeat(np.arange(len(texts)), lengths)
        windows = max(0, len(self.tokens) - n + 1)
        self.starts = np.flatnonzero(text_of[:windows] == text_of[len(text_of) - windows :])
        self.hashes = _window_hashes(self.tokens, n=n)[self.starts]


class _Index:
    """The windows and the short texts of the evaluation examples."""

    def __init__(self, texts_by_owner: Sequence[Sequence[np.ndarray]], *, n: int) -> None:
        self._n = n
        self._flat = _Flat(texts_by_owner, n=n)
        order = np.argsort(self._flat.hashes, kind="stable")
        self._hashes = self._flat.hashes[order]
        self._starts = self._flat.starts[order]
        self._filter = np.zeros(1 << _FILTER_BITS, dtype=bool)
        self._filter[self._hashes >> np.uint64(64 - _FILTER_BITS)] = True
        self._short: dict[bytes, int] = {}
        for owner, text in self._flat.texts:
            if len(text) < n:
                self._short.setdefault(text.tobytes(), owner)

    def find(self, texts_by_owner: Sequence[Sequence[np.ndarray]]) -> dict[int, _Hit]:
        """The first overlap of each owner that has one."""
        hits: dict[int, _Hit] = {}
        flat = _Flat(texts_by_owner, n=self._n)
        for owner, text in flat.texts:
            if len(text) < self._n and (example := self._short.get(text.tobytes())) is not None:
                hits.setdefault(owner, _Hit(example, window=False))
        if not len(self._hashes):
            return hits
        maybe = np.flatnonzero(self._filter[flat.hashes >> np.uint64(64 - _FILTER_BITS)])
        first = np.searchsorted(self._hashes, flat.hashes[maybe], side="left")
        equal = self._hashes[np.minimum(first, len(self._hashes) - 1)] == flat.hashes[maybe]
        for window, place in zip(maybe[equal], first[equal], strict=True):
            start = flat.starts[window]
            owner = int(flat.owner[start])
            if (
                owner not in hits
                and (example := self._confirm(flat.tokens[start : start + self._n], place)) is not None
            ):
                hits[owner] = _Hit(example, window=True)
        return hits

    def _confirm(self, window: np.ndarray, place: int) -> int | None:
        """The owner of an evaluation window with these very tokens, among those with the hash at ``place``."""
        value = self._hashes[place]
        while place < len(self._hashes) and self._hashes[place] == value:
            start = self._starts[place]
            if np.array_equal(self._flat.tokens[start : start + self._n], window):
                return int(self._flat.owner[start])
            place += 1
        return None


def _window_hashes(tokens: np.ndarray, *, n: int) -> np.ndarray:
    """uint64 hash of every window of n tokens: sum of mix(token_j) * multiplier^(n-1-j), modulo 2^64."""
    windows = max(0, len(tokens) - n + 1)
    mixed = _mix(tokens.astype(np.uint64))
    hashes = np.zeros(windows, dtype=np.uint64)
    for place in range(n):
        hashes *= _MULTIPLIER
        hashes += mixed[place : place + windows]
    return _mix(hashes)


def _mix(values: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64 (Steele et al. 2014): every bit of a value reaches every bit of its hash."""
    values = values + _MULTIPLIER
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
