"""The dense mask, entry by entry."""

import torch

from angelspec.ops.anchors import Anchors
from angelspec.ops.masks import dense_block_mask


def test_every_entry_follows_the_rule():
    document = torch.tensor([[0, 0, 0, 0, 1, 1, 1, -1], [2, 2, 2, 2, 2, 2, -1, -1]])
    anchors = Anchors(torch.tensor([0, 0, 1]), torch.tensor([2, 4, 3]))
    block = 2
    mask = dense_block_mask(document, anchors, block_size=block)
    rows, tokens = document.shape
    assert mask.shape == (3 * block, rows * tokens + 3 * block)
    for query in range(3 * block):
        anchor = query // block
        row, position = int(anchors.row_A[anchor]), int(anchors.position_A[anchor])
        for key in range(mask.shape[1]):
            if key < rows * tokens:
                key_row, token = divmod(key, tokens)
                expected = key_row == row and token < position and document[row, token] == document[row, position]
            else:
                expected = (key - rows * tokens) // block == anchor
            assert bool(mask[query, key]) == bool(expected)


def test_the_anchor_itself_is_not_context_but_its_predecessor_is():
    mask = dense_block_mask(
        torch.zeros(1, 5, dtype=torch.long), Anchors(torch.tensor([0]), torch.tensor([3])), block_size=2
    )
    assert mask[0, :5].tolist() == [True, True, True, False, False]
