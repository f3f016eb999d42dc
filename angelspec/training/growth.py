"""How an MTP training step grows with the length of its row: the work behind ``angelspec bench length``.

A step is measured at growing lengths, curves are fitted, and longer rows are extrapolated: the memory of a row grows
with its length (neither a score matrix nor the logits of a whole row are held), its time with the length and, by
attention, with its square.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from pydantic import BaseModel, ConfigDict

from angelspec.core.errors import TrainingError
from angelspec.training.bench import run_apart
from angelspec.training.bench_cases import Precision, reference_cases
from angelspec.training.bench_step import BenchResult


class Curve(BaseModel):
    """``constant + linear * tokens + quadratic * tokens ** 2``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    constant: float
    linear: float
    quadratic: float = 0.0

    def at(self, tokens: int) -> float:
        """Its value for a row of that many tokens."""
        return self.constant + self.linear * tokens + self.quadratic * float(tokens) ** 2


def fit_curve(tokens: Sequence[int], values: Sequence[float], *, degree: int) -> Curve:
    """The curve of least squared *relative* error, so that short rows count as much as long ones.

    A square that would come out negative is left out.

    Args:
        tokens: row lengths, at least ``degree + 1`` different ones.
        values: above 0, one per length.
        degree: 1 or 2.

    Raises:
        ValueError: too few lengths.
    """
    if len(set(tokens)) <= degree:
        raise ValueError(f"a curve of degree {degree} needs {degree + 1} different lengths")
    lengths, heights = np.asarray(tokens, dtype=np.float64), np.asarray(values, dtype=np.float64)
    unit = lengths.max()
    powers = np.stack([(lengths / unit) ** power for power in range(degree + 1)], axis=1)
    weights = np.linalg.lstsq(powers / heights[:, None], np.ones_like(heights), rcond=None)[0]
    if degree == 2 and weights[2] < 0:
        return fit_curve(tokens, values, degree=1)
    constant, linear, quadratic = (*(float(weight) for weight in weights), 0.0)[:3]
    return Curve(constant=constant, linear=linear / unit, quadratic=quadratic / unit**2)


class Growth(BaseModel):
    """One way of unrolling, measured at growing lengths."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    num_depths: int
    recompute: bool
    """Whether the depths above the first run again in the backward pass."""
    lengths: tuple[int, ...]
    results: tuple[BenchResult, ...]
    seconds: Curve
    """Of a step."""
    peak_bytes: Curve
    """Of the process."""

    @property
    def name(self) -> str:
        """As a table names it."""
        depths = "1 depth" if self.num_depths == 1 else f"{self.num_depths} depths"
        return f"{depths}, recomputed" if self.recompute else depths


def bench_length(
    lengths: Sequence[int],
    *,
    num_depths: int = 3,
    objective: str = "lk",
    matmul: Precision = "float32",
    repeats: int = 3,
    device: str = "cpu",
) -> list[Growth]:
    """Measure the MTP reference at growing lengths: one depth alone, all of them, and all of them recomputed.

    Args:
        lengths: tokens of the one row of a step; three different ones at least.
        num_depths: above 1.

    Raises:
        TrainingError: too few lengths, or a case failed.
        MissingRequirement: a case was killed, most likely for want of memory.
    """
    lengths = sorted(set(lengths))
    if len(lengths) < 3:
        raise TrainingError("growth needs three different lengths", mend="give --length three times or more")
    (reference,) = reference_cases([objective], [matmul], reference="mtp", repeats=repeats)
    grown = []
    for depths, recompute in ((1, False), (num_depths, False), (num_depths, True)):
        drafter = reference.drafter.model_copy(update={"num_depths": depths})
        results = [
            run_apart(
                reference.model_copy(
                    update={
                        "name": f"{depths} depths at {length} tokens",
                        "drafter": drafter,
                        "row_length": length,
                        "recompute_depths": recompute,
                        "yardstick": False,
                        "device": device,
                    }
                )
            )
            for length in lengths
        ]
        grown.append(
            Growth(
                num_depths=depths,
                recompute=recompute,
                lengths=tuple(lengths),
                results=tuple(results),
                seconds=fit_curve(lengths, [result.step_seconds for result in results], degree=2),
                peak_bytes=fit_curve(lengths, [result.peak_process_bytes for result in results], degree=1),
            )
        )
    return grown


def print_growth(grown: Sequence[Growth], *, extrapolate: Sequence[int]) -> None:
    """Print memory and time by length, measured and extrapolated."""
    from rich.console import Console
    from rich.table import Table

    first = grown[0].results[0]
    where = f"{first.threads} threads" if first.device == "cpu" else "a GPU"
    table = Table(title=f"one MTP training step by the length of its row, {where}")
    table.add_column("tokens", justify="right")
    for growth in grown:
        table.add_column(f"{growth.name}: memory", justify="right")
        table.add_column("time", justify="right")
    for index, length in enumerate(grown[0].lengths):
        cells = ((g.results[index].peak_process_bytes, g.results[index].step_seconds) for g in grown)
        table.add_row(f"{length:,}", *_cells(cells))
    table.add_section()
    for length in sorted(extrapolate):
        table.add_row(f"{length:,} *", *_cells((g.peak_bytes.at(length), g.seconds.at(length)) for g in grown))
    console = Console()
    console = console if console.is_terminal else Console(width=140)
    console.print(table)
    if extrapolate:
        console.print("* extrapolated: memory a + b n, time a + b n + c n² of the measured lengths", highlight=False)


def _cells(values) -> list[str]:
    return [cell for peak, seconds in values for cell in (f"{peak / 2**30:.2f} GiB", f"{seconds:.2f} s")]
