"""The held-out share of the rows: one function, keyed by content, so that it never depends on order."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from angelspec.core.errors import DataError
from angelspec.data.tokenised import TokenisedRow


@dataclass(frozen=True)
class Split:
    """Training and held-out rows, each in the given order."""

    train: list[TokenisedRow]
    held_out: list[TokenisedRow]


def split_held_out(rows: Iterable[TokenisedRow], *, fraction: float, seed: int) -> Split:
    """Hold out about ``fraction`` of the conversations, by the hash of how each begins.

    All that grew from one prompt (turns, samples, doubles under other ids) stays on one side, and a conversation
    stays on its side when others come or go. At least one conversation is held out.

    Raises:
        DataError: fewer than two different conversations.
    """
    rows = list(rows)
    keys = {group: _share(group, seed=seed) for group in {row.group for row in rows}}
    if len(keys) < 2:
        raise DataError(
            f"{len(keys)} conversation(s) cannot be split into training and held-out rows", mend="give more data"
        )
    ordered = sorted(keys, key=lambda group: (keys[group], group))
    held: set[str] = {group for group in ordered if keys[group] < fraction} or set(ordered[:1])
    if len(held) == len(keys):
        held.discard(ordered[-1])
    return Split(_where(rows, held, inside=False), _where(rows, held, inside=True))


def _where(rows: Sequence[TokenisedRow], groups: set[str], *, inside: bool) -> list[TokenisedRow]:
    return [row for row in rows if (row.group in groups) == inside]


def _share(group: str, *, seed: int) -> float:
    """A number in [0, 1) that the group and the seed decide."""
    digest = hashlib.sha256(f"{seed}/{group}".encode()).digest()
    return int.from_bytes(digest[:7], "big") / 2**56
