"""The report: round trip, pooled tables, definitions."""

import io

import pytest
from evaluation_builders import small_report
from rich.console import Console

from angelspec.core.acceptance import AcceptanceCounts
from angelspec.core.errors import DataError
from angelspec.evaluation.acceptance_tables import exactness_table, length_table, lookup_table, position_table
from angelspec.evaluation.rendering import print_report, tables, to_markdown, write_report
from angelspec.evaluation.report import Report
from angelspec.evaluation.results import Divergence, ExactnessResult, ShortlistResult
from angelspec.evaluation.speed_tables import shortlist_table, speed_table
from angelspec.evaluation.tables import MISSING


def _cells(table, label):
    return dict(zip(table.columns, next(row for row in table.rows if row[0] == label), strict=True))


def test_json_round_trip(tmp_path):
    report = small_report()
    as_json, as_markdown = write_report(report, tmp_path)
    assert Report.load(as_json) == report
    assert as_markdown.read_text(encoding="utf-8") == to_markdown(report)


def test_a_foreign_or_broken_file_is_refused_by_name(tmp_path):
    path = tmp_path / "report.json"
    for text in ("{", "{}", small_report().model_dump_json().replace('"format_version":1', '"format_version":2')):
        path.write_text(text)
        with pytest.raises(DataError, match="report.json is no report"):
            Report.load(path)
    with pytest.raises(DataError):
        Report.load(tmp_path / "missing.json")


def test_the_mean_is_pooled_over_suites_not_averaged():
    """B30: 100 tokens in 50 steps and 300 in 60 are 400/110, not (2 + 5) / 2."""
    report = small_report(steps={"a": ([1] * 50, 3), "b": ([4] * 60, 4)}, drafters=("dfly",))
    table = length_table(report, temperature=0.0, finished=True)
    assert _cells(table, "a")["dfly"] == "2.00"
    assert _cells(table, "b")["dfly"] == "5.00"
    assert _cells(table, "all")["dfly"] == "3.64"
    assert "pooled" in table.caption


def test_the_best_is_bold_and_every_table_has_the_lookup_column():
    report = small_report()
    table = length_table(report, temperature=0.0, finished=True)
    assert table.columns == ("suite", "dfly", "prompt lookup", "finished answers", "repeated 12-grams")
    row = _cells(table, "a")
    assert row["dfly"].startswith("**")
    assert not row["prompt lookup"].startswith("**")
    assert row["finished answers"] == "2 of 3"
    assert row["repeated 12-grams"] == "25.0 %"


def test_unfinished_answers_stand_apart():
    report = small_report()
    finished = report.pooled("dfly", temperature=0.0)
    unfinished = report.pooled("dfly", temperature=0.0, finished=False)
    assert (finished.answers, unfinished.answers) == (4, 2)
    assert _cells(length_table(report, temperature=0.0, finished=False), "all")["unfinished answers"] == "2 of 6"


def test_ratio_to_lookup():
    report = small_report(steps={"a": ([2] * 10, 3)}, lookup_steps={"a": ([0] * 15, 3)})
    row = _cells(lookup_table(report), "all code, temperature 0")
    assert row == {
        "workload": "all code, temperature 0", "dfly": "3.00x", "prompt lookup: accepted length": "1.00",
    }  # fmt: skip


def test_position_table_is_over_full_depth_steps():
    report = small_report(steps={"a": ([3, 0, 1, 0], 3)}, drafters=("dfly",))
    row = _cells(position_table(report, temperature=0.0), "dfly, all")
    assert [row["p1"], row["p2"], row["p3"]] == ["0.500", "0.250", "0.250"]
    assert row["full-depth steps"] == "8"  # two finished answers
    assert row["kept ratio"] == "100.0 %"


