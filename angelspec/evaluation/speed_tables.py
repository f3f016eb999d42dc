"""Tables of time: against plain decoding, by component, and by size of a shortlist."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from angelspec.evaluation.report import Report
from angelspec.evaluation.results import ShortlistResult, SpeedResult
from angelspec.evaluation.tables import MISSING, Table, at_temperature, number, percent


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
                f"{suite}, {at_temperature(temperature)}",
                lambda r, suite=suite, temperature=temperature: (r.suite, r.temperature) == (suite, temperature),
            )
        add(f"all, {at_temperature(temperature)}", lambda r, temperature=temperature: r.temperature == temperature)
    batches = sorted({report.settings.rows_together(result.prompts) for result in report.speed})
    return Table(
        "Speed of the reference loop, tokens/s (against plain decoding)",
        ("suite", "plain", *names),
        tuple(rows),
        caption=f"Same prompts in turns, batch {' or '.join(map(str, batches))}, on {report.machine.description}, "
        f"{report.machine.threads_in_words}. The loop is written to be read, not to be fast.",
    )


def _speed_cell(results: Sequence[SpeedResult]) -> str:
    if not results:
        return MISSING
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
                    *(number(shares[name]) for name in components),
                    number(sum(shares.values())),
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


def _fastest(results: Sequence[ShortlistResult]) -> str:
    if not results:
        return ""
    best = max(results, key=lambda result: result.tokens / result.total_seconds)
    return f" Most tokens/s: {'the exact head' if best.size is None else f'{best.size} candidates'}."


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else 1000 * seconds


def shortlist_table(report: Report) -> Table:
    """What a shortlist costs and gains, and which size answers fastest."""
    exact = next((result for result in report.shortlist if result.size is None), None)
    rows = []
    for result in report.shortlist:
        length = result.counts.mean_accepted_length
        reference = exact.counts.mean_accepted_length if exact else None
        rows.append(
            (
                "exact" if result.size is None else str(result.size),
                number(length, "{:.3f}"),
                percent(length / reference - 1) if length and reference else MISSING,
                number(_milliseconds(result.draft_seconds_per_step), "{:.2f}"),
                number(result.tokens / result.total_seconds, "{:.1f}"),
            )
        )
    return Table(
        "Shortlist of the sequential head",
        ("candidates per slot", "accepted length", "against exact", "draft ms per block", "tokens/s"),
        tuple(rows),
        caption="Greedy decoding of the same prompts with each size in turns." + _fastest(report.shortlist),
    )
