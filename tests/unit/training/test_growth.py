import pytest

from angelspec.core.errors import TrainingError
from angelspec.training import growth
from angelspec.training.bench_step import BenchResult
from angelspec.training.growth import Curve, bench_length, fit_curve, print_growth


def test_a_curve_is_found_again_from_its_own_values():
    curve = Curve(constant=3.0, linear=2e-3, quadratic=5e-8)
    lengths = [512, 1024, 4096, 8192]
    found = fit_curve(lengths, [curve.at(n) for n in lengths], degree=2)
    assert found.at(131072) == pytest.approx(curve.at(131072), rel=1e-9)
    line = fit_curve(lengths, [1.0 + 0.5 * n for n in lengths], degree=1)
    assert (line.constant, line.linear, line.quadratic) == pytest.approx((1.0, 0.5, 0.0))


def test_a_negative_square_is_left_out_and_too_few_lengths_are_refused():
    assert fit_curve([1, 2, 3], [1.0, 1.9, 2.7], degree=2).quadratic == 0.0
    with pytest.raises(ValueError, match="degree 2 needs 3"):
        fit_curve([1, 2, 2], [1.0, 2.0, 2.0], degree=2)
    with pytest.raises(TrainingError, match="three different lengths"):
        bench_length([512, 512, 1024])


def _measured(case):
    """Memory and time of a machine where both are known."""
    tokens, depths = case.row_length, case.drafter.num_depths
    held = 1 if case.recompute_depths else depths
    return BenchResult(
        name=case.name, objective=case.objective_name, matmul=case.matmul, row_length=tokens,
        positions_per_step=tokens, positions_per_second=1.0, step_seconds=1e-3 * tokens * depths + 1e-7 * tokens**2,
        peak_process_bytes=2**30 + tokens * held * 2**14, peak_training_bytes=1, shares={}, num_parameters=1, threads=2,
        repeats=1,
    )  # fmt: skip


def test_every_way_of_unrolling_is_measured_at_every_length_and_extrapolated(monkeypatch, capsys):
    monkeypatch.setattr(growth, "run_apart", _measured)
    grown = bench_length([2048, 512, 1024], num_depths=3)
    assert [item.name for item in grown] == ["1 depth", "3 depths", "3 depths, recomputed"]
    assert {item.lengths for item in grown} == {(512, 1024, 2048)}
    assert [item.peak_bytes.linear for item in grown] == pytest.approx([2**14, 3 * 2**14, 2**14], rel=1e-6)
    print_growth(grown, extrapolate=[131072])
    lines = [line for line in capsys.readouterr().out.splitlines() if "131,072 *" in line]
    assert len(lines) == 1
    assert "3.00 GiB" in lines[0] and "7.00 GiB" in lines[0] and f"{131.072 + 1e-7 * 131072**2:.2f} s" in lines[0]
