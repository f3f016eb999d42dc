"""Training curves from ``metrics.jsonl``: loss terms and held-out accepted length over steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from matplotlib.axes import Axes

from angelspec.evaluation.drawing import COLOURS, MARKERS, drawing, legend_above
from angelspec.training.metrics import read_metrics

_TERM = "loss_"


@dataclass
class _Curves:
    """One log: (step, value) points by loss term, and of the held-out accepted length."""

    terms: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    held_out: list[tuple[int, float]] = field(default_factory=list)
    last_step: int = 0

    @classmethod
    def read(cls, path: Path, *, offset: int) -> _Curves:
        curves = cls(last_step=offset)
        for event in read_metrics(path.parent):
            step = event["step"] + offset
            curves.last_step = max(curves.last_step, step)
            if event["kind"] == "held_out":
                curves.held_out.append((step, event["accepted_length"]))
            elif event["kind"] == "step":
                for key, value in event.items():
                    if key.startswith(_TERM):
                        curves.terms.setdefault(key.removeprefix(_TERM), []).append((step, value))
        return curves


def plot_training(logs: Mapping[str, Path], path: Path, *, consecutive: bool = True) -> Path:
    """Two panels over optimiser steps: the loss terms, and the held-out accepted length.

    Args:
        logs: name of a stage or run -> its ``metrics.jsonl``.
        path: the PNG to write.
        consecutive: the logs are stages of one run, drawn one behind the other; False: runs, drawn together.
    """
    curves: dict[str, _Curves] = {}
    offset = 0
    for name, log in logs.items():
        curves[name] = _Curves.read(log, offset=offset)
        offset = curves[name].last_step if consecutive else 0
    with drawing(path, width=9.6, height=3.9, columns=2) as (figure, (left, right)):
        _draw_terms(left, curves, consecutive=consecutive)
        _draw_held_out(right, curves, consecutive=consecutive)
        for axes in (left, right):
            axes.set_xlabel("optimiser steps")
            axes.margins(x=0.02)
            if consecutive:
                _mark_stages(axes, curves)
        figure.suptitle("Training", x=0.01, ha="left", fontsize=12, fontweight="bold")
    return path


def _draw_terms(axes: Axes, curves: Mapping[str, _Curves], *, consecutive: bool) -> None:
    terms = list(dict.fromkeys(term for item in curves.values() for term in item.terms))
    styles = ("-", "--", ":", "-.")
    for number, (name, item) in enumerate(curves.items()):
        for term, points in item.terms.items():
            index = terms.index(term)
            words = term.replace("_", " ")
            label = words if consecutive else f"{name}: {words}"
            first = not consecutive or not any(term in earlier.terms for earlier in list(curves.values())[:number])
            axes.plot(
                *zip(*points, strict=True),
                color=COLOURS[(index if consecutive else number) % len(COLOURS)],
                linestyle="-" if consecutive else styles[index % len(styles)],
                label=label if first else None,
            )
    axes.set_ylabel("loss term, weighted mean per position")
    if consecutive and terms:
        axes.legend(loc="upper right", frameon=True, facecolor="white", edgecolor="none", framealpha=0.9)
    elif not consecutive:
        legend_above(axes, columns=2)


def _draw_held_out(axes: Axes, curves: Mapping[str, _Curves], *, consecutive: bool) -> None:
    every = []
    for number, (name, item) in enumerate(curves.items()):
        if not item.held_out:
            continue
        every += item.held_out
        colour = COLOURS[0 if consecutive else number % len(COLOURS)]
        marker = MARKERS[0 if consecutive else number % len(MARKERS)]
        label = None if consecutive else name
        axes.plot(*zip(*item.held_out, strict=True), color=colour, marker=marker, markersize=4, label=label)
    if every:
        step, best = max(every, key=lambda point: point[1])
        late = step > 0.8 * max(point[0] for point in every)
        axes.annotate(
            f"best {best:.2f}", (step, best), xytext=(4 if late else 0, 7), textcoords="offset points",
            ha="right" if late else "center", fontsize=8.5, fontweight="bold", color="#222222",
        )  # fmt: skip
        low = min(value for _, value in every)
        axes.set_ylim(low - 0.04 * (best - low) - 1e-3, best + 0.14 * (best - low) + 1e-3)
    axes.set_ylabel("held-out accepted length\n(tokens per verify step)")
    if not consecutive:
        legend_above(axes, columns=2)


def _mark_stages(axes: Axes, curves: Mapping[str, _Curves]) -> None:
    """A line where each stage begins, and its name above its span."""
    start = 0
    for name, item in curves.items():
        if start:
            axes.axvline(start, color="#999999", linewidth=0.9, linestyle=(0, (4, 3)))
        if len(curves) > 1:
            axes.annotate(
                name, ((start + item.last_step) / 2, 1.0), xycoords=("data", "axes fraction"), xytext=(0, 4),
                textcoords="offset points", fontsize=9, color="#555555", ha="center", va="bottom",
            )  # fmt: skip
        start = item.last_step
