"""Prompt lookup against its definition, and the proposer that proposes nothing."""

import torch

from angelspec.decoding.proposers import LookupProposer, NoProposer, copy_match, lookup_reference


def _propose(proposer, histories, rows=None):
    rows = torch.arange(len(histories)) if rows is None else rows
    return proposer.propose(
        rows,
        histories=histories,
        last_token_B=torch.tensor([history[-1] for history in histories]),
        position_B=torch.tensor([len(history) - 1 for history in histories]),
    )


def test_the_longest_suffix_wins_over_a_later_shorter_one():
    history = [1, 2, 3, 50, 51, 9, 3, 60, 61, 1, 2, 3]
    assert lookup_reference(history, max_match=3, num_proposals=2) == [50, 51]
    assert lookup_reference(history, max_match=1, num_proposals=2) == [60, 61]


def test_the_most_recent_occurrence_wins():
    assert lookup_reference([5, 10, 5, 11, 5], max_match=3, num_proposals=1) == [11]


def test_a_match_that_reaches_the_end_reads_on_in_its_own_copy():
    assert lookup_reference([7, 7], max_match=3, num_proposals=4) == [7, 7, 7, 7]
    assert lookup_reference([1, 2, 3, 1, 2, 3], max_match=3, num_proposals=7) == [1, 2, 3, 1, 2, 3, 1]
    assert copy_match([4, 5, 6], start=1, count=5) == [5, 6, 5, 6, 5]


def test_no_match_and_too_short_a_history_propose_nothing():
    assert lookup_reference([1, 2, 3], max_match=3, num_proposals=7) == []
    assert lookup_reference([1], max_match=3, num_proposals=7) == []
    proposer = LookupProposer(max_match=3, num_proposals=7)
    proposer.start(2, capacity=8)
    assert _propose(proposer, [[1, 2, 3], [1]]).lengths_B.tolist() == [0, 0]


def test_growing_histories_equal_the_reference_and_rows_are_apart():
    generator = torch.Generator().manual_seed(0)
    proposer = LookupProposer(max_match=3, num_proposals=4)
    proposer.start(3, capacity=400)
    histories = [torch.randint(4, (5,), generator=generator).tolist() for _ in range(3)]
    found = 0
    for step in range(60):
        if step == 30:  # row 1 gets another request
            proposer.reset(torch.tensor([1]))
            histories[1] = torch.randint(4, 8, (6,), generator=generator).tolist()
        proposals = _propose(proposer, histories)
        for index, history in enumerate(histories):
            expected = lookup_reference(history, max_match=3, num_proposals=4)
            length = int(proposals.lengths_B[index])
            assert proposals.tokens_BK[index, :length].tolist() == expected
            found += length > 0
            high = 8 if index == 1 and step >= 30 else 4
            grow = int(torch.randint(1, 4, (1,), generator=generator))
            histories[index] = history + torch.randint(high - 4, high, (grow,), generator=generator).tolist()
    assert found > 100


def test_longer_matches_are_trusted_more():
    proposer = LookupProposer(max_match=3, num_proposals=2)
    proposer.start(2, capacity=20)
    confidence = _propose(proposer, [[1, 2, 3, 9, 1, 2, 3], [8, 3, 9, 7, 3]]).confidence_BK
    assert (confidence[0] > confidence[1]).all()


def test_no_proposer_offers_no_tokens():
    proposals = _propose(NoProposer(), [[1, 2], [3]])
    assert proposals.tokens_BK.shape == (2, 0)
    assert proposals.lengths_B.tolist() == [0, 0]
