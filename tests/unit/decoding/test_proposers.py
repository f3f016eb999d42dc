"""Prompt lookup against its definition, the block drafter in the loop, and the proposer that proposes nothing."""

import pytest
import torch
from decoding_builders import small_target
from drafter_builders import tiny_drafter

from angelspec.core.errors import CheckpointError
from angelspec.decoding.block_proposer import BlockProposer
from angelspec.decoding.lookup import LookupProposer, copy_match, lookup_reference
from angelspec.decoding.plain import decode_without_cache
from angelspec.decoding.proposer import NoProposer
from angelspec.decoding.speculative import decode


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


def _fitting_drafter(name, **changes):
    """A drafter for ``small_target(vocab_size=50, num_layers=3)``."""
    fit = {"hidden_size": 32, "target_hidden_size": 32, "target_num_layers": 3, "target_layer_ids": (0, 1, 2)}
    return tiny_drafter(name, **fit, **changes)


@pytest.mark.parametrize("name", ["dflash", "dflare", "dspark", "dfly"])
def test_a_block_drafter_keeps_its_context_through_rollbacks(name):
    """What it drafts in the loop is what it drafts from the whole history at once."""
    target = small_target(vocab_size=50, num_layers=3)
    drafter = _fitting_drafter(name, block_size=4).eval()
    proposer = BlockProposer(drafter, target=target, name=name)
    calls = 0
    inner = proposer.propose

    def checked(rows, *, histories, last_token_B, position_B):
        nonlocal calls
        proposals = inner(rows, histories=histories, last_token_B=last_token_B, position_B=position_B)
        for index, history in enumerate(histories):
            fresh = drafter.context_cache(1, capacity=len(history))
            drafter.extend_context(
                fresh, target.forward(torch.tensor([history[:-1]]), layer_ids=proposer.layer_ids).taps_BTF
            )
            drafts = drafter.draft(
                fresh,
                anchor_tokens_B=torch.tensor([history[-1]]),
                anchor_positions_B=torch.tensor([len(history) - 1]),
                embedding_VD=target.embedding_VD,
                head_VD=target.head_VD,
            )
            assert proposals.tokens_BK[index].tolist() == drafts.tokens_BK[0].tolist()
            torch.testing.assert_close(proposals.confidence_BK[index], drafts.confidence_BK[0], atol=1e-3, rtol=1e-3)
            calls += 1
        return proposals

    proposer.propose = checked
    prompts = [[2 + i % 5, 3, 7][: 1 + i % 3] for i in range(4)]
    run = decode(target, proposer, prompts, max_new_tokens=9, temperature=0.0, seed=0, batch_size=2)
    plain = decode_without_cache(target, prompts, max_new_tokens=9, temperature=0.0, seed=0)
    assert [answer.tokens for answer in run.answers] == [answer.tokens for answer in plain]
    assert calls >= 12


def test_identity_follows_weights_and_shortlist():
    target = small_target(vocab_size=50, num_layers=3)

    def identity(seed=0, shortlist=None, name="dfly"):
        drafter = _fitting_drafter(name, seed=seed)
        return dict(BlockProposer(drafter, target=target, name="x", shortlist=shortlist).identity)

    assert identity() == identity()
    assert identity() != identity(seed=1)
    assert identity() != identity(shortlist=8)
    assert identity(name="dflash") == identity(name="dflash", shortlist=8)


def test_a_drafter_of_another_target_is_refused():
    with pytest.raises(CheckpointError, match="vocab_size is 50 but the target has 32"):
        BlockProposer(_fitting_drafter("dfly"), target=small_target(num_layers=3), name="foreign")
