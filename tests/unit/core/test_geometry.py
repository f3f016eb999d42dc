"""Shapes and rope are read alike from every spelling of a config."""

from __future__ import annotations

import pytest

from angelspec.core.geometry import Rope, TargetGeometry, spread_layer_ids

YARN = {"factor": 4.0, "original_max_position_embeddings": 32768}


@pytest.mark.parametrize(
    "config",
    [
        {"rope_theta": 1e6, "rope_scaling": {"type": "yarn", **YARN}},
        {"rope_theta": 1e6, "rope_scaling": {"rope_type": "yarn", **YARN}},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, **YARN}},
        {"rope_theta": 1e6, "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, **YARN}},
        {"rope_parameters": {"full_attention": {"rope_type": "yarn", "rope_theta": 1e6, **YARN}}},
    ],
)
def test_rope_spellings_agree(config):
    assert Rope.from_config(config) == Rope(theta=1e6, type="yarn", scaling=YARN)


def test_partial_rotary_nested_or_flat():
    assert Rope.from_config({"partial_rotary_factor": 0.25}).partial_rotary_factor == 0.25
    assert Rope.from_config({"rope_parameters": {"partial_rotary_factor": 0.25}}).partial_rotary_factor == 0.25


@pytest.mark.parametrize(
    "config",
    [
        {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}},
        {"rope_parameters": {"a": {"rope_theta": 1e4}, "b": {"rope_theta": 1e6}}},
        {"rope_scaling": {"type": "yarn", "rope_type": "linear"}},
    ],
)
def test_contradicting_rope_is_refused(config):
    with pytest.raises(ValueError, match="rope"):
        Rope.from_config(config)


def test_rope_writes_both_spellings_and_reads_itself_back():
    for rope in (Rope(theta=1e5), Rope(theta=1e6, type="yarn", scaling=YARN, partial_rotary_factor=0.5)):
        config = rope.to_config()
        assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == rope.theta
        assert Rope.from_config(config) == rope


def test_missing_keys_are_named():
    with pytest.raises(ValueError, match="num_hidden_layers"):
        TargetGeometry.from_config({"model_type": "llama", "hidden_size": 8, "intermediate_size": 8})


def test_layer_ids_follow_the_published_rule():
    assert spread_layer_ids(36, 5) == (1, 9, 17, 25, 33)
    assert spread_layer_ids(36, 9) == (1, 5, 9, 13, 17, 21, 25, 29, 33)
    assert spread_layer_ids(80, 5) == (1, 20, 39, 58, 77)
    assert spread_layer_ids(36, 1) == (18,)
    with pytest.raises(ValueError, match="distinct"):
        spread_layer_ids(6, 5)
