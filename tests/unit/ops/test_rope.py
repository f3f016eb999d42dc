"""Rope: spellings, scaling rules, partial rotation, and the rotation itself."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from angelspec.core.errors import TargetError
from angelspec.core.geometry import Rope
from angelspec.ops.rope import inverse_frequencies, rotate, rotate_reference, rotation

YARN = {"factor": 4.0, "original_max_position_embeddings": 64}


def frequencies(config: dict, head_dim: int = 32):
    return inverse_frequencies(Rope.from_config(config), head_dim=head_dim, max_position_embeddings=256)


@pytest.mark.parametrize("partial", [1.0, 0.25])
def test_every_spelling_gives_the_same_frequencies(partial):
    nested = {"partial_rotary_factor": partial}
    spellings = [
        {"rope_theta": 1e6, "rope_scaling": {"type": "yarn", **YARN}, "partial_rotary_factor": partial},
        {"rope_theta": 1e6, "rope_scaling": {"rope_type": "yarn", **YARN}, "partial_rotary_factor": partial},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, **YARN, **nested}},
        {"rope_parameters": {"full_attention": {"rope_type": "yarn", "rope_theta": 1e6, **YARN, **nested}}},
        Rope.from_config({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, **YARN, **nested}}).to_config(),
    ]
    first, factor = frequencies(spellings[0])
    assert first.shape == (int(32 * partial) // 2,)
    assert factor == pytest.approx(1.1386294)
    for spelling in spellings[1:]:
        other, other_factor = frequencies(spelling)
        assert torch.equal(first, other) and factor == other_factor
    assert not torch.equal(first, frequencies({"rope_theta": 1e6, "partial_rotary_factor": partial})[0])


@pytest.mark.parametrize(
    "scaling",
    [
        None,
        {"rope_type": "linear", "factor": 2.0},
        {"rope_type": "dynamic", "factor": 2.0},
        {"rope_type": "yarn", **YARN},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 64},
        {"rope_type": "longrope", "factor": 4.0, "short_factor": [1.0] * 16, "long_factor": [2.0] * 16,
         "original_max_position_embeddings": 64},
    ],
)  # fmt: skip
def test_rotation_equals_transformers(scaling):
    config = LlamaConfig(
        hidden_size=64, num_attention_heads=2, head_dim=32, max_position_embeddings=256, rope_theta=7777.0,
        rope_scaling=scaling,
    )  # fmt: skip
    position_BT = torch.arange(5, 17)[None]
    query, key = torch.randn(1, 2, 12, 32), torch.randn(1, 2, 12, 32)
    cos, sin = LlamaRotaryEmbedding(config)(query, position_BT)
    expected_query, expected_key = apply_rotary_pos_emb(query, key, cos, sin)
    frequencies_E, factor = frequencies({"rope_theta": 7777.0, "rope_scaling": scaling})
    ours = [item[:, None] for item in rotation(position_BT, frequencies_E, factor=factor)]
    torch.testing.assert_close(rotate(query, *ours), expected_query)
    torch.testing.assert_close(rotate(key, *ours), expected_key)


@pytest.mark.parametrize("pairs", [4, 3])
def test_fast_equals_reference_in_value_and_gradient(pairs):
    torch.manual_seed(0)
    cos, sin = rotation(torch.arange(6).reshape(2, 3), torch.rand(pairs), factor=1.3)
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    for shape in [(2, 3, 5, 8), (1, 1, 5, 8), (2, 1, 5, 8)]:
        states = torch.randn(shape, requires_grad=True)
        upstream = torch.randn(2, 3, 5, 8)
        results = []
        for turn in (rotate, rotate_reference):
            out = turn(states.expand(2, 3, 5, 8) if turn is rotate_reference else states, cos, sin)
            results.append((out.detach(), *torch.autograd.grad(out, states, upstream)))
        for fast, slow in zip(*results, strict=True):
            torch.testing.assert_close(fast, slow)


def test_partial_rotation_leaves_the_rest():
    cos, sin = rotation(torch.tensor([3]), torch.tensor([0.5]))
    states = torch.randn(1, 8)
    turned = rotate(states, cos, sin)
    assert torch.equal(turned[:, 2:], states[:, 2:])
    assert not torch.allclose(turned[:, :2], states[:, :2])


def test_refuses_what_it_does_not_know():
    with pytest.raises(TargetError, match="rope type 'spiral' is unknown"):
        frequencies({"rope_theta": 1e4, "rope_scaling": {"rope_type": "spiral"}})
    with pytest.raises(TargetError, match="'yarn' lacks its argument 'factor'"):
        frequencies({"rope_theta": 1e4, "rope_scaling": {"rope_type": "yarn"}})
    with pytest.raises(TargetError, match="rotates 3 of 32 channels"):
        frequencies({"rope_theta": 1e4, "partial_rotary_factor": 0.1})
