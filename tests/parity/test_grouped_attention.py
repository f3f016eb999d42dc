"""Grouped attention against the plain definition with repeated keys and values."""

from types import SimpleNamespace

import pytest
import torch

from angelspec.targets.grouped_attention import fold_mask, grouped_attention

MODULE = SimpleNamespace(is_causal=True)


def repeated(query, key, value, visible, scaling):
    """softmax(q k^T * s) v in float64, every head with its own copy of keys and values."""
    group = query.shape[1] // key.shape[1]
    key, value = (x.double().repeat_interleave(group, dim=1) for x in (key, value))
    scores = (query.double() @ key.transpose(-1, -2)) * scaling
    scores = scores.masked_fill(~visible, -torch.inf)
    return (scores.softmax(-1) @ value).transpose(1, 2)


def draw(batch=3, heads=6, groups=2, queries=1, keys=9, channels=8, dtype=torch.float32):
    generator = torch.Generator().manual_seed(queries * 100 + keys)
    shapes = ((batch, heads, queries, channels), (batch, groups, keys, channels), (batch, groups, keys, channels))
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def ragged(batch, queries, keys):
    """Row b has some committed keys; query t also sees the new ones up to itself."""
    committed = torch.tensor([(2 * row + 1) % (keys - queries + 1) for row in range(batch)])
    last = committed[:, None] + torch.arange(queries)
    return (torch.arange(keys) <= last[:, :, None])[:, None]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("queries", [1, 4])
@pytest.mark.parametrize("channel_major", [False, True])
def test_folded_queries_over_a_cache(queries, dtype, tolerance, channel_major):
    query, key, value = draw(queries=queries, dtype=dtype)
    visible = ragged(3, queries, 9)
    if channel_major:  # as the cache stores keys
        key = key.transpose(-1, -2).contiguous().transpose(-1, -2)
    mask = fold_mask(visible, group=3, dtype=dtype)
    output, weights = grouped_attention(MODULE, query, key, value, mask, scaling=0.3)
    assert weights is None
    assert output.shape == (3, queries, 6, 8)
    torch.testing.assert_close(
        output.double(), repeated(query, key, value, visible, 0.3), rtol=tolerance, atol=tolerance
    )


@pytest.mark.parametrize("queries", [1, 5])
def test_bool_mask_as_it_is(queries):
    query, key, value = draw(queries=queries)
    visible = ragged(3, queries, 9)
    output, _ = grouped_attention(MODULE, query, key, value, visible)
    torch.testing.assert_close(output.double(), repeated(query, key, value, visible, 8**-0.5), rtol=1e-5, atol=1e-5)


def test_causal_without_a_mask():
    query, key, value = draw(queries=7, keys=7)
    output, _ = grouped_attention(MODULE, query, key, value, None)
    visible = torch.ones(7, 7, dtype=torch.bool).tril()
    torch.testing.assert_close(output.double(), repeated(query, key, value, visible, 8**-0.5), rtol=1e-5, atol=1e-5)


def test_no_grouping_and_one_group():
    for groups in (6, 1):
        query, key, value = draw(groups=groups, queries=2)
        visible = ragged(3, 2, 9)
        mask = fold_mask(visible, group=6 // groups, dtype=torch.float32)
        output, _ = grouped_attention(MODULE, query, key, value, mask)
        torch.testing.assert_close(output.double(), repeated(query, key, value, visible, 8**-0.5), rtol=1e-5, atol=1e-5)


def test_refuses_what_it_lacks():
    query, key, value = draw(queries=2)
    with pytest.raises(ValueError, match="softcap"):
        grouped_attention(MODULE, query, key, value, ragged(3, 2, 9), softcap=30.0)
    with pytest.raises(ValueError, match="explicit mask"):
        grouped_attention(MODULE, query, key, value, None)
