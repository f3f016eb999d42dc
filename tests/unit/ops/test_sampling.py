"""The random stream and the sampler: reproducible, uniform, and of the right distribution."""

import math

import pytest
import scipy.stats
import torch

from angelspec.ops.sampling import probabilities, race_times, sample_tokens, stream_keys


def test_keys_match_splitmix_in_plain_integers():
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
        actual = stream_keys(torch.tensor(row), torch.tensor(position), seed=seed)
        assert int(actual) & mask == state


def test_times_match_murmur_in_plain_integers():
    mask = 2**32 - 1

    def mix(value):
        value = ((value ^ (value >> 16)) * 0x85EBCA6B) & mask
        value = ((value ^ (value >> 13)) * 0xC2B2AE35) & mask
        return value ^ (value >> 16)

    keys = stream_keys(torch.arange(3), torch.tensor(5), seed=1)
    times_NV = race_times(keys, vocab_size=1000)
    for row, key in enumerate(keys.tolist()):
        low, high = key & mask, (key >> 32) & mask
        for token in (0, 1, 17, 999):
            hashed = mix(mix((token * 0x9E3779B1 + low) & mask) ^ high)
            uniform = (hashed & 0x7FFFFFFF) * 2.0**-31 + 2.0**-32
            assert float(times_NV[row, token]) == pytest.approx(-math.log1p(-min(uniform, 1 - 2.0**-24)), rel=1e-5)


def test_a_key_depends_on_seed_row_and_position_only():
    rows, positions = torch.tensor([[2], [9]]), torch.arange(5, 8)
    block = stream_keys(rows, positions, seed=3)
    assert block.shape == (2, 3)
    assert block[1, 2] == stream_keys(torch.tensor(9), torch.tensor(7), seed=3)
    assert block.unique().numel() == 6
    assert not torch.equal(block, stream_keys(rows, positions, seed=4))


@pytest.mark.parametrize("axis", ["rows", "positions", "seeds", "tokens"])
def test_times_are_exponential_and_uncorrelated_along_each_axis(axis):
    count = torch.arange(20_000)
    zero = torch.tensor(0)
    if axis == "tokens":
        times = race_times(stream_keys(zero, zero, seed=0)[None], vocab_size=20_000)[0]
    else:
        keys = {
            "rows": lambda: stream_keys(count, zero, seed=0),
            "positions": lambda: stream_keys(zero, count, seed=0),
            "seeds": lambda: torch.stack([stream_keys(zero, zero, seed=seed) for seed in range(4000)]),
        }[axis]()
        times = race_times(keys, vocab_size=4)[:, 3]
    assert (times > 0).all() and times.isfinite().all()
    assert scipy.stats.kstest(times.numpy(), "expon").pvalue > 1e-3
    pairs = torch.stack([times[:-1], times[1:]])
    assert abs(float(torch.corrcoef(pairs)[0, 1])) < 0.05


@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.5])
def test_samples_follow_the_softmax(temperature):
    logits = torch.tensor([2.0, -1.0, 0.5, 0.0, -30.0, 1.0])
    draws = 20_000
    key_N = stream_keys(torch.arange(draws), torch.tensor(4), seed=11)
    tokens = sample_tokens(logits.expand(draws, -1), temperature=temperature, key_N=key_N)
    expected = torch.softmax(logits.double() / temperature, -1) * draws
    observed = torch.bincount(tokens, minlength=6).double()
    common = expected > 5
    statistic = ((observed - expected)[common] ** 2 / expected[common]).sum()
    assert scipy.stats.chi2.sf(float(statistic), int(common.sum()) - 1) > 1e-3


def test_an_impossible_token_never_wins():
    draws = 5000
    logits_NV = torch.tensor([[-torch.inf, 0.0, 3.0, -torch.inf]]).expand(draws, -1)
    key_N = stream_keys(torch.arange(draws), torch.tensor(0), seed=0)
    assert set(sample_tokens(logits_NV, temperature=1.0, key_N=key_N).tolist()) == {1, 2}
    certain_NV = torch.full((draws, 50), -torch.inf)
    certain_NV[:, 31] = 0.0
    assert (sample_tokens(certain_NV, temperature=1.0, key_N=key_N) == 31).all()


def test_the_last_bits_of_the_logits_hardly_ever_change_the_draw():
    """Rounding of a batch's shape must not change an answer; a flat tail is the hardest case."""
    generator = torch.Generator().manual_seed(0)
    logits_NV = torch.randn(200, 20_000, generator=generator)
    key_N = stream_keys(torch.arange(200), torch.tensor(0), seed=0)
    noisy_NV = logits_NV + 1e-5 * torch.randn(200, 20_000, generator=generator)
    drawn, again = (sample_tokens(x, temperature=1.0, key_N=key_N) for x in (logits_NV, noisy_NV))
    assert (drawn == again).sum() >= 199
    assert drawn.unique().numel() > 150


def test_temperature_zero_is_the_argmax_and_needs_no_numbers():
    logits_NV = torch.randn(5, 9)
    assert torch.equal(sample_tokens(logits_NV, temperature=0.0), logits_NV.argmax(-1))
    with pytest.raises(ValueError, match="key_N"):
        sample_tokens(logits_NV, temperature=1.0)
    with pytest.raises(ValueError, match="negative"):
        sample_tokens(logits_NV, temperature=-1.0)


def test_nucleus_keeps_the_smallest_set_that_reaches_top_p():
    logits = torch.tensor([0.1, 0.5, 0.25, 0.15]).log()
    assert probabilities(logits, temperature=1.0, top_p=0.7).tolist() == pytest.approx([0, 2 / 3, 1 / 3, 0], abs=1e-6)
    assert probabilities(logits, temperature=1.0, top_p=1e-9).tolist() == pytest.approx([0, 1, 0, 0])
    assert probabilities(logits, temperature=1.0).tolist() == pytest.approx([0.1, 0.5, 0.25, 0.15])
