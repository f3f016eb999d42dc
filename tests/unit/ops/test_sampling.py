"""The random stream and the sampler: reproducible, uniform, and of the right distribution."""

import pytest
import scipy.stats
import torch

from angelspec.ops.sampling import probabilities, sample_tokens, uniforms


def test_uniforms_match_splitmix_in_plain_integers():
    mask = 2**64 - 1

    def mix(value):
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
        return value ^ (value >> 31)

    golden = 0x9E3779B97F4A7C15
    for seed, row, position in [(0, 0, 0), (7, 3, 511), (-1, 12, 100_000), (2**63 + 5, 1, 2)]:
        state = mix(((seed & mask) + golden) & mask)
        state = mix((state + (row + 1) * golden) & mask)
        state = mix((state + (position + 1) * golden) & mask)
        actual = uniforms(torch.tensor(row), torch.tensor(position), seed=seed)
        assert float(actual) == (state >> 12) * 2.0**-52


def test_a_number_depends_on_seed_row_and_position_only():
    rows, positions = torch.tensor([[2], [9]]), torch.arange(5, 8)
    block = uniforms(rows, positions, seed=3)
    assert block.shape == (2, 3)
    assert block[1, 2] == uniforms(torch.tensor(9), torch.tensor(7), seed=3)
    assert block.unique().numel() == 6
    assert not torch.equal(block, uniforms(rows, positions, seed=4))


@pytest.mark.parametrize("axis", ["rows", "positions", "seeds"])
def test_uniform_along_each_axis(axis):
    count = torch.arange(20_000)
    zero = torch.tensor(0)
    if axis == "rows":
        numbers = uniforms(count, zero, seed=0)
    elif axis == "positions":
        numbers = uniforms(zero, count, seed=0)
    else:
        numbers = torch.stack([uniforms(zero, zero, seed=seed) for seed in range(4000)])
    assert ((numbers >= 0) & (numbers < 1)).all()
    assert scipy.stats.kstest(numbers.numpy(), "uniform").pvalue > 1e-3
    pairs = torch.stack([numbers[:-1], numbers[1:]])
    assert abs(float(torch.corrcoef(pairs)[0, 1])) < 0.05


@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.5])
def test_samples_follow_the_softmax(temperature):
    logits = torch.tensor([2.0, -1.0, 0.5, 0.0, -30.0, 1.0])
    draws = 20_000
    uniform_N = uniforms(torch.arange(draws), torch.tensor(4), seed=11)
    tokens = sample_tokens(logits.expand(draws, -1), temperature=temperature, uniform_N=uniform_N)
    expected = torch.softmax(logits.double() / temperature, -1) * draws
    observed = torch.bincount(tokens, minlength=6).double()
    common = expected > 5
    statistic = ((observed - expected)[common] ** 2 / expected[common]).sum()
    assert scipy.stats.chi2.sf(float(statistic), int(common.sum()) - 1) > 1e-3


def test_the_ends_of_the_unit_interval_never_draw_an_impossible_token():
    logits_NV = torch.tensor([[-torch.inf, 0.0, 0.0, -torch.inf]]).expand(3, -1)
    tokens = sample_tokens(
        logits_NV, temperature=1.0, uniform_N=torch.tensor([0.0, 0.5, 1 - 2.0**-52], dtype=torch.float64)
    )
    assert tokens.tolist() == [1, 2, 2]


def test_temperature_zero_is_the_argmax_and_needs_no_numbers():
    logits_NV = torch.randn(5, 9)
    assert torch.equal(sample_tokens(logits_NV, temperature=0.0), logits_NV.argmax(-1))
    with pytest.raises(ValueError, match="uniform_N"):
        sample_tokens(logits_NV, temperature=1.0)
    with pytest.raises(ValueError, match="negative"):
        sample_tokens(logits_NV, temperature=-1.0)


def test_nucleus_keeps_the_smallest_set_that_reaches_top_p():
    logits = torch.tensor([0.1, 0.5, 0.25, 0.15]).log()
    assert probabilities(logits, temperature=1.0, top_p=0.7).tolist() == pytest.approx([0, 2 / 3, 1 / 3, 0], abs=1e-6)
    assert probabilities(logits, temperature=1.0, top_p=1e-9).tolist() == pytest.approx([0, 1, 0, 0])
    assert probabilities(logits, temperature=1.0).tolist() == pytest.approx([0.1, 0.5, 0.25, 0.15])
