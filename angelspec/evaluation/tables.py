"""A table of text cells, drawn by Markdown and by rich, and how figures become cells."""

from __future__ import annotations

from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.console import Group as RichGroup
from rich.table import Table as RichTable
from rich.text import Text

MISSING = "–"
"""A cell without a figure."""


@dataclass(frozen=True)
class Table:
    """A table of text cells; the first column is left-aligned, the others right."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    caption: str = ""

    def to_markdown(self) -> str:
        """A GitHub table under a third-level heading."""
        lines = [f"### {self.title}", ""]
        if self.caption:
            lines += [self.caption, ""]
        lines.append(f"| {' | '.join(map(_escape, self.columns))} |")
        lines.append(f"|{'|'.join(['---', *['---:'] * (len(self.columns) - 1)])}|")
        lines += [f"| {' | '.join(map(_escape, row))} |" for row in self.rows]
        return "\n".join([*lines, ""])

    def to_rich(self) -> RichGroup:
        """The same for a terminal, without Markdown's bold."""
        table = RichTable(box=SIMPLE_HEAD, pad_edge=False)
        for index, column in enumerate(self.columns):
            table.add_column(column, justify="left" if index == 0 else "right", no_wrap=index == 0)
        for row in self.rows:
            table.add_row(*(Text(cell.strip("*"), style="bold" if cell.startswith("**") else "") for cell in row))
        parts = [Text(f"\n{self.title}", style="bold"), *([Text(self.caption, style="dim")] if self.caption else [])]
        return RichGroup(*parts, table)


def number(value: float | None, pattern: str = "{:.2f}") -> str:
    """A figure, or the dash that stands for none."""
    return MISSING if value is None else pattern.format(value)


def percent(value: float | None) -> str:
    """A share of 1 in percent."""
    return number(None if value is None else 100 * value, "{:.1f} %")


def at_temperature(value: float) -> str:
    """How tables name a temperature."""
    return f"temperature {value:g}"


def _escape(cell: str) -> str:
    return cell.replace("|", "\\|")
