"""A comparison as a picture: every seed a dot, every variant a row, one panel per mode."""

from __future__ import annotations

from pathlib import Path
from statistics import mean

from angelspec.core.workloads import WORKLOADS
from angelspec.evaluation.comparison import ComparisonReport
from angelspec.evaluation.drawing import COLOURS, MARKERS, NEUTRAL, drawing, legend_above


def plot_comparison(report: ComparisonReport, path: Path) -> Path:
    """Accepted length of finished answers by variant and workload; dots are seeds, bars their means."""
    variants = list(dict.fromkeys(outcome.variant for outcome in report.outcomes))
    trained = set(report.comparison.variants)
    workloads = [name for name in WORKLOADS if any(item.workload == name for item in report.outcomes)]
    with drawing(
        path, width=4.4 * len(report.modes) + 1.6, height=0.42 * len(variants) + 1.5, columns=len(report.modes),
        share_y=True,
    ) as (_, panels):  # fmt: skip
        for axes, mode in zip(panels, report.modes, strict=True):
            for index, workload in enumerate(workloads):
                offset = 0.24 * (index - (len(workloads) - 1) / 2)
                label = workload
                for row, variant in enumerate(variants):
                    values = list(report.lengths(variant, mode=mode, workloads=(workload,)).values())
                    if not values:
                        continue
                    colour = COLOURS[index] if variant in trained else NEUTRAL
                    height = [row + offset] * len(values)
                    axes.plot(values, height, MARKERS[index], color=colour, markersize=4, alpha=0.75, label=label)
                    axes.plot([mean(values)], [row + offset], "|", color=colour, markersize=11, markeredgewidth=2)
                    label = None
            axes.set_yticks(range(len(variants)), variants)
            axes.set_ylim(len(variants) - 0.5, -0.5)
            axes.grid(axis="x")
            axes.grid(visible=False, axis="y")
            axes.set_xlabel("accepted length, finished answers")
            axes.set_title(f"{mode} prompts", pad=24)
            legend_above(axes)
    return path
