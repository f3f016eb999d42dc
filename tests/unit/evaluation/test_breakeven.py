"""The break-even with MTP: hand-made times with a known answer, its tables and its picture."""

from unittest import mock

import pytest
from evaluation_builders import small_report
from matplotlib.axes import Axes
from matplotlib.image import imread

from angelspec.evaluation.breakeven import PAPER_NEEDED_LENGTHS, PLAIN, BreakEven, needed_length
from angelspec.evaluation.breakeven_plot import plot_breakeven
from angelspec.evaluation.breakeven_tables import breakeven_table, step_time_table
from angelspec.evaluation.plots import plot_report
from angelspec.evaluation.rendering import tables, to_markdown, write_report
from angelspec.evaluation.report import Report
from angelspec.evaluation.results import StepTimes

# (draft, verify, sample) milliseconds per step: MTP takes 20, dfly 1.6 times that in a batch of 1, 3 times in one of 8
MILLISECONDS = {
    ("mtp", 1): (6, 12, 2),
    ("dfly", 1): (10, 18, 4),
    (PLAIN, 1): (0, 9, 0),
    ("mtp", 8): (10, 26, 4),
    ("dfly", 8): (30, 78, 12),
    (PLAIN, 8): (0, 16, 2),
}


def _report(*, drafters=("dfly", "mtp", "prompt lookup"), milliseconds=MILLISECONDS, steps=5) -> Report:
    report = small_report(steps={"a": ([3, 3, 2, 3, 3, 3], 7)}, mtp_steps={"a": ([1, 1, 1], 3)}, drafters=drafters)
    times = tuple(
        StepTimes(
            proposer=name,
            temperature=0.0,
            batch_size=batch_size,
            steps=steps,
            draft_seconds=1e-3 * steps * draft,
            verify_seconds=1e-3 * steps * verify,
            sample_seconds=1e-3 * steps * sample,
        )
        for (name, batch_size), (draft, verify, sample) in milliseconds.items()
    )
    return report.model_copy(update={"step_times": times})


def _cells(table, label):
    return dict(zip(table.columns, next(row for row in table.rows if row[0] == label), strict=True))


def test_the_papers_own_figures():
    """Table 8: where MTP-3 reaches 3, a step 4.61/3 times as long needs 4.61."""
    for needed in PAPER_NEEDED_LENGTHS.values():
        assert needed_length(3.0, seconds=0.030 * needed / 3, mtp_seconds=0.030) == pytest.approx(needed)
    assert (PAPER_NEEDED_LENGTHS["DFlash"], PAPER_NEEDED_LENGTHS["DFly"]) == (4.61, 5.14)


def test_equal_time_per_token_is_what_matches():
    figures = BreakEven(_report(), temperature=0.0)
    needed = figures.needed("dfly", batch_size=8, mtp_length=2.5)
    step, mtp_step = (figures.times(name, batch_size=8).seconds_per_step for name in ("dfly", "mtp"))
    assert step / needed == pytest.approx(mtp_step / 2.5)
    assert (step, mtp_step) == (pytest.approx(0.120), pytest.approx(0.040))


def test_known_answers_in_the_tables():
    report = _report()
    steps = step_time_table(report, temperature=0.0)
    assert _cells(steps, "dfly, batch 1") == {
        "drafter, batch size": "dfly, batch 1", "draft": "10.00", "verify": "18.00", "sample": "4.00", "step": "32.00",
        "needs where MTP reaches 3": "4.80",
    }  # fmt: skip
    assert _cells(steps, "mtp, batch 8")["needs where MTP reaches 3"] == "3.00"
    assert _cells(steps, f"{PLAIN}, batch 8")["needs where MTP reaches 3"] == "1.35"
    assert "4.61 for DFlash and 5.14 for DFly" in steps.caption

    lengths = breakeven_table(report, temperature=0.0)
    assert lengths.columns == ("drafter, workload", "reaches", "mtp reaches", "needs at batch 1", "needs at batch 8")
    for workload in ("code", "all"):
        row = _cells(lengths, f"dfly, {workload}")
        assert (row["reaches"], row["mtp reaches"]) == ("3.83", "2.00")
        assert row["needs at batch 1"] == "**3.20**"  # reached: faster than MTP
        assert row["needs at batch 8"] == "6.00"  # not reached
    plain = _cells(lengths, f"{PLAIN}, all")
    assert (plain["reaches"], plain["needs at batch 1"], plain["needs at batch 8"]) == ("1.00", "**0.90**", "**0.90**")
    assert not any(row[0].startswith("mtp") for row in lengths.rows)


def test_the_first_mtp_drafter_is_matched_and_a_second_one_compared():
    times = {**MILLISECONDS, ("mtp second", 1): (8, 16, 6)}
    report = _report(drafters=("dfly", "mtp", "mtp second"), milliseconds=times)
    figures = BreakEven(report, temperature=0.0)
    assert figures.mtp == "mtp"
    assert figures.others == ("dfly", "mtp second", PLAIN)
    table = breakeven_table(report, temperature=0.0)
    row = _cells(table, "mtp second, all")
    assert (row["needs at batch 1"], row["needs at batch 8"]) == ("3.00", "–")


def test_without_times_or_mtp_there_is_no_table():
    for report in (
        _report().model_copy(update={"step_times": ()}),
        _report(drafters=("dfly", "prompt lookup")),
    ):
        assert not any("Break-even" in table.title or "Step time" in table.title for table in tables(report))
    other = _report()
    assert BreakEven(other, temperature=1.0).batch_sizes == ()


def test_the_report_keeps_and_shows_it(tmp_path):
    report = _report()
    as_json, as_markdown = write_report(report, tmp_path)
    assert Report.load(as_json) == report
    text = as_markdown.read_text(encoding="utf-8")
    assert "| dfly, code | 3.83 | 2.00 | **3.20** | 6.00 |" in text
    assert report.definitions["break-even"] in text
    assert text == to_markdown(report)


def test_the_picture_opens_and_shows_what_is_needed_and_reached(tmp_path):
    report = _report()
    drawn = {}
    for method in ("plot", "axhline"):
        inner = getattr(Axes, method)
        with mock.patch.object(Axes, method, autospec=True, side_effect=inner) as spy:
            path = plot_breakeven(report, tmp_path / f"{method}.png", temperature=0.0)
        drawn[method] = spy.call_args_list
    pixels = imread(path)
    assert min(pixels.shape[:2]) > 300
    assert pixels.std() > 0.02
    assert [list(call.args[2]) for call in drawn["plot"]] == [pytest.approx([3.2, 6.0])]
    assert [call.args[1] for call in drawn["axhline"]] == pytest.approx([2.0, 23 / 6])
    assert drawn["plot"][0].kwargs["color"] == drawn["axhline"][1].kwargs["color"]
    assert drawn["plot"][0].args[0].get_ylim()[1] >= 6.0  # nothing lies outside the panel


def test_it_is_among_the_reports_pictures(tmp_path):
    pictures = plot_report(_report(), tmp_path)
    assert pictures["Break-even with MTP, temperature 0"].is_file()
    assert not any("Break-even" in caption for caption in plot_report(small_report(), tmp_path))
