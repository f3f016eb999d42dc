"""What a visitor's comparisons measured, and what result files say, as charts."""

from __future__ import annotations

from collections.abc import Sequence

from angelspec.demo.plots import Chart
from angelspec.demo.stream import ColumnState
from angelspec.demo.texts import NO_RESULTS
from angelspec.serving.bench_result import BenchResult

_MOST_POINTS = 60
"""Of one answer's line."""


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


def acceptance_chart(states: Sequence[ColumnState]) -> Chart:
    """By column, the share of verify steps that accepted proposals 1 .. k, pooled over all its answers."""
    runs: dict[str, list[int]] = {}
    depths: dict[str, int] = {}
    for state in _drafted(states):
        name = state.column.name
        runs.setdefault(name, []).extend(accepted_runs([piece.position for piece in state.answer.pieces]))
        depths[name] = max(depths.get(name, 0), state.column.depth)
    lines = {
        name: [(float(k), sum(run >= k for run in found) / len(found)) for k in range(1, depths[name] + 1)]
        for name, found in runs.items()
        if found
    }
    return Chart("Accepted proposals by position", "proposal k", "verify steps that accepted proposals 1 to k", lines,
                 y_top=1, percent=True, at_points=True)  # fmt: skip


def kept_chart(states: Sequence[ColumnState]) -> Chart:
    """Kept ratio along the drafted answers of this visit; a column's answers follow one another."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for state in _drafted(states):
        if state.kept:
            line = lines.setdefault(state.column.name, [])
            offset = line[-1][0] if line else 0.0
            every = max(len(state.kept) // _MOST_POINTS, 1)
            line += [(offset + seconds, kept) for seconds, kept in [*state.kept[:-1:every], state.kept[-1]]]
    return Chart("Kept ratio over time", "seconds of answering", "slots verified of those drafted", lines,
                 y_top=1, percent=True)  # fmt: skip


def throughput_chart(results: Sequence[BenchResult]) -> Chart:
    """Tokens per second of all requests against how many run at a time, from load tests.

    One line for each choice, and for each set of prompts and each file where there are several.
    """
    several_sets = any(len({cell.traffic for cell in result.cells}) > 1 for result in results)
    lines: dict[str, list[tuple[float, float]]] = {}
    for number, result in enumerate(results, start=1):
        for cell in sorted(result.cells, key=lambda cell: cell.concurrency):
            if cell.tokens_per_second is not None:
                name = [
                    cell.choice,
                    *([cell.traffic] if several_sets else []),
                    *([f"#{number}"] if results[1:] else []),
                ]
                lines.setdefault(", ".join(name), []).append((float(cell.concurrency), cell.tokens_per_second))
    return Chart("Throughput against concurrency", "requests at a time", "tokens per second, all requests", lines,
                 doubling=True, empty=NO_RESULTS)  # fmt: skip


def _drafted(states: Sequence[ColumnState]) -> list[ColumnState]:
    return [state for state in states if state.answer.pieces and not state.column.plain]
