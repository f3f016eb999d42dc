"""Tables of a load test, in the shape of the AngelSpec paper's Table 7 (arXiv 2607.25852): a row per concurrency."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from angelspec.core.files import write_text_atomic
from angelspec.evaluation.tables import MISSING, Table, number, percent
from angelspec.serving.bench_result import BenchResult, Cell, Choice
from angelspec.serving.intervals import Ratio

REPORT_FILE = "serve-bench.md"


def bench_tables(result: BenchResult) -> list[Table]:
    """Every table, in reading order: for each prompt set its speeds, then what explains them."""
    of_traffic = (speed_table, speedup_table, user_table, user_ratio_table, draft_table)
    tables = [table(result, traffic=traffic.name) for traffic in result.prompt_sets for table in of_traffic]
    tables.append(time_table(result))
    return [table for table in tables if table.rows]


def speed_table(result: BenchResult, *, traffic: str) -> Table:
    """Concurrency by choice: tokens/s, speedup, accepted length."""

    def shown(cell: Cell, choice: Choice) -> str:
        parts = [f"{number(cell.tokens_per_second, '{:.1f}')}{cell.marks}"]
        if choice.name != result.baseline:
            parts.append(f"{number(cell.speedup)}×")
        if _speculates(result, choice):
            parts.append(number(cell.accepted_length))
        return ", ".join(parts)

    caption = f"tokens/s, speedup over {result.baseline}, accepted length"
    return _by_concurrency(result, f"Throughput: {traffic}", traffic=traffic, cell=shown, caption=caption)


def speedup_table(result: BenchResult, *, traffic: str) -> Table:
    """Concurrency by choice: the speedup's 95 % interval."""

    def shown(cell: Cell, choice: Choice) -> str:
        if choice.name == result.baseline or cell.speedup_low is None or cell.speedup_high is None:
            return MISSING
        return f"[{cell.speedup_low:.2f}, {cell.speedup_high:.2f}]"

    caption = f"95 % interval of the speedup over {result.baseline}, {result.settings.repeats} repeat(s)"
    return _by_concurrency(result, f"Certainty: {traffic}", traffic=traffic, cell=shown, caption=caption)


def user_table(result: BenchResult, *, traffic: str) -> Table:
    """Concurrency by choice: per-user speed, time to first token."""

    def shown(cell: Cell, choice: Choice) -> str:
        first = None if cell.first_token_seconds is None else 1e3 * cell.first_token_seconds
        return f"{number(cell.user_tokens_per_second, '{:.1f}')}, {number(first, '{:.0f}')} ms"

    caption = "tokens/s of one user, time to first token"
    return _by_concurrency(result, f"Users: {traffic}", traffic=traffic, cell=shown, caption=caption)


def user_ratio_table(result: BenchResult, *, traffic: str) -> Table:
    """Concurrency by choice: per-user speed and time to first token against plain decoding's."""

    def shown(cell: Cell, choice: Choice) -> str:
        if choice.name == result.baseline:
            return MISSING
        return ", ".join(_ratio(ratio) for ratio in (cell.user_speedup, cell.first_token_ratio))

    caption = f"speed of one user and time to first token over those of {result.baseline}, with 95 % intervals"
    return _by_concurrency(result, f"Users against plain: {traffic}", traffic=traffic, cell=shown, caption=caption)


def draft_table(result: BenchResult, *, traffic: str) -> Table:
    """Concurrency by choice: share of speculative steps, kept ratio."""

    def shown(cell: Cell, choice: Choice) -> str:
        if not _speculates(result, choice):
            return MISSING
        return f"{percent(cell.speculative_share)}, {number(cell.kept_ratio)}"

    caption = "share of steps that were drafted for, kept ratio"
    return _by_concurrency(result, f"Speculation: {traffic}", traffic=traffic, cell=shown, caption=caption)


