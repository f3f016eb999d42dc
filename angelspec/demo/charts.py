"""What a visitor's comparisons measured, and what result files say, as rows for the plots."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from angelspec.demo.stream import ColumnState

Row = dict[str, Any]


def accepted_runs(positions: Sequence[int]) -> list[int]:
    """Proposals accepted in each verify step, from the positions of an answer's tokens.

    The first token is of the prefill, not of a step; a step ends with the target's own token, so one that the answer's
    end has cut short is left out.

    >>> accepted_runs([0, 1, 2, 0, 0, 1])
    [2, 0]
    """
    runs, accepted = [], 0
    for position in positions[1:]:
        if position == 0:
            runs.append(accepted)
        accepted = position
    return runs


def acceptance_rows(states: Sequence[ColumnState]) -> list[Row]:
    """By column, the share of verify steps that accepted proposals 1 .. k, pooled over all its answers."""
    runs: dict[str, list[int]] = {}
    depths: dict[str, int] = {}
    for state in states:
        if state.column.plain or not state.answer.pieces:
            continue
        title = state.column.title
        runs.setdefault(title, []).extend(accepted_runs([piece.position for piece in state.answer.pieces]))
        depths[title] = max(depths.get(title, 0), state.column.depth)
    return [
        {"proposal": k, "share": sum(run >= k for run in found) / len(found), "column": title}
        for title, found in runs.items()
        if found
        for k in range(1, depths[title] + 1)
    ]


def kept_rows(states: Sequence[ColumnState]) -> list[Row]:
    """Kept ratio along the drafted answers of this visit; each answer's seconds follow those of the one before it."""
    rows: list[Row] = []
    offsets: dict[str, float] = {}
    for state in states:
        if state.column.plain or not state.kept:
            continue
        title = state.column.title
        offset = offsets.get(title, 0.0)
        step = max(len(state.kept) // 60, 1)
        points = [*itertools.islice(state.kept, 0, None, step), state.kept[-1]]
        rows += [{"seconds": offset + seconds, "kept": kept, "column": title} for seconds, kept in points]
        offsets[title] = offset + state.kept[-1][0]
    return rows
