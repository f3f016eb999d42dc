"""Tables of the break-even with MTP: what a step costs, and which accepted length pays for it."""

from __future__ import annotations

from angelspec.evaluation.breakeven import PAPER_MTP_LENGTH, PAPER_NEEDED_LENGTHS, BreakEven
from angelspec.evaluation.report import Report
from angelspec.evaluation.tables import Table, at_temperature, number


def step_time_table(report: Report, *, temperature: float) -> Table:
    """The parts of each drafter's step by batch size, and the length it needs in the form of the paper's table 8."""
    figures = BreakEven(report, temperature=temperature)
    rows = []
    for batch_size in figures.batch_sizes:
        for drafter in (*([figures.mtp] if figures.mtp else []), *figures.others):
            times = figures.times(drafter, batch_size=batch_size)
            if times is None:
                continue
            parts = (times.draft_seconds, times.verify_seconds, times.sample_seconds)
            needed = figures.needed(drafter, batch_size=batch_size, mtp_length=PAPER_MTP_LENGTH)
            rows.append(
                (
                    f"{drafter}, batch {batch_size}",
                    *(number(1000 * seconds / times.steps) for seconds in parts),
                    number(1000 * times.seconds_per_step),
                    number(needed),
                )
            )
    paper = " and ".join(f"{length:.2f} for {name}" for name, length in PAPER_NEEDED_LENGTHS.items())
    return Table(
        f"Step time, ms, {at_temperature(temperature)}",
        ("drafter, batch size", "draft", "verify", "sample", "step", f"needs where MTP reaches {PAPER_MTP_LENGTH:g}"),
        tuple(rows),
        caption=f"One step of the whole batch, reference loop, on {report.machine.description}, "
        f"{report.machine.threads_in_words}. The last column is the paper's table 8 (on its engine: {paper}).",
    )


def breakeven_table(report: Report, *, temperature: float) -> Table:
    """The accepted length that each drafter needs to match MTP, beside what it reaches, by workload and batch size."""
    figures = BreakEven(report, temperature=temperature)
    rows = []
    for drafter in figures.others:
        for workload in (*report.workloads, None):
            reached = figures.reached(drafter, workload=workload)
            mtp_length = figures.reached(figures.mtp or "", workload=workload)
            cells = []
            for batch_size in figures.batch_sizes:
                needed = figures.needed(drafter, batch_size=batch_size, mtp_length=mtp_length)
                faster = needed is not None and reached is not None and reached >= needed
                cells.append(f"**{number(needed)}**" if faster else number(needed))
            rows.append((f"{drafter}, {workload or 'all'}", number(reached), number(mtp_length), *cells))
    return Table(
        f"Break-even with {figures.mtp}, finished answers, {at_temperature(temperature)}",
        (
            "drafter, workload",
            "reaches",
            f"{figures.mtp} reaches",
            *(f"needs at batch {batch_size}" for batch_size in figures.batch_sizes),
        ),
        tuple(rows),
        caption="Accepted length that matches MTP's time per token; bold where the drafter reaches it.",
    )
