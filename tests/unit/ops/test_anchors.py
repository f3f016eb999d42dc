"""Anchors: the exact candidate rule (B14, B15) and the draw."""

import pytest
import torch

from angelspec.ops.anchors import anchor_candidates, document_starts, sample_anchors


def draw(loss_mask, document, *, block_size=8, num_anchors=1000, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return sample_anchors(loss_mask, document, block_size=block_size, num_anchors=num_anchors, generator=generator)


@pytest.mark.parametrize(("length", "count"), [(7, 0), (8, 1), (9, 2), (16, 9)])
def test_a_row_hosts_anchors_up_to_its_length_minus_the_block(length, count):
    anchors = draw(torch.ones(1, length, dtype=torch.bool), torch.zeros(1, length, dtype=torch.long))
    assert anchors.position_A.tolist() == list(range(count))


def test_documents_of_exactly_one_block_start_at_their_first_token():
    document = torch.arange(3).repeat_interleave(8)[None]
    anchors = draw(torch.ones(1, 24, dtype=torch.bool), document)
    assert anchors.position_A.tolist() == [0, 8, 16]


def test_candidates_follow_the_rule_word_by_word():
    generator = torch.Generator().manual_seed(0)
    block = 3
    for _ in range(20):
        document = torch.randint(-1, 3, (4, 12), generator=generator).sort(dim=1).values
        supervised = torch.rand(4, 12, generator=generator) < 0.7
        candidates = anchor_candidates(supervised, document, block_size=block)
        for row in range(4):
            for a in range(12):
                expected = (
                    a <= 12 - block
                    and bool(supervised[row, a])
                    and bool((document[row, a : a + block] == document[row, a]).all())
                    and int(document[row, a]) >= 0
                )
                assert bool(candidates[row, a]) == expected


def test_padding_hosts_nothing_and_rows_are_ordered():
    document = torch.tensor([[0] * 6 + [-1] * 4, [1] * 10])
    anchors = draw(torch.ones(2, 10, dtype=torch.bool), document, block_size=3, num_anchors=5)
    assert anchors.row_A.tolist() == [0] * 4 + [1] * 5
    assert anchors.position_A[:4].tolist() == [0, 1, 2, 3]
    assert anchors.position_A[4:].tolist() == sorted(set(anchors.position_A[4:].tolist()))


def test_the_draw_is_uniform_without_replacement_and_follows_the_seed():
    mask, document = torch.ones(1, 20, dtype=torch.bool), torch.zeros(1, 20, dtype=torch.long)
    counts = torch.zeros(20)
    for seed in range(2000):
        position = draw(mask, document, block_size=2, num_anchors=5, seed=seed).position_A
        assert len(set(position.tolist())) == 5
        counts[position] += 1
    expected = 2000 * 5 / 19
    assert counts[19] == 0
    assert ((counts[:19] - expected) ** 2 / expected).sum() < 42.3  # chi-square, 18 degrees of freedom, p = 0.001
    assert torch.equal(draw(mask, document, seed=3).position_A, draw(mask, document, seed=3).position_A)
    few = [draw(mask, document, num_anchors=3, seed=seed).position_A.tolist() for seed in (1, 2)]
    assert few[0] != few[1]


def test_document_starts():
    document = torch.tensor([[4, 4, 4, 9, 9, -1, -1], [2, 3, 3, 3, -1, -1, -1]])
    assert document_starts(document).tolist() == [[0, 0, 0, 3, 3, 5, 5], [0, 1, 1, 1, 4, 4, 4]]
    with pytest.raises(ValueError, match="two separate runs"):
        document_starts(torch.tensor([[1, 1, 2, 1]]))
