"""One look for all pictures.

Colours are Okabe and Ito's, told apart by the colour-blind; lines also differ by marker.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from angelspec.evaluation.report import Report

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
NEUTRAL = "#8C8C8C"
"""What needs no training."""
MARKERS = ("o", "s", "^", "D", "v", "P")
_STYLE = {
    "savefig.dpi": 160,
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
    "axes.labelsize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#555555",
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": "#E4E4E4",
    "grid.linewidth": 0.8,
    "xtick.color": "#333333",
    "ytick.color": "#333333",
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "lines.linewidth": 1.8,
    "lines.markersize": 5,
}


@contextmanager
def drawing(
    path: Path, *, width: float, height: float, columns: int = 1, share_y: bool = False
) -> Iterator[tuple[Figure, tuple[Axes, ...]]]:
    """A figure of ``columns`` panels, in inches, written to ``path`` as PNG at the end."""
    with rc_context(_STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots(1, columns, sharey=share_y, squeeze=False)[0]
        yield figure, tuple(axes)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, facecolor="white")


def legend_above(axes: Axes, *, columns: int = 6) -> None:
    """A legend in one line between title and panel; nothing without labels."""
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        axes.legend(
            handles, labels, loc="lower left", bbox_to_anchor=(-0.01, 1.0), ncols=min(columns, len(labels)),
            borderaxespad=0.2, columnspacing=1.4, handlelength=1.2, handletextpad=0.5,
        )  # fmt: skip


def legend_below(figure: Figure, handles: Mapping[str, Any], *, most: int) -> None:
    """A legend below all panels, in as many columns as its labels leave room for, at most ``most``."""
    longest = max(map(len, handles))
    room = int(figure.get_figwidth() / (0.7 + 0.085 * longest))  # inches of a handle and of a letter
    figure.legend(
        handles.values(), handles.keys(), loc="outside lower center", ncols=max(1, min(most, len(handles), room))
    )


def drafter_colours(report: Report) -> dict[str, str]:
    """Colours by drafter, the same in every picture; drafters without weights are grey."""
    trained = [drafter.name for drafter in report.drafters if drafter.identity.get("kind") not in ("lookup", "none")]
    colours = {name: COLOURS[index % len(COLOURS)] for index, name in enumerate(trained)}
    return {drafter.name: colours.get(drafter.name, NEUTRAL) for drafter in report.drafters}
