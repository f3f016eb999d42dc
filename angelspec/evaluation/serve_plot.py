"""Picture of a load test, in the shape of the AngelSpec paper's Figure 4: throughput against per-user speed."""

from __future__ import annotations

from pathlib import Path

from angelspec.evaluation.drawing import COLOURS, MARKERS, NEUTRAL, drawing, legend_below
from angelspec.serving.bench_result import CONTROL, BenchResult, Cell

_HIGHEST = 8.0
"""Speedup up to which the axis reaches: two repeats can give intervals without an end."""


def plot_bench(result: BenchResult, folder: Path) -> dict[str, Path]:
    """Every picture, as ``caption -> PNG``."""
    return {
        "Throughput against per-user speed": plot_frontier(result, folder / "throughput.png"),
        "Speedup over plain decoding": plot_speedup(result, folder / "speedup.png"),
    }


def plot_frontier(result: BenchResult, path: Path) -> Path:
    """Tokens/s of all users over tokens/s of each, one line per choice through its concurrencies, a panel per set."""

    def point(cell: Cell) -> tuple[float, float] | None:
        if cell.user_tokens_per_second is None or cell.tokens_per_second is None:
            return None
        return cell.user_tokens_per_second, cell.tokens_per_second

    with drawing(path, width=_width(result), height=4.0, columns=len(result.prompt_sets)) as (figure, all_axes):
        handles = {}
        speculating = [choice.name for choice in result.choices if choice.name not in (result.baseline, CONTROL)]
        numbered = {result.baseline, *speculating[-1:]}  # the other lines pass the same numbers in the same order
        for axes, traffic in zip(all_axes, result.prompt_sets, strict=True):
            for index, choice in enumerate(result.choices):
                cells = _cells(result, traffic.name, choice.name)
                points = [(cell.concurrency, place) for cell in cells if (place := point(cell)) is not None]
                if not points:
                    continue
                (handles[choice.name],) = axes.plot(
                    [x for _, (x, _) in points], [y for _, (_, y) in points], **_style(result, index)
                )
                for concurrency, place in points if choice.name in numbered else ():
                    axes.annotate(
                        str(concurrency), place, textcoords="offset points", xytext=(4, 4), fontsize=7, color="#555555"
                    )
            axes.set_title(traffic.name, fontsize=10.5, fontweight="normal")
            axes.set_xlabel("tokens/s of one user")
            axes.set_xlim(left=0)
            axes.set_ylim(bottom=0)
        all_axes[0].set_ylabel("tokens/s of all users")
        figure.suptitle(
            "Throughput against per-user speed; numbers are users at a time", x=0.01, ha="left", fontsize=12,
            fontweight="bold",
        )  # fmt: skip
        if handles:
            legend_below(figure, handles, most=5)
    return path


def plot_speedup(result: BenchResult, path: Path) -> Path:
    """Speedup over plain decoding by concurrency, with 95 % intervals."""
    with drawing(path, width=_width(result), height=3.8, columns=len(result.prompt_sets), share_y=True) as (
        figure,
        all_axes,
    ):
        handles = {}
        places = {concurrency: place for place, concurrency in enumerate(result.settings.concurrency)}
        compared = [(i, c) for i, c in enumerate(result.choices) if c.name != result.baseline]
        for axes, traffic in zip(all_axes, result.prompt_sets, strict=True):
            axes.axhline(1.0, color=NEUTRAL, linewidth=1.2)
            for order, (index, choice) in enumerate(compared):
                cells = [cell for cell in _cells(result, traffic.name, choice.name) if cell.speedup is not None]
                if not cells:
                    continue
                shift = 0.08 * (order - (len(compared) - 1) / 2)
                values = [cell.speedup or 0.0 for cell in cells]
                spread = [
                    [
                        v - (c.speedup_low if c.speedup_low is not None else v)
                        for c, v in zip(cells, values, strict=True)
                    ],
                    [
                        (c.speedup_high if c.speedup_high is not None else v) - v
                        for c, v in zip(cells, values, strict=True)
                    ],
                ]
                handles[choice.name] = axes.errorbar(
                    [places[cell.concurrency] + shift for cell in cells], values, yerr=spread, capsize=2.5,
                    elinewidth=1.0, **_style(result, index),
                )  # fmt: skip
            axes.set_title(traffic.name, fontsize=10.5, fontweight="normal")
            axes.set_xticks(list(places.values()), [str(concurrency) for concurrency in places])
            axes.set_xlabel("users at a time")
        tops = [cell.speedup_high or cell.speedup or 0.0 for cell in result.cells]
        all_axes[0].set_ylim(0, 1.05 * min(max([1.0, *tops]), _HIGHEST))
        all_axes[0].set_ylabel(f"speedup over {result.baseline}")
        figure.suptitle(
            "Speedup over plain decoding, 95 % intervals", x=0.01, ha="left", fontsize=12, fontweight="bold"
        )
        if handles:
            legend_below(figure, handles, most=5)
    return path


def _cells(result: BenchResult, traffic: str, choice: str) -> list[Cell]:
    found = [
        result.cell(traffic=traffic, concurrency=concurrency, choice=choice)
        for concurrency in result.settings.concurrency
    ]
    return [cell for cell in found if cell is not None]


def _style(result: BenchResult, index: int) -> dict[str, object]:
    """A choice's look, the same in every picture; what does not speculate is grey."""
    name = result.choices[index].name
    if name in (result.baseline, CONTROL):
        return {"color": NEUTRAL, "marker": "o", "linestyle": "-" if name == result.baseline else (0, (3, 2))}
    others = [choice.name for choice in result.choices if choice.name not in (result.baseline, CONTROL)]
    place = others.index(name)
    return {"color": COLOURS[place % len(COLOURS)], "marker": MARKERS[place % len(MARKERS)]}


def _width(result: BenchResult) -> float:
    return max(5.2, 3.4 * len(result.prompt_sets) + 0.8)