def test_mtp_and_block_drafters_share_a_table_each_to_its_depth():
    report = small_report(
        steps={"a": ([7, 5, 0, 0], 7)}, mtp_steps={"a": ([3, 3, 1, 0], 3)}, drafters=("mtp", "dfly", "prompt lookup")
    )
    table = position_table(report, temperature=0.0)
    assert table.columns[1:8] == tuple(f"p{k}" for k in range(1, 8))
    mtp, dfly = _cells(table, "mtp, all"), _cells(table, "dfly, all")
    assert [mtp[f"p{k}"] for k in range(1, 8)] == ["0.750", "0.500", "0.500", "–", "–", "–", "–"]
    assert [dfly[f"p{k}"] for k in range(1, 8)] == ["0.500"] * 5 + ["0.250"] * 2
    lengths = _cells(length_table(report, temperature=0.0, finished=True), "a")
    assert (lengths["mtp"], lengths["dfly"]) == ("2.75", "**4.00**")
    assert _cells(lookup_table(report), "all code, temperature 0")["mtp"] == "2.20x"


def test_speed_is_pooled_too():
    table = speed_table(small_report())
    assert _cells(table, "a, temperature 0")["dfly"] == "50.0 (2.00x)"
    assert _cells(table, "b, temperature 0")["dfly"] == "25.0 (1.00x)"
    assert _cells(table, "all, temperature 0")["dfly"] == "33.3 (1.33x)"
    assert _cells(table, "all, temperature 0")["plain"] == "25.0"
    assert "in turns, batch 3, on" in table.caption  # of the 4 that the settings allow, as many as there were prompts


def test_a_divergence_is_told_with_its_gap():
    first = Divergence(prompt_id="a|1", position=41, plain_token=4, speculative_token=5, top2_gap=0.00021)
    result = ExactnessResult(
        proposer="dfly", temperature=0.0, dtype="bfloat16", prompts=8, tokens=1834, identical=7, first_divergence=first
    )
    report = small_report().model_copy(update={"exactness": (result,)})
    assert _cells(exactness_table(report), "dfly, temperature 0")["identical answers"] == "7 of 8"
    assert "prompt a\\|1, token 41, top-2 logit gap 0.00021" in to_markdown(report)


def test_markdown_says_what_was_measured_where_and_how():
    report = small_report()
    text = to_markdown(report, plots={"Accepted length": "accepted.png"})
    for part in (
        *report.definitions.values(), report.machine.description, *report.commands, report.target.digest, "no-think",
        f"torch {report.versions['torch']}", "seed 3", "batch 4", "no cut", "![Accepted length](accepted.png)", "a (3)",
    ):  # fmt: skip
        assert part in text, part
    lines = text.splitlines()
    for index, line in enumerate(lines):
        if line.startswith("|---"):
            assert line.count("|") == lines[index - 1].count("|") == lines[index + 1].count("|")


def test_the_terminal_shows_every_table_without_markup_of_markdown():
    stream = io.StringIO()
    print_report(small_report(), console=Console(file=stream, width=200))
    shown = stream.getvalue()
    assert "**" not in shown
    assert all(table.title in shown for table in tables(small_report()))


def test_empty_tables_are_left_out():
    report = small_report().model_copy(update={"speed": (), "exactness": (), "shortlist": ()})
    titles = [table.title for table in tables(report)]
    assert not any("Speed" in title or "plain decoding" in title or "Shortlist" in title for title in titles)


def test_drafters_that_finish_other_answers_show_their_own_counts():
    report = small_report()

    def turned(result):
        groups = [
            group.model_copy(update={"finished": group.unfinished, "unfinished": group.finished})
            for group in result.groups
        ]
        return result.model_copy(update={"groups": tuple(groups)})

    results = tuple(turned(item) if item.proposer == "prompt lookup" else item for item in report.results)
    table = length_table(report.model_copy(update={"results": results}), temperature=0.0, finished=True)
    assert _cells(table, "a")["finished answers"] == "2/1 of 3"
    assert _cells(table, "a")["repeated 12-grams"] == "25.0 %"


def test_a_shortlist_of_answers_without_a_step_has_no_time_per_block():
    empty = ShortlistResult(size=8, counts=AcceptanceCounts(), draft_seconds=0.0, total_seconds=1.0, tokens=3)
    report = small_report().model_copy(update={"shortlist": (empty,)})
    assert shortlist_table(report).rows[0][3] == MISSING
