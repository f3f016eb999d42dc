"""Line charts as SVG: they take the page's colours in light and dark, scale with its width, and need no script."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Points = Sequence[tuple[float, float]]
_WIDTH, _HEIGHT = 480, 270
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 22, 12, 46
_COLOURS = 6


@dataclass(frozen=True)
class Chart:
    """What one chart shows."""

    title: str
    x_title: str
    y_title: str
    lines: Mapping[str, Points]
    """Points by the line's name, x rising."""
    y_top: float | None = None
    """End of the y axis; None: above the highest point."""
    percent: bool = False
    """Whether y is a share."""
    at_points: bool = False
    """Whether the x axis is marked at the points only."""
    doubling: bool = False
    """The same, with equal steps along x that double it (x is at least 1)."""
    empty: str = "Nothing was measured yet."


def line_chart(chart: Chart) -> str:
    """The chart with its heading and legend; its words in place of it where there is no point."""
    points = [point for line in chart.lines.values() for point in line]
    heading = f"<h4>{html.escape(chart.title)}</h4>"
    if not points:
        return f'<figure class="chart">{heading}<p class="start">{html.escape(chart.empty)}</p></figure>'
    xs = sorted({x for x, _ in points})
    y_ticks = ticks(chart.y_top or max(y for _, y in points))
    x_ticks = xs[:: math.ceil(len(xs) / 8)] if chart.at_points or chart.doubling else ticks(max(xs[-1], 1))
    low, high = (xs[0], xs[-1]) if chart.at_points or chart.doubling else (x_ticks[0], x_ticks[-1])

    def at_x(x: float) -> float:
        place = _share(math.log2(x), math.log2(low), math.log2(high)) if chart.doubling else _share(x, low, high)
        return _LEFT + place * (_WIDTH - _LEFT - _RIGHT)

    def at_y(y: float) -> float:
        return _HEIGHT - _BOTTOM - y / y_ticks[-1] * (_HEIGHT - _TOP - _BOTTOM)

    parts = []
    for tick in y_ticks:
        shown = f"{tick:.0%}" if chart.percent else f"{tick:g}"
        parts.append(f'<path class="grid" d="M{_LEFT} {at_y(tick):.1f}H{_WIDTH - _RIGHT}"/>')
        parts.append(f'<text class="y" x="{_LEFT - 8}" y="{at_y(tick) + 4:.1f}">{shown}</text>')
    for tick in x_ticks:
        parts.append(f'<text class="x" x="{at_x(tick):.1f}" y="{_HEIGHT - _BOTTOM + 18}">{tick:g}</text>')
    middle = _LEFT + (_WIDTH - _LEFT - _RIGHT) / 2
    parts.append(f'<text class="x name" x="{middle:.1f}" y="{_HEIGHT - 6}">{html.escape(chart.x_title)}</text>')
    for number, (name, line) in enumerate(chart.lines.items()):
        parts.append(_line(name, [(at_x(x), at_y(y)) for x, y in line], line, number, percent=chart.percent))
    legend = "".join(
        f'<span class="c{number % _COLOURS}"><i></i>{html.escape(name)}</span>'
        for number, name in enumerate(chart.lines)
    )
    label = html.escape(f"{chart.title}: {chart.y_title} against {chart.x_title}")
    return (
        f'<figure class="chart">{heading}<p class="axis">{html.escape(chart.y_title)}</p>'
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}">{"".join(parts)}</svg>'
        f'<figcaption class="lines">{legend}</figcaption></figure>'
    )


def ticks(top: float) -> list[float]:
    """Four to six round numbers from 0 to ``top`` or a little above it."""
    rough = top / 5
    unit = 10 ** math.floor(math.log10(rough)) if rough > 0 else 1.0
    step = next(unit * factor for factor in (1, 2, 2.5, 5, 10) if unit * factor >= rough * 0.999)
    return [round(step * i, 10) for i in range(math.ceil(top / step * 0.999) + 1)]


def _line(name: str, places: Points, values: Points, number: int, *, percent: bool) -> str:
    path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
    few, told = len(places) <= 16, html.escape(name)
    dots = "".join(
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5"><title>{told}: {_shown(value, percent)}</title></circle>'
        for (x, y), (_, value) in zip(places, values, strict=True)
    )
    return f'<g class="c{number % _COLOURS}"><path class="line" d="{path}"/>{dots if few else ""}</g>'


def _shown(value: float, percent: bool) -> str:
    return f"{value:.0%}" if percent else f"{value:.4g}"


def _share(value: float, low: float, high: float) -> float:
    return (value - low) / (high - low) if high > low else 0.5
