"""What a comparison found: accepted lengths by variant and seed, their spread, and which orderings hold.

The record holds counts; lengths and differences are divided from them when they are shown. Seeds are paired: the
variants of one seed saw the same rows in the same order, so an ordering is judged by differences within a seed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Literal

from pydantic import BaseModel, ConfigDict

from angelspec.core.acceptance import AcceptanceCounts, pool
from angelspec.core.comparison import Comparison, Ordering
from angelspec.core.files import write_text_atomic
from angelspec.core.modes import Mode
from angelspec.core.workloads import WORKLOADS
from angelspec.evaluation.tables import MISSING, Table

_STRICT = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)
Verdict = Literal["holds", "undecided", "does not hold", "not measured"]


class Outcome(BaseModel):
    """One variant of one seed (or a drafter without weights) on the prompts of one mode and workload."""

    model_config = _STRICT

    variant: str
    seed: int | None
    """None: not trained."""
    mode: Mode
    workload: str
    finished: AcceptanceCounts
    unfinished: AcceptanceCounts


class Training(BaseModel):
    """What one variant of one seed was trained on."""

    model_config = _STRICT

    variant: str
    seed: int
    steps: int
    supervised_positions: int
    held_out_accepted_length: float | None
    seconds: float
    """Of its training stages, when they ran."""


class ComparisonReport(BaseModel):
    """Everything a comparison measured."""

    model_config = _STRICT

    comparison: Comparison
    mode: Mode
    """The base recipe's."""
    target: str
    temperature: float
    trainings: tuple[Training, ...]
    outcomes: tuple[Outcome, ...]
    seconds: float
    """Of the whole run, reused stages excepted."""

    @property
    def modes(self) -> tuple[Mode, ...]:
        return self.comparison.modes or (self.mode,)

    def save(self, folder: Path) -> Path:
        """Write comparison.json."""
        path = folder / "comparison.json"
        write_text_atomic(path, self.model_dump_json(indent=1))
        return path

    def lengths(
        self, variant: str, *, mode: Mode | None = None, workloads: Sequence[str] = (), finished: bool = True
    ) -> dict[int | None, float]:
        """Accepted length by seed, pooled over workloads (none named: all); seeds without answers are left out."""
        counts = self.counts(variant, mode=mode, workloads=workloads, finished=finished)
        lengths = {seed: mine.mean_accepted_length for seed, mine in counts.items()}
        return {seed: length for seed, length in lengths.items() if length is not None}

    def counts(
        self, variant: str, *, mode: Mode | None = None, workloads: Sequence[str] = (), finished: bool = True
    ) -> dict[int | None, AcceptanceCounts]:
        """Counters by seed, pooled over workloads (none named: all)."""
        chosen: dict[int | None, list[AcceptanceCounts]] = {}
        for outcome in self.outcomes:
            if (outcome.variant, outcome.mode) != (variant, mode or self.mode):
                continue
            if not workloads or outcome.workload in workloads:
                chosen.setdefault(outcome.seed, []).append(outcome.finished if finished else outcome.unfinished)
        return {seed: pool(parts) for seed, parts in chosen.items()}

    def differences(self, ordering: Ordering) -> dict[int | None, float]:
        """Better minus worse by seed, on finished answers."""
        better, worse = (
            self.lengths(name, mode=ordering.mode, workloads=ordering.workloads)
            for name in (ordering.better, ordering.worse)
        )
        return {seed: better[seed] - worse[seed] for seed in better if seed in worse}


def verdict(differences: Iterable[float]) -> Verdict:
    """Whether every seed agrees on the sign; ``undecided`` where they differ."""
    values = list(differences)
    if not values:
        return "not measured"
    if all(value > 0 for value in values):
        return "holds"
    if all(value <= 0 for value in values):
        return "does not hold"
    return "undecided"


def spread(values: Iterable[float], *, pattern: str = "{:.3f}") -> str:
    """Mean and sample standard deviation as text; the value alone if there is one, a dash if there is none."""
    values = list(values)
    if not values:
        return MISSING
    text = pattern.format(mean(values))
    return text if len(values) == 1 else f"{text} ± {pattern.format(stdev(values))}"


