"""A plan for the terminal: what runs where, and what memory the drafters take."""

from __future__ import annotations

import shlex
from collections.abc import Iterable

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from angelspec.core.bundle import Bundle
from angelspec.core.byte_sizes import byte_size
from angelspec.serving.plan import ServePlan


def print_plan(plan: ServePlan, *, console: Console) -> None:
    """Draw the plan."""
    resolved = plan.resolved
    drafters = _table("drafter", "algorithm", "mode", "depth", "weights", "pool per token", "from")
    for drafter in resolved.drafters:
        entry, memory = drafter.entry, plan.memory
        _add(
            drafters,
            entry.name,
            entry.algorithm or entry.family,
            entry.mode,
            str(entry.depth),
            byte_size(memory.drafter_weights[entry.name]),
            byte_size(memory.draft_bytes_per_token[entry.name]),
            entry.source,
        )
    console.print(_facts(_plan_facts(plan)))
    if resolved.drafters:
        console.print(drafters)
    print_routes(resolved.bundle, console=console)
    for note in plan.notes:
        console.print(f"note: {note}", highlight=False, markup=False)


def print_bundle(bundle: Bundle, *, console: Console) -> None:
    """Draw what a bundle says."""
    target = bundle.target
    digest = f", content {target.digest[:16]}" if target.digest else ""
    costs = "measured when the server starts"
    if bundle.costs is not None:
        where = bundle.costs.measured_for
        costs = f"measured on {where.hardware}, {where.engine}" if where is not None else "given, for any machine"
    facts = [("bundle", bundle.name)] if bundle.name else []
    facts += [("target", f"{target.source} (thinking as {target.mode_family}{digest})"), ("step costs", costs)]
    console.print(_facts(facts))
    drafters = _table("drafter", "algorithm", "family", "mode", "depth", "calibrated", "from")
    for entry in bundle.drafters:
        _add(
            drafters, entry.name, entry.algorithm or entry.family, entry.family, entry.mode, str(entry.depth),
            "yes" if entry.name in bundle.calibrations else "no", entry.source,
        )  # fmt: skip
    if bundle.drafters:
        console.print(drafters)
    print_routes(bundle, console=console)


def print_routes(bundle: Bundle, *, console: Console) -> None:
    """Routes and measured acceptance of a bundle."""
    rules = [f"{rule.workload or 'any workload'}, {rule.mode or 'any mode'}: {rule.route}" for rule in bundle.routes]
    console.print(f"routes: {'; '.join([*rules, 'everything else by load'])}", highlight=False, markup=False)
    if bundle.acceptance:
        lengths = _table("measured acceptance", "workload", "accepted length", "p_1 .. p_D", "steps")
        for item in bundle.acceptance:
            shown = " ".join(f"{value:.2f}" for value in item.cumulative)
            _add(lengths, item.drafter, item.workload, f"{item.accepted_length:.2f}", shown, str(item.steps))
        console.print(lengths)


def _plan_facts(plan: ServePlan) -> list[tuple[str, str]]:
    memory, geometry = plan.memory, plan.resolved.target.geometry
    ours, whole = memory.draft_pool_bytes_per_token, memory.target_bytes_per_token
    pool = f"{byte_size(ours)} per token beside the target's {byte_size(whole)}"
    if ours is None or whole is None:
        pool = "not estimated: the size of the pool's numbers is not known"
    elif memory.pool_tokens is not None:
        tokens = memory.pool_tokens
        pool += f"; {byte_size(ours * tokens)} beside {byte_size(whole * tokens)} for {tokens} tokens"
    else:
        pool += f"; {byte_size(ours * 100_000)} for every 100 000 tokens"
    cut = plan.resolved.bundle.dcut
    return [
        ("target", f"{plan.resolved.target.folder} ({geometry.architecture}, {geometry.num_layers} layers, "
                   f"weights {byte_size(memory.target_weights)})"),
        ("engine", f"SGLang {plan.engine_version} with {len(plan.resolved.drafters)} drafter(s) in one process"),
        ("hardware", f"{plan.hardware.device}: {plan.hardware.description}"),
        ("extra pools", pool),
        ("waiting states", f"{byte_size(memory.waiting_states, unknown='not estimated')} for all running requests"),
        ("D-cut", "step by step" if cut.ratio is None else "off" if cut.ratio == 1 else f"ratio {cut.ratio:g}"),
        ("flags", shlex.join(word for flag in plan.flags for word in flag.shown) or "none"),
        ("address", plan.url),
    ]  # fmt: skip


def _facts(rows: Iterable[tuple[str, str]]) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for row in rows:
        _add(table, *row)
    return table


def _add(table: Table, *cells: str) -> None:
    """A row of plain texts: brackets in paths and flags are no markup."""
    table.add_row(*map(Text, cells))


def _table(*columns: str) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table
