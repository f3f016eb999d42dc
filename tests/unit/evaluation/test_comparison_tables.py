import pytest

from angelspec.core.acceptance import AcceptanceCounts
from angelspec.core.comparison import Comparison
from angelspec.evaluation.comparison import (
    ComparisonReport,
    Outcome,
    Training,
    comparison_tables,
    length_table,
    ordering_table,
    position_table,
    spread,
    verdict,
)
from angelspec.evaluation.comparison_plot import plot_comparison


def counts(length, steps=100):
    return AcceptanceCounts(generated_tokens=round(length * steps), verify_steps=steps)


def report(lengths, orderings=()):
    """``lengths``: variant to workload to one length per seed."""
    trained = {name: {} for name in lengths if name != "prompt lookup"}
    outcomes = [
        Outcome(
            variant=variant,
            seed=seed if variant in trained else None,
            mode="no-think",
            workload=workload,
            finished=counts(length),
            unfinished=AcceptanceCounts(),
        )
        for variant, by_workload in lengths.items()
        for workload, values in by_workload.items()
        for seed, length in enumerate(values)
    ]
    trainings = [
        Training(variant=v, seed=s, steps=9, supervised_positions=90, held_out_accepted_length=1.5, seconds=4.0)
        for v in trained
        for s in (0, 1)
    ]
    return ComparisonReport(
        comparison=Comparison(name="c", base="r", seeds=(0, 1), variants=trained, orderings=orderings),
        mode="no-think",
        target="t",
        temperature=0.0,
        trainings=trainings,
        outcomes=outcomes,
        seconds=60.0,
    )


LENGTHS = {
    "a": {"chat": [1.2, 1.4], "code": [2.0, 2.2]},
    "b": {"chat": [1.3, 1.3], "code": [1.5, 1.6]},
    "prompt lookup": {"chat": [1.1], "code": [1.9]},
}


def test_lengths_are_pooled_over_workloads_and_paired_by_seed():
    orderings = (
        {"claim": "a is better", "better": "a", "worse": "b", "workloads": ["code"]},
        {"claim": "on chat too", "better": "a", "worse": "b", "workloads": ["chat"]},
        {"claim": "b is better", "better": "b", "worse": "a"},
    )
    found = report(LENGTHS, orderings)
    assert found.lengths("a") == {0: pytest.approx(1.6), 1: pytest.approx(1.8)}
    assert found.differences(found.comparison.orderings[0]) == {0: pytest.approx(0.5), 1: pytest.approx(0.6)}
    rows = ordering_table(found).rows
    assert [row[-1] for row in rows] == ["holds", "undecided", "does not hold"]
    assert rows[0][3] == "+0.550 ± 0.071" and rows[0][4] == "+0.500, +0.600"


def test_the_table_shows_mean_and_deviation_and_lookup_without_one():
    table = length_table(report(LENGTHS), mode="no-think", finished=True)
    assert table.columns == ("variant", "chat", "code")
    assert table.rows[0] == ("a", "1.300 ± 0.141", "2.100 ± 0.141")
    assert table.rows[2] == ("prompt lookup", "1.100", "1.900")


def test_tables_without_answers_are_left_out():
    titles = [table.title for table in comparison_tables(report(LENGTHS))]
    assert [title.split(",")[0] for title in titles] == ["Accepted length on finished answers", "Training"]


def test_spread_and_verdict():
    assert spread([]) == "–" and spread([1.0]) == "1.000" and spread([1.0, 2.0]) == "1.500 ± 0.707"
    assert verdict([]) == "not measured" and verdict([0.1, -0.1]) == "undecided"
    assert verdict([0.1]) == "holds" and verdict([0.0, -1.0]) == "does not hold"


def test_the_record_survives_and_the_picture_is_drawn(tmp_path):
    found = report(LENGTHS)
    assert ComparisonReport.model_validate_json(found.save(tmp_path).read_text()) == found
    path = plot_comparison(found, tmp_path / "c.png")
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5000


def test_positions_are_shares_of_full_depth_steps():
    found = report(LENGTHS)
    deep = [
        outcome.model_copy(
            update={
                "finished": AcceptanceCounts(
                    generated_tokens=170, verify_steps=100, full_depth_steps=100, accepted_through=through
                )
            }
        )
        for outcome, through in zip(found.outcomes[:2], ((50, 20), (70, 20)), strict=True)
    ]
    (row,) = position_table(found.model_copy(update={"outcomes": tuple(deep)}), mode="no-think").rows
    assert row == ("a", "0.600 ± 0.141", "0.200 ± 0.000")
    assert position_table(found, mode="no-think").rows == (), "nothing was counted by position"