def length_table(report: ComparisonReport, *, mode: Mode, finished: bool) -> Table:
    """Variants by workload: mean accepted length over seeds, with its standard deviation."""
    present = {outcome.workload for outcome in report.outcomes if outcome.mode == mode}
    workloads = [name for name in WORKLOADS if name in present]
    together = [name for name in workloads if name != "chat"]
    columns = [(name, (name,)) for name in workloads]
    if len(together) > 1:
        columns.append(("+".join(together), tuple(together)))
    rows = []
    for variant in dict.fromkeys(outcome.variant for outcome in report.outcomes):
        cells = [
            spread(report.lengths(variant, mode=mode, workloads=names, finished=finished).values())
            for _, names in columns
        ]
        if set(cells) != {MISSING}:
            rows.append((variant, *cells))
    kind = "finished" if finished else "unfinished"
    return Table(
        title=f"Accepted length on {kind} answers, {mode} prompts, temperature {report.temperature:g}",
        columns=("variant", *(name for name, _ in columns)),
        rows=tuple(rows),
        caption=f"mean ± standard deviation over seeds {', '.join(map(str, report.comparison.seeds))}",
    )


def position_table(report: ComparisonReport, *, mode: Mode) -> Table:
    """Variants by position: mean p_k over seeds on finished answers of all workloads, with its standard deviation."""
    found = {}
    for variant in dict.fromkeys(outcome.variant for outcome in report.outcomes):
        by_seed = [counts.cumulative_acceptance for counts in report.counts(variant, mode=mode).values()]
        if by_seed := [chances for chances in by_seed if chances]:
            found[variant] = [spread(values) for values in zip(*by_seed, strict=False)]
    depth = max(map(len, found.values()), default=0)
    return Table(
        title=f"Acceptance by position on finished answers, {mode} prompts, temperature {report.temperature:g}",
        columns=("variant", *(f"p{k}" for k in range(1, depth + 1))),
        rows=tuple((variant, *cells, *[MISSING] * (depth - len(cells))) for variant, cells in found.items()),
        caption="share of full-depth steps that accepted proposals 1 to k; mean ± standard deviation over seeds",
    )


def ordering_table(report: ComparisonReport) -> Table:
    """Each expected ordering with its paired differences."""
    rows = []
    for ordering in report.comparison.orderings:
        differences = report.differences(ordering)
        rows.append(
            (
                ordering.claim,
                f"{ordering.better} − {ordering.worse}",
                f"{ordering.mode or report.mode}: {'+'.join(ordering.workloads) or 'all'}",
                spread(differences.values(), pattern="{:+.3f}").replace("± +", "± "),
                ", ".join(f"{value:+.3f}" for value in differences.values()),
                verdict(differences.values()),
            )
        )
    return Table(
        title="Orderings",
        columns=("claim", "difference", "prompts", "mean ± deviation", "by seed", "verdict"),
        rows=tuple(rows),
        caption="accepted length of finished answers, paired by seed; holds: every seed agrees",
    )


def training_table(report: ComparisonReport) -> Table:
    """What each variant was trained on, and its accepted length on held-out rows."""
    rows = []
    for variant in report.comparison.variants:
        mine = [item for item in report.trainings if item.variant == variant]
        held_out = [item.held_out_accepted_length for item in mine if item.held_out_accepted_length is not None]
        rows.append(
            (
                variant,
                spread([item.steps for item in mine], pattern="{:.0f}").split(" ±")[0],
                spread([item.supervised_positions for item in mine], pattern="{:.0f}").split(" ±")[0],
                spread(held_out),
                spread([item.seconds for item in mine], pattern="{:.0f}"),
            )
        )
    return Table(
        title="Training",
        columns=("variant", "steps", "supervised positions", "held-out accepted length", "seconds"),
        rows=tuple(rows),
        caption="held-out rows are those of the variant's own mode and workloads",
    )


def comparison_tables(report: ComparisonReport) -> list[Table]:
    """All tables, the verdicts first."""
    found = [ordering_table(report)] if report.comparison.orderings else []
    for finished in (True, False):
        for mode in report.modes:
            table = length_table(report, mode=mode, finished=finished)
            if table.rows:
                found.append(table)
    found += [table for mode in report.modes if (table := position_table(report, mode=mode)).rows]
    return [*found, training_table(report)]
