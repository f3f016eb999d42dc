"""The report of a measurement: one record, written as JSON and shown as Markdown and in the terminal.

The record holds counts and seconds; tables divide them, once, when they are drawn.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import psutil
import torch
from pydantic import BaseModel, ConfigDict, Field
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.console import Group as RichGroup
from rich.table import Table as RichTable
from rich.text import Text

from angelspec.core.errors import DataError
from angelspec.core.files import write_text_atomic
from angelspec.core.modes import Mode
from angelspec.core.workloads import WORKLOADS
from angelspec.evaluation.results import (
    AnswerGroup,
    ExactnessResult,
    MeasureSettings,
    ShortlistResult,
    SpeedResult,
    SuiteResult,
)

FORMAT_VERSION = 1
_STRICT = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=())
_PACKAGES = ("angelspec", "torch", "transformers", "tokenizers", "safetensors", "numpy")

DEFINITIONS: Mapping[str, str] = MappingProxyType(
    {
        "accepted length": "mean accepted length (MAL): tokens committed per verify step, bonus token included, "
        "pooled: all tokens of verify steps / all verify steps. 1 is plain decoding. The token sampled after the "
        "prompt is not counted.",
        "p_k": "cumulative acceptance: share of verify steps whose proposals 1 to k were all accepted, over steps that "
        "verified the drafter's full depth: a cut step says nothing about what was cut, nor does one in which prompt "
        "lookup found no match.",
        "finished / unfinished": "answers that ended by a stop token / were cut at the token limit. Unfinished answers "
        "stand apart because they loop more often, which flatters every drafter.",
        "repeated 12-grams": "share of an answer's 12-grams that occurred earlier in the same answer, pooled.",
        "kept ratio": "verified slots / drafted slots, anchors counted (D-cut); 100 % without a cut.",
        "prompt lookup": "a drafter without weights: what followed the last occurrence of the longest suffix (up to "
        "the given number of tokens) of prompt and answer.",
        "speed-up": "tokens/s of the reference loop with the drafter / tokens/s of the same loop without one, same "
        "prompts, in turns in one process. The loop is written to be read; serving engines are faster on both sides.",
        "exact": "answers equal, token for token, to plain decoding of one request at a time, same random streams.",
    }
)
"""What each figure means; written into every report."""


class Machine(BaseModel):
    """Where the seconds were measured."""

    model_config = _STRICT

    description: str
    """Hardware in words."""
    threads: int
    """torch's threads."""

    @classmethod
    def here(cls, device: torch.device | str = "cpu") -> Machine:
        """Describe this machine."""
        memory = psutil.virtual_memory().total / 2**30
        words = f"{psutil.cpu_count() or 0} logical cores of {_processor()}, {memory:.0f} GiB memory"
        if torch.device(device).type == "cuda":
            properties = torch.cuda.get_device_properties(device)
            words = f"{properties.name} ({properties.total_memory / 2**30:.0f} GiB), {words}"
        return cls(description=words, threads=torch.get_num_threads())


class TargetFacts(BaseModel):
    """The target that was sped up."""

    model_config = _STRICT

    name: str
    digest: str
    """Content hash of weights, configuration, tokenizer and template."""
    dtype: str


class DrafterFacts(BaseModel):
    """One column of the tables."""

    model_config = _STRICT

    name: str
    description: str
    depth: int
    """Proposals per step."""
    identity: dict[str, Any]
    """What its proposals depend on."""


class SuiteFacts(BaseModel):
    """One row of the tables."""

    model_config = _STRICT

    name: str
    prompts: int
    digest: str


