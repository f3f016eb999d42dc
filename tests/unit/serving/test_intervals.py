"""Ratios and their intervals against values computed by hand and by scipy."""

import math

import pytest

from angelspec.serving.intervals import paired_ratio, t_975


def test_quantiles_are_those_of_student():
    scipy_stats = pytest.importorskip("scipy.stats")
    for degrees in (*range(1, 31), 31, 40, 60, 120, 1000):
        assert t_975(degrees) == pytest.approx(scipy_stats.t.ppf(0.975, degrees), rel=5e-3 if degrees > 30 else 3e-4)
    with pytest.raises(ValueError, match="one degree"):
        t_975(0)


def test_a_ratio_by_hand():
    # ratios 2 and 8: geometric mean 4; logs ln 2 and ln 8, deviation (ln 8 - ln 2) / sqrt 2 = ln 4 / sqrt 2
    ratio = paired_ratio([20.0, 40.0], [10.0, 5.0])
    half = 12.706 * (math.log(4) / math.sqrt(2)) / math.sqrt(2)
    assert ratio.value == pytest.approx(4.0)
    assert ratio.low == pytest.approx(4 / math.exp(half))
    assert ratio.high == pytest.approx(4 * math.exp(half))
    assert ratio.pairs == 2


def test_what_falls_on_both_sides_of_a_pair_cancels():
    steady = paired_ratio([11.0, 22.0, 5.5], [10.0, 20.0, 5.0])  # a machine that is twice as fast in the second round
    assert steady.value == pytest.approx(1.1)
    assert steady.low == pytest.approx(1.1)
    assert steady.high == pytest.approx(1.1)


def test_missing_figures():
    assert paired_ratio([None, 3.0], [1.0, None]) is None
    one = paired_ratio([None, 3.0], [1.0, 2.0])
    assert (one.value, one.low, one.high, one.pairs) == (pytest.approx(1.5), None, None, 1)
