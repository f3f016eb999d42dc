"""Block-wise search against ``topk`` and ``argmax``: ragged vocabularies, ties, NaN."""

from __future__ import annotations

import pytest
import torch

from angelspec.objectives.top_tokens import BLOCK, first_maximum, top_tokens

VOCABULARIES = [5, BLOCK - 1, BLOCK, BLOCK + 1, 20 * BLOCK, 40 * BLOCK + 13]


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("count", [1, 3, 5])
def test_top_tokens_match_topk(vocabulary: int, count: int) -> None:
    logits = torch.randn(200, vocabulary, generator=torch.Generator().manual_seed(vocabulary))
    found, expected = top_tokens(logits, count=count), logits.topk(count, 1)
    logits_RK, order_RK = found.logits_RK.sort(1, descending=True)
    assert torch.equal(logits_RK, expected.values)
    assert torch.equal(found.tokens_RK.gather(1, order_RK), expected.indices)


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_top_tokens_among_many_equal_logits_are_distinct_and_have_their_logits(vocabulary: int) -> None:
    logits = torch.randint(0, 3, (50, vocabulary), generator=torch.Generator().manual_seed(0)).float()
    found = top_tokens(logits, count=5)
    assert torch.equal(found.logits_RK.sort(1, descending=True).values, logits.topk(5, 1).values)
    assert torch.equal(logits.gather(1, found.tokens_RK), found.logits_RK)
    assert all(len(set(row)) == 5 for row in found.tokens_RK.tolist())


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_first_maximum_is_argmax_even_with_ties(vocabulary: int) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    for logits in (
        torch.randn(200, vocabulary, generator=generator),
        torch.randint(0, 3, (200, vocabulary), generator=generator).float(),
        torch.zeros(3, vocabulary),
    ):
        assert torch.equal(first_maximum(logits), logits.argmax(1))


def test_a_row_with_nan_is_found_out() -> None:
    logits = torch.randn(2, 5 * BLOCK)
    logits[1, 77] = float("nan")
    assert first_maximum(logits)[1] == 77


def test_no_rows() -> None:
    assert first_maximum(torch.empty(0, 5 * BLOCK)).shape == (0,)
    assert top_tokens(torch.empty(0, 50 * BLOCK), count=3).tokens_RK.shape == (0, 3)
