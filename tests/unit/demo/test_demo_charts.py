"""What a visit measured, what load tests measured, and both as charts."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

from angelspec.core.request_label import RequestMetadata
from angelspec.demo.charts import acceptance_chart, accepted_runs, kept_chart, throughput_chart
from angelspec.demo.columns import Column, Server
from angelspec.demo.plots import Chart, line_chart, ticks
from angelspec.demo.stream import ColumnState
from angelspec.serving.answers import ChatChunk, Piece


def state(positions: list[int], *, title: str = "DFly", plain: bool = False, kept: float | None = None) -> ColumnState:
    found = ColumnState(Column(title, title, "", Server("s", "http://x"), {}, depth=3, plain=plain))
    meta = RequestMetadata(route="dfly", why="", workload="chat", mode=None, verify_steps=1, accepted_length=1.0,
                           generated_tokens=1, drafted_tokens=3, proposed_tokens=3, kept_ratio=kept,
                           speculative_share=1.0)  # fmt: skip
    for second, position in enumerate(positions, start=1):
        found.add(ChatChunk(text="x", pieces=(Piece("x", position),), metadata=meta, seconds=float(second)))
    return found


@pytest.mark.parametrize(
    ("positions", "runs"),
    [
        ([], []), ([0], []), ([0, 0, 0], [0, 0]), ([0, 1, 2, 0], [2]), ([0, 1, 0, 0, 1, 2, 3, 0], [1, 0, 3]),
        ([0, 1, 2, 0, 1, 2], [2]),
    ],
)  # fmt: skip
def test_steps_are_found_again_in_the_positions(positions, runs):
    assert accepted_runs(positions) == runs


def test_acceptance_is_pooled_over_a_columns_answers():
    states = [state([0, 1, 2, 3, 0]), state([0, 0, 1, 0, 0]), state([0, 0], plain=True), state([0, 1, 0], title="MTP")]
    lines = acceptance_chart(states).lines
    assert lines == {"DFly": [(1.0, 0.5), (2.0, 0.25), (3.0, 0.25)], "MTP": [(1.0, 1.0), (2.0, 0.0), (3.0, 0.0)]}


def test_kept_ratios_of_several_answers_follow_one_another():
    lines = kept_chart([state([0, 1], kept=0.5), state([0], kept=0.75), state([0, 0], kept=1.0, plain=True)]).lines
    assert lines == {"DFly": [(1.0, 0.5), (2.0, 0.5), (3.0, 0.75)]}
    assert len(kept_chart([state([0] * 1000, kept=0.5)]).lines["DFly"]) < 130


def test_throughput_has_a_line_per_choice_and_tells_sets_and_files_apart():
    def result(*cells):
        keys = ("traffic", "concurrency", "choice", "tokens_per_second")
        return SimpleNamespace(cells=[SimpleNamespace(**dict(zip(keys, cell, strict=True))) for cell in cells])

    one = result(("mixed", 4, "ar", 90.0), ("mixed", 1, "ar", 30.0), ("mixed", 1, "dfly", None))
    assert throughput_chart([one]).lines == {"ar": [(1.0, 30.0), (4.0, 90.0)]}
    two = result(("chat", 1, "ar", 1.0), ("code", 1, "ar", 2.0))
    assert list(throughput_chart([two]).lines) == ["ar, chat", "ar, code"]
    assert list(throughput_chart([one, one]).lines) == ["ar, #1", "ar, #2"]
    assert "angelspec bench serve" in line_chart(throughput_chart([]))


# ---------------------------------------------------------------------------------------------- drawing


@pytest.mark.parametrize(
    ("top", "expected"),
    [(1, [0, 0.2, 0.4, 0.6, 0.8, 1.0]), (97, [0, 20, 40, 60, 80, 100]), (12, [0, 2.5, 5, 7.5, 10, 12.5]), (0, None)],
)
def test_axes_have_round_marks(top, expected):
    found = ticks(top)
    assert found == expected if expected else found[0] == 0
    assert found[-1] >= top


def test_points_lie_where_their_values_say():
    chart = Chart("t", "x", "y", {"<a>": [(1.0, 0.0), (2.0, 50.0), (4.0, 100.0)]}, doubling=True)
    drawn = line_chart(chart)
    xs, ys = zip(
        *[(float(x), float(y)) for x, y in re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)"', drawn)], strict=True
    )
    assert xs[1] - xs[0] == pytest.approx(xs[2] - xs[1]), "doubling is an equal step"
    assert ys[0] - ys[1] == pytest.approx(ys[1] - ys[2]) and ys[0] > ys[2]
    assert "<a>" not in drawn and "&lt;a&gt;" in drawn


def test_one_point_is_drawn():
    assert "<circle" in line_chart(Chart("t", "x", "y", {"a": [(1.0, 5.0)]}, doubling=True))
