"""Tables of a load test: what stands in each cell, the marks of faulty windows, and the report around them."""

import io

import pytest
from rich.console import Console
from serving_builders import bench_result

from angelspec.evaluation.serve_plot import plot_bench
from angelspec.evaluation.serve_tables import (
    bench_markdown,
    draft_table,
    print_bench,
    speed_table,
    speedup_table,
    time_table,
    user_ratio_table,
    user_table,
)


@pytest.fixture
def result():
    return bench_result()


def test_cells(result):
    settings = result.settings.model_copy(update={"concurrency": (4, 8)})
    result = result.model_copy(update={"settings": settings})
    assert result.faults[0] == "broken off after 6 of 12 windows"
    speed = speed_table(result, traffic="code")
    assert speed.columns == ("concurrency", "ar", "dfly", "control")
    assert speed.rows == (("4", "10.0", "19.0†‡, 1.90×, 2.00", "11.0, 1.10×"),)  # nothing was measured at 8
    (row,) = speedup_table(result, traffic="code").rows
    assert row[1] == "–"
    assert row[2].startswith("[0.97, 3.7")  # sqrt(2.0 * 1.8) = 1.897, over two repeats
    assert row[3] == "[1.10, 1.10]"
    assert user_table(result, traffic="code").rows[0][2] == "10.0, 200 ms"
    (row,) = user_ratio_table(result, traffic="code").rows
    assert row[1:] == ("–", *["1.00× [1.00, 1.00], 1.00× [1.00, 1.00]"] * 2)
    assert draft_table(result, traffic="code").rows[0][1:] == ("–", "100.0 %, 0.50", "–")


def test_where_the_time_goes(result):
    (row,) = time_table(result).rows
    assert row == ("dfly", "100", "75.0 %", "20.0 %", "50.0 %", "100.0", "10.0 %", "5.0 %", "80.0 %", "5.0 %", "5.0 %")


def test_faults_stand_before_the_results(result):
    text = bench_markdown(result, plots={"Speed": "speedup.png"})
    assert text.index("## Faults") < text.index("## Results")
    assert "code, concurrency 4, dfly, repeat 1: the window took 10.0 s, the minimum is 10 s" in text
    assert "code, concurrency 4, dfly, repeat 1: 3 row(s) were decoded plainly because their drafter was not f" in text
    assert "code, concurrency 4, dfly, repeat 2: 1 request(s) failed, first: p1: gone" in text
    assert "![Speed](speedup.png)" in text
    for name in ("speedup", "kept ratio", "accepted length", "control", "†", "‡"):
        assert f"- **{name}**: " in text
    output = io.StringIO()
    print_bench(result, console=Console(file=output, width=120))
    assert output.getvalue().count("fault: ") == 3


def test_pictures(result, tmp_path):
    for path in plot_bench(result, tmp_path).values():
        assert path.read_bytes().startswith(b"\x89PNG")