class Report(BaseModel):
    """Everything measured about some drafters of one target in one mode."""

    model_config = _STRICT

    format_version: Literal[1] = FORMAT_VERSION
    title: str
    created: str = Field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    """UTC, ISO 8601."""
    target: TargetFacts
    mode: Mode
    machine: Machine
    versions: dict[str, str] = Field(default_factory=lambda: package_versions())
    settings: MeasureSettings
    commands: tuple[str, ...]
    """How to get these figures again."""
    definitions: dict[str, str] = Field(default_factory=lambda: dict(DEFINITIONS))
    drafters: tuple[DrafterFacts, ...]
    suites: tuple[SuiteFacts, ...]
    results: tuple[SuiteResult, ...]
    speed: tuple[SpeedResult, ...] = ()
    exactness: tuple[ExactnessResult, ...] = ()
    shortlist: tuple[ShortlistResult, ...] = ()
    notes: tuple[str, ...] = ()
    """What limits these figures, in sentences."""

    def pooled(
        self,
        drafter: str,
        *,
        temperature: float,
        finished: bool = True,
        suites: Sequence[str] | None = None,
        workloads: Sequence[str] | None = None,
    ) -> AnswerGroup:
        """Counters of one drafter over some suites and workloads (None: all)."""
        total = AnswerGroup()
        for result in self.results:
            if (result.proposer, result.temperature) != (drafter, temperature):
                continue
            if suites is not None and result.suite not in suites:
                continue
            for workload in [None] if workloads is None else workloads:
                total += result.pooled(finished=finished, workload=workload)
        return total

    @property
    def temperatures(self) -> tuple[float, ...]:
        """Measured temperatures, ascending."""
        return tuple(sorted({result.temperature for result in self.results}))

    @property
    def workloads(self) -> tuple[str, ...]:
        """Measured workloads, in the order of ``WORKLOADS``."""
        present = {group.workload for result in self.results for group in result.groups}
        return tuple(workload for workload in WORKLOADS if workload in present)

    def save(self, folder: Path) -> tuple[Path, Path]:
        """Write ``report.json`` and ``report.md``."""
        as_json, as_markdown = folder / "report.json", folder / "report.md"
        write_text_atomic(as_json, self.model_dump_json(indent=2) + "\n")
        write_text_atomic(as_markdown, to_markdown(self))
        return as_json, as_markdown

    @classmethod
    def load(cls, path: Path) -> Report:
        """Read a ``report.json``.

        Raises:
            DataError: no report of this version (named).
        """
        try:
            return cls.model_validate_json(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise DataError(f"{path} is no report: {error}", mend="write it again by measuring") from error


def package_versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide the figures."""
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "not installed as a package"
    return versions


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


# Tables: built once, drawn by Markdown and by rich.


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


_MISSING = "–"


def _number(value: float | None, pattern: str = "{:.2f}") -> str:
    return _MISSING if value is None else pattern.format(value)


def _percent(value: float | None) -> str:
    return _number(None if value is None else 100 * value, "{:.1f} %")


def _escape(cell: str) -> str:
    return cell.replace("|", "\\|")


def _temperature(value: float) -> str:
    return f"temperature {value:g}"


def length_table(report: Report, *, temperature: float, finished: bool) -> Table:
    """Accepted length by suite and by workload, one column per drafter."""
    names = [drafter.name for drafter in report.drafters]
    rows = []

    def add(label: str, **where: Any) -> None:
        groups = [report.pooled(name, temperature=temperature, finished=finished, **where) for name in names]
        others = [report.pooled(name, temperature=temperature, finished=not finished, **where) for name in names]
        if not any(group.answers + other.answers for group, other in zip(groups, others, strict=True)):
            return
        best = max((group.counts.mean_accepted_length or 0 for group in groups), default=0)
        cells = [_number(group.counts.mean_accepted_length) for group in groups]
        if len(names) > 1:
            cells = [
                f"**{cell}**" if group.counts.mean_accepted_length == best else cell
                for cell, group in zip(cells, groups, strict=True)
            ]
        asked = groups[0].answers + others[0].answers
        rows.append((label, *cells, f"{groups[0].answers} of {asked}", _percent(groups[0].repeated_share)))

    for suite in report.suites:
        add(suite.name, suites=[suite.name])
    for workload in report.workloads:
        add(f"all {workload}", workloads=[workload])
    if {"code", "math"} <= set(report.workloads):
        add("code and math", workloads=["code", "math"])
    add("all")
    kind = "finished" if finished else "unfinished"
    return Table(
        f"Accepted length, {kind} answers, {_temperature(temperature)}",
        ("suite", *names, f"{kind} answers", "repeated 12-grams"),
        tuple(rows),
        caption="Tokens per verify step, bonus included, pooled; the best in bold."
        if finished
        else "Answers cut at the token limit, apart because they loop more often.",
    )


def position_table(report: Report, *, temperature: float) -> Table:
    """p_k on finished answers, by drafter and workload."""
    depth = max((drafter.depth for drafter in report.drafters), default=0)
    rows = []
    for drafter in report.drafters:
        if not drafter.depth:
            continue
        for workload in (*report.workloads, None):
            group = report.pooled(
                drafter.name, temperature=temperature, workloads=None if workload is None else [workload]
            )
            rates = group.counts.cumulative_acceptance
            if not rates:
                continue
            cells = [_number(rate, "{:.3f}") for rate in rates] + [_MISSING] * (depth - len(rates))
            rows.append(
                (
                    f"{drafter.name}, {workload or 'all'}",
                    *cells,
                    f"{group.counts.full_depth_steps:,}",
                    _percent(group.counts.kept_ratio),
                )
            )
    return Table(
        f"Acceptance by position, finished answers, {_temperature(temperature)}",
        ("drafter, workload", *(f"p{k}" for k in range(1, depth + 1)), "full-depth steps", "kept ratio"),
        tuple(rows),
        caption="Share of full-depth steps whose proposals 1 to k were all accepted.",
    )


def lookup_table(report: Report) -> Table:
    """Accepted length of each trained drafter over prompt lookup's, finished answers."""
    lookups = [drafter.name for drafter in report.drafters if drafter.identity.get("kind") == "lookup"]
    trained = [drafter.name for drafter in report.drafters if drafter.name not in lookups]
    rows = []
    groups = [(f"all {workload}", [workload]) for workload in report.workloads]
    if {"code", "math"} <= set(report.workloads):
        groups.append(("code and math", ["code", "math"]))
    for temperature in report.temperatures if lookups and trained else ():
        for label, workloads in groups:

            def length(name: str, temperature=temperature, workloads=workloads) -> float | None:
                return report.pooled(name, temperature=temperature, workloads=workloads).counts.mean_accepted_length

            floor = length(lookups[0])
            ratios = [None if floor is None or length(name) is None else length(name) / floor for name in trained]
            cells = [_number(ratio, "{:.2f}x") for ratio in ratios]
            rows.append((f"{label}, {_temperature(temperature)}", *cells, _number(floor)))
    return Table(
        "Accepted length against prompt lookup, finished answers",
        ("workload", *trained, *(f"{name}: accepted length" for name in lookups[:1])),
        tuple(rows),
    )


def speed_table(report: Report) -> Table:
    """Reference loop against plain decoding: one row per suite and temperature, and all suites together."""
    names = list(dict.fromkeys(result.proposer for result in report.speed))
    rows = []

    def add(label: str, chosen: Callable[[SpeedResult], bool]) -> None:
        by_name = {name: [r for r in report.speed if r.proposer == name and chosen(r)] for name in names}
        some = next((results for results in by_name.values() if results), None)
        if some is None:
            return
        plain = _rate((r.plain_tokens, r.plain_seconds) for r in some)
        cells = [_speed_cell(results) for results in by_name.values()]
        rows.append((label, f"{plain:.1f}", *cells))

    for temperature in sorted({result.temperature for result in report.speed}):
        for suite in dict.fromkeys(result.suite for result in report.speed):
            add(
                f"{suite}, {_temperature(temperature)}",
                lambda r, suite=suite, temperature=temperature: (r.suite, r.temperature) == (suite, temperature),
            )
        add(f"all, {_temperature(temperature)}", lambda r, temperature=temperature: r.temperature == temperature)
    return Table(
        "Speed of the reference loop, tokens/s (against plain decoding)",
        ("suite", "plain", *names),
        tuple(rows),
        caption=f"Same prompts in turns, batch {report.settings.batch_size}, on {report.machine.description}, "
        f"{report.machine.threads} threads. The loop is written to be read, not to be fast.",
    )


def _speed_cell(results: Sequence[SpeedResult]) -> str:
    if not results:
        return _MISSING
    ours = _rate((result.tokens, result.seconds) for result in results)
    plain = _rate((result.plain_tokens, result.plain_seconds) for result in results)
    return f"{ours:.1f} ({ours / plain:.2f}x)"


def _rate(parts: Iterable[tuple[float, float]]) -> float:
    """Pooled: all amounts over all seconds."""
    amounts, seconds = zip(*parts, strict=True)
    return sum(amounts) / sum(seconds)


def component_table(report: Report) -> Table:
    """Milliseconds per answer token by component, over all suites and temperatures."""
    rows = []
    components: list[str] = []
    for drafter in report.drafters:
        shares = component_milliseconds(report, drafter.name)
        components = components or list(shares)
        if shares:
            rows.append(
                (
                    drafter.name,
                    *(_number(shares[name]) for name in components),
                    _number(sum(shares.values())),
                )
            )
    return Table(
        "Time per answer token, ms",
        ("drafter", *components, "total"),
        tuple(rows),
        caption="Wall time of the measured runs divided by their answer tokens, all suites and temperatures.",
    )


def component_milliseconds(report: Report, drafter: str) -> dict[str, float]:
    """Milliseconds per answer token of one drafter, by component; empty without answers."""
    results = [result for result in report.results if result.proposer == drafter]
    tokens = sum(result.pooled(finished=ended).tokens for result in results for ended in (True, False))
    if not tokens:
        return {}
    totals: dict[str, float] = {}
    for result in results:
        for name, seconds in result.seconds.items():
            totals[name] = totals.get(name, 0.0) + seconds
    totals["other"] = max(0.0, sum(result.total_seconds for result in results) - sum(totals.values()))
    return {name: 1000 * seconds / tokens for name, seconds in totals.items()}


def exactness_table(report: Report) -> Table:
    """Speculative against plain decoding."""
    rows = []
    for result in report.exactness:
        first = result.first_divergence
        rows.append(
            (
                f"{result.proposer}, {_temperature(result.temperature)}",
                result.dtype,
                f"{result.identical} of {result.prompts}",
                f"{result.tokens:,}",
                "none"
                if first is None
                else f"prompt {first.prompt_id}, token {first.position}, top-2 logit gap {first.top2_gap:.2g}",
            )
        )
    return Table(
        "Output against plain decoding",
        ("drafter", "precision", "identical answers", "tokens compared", "first difference"),
        tuple(rows),
    )


def shortlist_table(report: Report) -> Table:
    """What a shortlist costs and gains."""
    exact = next((result for result in report.shortlist if result.size is None), None)
    rows = []
    for result in report.shortlist:
        length = result.counts.mean_accepted_length
        reference = exact.counts.mean_accepted_length if exact else None
        rows.append(
            (
                "exact" if result.size is None else str(result.size),
                _number(length, "{:.3f}"),
                _percent(length / reference - 1) if length and reference else _MISSING,
                _number(1000 * result.draft_seconds_per_step, "{:.2f}"),
                _number(result.tokens / result.total_seconds, "{:.1f}"),
            )
        )
    return Table(
        "Shortlist of the sequential head",
        ("candidates per slot", "accepted length", "against exact", "draft ms per block", "tokens/s"),
        tuple(rows),
        caption="Greedy decoding of the same prompts with each size in turns.",
    )


def tables(report: Report) -> list[Table]:
    """Every table of the report that has rows, in reading order."""
    made = [length_table(report, temperature=t, finished=True) for t in report.temperatures]
    made += [lookup_table(report)]
    made += [position_table(report, temperature=t) for t in report.temperatures]
    made += [length_table(report, temperature=t, finished=False) for t in report.temperatures]
    made += [speed_table(report), component_table(report), exactness_table(report), shortlist_table(report)]
    return [table for table in made if any(_says_something(row) for row in table.rows)]


def _says_something(row: Iterable[str]) -> bool:
    return any(cell != _MISSING for cell in list(row)[1:])


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
        ("machine", f"{report.machine.description}, {report.machine.threads} threads"),
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


def print_report(report: Report, *, console: Console, only: Callable[[Table], bool] = lambda table: True) -> None:
    """Draw the tables in a terminal."""
    console.print(f"[bold]{report.title}[/bold]  ({report.target.name}, {report.mode})", highlight=False)
    for table in tables(report):
        if only(table):
            console.print(table.to_rich())


def join_reports(reports: Sequence[Report], *, title: str, commands: Sequence[str]) -> Report:
    """One report over drafters that were measured apart: same target, mode, suites and settings.

    Raises:
        DataError: the reports differ in one of them (named), or share a drafter's name with different identity.
    """
    first = reports[0]
    for report in reports[1:]:
        for name in ("target", "mode", "settings", "suites"):
            if getattr(report, name) != getattr(first, name):
                raise DataError(
                    f"reports '{first.title}' and '{report.title}' differ in their {name}",
                    mend="compare drafters measured alike",
                )
    drafters: dict[str, DrafterFacts] = {}
    for report in reports:
        for drafter in report.drafters:
            known = drafters.setdefault(drafter.name, drafter)
            if known.identity != drafter.identity:
                raise DataError(f"two different drafters are called '{drafter.name}'", mend="name them differently")

    def union(name: str, key: Callable[[Any], tuple]) -> tuple:
        return tuple({key(item): item for report in reports for item in getattr(report, name)}.values())

    return first.model_copy(
        update={
            "title": title,
            "commands": tuple(commands),
            "drafters": tuple(drafters.values()),
            "results": union("results", lambda r: (r.suite, r.temperature, r.proposer)),
            "speed": union("speed", lambda r: (r.suite, r.temperature, r.proposer)),
            "exactness": union("exactness", lambda r: (r.temperature, r.proposer)),
            "shortlist": (),
            "notes": tuple(dict.fromkeys(note for report in reports for note in report.notes)),
        }
    )
