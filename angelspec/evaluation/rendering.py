"""A report as Markdown and in the terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType

from rich.console import Console

from angelspec.core.files import write_text_atomic
from angelspec.evaluation.acceptance_tables import exactness_table, length_table, lookup_table, position_table
from angelspec.evaluation.breakeven_tables import breakeven_table, step_time_table
from angelspec.evaluation.report import Report
from angelspec.evaluation.speed_tables import component_table, shortlist_table, speed_table
from angelspec.evaluation.tables import MISSING, Table


def tables(report: Report) -> list[Table]:
    """Every table of the report that has rows, in reading order."""
    made = [length_table(report, temperature=t, finished=True) for t in report.temperatures]
    made += [lookup_table(report)]
    made += [position_table(report, temperature=t) for t in report.temperatures]
    made += [length_table(report, temperature=t, finished=False) for t in report.temperatures]
    made += [speed_table(report), component_table(report)]
    made += [breakeven_table(report, temperature=t) for t in report.temperatures if report.step_times]
    made += [step_time_table(report, temperature=t) for t in report.temperatures if report.step_times]
    made += [exactness_table(report), shortlist_table(report)]
    return [table for table in made if any(_says_something(row) for row in table.rows)]


def _says_something(row: Iterable[str]) -> bool:
    return any(cell != MISSING for cell in list(row)[1:])


def to_markdown(report: Report, *, plots: Mapping[str, str] = MappingProxyType({})) -> str:
    """The whole report; ``plots`` maps captions to paths of images, relative to where it is written."""
    cut = report.settings.cut
    facts = [
        ("target", f"{report.target.name}, {report.target.dtype} (`{report.target.digest}`)"),
        ("thinking mode", report.mode),
        *(("drafter", f"{drafter.name}: {drafter.description}") for drafter in report.drafters),
        ("suites", ", ".join(f"{suite.name} ({suite.prompts})" for suite in report.suites)),
        (
            "decoding",
            f"up to {report.settings.max_new_tokens} tokens, batch {report.settings.batch_size}, "
            f"seed {report.settings.seed}, "
            + ("no cut" if cut is None else f"D-cut, keep ratio {'auto' if cut.ratio is None else cut.ratio}"),
        ),
        ("machine", f"{report.machine.description}, {report.machine.threads_in_words}"),
        ("versions", ", ".join(f"{name} {number}" for name, number in report.versions.items())),
        ("measured", report.created),
    ]
    lines = [f"# {report.title}", ""]
    lines += [f"- **{name}**: {text}" for name, text in facts]
    lines += ["", "## Results", ""]
    lines += [table.to_markdown() for table in tables(report)]
    for caption, path in plots.items():
        lines += [f"![{caption}]({path})", ""]
    if report.notes:
        lines += ["## What limits these figures", "", *(f"- {note}" for note in report.notes), ""]
    lines += ["## What the figures mean", ""]
    lines += [f"- **{name}**: {text}" for name, text in report.definitions.items()]
    lines += ["", "## How to get them again", "", "```", *report.commands, "```", ""]
    return "\n".join(lines)


def write_report(report: Report, folder: Path, *, plots: Mapping[str, str] = MappingProxyType({})) -> tuple[Path, Path]:
    """Write ``report.json`` and ``report.md``; ``plots`` as for ``to_markdown``."""
    as_markdown = folder / "report.md"
    write_text_atomic(as_markdown, to_markdown(report, plots=plots))
    return report.save(folder), as_markdown


def print_report(report: Report, *, console: Console, only: Callable[[Table], bool] = lambda table: True) -> None:
    """Draw the tables in a terminal."""
    console.print(f"[bold]{report.title}[/bold]  ({report.target.name}, {report.mode})", highlight=False)
    for table in tables(report):
        if only(table):
            console.print(table.to_rich())
