"""The metrics, by hand-made counts (B30: pooled, never a mean of means)."""

import pytest

from angelspec.core.acceptance import AcceptanceCounts, count_steps, pool, repeated_ngram_share


def test_b30_the_mean_accepted_length_is_pooled():
    request_a = count_steps([1] * 50, [3] * 50, [3] * 50, depth=3)
    request_b = count_steps([4] * 60, [4] * 60, [4] * 60, depth=4)
    assert (request_a.generated_tokens, request_b.generated_tokens) == (100, 300)
    pooled = pool([request_a, request_b])
    assert pooled.mean_accepted_length == pytest.approx(400 / 110)
    assert pooled.mean_accepted_length != pytest.approx((2 + 5) / 2)


def test_cumulative_acceptance_counts_full_depth_steps_only():
    counts = count_steps([3, 0, 2, 1], [3, 3, 2, 3], [3, 3, 3, 3], depth=3)
    assert counts.full_depth_steps == 3  # the cut step says nothing of proposal 3, and so nothing at all
    assert counts.accepted_through == (2, 1, 1)
    assert counts.cumulative_acceptance == pytest.approx((2 / 3, 1 / 3, 1 / 3))


def test_at_full_depth_the_mean_is_one_plus_the_sum_of_p():
    counts = count_steps([7, 0, 3, 5, 1], [7] * 5, [7] * 5, depth=7)
    assert counts.mean_accepted_length == pytest.approx(1 + sum(counts.cumulative_acceptance))
    assert list(counts.cumulative_acceptance) == sorted(counts.cumulative_acceptance, reverse=True)


def test_a_step_ended_by_a_stop_token_commits_less():
    counts = count_steps([2, 3], [3, 3], [3, 3], depth=3, committed=[3, 1])
    assert counts.generated_tokens == 4
    assert counts.mean_accepted_length == 2.0


def test_the_keep_ratio_counts_anchors():
    counts = count_steps([0, 0], [1, 3], [7, 7], depth=7)
    assert counts.kept_ratio == pytest.approx((4 + 2) / (14 + 2))


def test_nothing_measured_is_none_not_zero():
    empty = AcceptanceCounts()
    assert empty.mean_accepted_length is None
    assert empty.kept_ratio is None
    assert empty.cumulative_acceptance == ()
    plain = count_steps([0, 0], [0, 0], [0, 0], depth=0)
    assert plain.mean_accepted_length == 1.0


def test_sums_of_different_depths():
    total = count_steps([1], [1], [1], depth=1) + count_steps([2], [2], [2], depth=2)
    assert total.accepted_through == (2, 1)
    assert AcceptanceCounts.model_validate_json(total.model_dump_json()) == total


@pytest.mark.parametrize(
    ("accepted", "proposed", "drafted"),
    [([2], [1], [3]), ([1], [3], [2]), ([1], [4], [4]), ([-1], [3], [3])],
)
def test_impossible_steps_are_refused(accepted, proposed, drafted):
    with pytest.raises(ValueError, match="a step accepted"):
        count_steps(accepted, proposed, drafted, depth=3)


def test_sequences_of_different_lengths_are_refused():
    with pytest.raises(ValueError, match="one entry per verify step"):
        count_steps([1, 1], [1], [1, 1], depth=1)


def test_repeated_share():
    assert repeated_ngram_share(range(100)) == 0.0
    assert repeated_ngram_share([1] * 11) == 0.0  # no 12-gram
    assert repeated_ngram_share([1] * 13) == pytest.approx(1 / 2)
    loop = list(range(20)) * 5
    assert repeated_ngram_share(loop) == pytest.approx(1 - 20 / 89)
    assert repeated_ngram_share([1, 2, 1, 2, 1], n=2) == pytest.approx(2 / 4)
