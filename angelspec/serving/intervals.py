"""A ratio of two speeds that were measured in turns, with a 95 % interval."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

_T_975 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
"""0.975 quantiles of Student's t for 1..30 degrees of freedom."""
_NORMAL_975 = 1.960


@dataclass(frozen=True)
class Ratio:
    """A ratio and what is known of it."""

    value: float
    low: float | None
    """None: one pair gives no interval."""
    high: float | None
    pairs: int


def t_975(degrees: int) -> float:
    """0.975 quantile of Student's t; above 30 degrees within 0.5 % (the expansion in 1/degrees)."""
    if degrees < 1:
        raise ValueError("Student's t needs at least one degree of freedom")
    if degrees <= len(_T_975):
        return _T_975[degrees - 1]
    z = _NORMAL_975
    return z + (z**3 + z) / (4 * degrees)


def paired_ratio(ours: Sequence[float | None], theirs: Sequence[float | None]) -> Ratio | None:
    """Geometric mean of the pairs' ratios, and its t interval over their logarithms.

    A pair is what was measured in the same round; one without a figure on either side is left out. None: no pair.
    """
    logs = [math.log(a / b) for a, b in zip(ours, theirs, strict=True) if a is not None and b is not None]
    if not logs:
        return None
    mean = statistics.fmean(logs)
    if len(logs) == 1:
        return Ratio(math.exp(mean), None, None, 1)
    half = t_975(len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
    return Ratio(math.exp(mean), math.exp(mean - half), math.exp(mean + half), len(logs))
