"""Picture of the break-even with MTP: what each drafter reaches against what its step time asks of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from angelspec.evaluation.breakeven import PLAIN, BreakEven
from angelspec.evaluation.drawing import MARKERS, drafter_colours, drawing, legend_below
from angelspec.evaluation.report import Report


def plot_breakeven(report: Report, path: Path, *, temperature: float) -> Path:
    """Accepted length over batch size, one panel per workload.

    A solid line is what a drafter reaches, the same at every batch size; the dashed line of its colour is what it needs
    to match MTP. Where solid lies above dashed, the drafter is faster than MTP.
    """
    figures = BreakEven(report, temperature=temperature)
    drafters = [name for name in figures.others if name != PLAIN]
    colours = drafter_colours(report)
    panels = list(report.workloads) or [None]
    places = range(len(figures.batch_sizes))
    width = max(5.0, 3.1 * len(panels) + 0.8)
    with drawing(path, width=width, height=4.0, columns=len(panels), share_y=True) as (figure, all_axes):
        handles: dict[str, Any] = {}
        for axes, workload in zip(all_axes, panels, strict=True):
            mtp_length = figures.reached(figures.mtp or "", workload=workload)
            if mtp_length is not None:
                handles[f"{figures.mtp} reaches"] = axes.axhline(mtp_length, color=colours[figures.mtp], linewidth=2.4)
            for index, name in enumerate(drafters):
                reached = figures.reached(name, workload=workload)
                if reached is not None:
                    handles[f"{name} reaches"] = axes.axhline(reached, color=colours[name])
                needed = [
                    figures.needed(name, batch_size=batch_size, mtp_length=mtp_length)
                    for batch_size in figures.batch_sizes
                ]
                points = [(place, value) for place, value in zip(places, needed, strict=True) if value is not None]
                if points:
                    (handles[f"{name} needs"],) = axes.plot(
                        *zip(*points, strict=True),
                        color=colours[name],
                        linestyle=(0, (3, 2)),
                        marker=MARKERS[index % len(MARKERS)],
                        clip_on=False,
                        zorder=3,
                    )
            axes.set_title(workload or "all workloads", fontsize=10.5, fontweight="normal")
            axes.set_xticks(places, [str(batch_size) for batch_size in figures.batch_sizes])
            axes.set_xlabel("batch size")
        all_axes[0].set_ylim(bottom=0)  # shared; before all panels are drawn it would fix the top too
        all_axes[0].set_ylabel("accepted length\n(tokens per verify step)")
        figure.suptitle(
            f"Break-even with {figures.mtp or 'MTP'}, finished answers, temperature {temperature:g}",
            x=0.01, ha="left", fontsize=12, fontweight="bold",
        )  # fmt: skip
        if handles:
            legend_below(figure, handles, most=4)
    return path
