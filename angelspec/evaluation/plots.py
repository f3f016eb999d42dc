"""Pictures of a report: accepted length, acceptance by position, time by component, what a shortlist does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from angelspec.evaluation.breakeven_plot import plot_breakeven
from angelspec.evaluation.drawing import COLOURS, MARKERS, drafter_colours, drawing, legend_above, legend_below
from angelspec.evaluation.report import Report
from angelspec.evaluation.speed_tables import component_milliseconds

_COMPONENT_COLOURS = {
    "prefill": "#9A9A9A",
    "draft": "#D55E00",
    "verify": "#0072B2",
    "sample": "#E69F00",
    "features": "#009E73",
    "other": "#D8D8D8",
}


def plot_report(report: Report, folder: Path) -> dict[str, Path]:
    """Every picture that the report has figures for, as ``caption -> PNG``."""
    pictures: dict[str, Path] = {}
    for temperature in report.temperatures:
        label = f"{temperature:g}"
        pictures[f"Accepted length per suite, temperature {label}"] = plot_accepted_length(
            report, folder / f"accepted-length-t{label}.png", temperature=temperature
        )
        pictures[f"Acceptance by position, temperature {label}"] = plot_positions(
            report, folder / f"positions-t{label}.png", temperature=temperature
        )
    pictures["Time per answer token"] = plot_components(report, folder / "time.png")
    for temperature in sorted({times.temperature for times in report.step_times}):
        pictures[f"Break-even with MTP, temperature {temperature:g}"] = plot_breakeven(
            report, folder / f"breakeven-t{temperature:g}.png", temperature=temperature
        )
    if report.shortlist:
        pictures["Shortlist"] = plot_shortlist(report, folder / "shortlist.png")
    return pictures


def plot_accepted_length(report: Report, path: Path, *, temperature: float) -> Path:
    """Grouped bars: mean accepted length on finished answers, by suite, one bar per drafter."""
    labels = [(suite.name, {"suites": [suite.name]}) for suite in report.suites]
    if len(report.suites) > 1:
        labels.append(("all", {}))
    values = {
        drafter.name: [
            report.pooled(drafter.name, temperature=temperature, **where).counts.mean_accepted_length
            for _, where in labels
        ]
        for drafter in report.drafters
    }
    count = max(1, len(values))
    width = 0.8 / count
    colours = drafter_colours(report)
    slots = len(labels) * count
    with drawing(path, width=max(6.5, 1.6 + 0.42 * slots + 0.25 * len(labels)), height=4.2) as (_, (axes,)):
        highest = max((value for row in values.values() for value in row if value is not None), default=1.0)
        for index, (name, row) in enumerate(values.items()):
            offset = (index - (count - 1) / 2) * width
            places = [place + offset for place in range(len(row))]
            heights = [0.0 if value is None else value for value in row]
            axes.bar(places, heights, width=width * 0.92, color=colours[name], label=name)
            for place, value in zip(places, row, strict=True):
                text, height = ("none", 0.0) if value is None else (f"{value:.2f}", value)
                axes.text(
                    place, height + 0.012 * highest, text, ha="center", va="bottom", fontsize=8, color="#333333",
                    rotation=0 if count < 5 and value is not None else 90,
                )  # fmt: skip
        if len(report.suites) > 1:
            axes.axvline(len(labels) - 1.5, color="#BBBBBB", linewidth=0.8)
        axes.axhline(1.0, color="#555555", linewidth=1.0, linestyle=(0, (4, 3)))
        axes.text(
            1.005,
            1.0,
            "plain\ndecoding",
            transform=axes.get_yaxis_transform(),
            va="center",
            fontsize=8,
            color="#555555",
        )
        axes.set_xticks(range(len(labels)), [name for name, _ in labels])
        axes.set_xlim(-0.55, len(labels) - 0.45)
        axes.set_ylim(0, highest * 1.12)
        axes.set_ylabel("accepted length (tokens per verify step)")
        axes.set_title(f"Accepted length on finished answers, temperature {temperature:g}", pad=28)
        axes.grid(axis="x", visible=False)
        legend_above(axes)
    return path


def plot_positions(report: Report, path: Path, *, temperature: float) -> Path:
    """p_k over k: one panel per workload, one line per drafter."""
    colours = drafter_colours(report)
    panels = list(report.workloads) or [None]
    width = max(5.0, 3.1 * len(panels) + 0.8)
    with drawing(path, width=width, height=3.7, columns=len(panels), share_y=True) as (figure, all_axes):
        handles: dict[str, Any] = {}
        for axes, workload in zip(all_axes, panels, strict=True):
            deepest = 1
            for index, drafter in enumerate(d for d in report.drafters if d.depth):
                group = report.pooled(
                    drafter.name, temperature=temperature, workloads=None if workload is None else [workload]
                )
                rates = group.counts.cumulative_acceptance
                if not rates:
                    continue
                deepest = max(deepest, len(rates))
                (handles[drafter.name],) = axes.plot(
                    range(1, len(rates) + 1),
                    rates,
                    color=colours[drafter.name],
                    marker=MARKERS[index % len(MARKERS)],
                    clip_on=False,
                    zorder=3,
                )
            axes.set_title(workload or "all workloads", fontsize=10.5, fontweight="normal")
            axes.set_xticks(range(1, deepest + 1))
            axes.set_ylim(0, 1)
            axes.set_xlabel("position k of the proposal")
        all_axes[0].set_ylabel("share of full-depth steps with\nproposals 1 to k accepted")
        figure.suptitle(
            f"Acceptance by position, finished answers, temperature {temperature:g}",
            x=0.01, ha="left", fontsize=12, fontweight="bold",
        )  # fmt: skip
        if handles:
            legend_below(figure, handles, most=5)
    return path


def plot_components(report: Report, path: Path) -> Path:
    """Stacked horizontal bars: milliseconds per answer token, by component of the reference loop."""
    rows = {drafter.name: component_milliseconds(report, drafter.name) for drafter in report.drafters}
    rows = {name: parts for name, parts in rows.items() if parts}
    with drawing(path, width=8.0, height=1.9 + 0.5 * max(1, len(rows))) as (_, (axes,)):
        names = list(rows)[::-1]
        longest = max((sum(parts.values()) for parts in rows.values()), default=1.0)
        left = dict.fromkeys(names, 0.0)
        for component, colour in _COMPONENT_COLOURS.items():
            widths = [rows[name].get(component, 0.0) for name in names]
            if not any(widths):
                continue
            axes.barh(
                names, widths, left=[left[name] for name in names], color=colour, label=component, height=0.6,
                edgecolor="white", linewidth=0.8,
            )  # fmt: skip
            for name, width in zip(names, widths, strict=True):
                if width > 0.07 * longest:
                    dark = component in ("draft", "verify", "features")
                    axes.text(
                        left[name] + width / 2, name, f"{width:.1f}", ha="center", va="center", fontsize=8.5,
                        color="white" if dark else "#222222",
                    )  # fmt: skip
                left[name] += width
        for name in names:
            axes.text(
                left[name] + 0.012 * longest, name, f"{left[name]:.1f}", va="center", fontsize=9, fontweight="bold",
                color="#222222",
            )  # fmt: skip
        axes.set_xlim(0, longest * 1.1)
        axes.set_xlabel("wall time per answer token (ms), reference loop")
        axes.set_title("Where the time goes", pad=28)
        axes.grid(axis="y", visible=False)
        axes.grid(axis="x", visible=True)
        axes.tick_params(axis="y", length=0, labelsize=10)
        legend_above(axes)
    return path


def plot_shortlist(report: Report, path: Path) -> Path:
    """Accepted length and draft time by shortlist size."""
    sizes = ["exact" if result.size is None else str(result.size) for result in report.shortlist]
    lengths = [result.counts.mean_accepted_length or 0.0 for result in report.shortlist]
    milliseconds = [1000 * (result.draft_seconds_per_step or 0.0) for result in report.shortlist]
    with drawing(path, width=8.0, height=3.6, columns=2) as (figure, both):
        for axes, values, colour, label, pattern in zip(
            both,
            (lengths, milliseconds),
            COLOURS,
            ("accepted length (tokens per verify step)", "draft time per block (ms)"),
            ("{:.2f}", "{:.1f}"),
            strict=False,
        ):
            axes.bar(sizes, values, color=colour, width=0.65)
            highest = max(values, default=1.0)
            for place, value in enumerate(values):
                axes.text(place, value + 0.012 * highest, pattern.format(value), ha="center", va="bottom", fontsize=8.5)
            axes.set_ylim(0, highest * 1.12)
            axes.set_xlabel("candidates per slot")
            axes.set_ylabel(label)
            axes.grid(axis="x", visible=False)
        figure.suptitle("What a shortlist costs and gains", x=0.01, ha="left", fontsize=12, fontweight="bold")
    return path
