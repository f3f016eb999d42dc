"""Prompt lookup: a drafter without weights, which every trained drafter must beat.

Legend: B batch rows, T tokens, F width of the tapped target features, D hidden, K proposals.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from angelspec.decoding.proposer import Observed, Proposals


def copy_match(history: Sequence[int], *, start: int, count: int) -> list[int]:
    """``count`` tokens read from ``history[start:]``, reading on in what was just copied when the end is reached.

    A text that repeats with a period shorter than ``count`` is thereby continued in full.
    """
    copied = list(history[start : start + count])
    while len(copied) < count:
        copied.append(copied[start + len(copied) - len(history)])
    return copied


def lookup_reference(history: Sequence[int], *, max_match: int, num_proposals: int) -> list[int]:
    """Prompt lookup in the words of its definition: the longest suffix, its most recent earlier occurrence."""
    for length in range(min(max_match, len(history) - 1), 0, -1):
        suffix = list(history[-length:])
        for start in range(len(history) - length - 1, -1, -1):
            if list(history[start : start + length]) == suffix:
                return copy_match(history, start=start + length, count=num_proposals)
    return []


class LookupProposer:
    """Prompt lookup: propose what followed the last occurrence of the longest recent suffix.

    Suffixes of up to ``max_match`` tokens are sought in the prompt and the answer so far; without any match nothing is
    proposed. It has no weights, and every trained drafter must beat it.
    """

    layer_ids: tuple[int, ...] = ()

    def __init__(self, *, max_match: int, num_proposals: int, name: str = "prompt lookup") -> None:
        self.name = name
        self.depth = num_proposals
        self.max_match = max_match
        self._seen: dict[int, _SuffixIndex] = {}

    @property
    def identity(self) -> Mapping[str, Any]:
        return {"kind": "lookup", "max_match": self.max_match, "num_proposals": self.depth}

    def start(self, num_rows: int, *, capacity: int) -> None:
        self._seen = {}

    def reset(self, rows: Tensor) -> None:
        for row in rows.tolist():
            self._seen.pop(row, None)

    def observe(self, rows: Tensor, observed: Observed) -> None:
        pass

    def propose(
        self, rows: Tensor, *, histories: Sequence[Sequence[int]], last_token_B: Tensor, position_B: Tensor
    ) -> Proposals:
        tokens_BK = torch.zeros(len(rows), self.depth, dtype=torch.int64)
        confidence_BK = torch.zeros(len(rows), self.depth)
        lengths_B = torch.zeros(len(rows), dtype=torch.int64)
        for index, (row, history) in enumerate(zip(rows.tolist(), histories, strict=True)):
            match = self._seen.setdefault(row, _SuffixIndex(self.max_match)).find(history)
            if match is None:
                continue
            start, length = match
            tokens_BK[index] = torch.tensor(copy_match(history, start=start, count=self.depth))
            # No estimate comes with a match; longer ones are right more often. Only a cut reads this.
            confidence_BK[index] = length / (length + 1)
            lengths_B[index] = self.depth
        device = last_token_B.device
        return Proposals(tokens_BK.to(device), confidence_BK.to(device), lengths_B.to(device))


class _SuffixIndex:
    """Where each n-gram of one growing history ended last, the current end excepted."""

    def __init__(self, max_match: int) -> None:
        self._max_match = max_match
        self._end: dict[tuple[int, ...], int] = {}
        self._indexed = 0

    def find(self, history: Sequence[int]) -> tuple[int, int] | None:
        """(index of the token behind the match, its length) of the longest matching suffix; None without one."""
        for end in range(self._indexed + 1, len(history)):
            for length in range(1, min(self._max_match, end) + 1):
                self._end[tuple(history[end - length : end])] = end
        self._indexed = max(self._indexed, len(history) - 1)
        for length in range(min(self._max_match, len(history) - 1), 0, -1):
            start = self._end.get(tuple(history[-length:]))
            if start is not None:
                return start, length
        return None
