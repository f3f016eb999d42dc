"""Tables of what was accepted: by suite and workload, by position, against prompt lookup; and of exactness."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from angelspec.evaluation.report import Report
from angelspec.evaluation.tables import MISSING, Table, at_temperature, number, percent


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
        cells = [number(group.counts.mean_accepted_length) for group in groups]
        if len(names) > 1:
            cells = [
                f"**{cell}**" if group.counts.mean_accepted_length == best else cell
                for cell, group in zip(cells, groups, strict=True)
            ]
        asked = groups[0].answers + others[0].answers
        answers = _each(str(group.answers) for group in groups)
        rows.append((label, *cells, f"{answers} of {asked}", _each(percent(group.repeated_share) for group in groups)))

    for suite in report.suites:
        add(suite.name, suites=[suite.name])
    for workload in report.workloads:
        add(f"all {workload}", workloads=[workload])
    if {"code", "math"} <= set(report.workloads):
        add("code and math", workloads=["code", "math"])
    add("all")
    kind = "finished" if finished else "unfinished"
    return Table(
        f"Accepted length, {kind} answers, {at_temperature(temperature)}",
        ("suite", *names, f"{kind} answers", "repeated 12-grams"),
        tuple(rows),
        caption=(
            "Tokens per verify step, bonus included, pooled; the best in bold. Each drafter's own answers: in lower "
            "precision than float32 a few differ, and end elsewhere (then the counts stand in the columns' order)."
        )
        if finished
        else "Answers cut at the token limit, apart because they loop more often.",
    )


def _each(texts: Iterable[str]) -> str:
    """One text if all are equal, else all."""
    found = list(texts)
    return found[0] if len(set(found)) == 1 else "/".join(found)


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
            cells = [number(rate, "{:.3f}") for rate in rates] + [MISSING] * (depth - len(rates))
            rows.append(
                (
                    f"{drafter.name}, {workload or 'all'}",
                    *cells,
                    f"{group.counts.full_depth_steps:,}",
                    percent(group.counts.kept_ratio),
                )
            )
    return Table(
        f"Acceptance by position, finished answers, {at_temperature(temperature)}",
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
            cells = [number(ratio, "{:.2f}x") for ratio in ratios]
            rows.append((f"{label}, {at_temperature(temperature)}", *cells, number(floor)))
    return Table(
        "Accepted length against prompt lookup, finished answers",
        ("workload", *trained, *(f"{name}: accepted length" for name in lookups[:1])),
        tuple(rows),
        caption="Each over its own finished answers.",
    )


def exactness_table(report: Report) -> Table:
    """Speculative against plain decoding."""
    rows = []
    for result in report.exactness:
        first = result.first_divergence
        rows.append(
            (
                f"{result.proposer}, {at_temperature(result.temperature)}",
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
