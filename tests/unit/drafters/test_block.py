"""The block drafter's parts that need no parity: initial weights, fusion prior, precision of positions."""

import pytest
import torch
from drafter_builders import COMBINATIONS, tiny_config, tiny_drafter

from angelspec.core.errors import CheckpointError
from angelspec.core.geometry import Rope
from angelspec.drafters.block import BlockDrafter
from angelspec.drafters.context import distance_prior, mix_taps


def test_the_fusion_prior_prefers_the_tap_at_the_same_depth():
    assert distance_prior(2, 3).tolist() == [[0, -2, -4], [-4, -2, 0]]
    assert distance_prior(3, 5).tolist() == [[0, -2, -4, -6, -8], [-4, -2, 0, -2, -4], [-8, -6, -4, -2, 0]]
    assert distance_prior(1, 3).tolist() == [[0, -2, -4]]


def test_taps_are_mixed_by_a_softmax_over_taps():
    logits = torch.tensor([[0.0, 0.0], [0.0, 3.0**0.5]])
    taps = torch.tensor([[1.0, 2.0, 3.0, 6.0]])
    share = torch.tensor(3.0**0.5).sigmoid()
    expected = torch.stack([torch.tensor([[2.0, 4.0]]), taps[:, :2] * (1 - share) + taps[:, 2:] * share])
    torch.testing.assert_close(mix_taps(taps, logits), expected)


@pytest.mark.parametrize("name", COMBINATIONS)
def test_fresh_weights_follow_the_seed(name):
    first, again, other = (BlockDrafter(tiny_config(name)).initialise(seed=seed) for seed in (1, 1, 2))
    same = [key for key, value in first.state_dict().items() if torch.equal(value, other.state_dict()[key])]
    assert all(torch.equal(value, again.state_dict()[key]) for key, value in first.state_dict().items())
    fixed = ("norm.weight", "layer_fusion_weights", "down_proj.weight", "markov_w2.weight", "confidence_head")
    assert all(any(part in key for part in fixed) for key in same)
    assert "layers.0.mlp.down_proj.weight" not in same
    assert 0.015 < first.layers[0].mlp.up_proj.weight.std() < 0.025


def test_positions_keep_their_precision_in_a_bfloat16_drafter():
    exact, half = tiny_drafter("dfly"), tiny_drafter("dfly").to(torch.bfloat16)
    positions = torch.tensor([0, 1, 97, 1003])
    for ours, theirs in zip(half.rotation(positions), exact.rotation(positions), strict=True):
        assert torch.equal(ours, theirs.bfloat16())


def test_scaled_rope_survives_the_meta_device():
    rope = Rope(theta=1e4, type="yarn", scaling={"factor": 4.0, "original_max_position_embeddings": 32})
    with torch.device("meta"):
        drafter = BlockDrafter(tiny_config("dfly", rope=rope))
    assert torch.equal(drafter._rope_frequencies_E, BlockDrafter(tiny_config("dfly", rope=rope))._rope_frequencies_E)
    assert drafter._rope_frequencies_E.device.type == "cpu"


def test_an_anchor_that_predicts_is_refused():
    with pytest.raises(CheckpointError, match="sample_from_anchor"):
        BlockDrafter(tiny_config("dspark", sample_from_anchor=True))