def time_table(result: BenchResult) -> Table:
    """Where the engine's steps spend their time, by choice, over all windows."""
    rows = []
    for choice in result.choices:
        counters = [w.counters for w in result.windows if w.choice == choice.name and w.counters is not None]
        steps = sum(item.steps for item in counters)
        if not steps:
            continue
        parts = [
            sum(getattr(item, f"{name}_seconds") for item in counters) for name in ("draft", "plan", "verify", "other")
        ]
        whole = sum(parts)
        speculative = sum(item.speculative_steps for item in counters)
        mixed = sum(item.mixed_steps for item in counters)
        cut = sum(item.cut_steps for item in counters)
        costed = sum(item.costed_seconds for item in counters)
        misjudged = sum(item.misjudged_seconds for item in counters)
        rows.append(
            (
                choice.name,
                str(steps),
                percent(speculative / steps),
                percent(mixed / steps),
                percent(cut / steps),
                number(1e3 * whole / steps, "{:.1f}"),
                *(percent(part / whole) if whole else MISSING for part in parts),
                percent(misjudged / costed) if costed else MISSING,
            )
        )
    return Table(
        "Where the engine's time goes",
        ("choice", "steps", "speculative", "mixed", "cut", "ms per step", "draft", "plan", "verify", "other", "off"),
        tuple(rows),
        "steps of the whole batch, warm-up included; off: by how much the planner misjudges a step's time",
    )


def bench_markdown(result: BenchResult, *, plots: dict[str, str]) -> str:
    """The report; ``plots`` maps captions to paths of images, relative to where it is written."""
    settings = result.settings
    facts = [
        ("server", f"SGLang {result.engine_version} with angelspec, {result.url}"),
        ("bundle", _bundle(result)),
        ("control", "none" if result.control_url is None else f"SGLang {result.control_version}, {result.control_url}"),
        ("hardware", result.hardware),
        ("flags", ", ".join(f"{name} {value}" for name, value in result.engine_arguments.items()) or "not reported"),
        *(
            (f"prompts {item.name}", f"{item.prompts} from {item.source} (`{item.digest[:16]}`)")
            for item in result.prompt_sets
        ),
        (
            "windows",
            f"{settings.window_text}, {settings.repeats} repeats in rotated order, "
            f"up to {settings.max_tokens} tokens, temperature {settings.temperature:g}, "
            f"mode {settings.mode or 'default'}, seed {settings.seed}",
        ),
        ("measured", result.created),
    ]
    lines = ["# Load test", "", *(f"- **{name}**: {text}" for name, text in facts), ""]
    if result.faults:
        lines += ["## Faults", "", *(f"- {fault}" for fault in result.faults), ""]
    lines += ["## Results", "", *(table.to_markdown() for table in bench_tables(result))]
    for caption, path in plots.items():
        lines += [f"![{caption}]({path})", ""]
    lines += ["## What the figures mean", ""]
    lines += [f"- **{name}**: {text}" for name, text in result.definitions.items()]
    lines += ["", "## How to get them again", "", "```", result.command, "```", ""]
    return "\n".join(lines)


def write_bench_report(result: BenchResult, folder: Path, *, plots: dict[str, str]) -> Path:
    """Write ``serve-bench.md``."""
    path = folder / REPORT_FILE
    write_text_atomic(path, bench_markdown(result, plots=plots))
    return path


def print_bench(result: BenchResult, *, console: Console) -> None:
    """Draw the tables in a terminal, the faults after them."""
    for table in bench_tables(result):
        console.print(table.to_rich())
    for fault in result.faults:
        console.print(f"fault: {fault}", highlight=False)


def _by_concurrency(
    result: BenchResult, title: str, *, traffic: str, cell: Callable[[Cell, Choice], str], caption: str
) -> Table:
    rows = []
    for concurrency in result.settings.concurrency:
        found = [
            (choice, result.cell(traffic=traffic, concurrency=concurrency, choice=choice.name))
            for choice in result.choices
        ]
        if any(member is not None for _, member in found):
            cells = (MISSING if member is None else cell(member, choice) for choice, member in found)
            rows.append((str(concurrency), *cells))
    return Table(title, ("concurrency", *(choice.name for choice in result.choices)), tuple(rows), caption)


def _ratio(ratio: Ratio | None) -> str:
    if ratio is None:
        return MISSING
    interval = "" if ratio.low is None or ratio.high is None else f" [{ratio.low:.2f}, {ratio.high:.2f}]"
    return f"{ratio.value:.2f}×{interval}"


def _speculates(result: BenchResult, choice: Choice) -> bool:
    return choice.route not in (None, result.baseline)


def _bundle(result: BenchResult) -> str:
    if result.engine is None:
        return "none"
    drafters = ", ".join(f"{d.name} ({d.family}, {d.mode}, depth {d.depth})" for d in result.engine.drafters)
    return f"{result.engine.bundle or 'unnamed'}: {drafters or 'no drafter'}"
