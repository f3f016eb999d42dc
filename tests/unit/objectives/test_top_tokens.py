"""Block-wise and threshold search against ``topk`` and ``argmax``: ragged vocabularies, ties, NaN."""

from __future__ import annotations

import pytest
import torch

from angelspec.objectives import top_tokens as search
from angelspec.objectives.top_tokens import BLOCK, first_maximum, top_threshold, top_tokens

VOCABULARIES = [5, BLOCK - 1, BLOCK, BLOCK + 1, 20 * BLOCK, 40 * BLOCK + 13]


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("count", [1, 3, 5])
def test_top_tokens_match_topk(vocabulary: int, count: int) -> None:
    logits = torch.randn(200, vocabulary, generator=torch.Generator().manual_seed(vocabulary))
    found, expected = top_tokens(logits, count=count), logits.topk(count, 1)
    logits_RK, order_RK = found.logits_TK.sort(1, descending=True)
    assert torch.equal(logits_RK, expected.values)
    assert torch.equal(found.tokens_TK.gather(1, order_RK), expected.indices)


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_top_tokens_among_many_equal_logits_are_distinct_and_have_their_logits(vocabulary: int) -> None:
    logits = torch.randint(0, 3, (50, vocabulary), generator=torch.Generator().manual_seed(0)).float()
    found = top_tokens(logits, count=5)
    assert torch.equal(found.logits_TK.sort(1, descending=True).values, logits.topk(5, 1).values)
    assert torch.equal(logits.gather(1, found.tokens_TK), found.logits_TK)
    assert all(len(set(row)) == 5 for row in found.tokens_TK.tolist())


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
    assert top_tokens(torch.empty(0, 50 * BLOCK), count=3).tokens_TK.shape == (0, 3)
    assert top_threshold(torch.empty(0, 50 * BLOCK), count=300).shape == (0,)


SHAPES = {
    "normal": lambda x: x,
    "one-sided": lambda x: x.exp(),
    "two hills": lambda x: x + 30.0 * (x > 0.3),
    "heavy tails": lambda x: x**5,
    "far from zero": lambda x: x + 1e4,
    "mostly equal": lambda x: x.clamp(min=1.0),
    "bfloat16": lambda x: x.bfloat16().float(),
    "constant": lambda x: torch.zeros_like(x),
}


@pytest.mark.parametrize("count", [1, 2, 199, 1000, 2998, 2999, 3000])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_threshold_is_reached_by_exactly_so_many_or_by_all_that_share_the_last_place(
    shape: str, count: int
) -> None:
    logits = SHAPES[shape](torch.randn(40, 3000, generator=torch.Generator().manual_seed(count)))
    found = top_threshold(logits, count=count)
    least = logits.topk(count, 1).values[:, -1:]
    assert torch.equal(logits >= found[:, None], logits >= least)


def test_few_counts_suffice_for_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = []
    original = search._count_reaching
    monkeypatch.setattr(search, "_count_reaching", lambda *a: counted.append(1) or original(*a))
    monkeypatch.setattr(search, "_sorted_threshold", None)
    generator = torch.Generator().manual_seed(0)
    states, head = torch.randn(16, 64, generator=generator), torch.randn(20_000, 64, generator=generator) * 0.3
    top_threshold(states @ head.T, count=4000)
    assert len(counted) <= 9


def test_a_row_with_nan_costs_its_neighbours_nothing() -> None:
    logits = torch.randn(3, 3000)
    logits[1, 5] = float("nan")
    found = top_threshold(logits, count=700)
    assert ((logits >= found[:, None]).sum(1)[[0, 2]] == 700).all()
