"""Target-only acceptance: the vectorised rule against its definition, and its distribution (B29)."""

import pytest
import scipy.stats
import torch

from angelspec.ops.sampling import stream_keys
from angelspec.ops.verification import count_accepted, verify, verify_reference


def test_accepts_the_longest_equal_prefix_within_each_length():
    chosen_BQ = torch.tensor([[5, 6, 7, 8], [5, 6, 7, 8], [5, 6, 7, 8], [5, 6, 7, 8], [5, 6, 7, 8]])
    proposals_BK = torch.tensor([[5, 6, 7], [5, 9, 7], [4, 6, 7], [5, 6, 7], [5, 6, 7]])
    lengths_B = torch.tensor([3, 3, 3, 1, 0])
    assert count_accepted(proposals_BK, lengths_B, chosen_BQ).tolist() == [3, 1, 0, 1, 0]


def test_no_proposals_at_all():
    verdict = verify(
        torch.randn(2, 1, 7),
        proposals_BK=torch.empty(2, 0, dtype=torch.int64),
        lengths_B=torch.zeros(2, dtype=torch.int64),
        temperature=0.0,
    )
    assert verdict.accepted_B.tolist() == [0, 0]
    assert verdict.chosen_BQ.shape == (2, 1)


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("padding", [-1, 0])
def test_equals_the_reference(temperature, padding):
    generator = torch.Generator().manual_seed(1)
    batch, depth, vocabulary = 64, 5, 3  # a small vocabulary, so that every length is accepted sometimes
    logits_BQV = torch.randn(batch, depth + 1, vocabulary, generator=generator)
    proposals_BK = torch.randint(vocabulary, (batch, depth), generator=generator)
    lengths_B = torch.randint(depth + 1, (batch,), generator=generator)
    proposals_BK[torch.arange(depth) >= lengths_B.unsqueeze(1)] = padding
    key_BQ = stream_keys(torch.arange(batch).unsqueeze(1), torch.arange(depth + 1), seed=5)
    arguments = {
        "proposals_BK": proposals_BK,
        "lengths_B": lengths_B,
        "temperature": temperature,
        "key_BQ": key_BQ,
    }
    verdict = verify(logits_BQV, **arguments)
    committed = [
        chosen[: accepted + 1]
        for chosen, accepted in zip(verdict.chosen_BQ.tolist(), verdict.accepted_B.tolist(), strict=True)
    ]
    assert committed == verify_reference(logits_BQV, **arguments)
    assert set(verdict.accepted_B.tolist()) >= {0, 1, 2}


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="3 verified slots need 2 proposals"):
        verify(
            torch.randn(2, 3, 7),
            proposals_BK=torch.zeros(2, 3, dtype=torch.int64),
            lengths_B=torch.zeros(2, dtype=torch.int64),
            temperature=0.0,
        )


def _first_two_tokens(temperature, *, broken):
    """20 000 draws of the first two tokens of a tiny Markov target, one proposal per step, and their p-value."""
    draws, vocabulary = 20_000, 8
    generator = torch.Generator().manual_seed(0)
    first_V = torch.randn(vocabulary, generator=generator)
    second_VV = torch.randn(vocabulary, vocabulary, generator=generator)
    proposal = int(first_V.argmax())
    logits_BQV = torch.stack([first_V, second_VV[proposal]]).expand(draws, -1, -1)
    rows = torch.arange(draws)
    verdict = verify(
        logits_BQV,
        proposals_BK=torch.full((draws, 1), proposal),
        lengths_B=torch.ones(draws, dtype=torch.int64),
        temperature=temperature,
        key_BQ=stream_keys(rows.unsqueeze(1), torch.arange(2), seed=9),
    )
    first_B, second_B = verdict.chosen_BQ[:, 0].clone(), verdict.chosen_BQ[:, 1].clone()
    if broken:  # always accept
        first_B[:] = proposal
    else:
        rejected = (verdict.accepted_B == 0).nonzero().squeeze(1)
        follow = verify(
            second_VV[first_B[rejected]].unsqueeze(1),
            proposals_BK=torch.empty(len(rejected), 0, dtype=torch.int64),
            lengths_B=torch.zeros(len(rejected), dtype=torch.int64),
            temperature=temperature,
            key_BQ=stream_keys(rows[rejected].unsqueeze(1), torch.tensor([1]), seed=9),
        )
        second_B[rejected] = follow.chosen_BQ[:, 0]
    joint = torch.softmax(first_V.double() / temperature, -1).unsqueeze(1) * torch.softmax(
        second_VV.double() / temperature, -1
    )
    observed = torch.bincount(first_B * vocabulary + second_B, minlength=vocabulary**2).double()
    statistic = ((observed - joint.flatten() * draws) ** 2 / (joint.flatten() * draws)).sum()
    return scipy.stats.chi2.sf(float(statistic), vocabulary**2 - 1)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_joint_distribution_is_the_targets(temperature):
    assert _first_two_tokens(temperature, broken=False) > 1e-3
    assert _first_two_tokens(temperature, broken=True) < 1e-6
