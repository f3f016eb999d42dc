"""Pictures are drawn from the report's own figures, and survive missing ones."""

import json
from unittest import mock

import pytest
from evaluation_builders import small_report
from matplotlib.axes import Axes

from angelspec.evaluation.plots import plot_accepted_length, plot_components, plot_positions, plot_report
from angelspec.evaluation.training_plots import plot_training

PNG = b"\x89PNG\r\n\x1a\n"


def _drawn(method, draw):
    """What was passed to a method of Axes while drawing."""
    with mock.patch.object(Axes, method, autospec=True, side_effect=getattr(Axes, method)) as spy:
        draw()
    return spy.call_args_list


def test_every_picture_of_a_report(tmp_path):
    pictures = plot_report(small_report(), tmp_path / "plots")
    assert len(pictures) == 4
    assert len({path.name for path in pictures.values()}) == 4
    assert all(path.read_bytes().startswith(PNG) for path in pictures.values())


def test_bars_are_the_pooled_lengths(tmp_path):
    report = small_report()
    calls = _drawn("bar", lambda: plot_accepted_length(report, tmp_path / "a.png", temperature=0.0))
    heights = {call.kwargs["label"]: call.args[2] for call in calls}
    assert heights["dfly"] == pytest.approx([10 / 4, 8 / 4, 18 / 8])
    assert heights["prompt lookup"] == pytest.approx([5 / 4] * 3)
    colours = {call.kwargs["label"]: call.kwargs["color"] for call in calls}
    assert colours["prompt lookup"] == "#8C8C8C"
    assert len(set(colours.values())) == 2


def test_curves_are_the_cumulative_acceptance(tmp_path):
    calls = _drawn("plot", lambda: plot_positions(small_report(), tmp_path / "p.png", temperature=0.0))
    curves = [list(call.args[2]) for call in calls]
    assert curves == [pytest.approx([6 / 8, 3 / 8, 1 / 8]), pytest.approx([1 / 4, 0, 0])]


def test_time_adds_up_to_the_total(tmp_path):
    report = small_report()
    calls = _drawn("barh", lambda: plot_components(report, tmp_path / "t.png"))
    tokens = sum(r.pooled(finished=f).tokens for r in report.results if r.proposer == "dfly" for f in (True, False))
    widths = [list(call.args[2])[-1] for call in calls]  # the first drafter is drawn on top, last in the list
    assert sum(widths) == pytest.approx(1000 * 2 * 0.6 / tokens)


def test_missing_figures_draw_an_empty_place(tmp_path):
    report = small_report().model_copy(update={"results": ()})
    assert plot_accepted_length(report, tmp_path / "a.png", temperature=0.0).is_file()
    assert plot_positions(report, tmp_path / "p.png", temperature=0.0).is_file()
    assert plot_components(report, tmp_path / "t.png").is_file()


def _log(folder, stage, *, steps, length, term):
    folder.mkdir()
    events = [{"kind": "held_out", "step": 0, "stage": stage, "accepted_length": 1.0}]
    events += [{"kind": "step", "step": s, "stage": stage, f"loss_{term}": 1 / s} for s in range(10, steps + 1, 10)]
    events += [{"kind": "skipped", "step": 15, "stage": stage, "gradient_norm": 1e9}]
    events += [{"kind": "held_out", "step": steps, "stage": stage, "accepted_length": length}]
    lines = [json.dumps(event) + "\n" for event in events]
    (folder / "metrics.jsonl").write_text("".join(lines) + '{"kind": "step", "st')  # a crash while writing
    return folder / "metrics.jsonl"


def test_stages_are_drawn_one_behind_the_other(tmp_path):
    logs = {
        "cold": _log(tmp_path / "cold", "cold", steps=100, length=1.8, term="ce"),
        "end": _log(tmp_path / "end", "end", steps=50, length=2.0, term="tv"),
    }
    calls = _drawn("plot", lambda: plot_training(logs, tmp_path / "training.png"))
    points = [list(zip(*call.args[1:3], strict=True)) for call in calls]
    assert points[0][-1] == (100, 1 / 100)
    assert points[1][0] == (110, 1 / 10)
    assert points[2] == [(0, 1.0), (100, 1.8)]
    assert points[3][-1] == (150, 2.0)
    assert (tmp_path / "training.png").read_bytes().startswith(PNG)


def test_runs_are_drawn_together(tmp_path):
    logs = {name: _log(tmp_path / name, "cold", steps=100, length=1.5, term="ce") for name in ("one", "two")}
    calls = _drawn("plot", lambda: plot_training(logs, tmp_path / "training.png", consecutive=False))
    assert [call.args[1][-1] for call in calls] == [100, 100, 100, 100]
    assert [call.kwargs["label"] for call in calls] == ["one: ce", "two: ce", "one", "two"]
    assert calls[0].kwargs["color"] != calls[1].kwargs["color"]


def test_a_log_without_events_draws_nothing(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("")
    assert plot_training({"cold": tmp_path / "metrics.jsonl"}, tmp_path / "training.png").is_file()
