"""The training pass of every combination against the slow reference: values, and gradients of every weight."""

import dataclasses

import pytest
import torch
from drafter_builders import COMBINATIONS, tiny_drafter, tiny_rows

from angelspec.drafters.block_reference import forward_reference


def outputs(states):
    values = [getattr(states, field.name) for field in dataclasses.fields(states)]
    return [value for value in values if value is not None]


@pytest.mark.parametrize("num_layers", [1, 2, 3])
@pytest.mark.parametrize("name", COMBINATIONS)
def test_fast_equals_reference(name, num_layers):
    drafter = tiny_drafter(name, num_layers=num_layers)
    rows = tiny_rows(drafter.config)
    assert rows.anchors.count >= 8
    results = []
    for forward in (drafter, lambda *a, **k: forward_reference(drafter, *a, **k)):
        states = forward(rows.taps_RTF, **rows.inputs())
        generator = torch.Generator().manual_seed(9)
        loss = sum((value * torch.randn(value.shape, generator=generator)).sum() for value in outputs(states))
        used = [parameter for key, parameter in drafter.named_parameters() if key != "markov_head.markov_w2.weight"]
        results.append((outputs(states), torch.autograd.grad(loss, used, allow_unused=True)))
    (fast, fast_gradients), (slow, slow_gradients) = results
    assert len(fast) == len(slow)
    for ours, theirs in zip(fast, slow, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    for ours, theirs in zip(fast_gradients, slow_gradients, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", COMBINATIONS)
def test_every_weight_learns_and_features_get_no_gradient(name):
    drafter = tiny_drafter(name)
    rows = tiny_rows(drafter.config)
    rows.taps_RTF.requires_grad_(True)
    rows.embedding_VD.requires_grad_(True)
    states = drafter(rows.taps_RTF, **rows.inputs())
    sum(value.square().sum() for value in outputs(states)).backward()
    without = [key for key, value in drafter.named_parameters() if value.grad is None or not value.grad.any()]
    assert without == (["markov_head.markov_w2.weight"] if name == "dspark" else [])
    assert rows.taps_RTF.grad is None and rows.embedding_VD.grad is None


def test_heads_start_as_the_identity():
    for name in COMBINATIONS:
        drafter = tiny_drafter(name).initialise(seed=3)
        rows = tiny_rows(drafter.config)
        states = drafter(rows.taps_RTF, **rows.inputs())
        assert torch.equal(states.corrected_AKD, states.hidden_AKD)
        if states.markov_AKR is not None:
            assert not drafter.markov_head.bias(states.markov_AKR).any()


def test_bfloat16_products_stay_near_float32():
    drafter = tiny_drafter("dfly")
    rows = tiny_rows(drafter.config)
    exact = drafter(rows.taps_RTF, **rows.inputs()).corrected_AKD
    drafter.matmul_dtype = torch.bfloat16
    rough = drafter(rows.taps_RTF, **rows.inputs()).corrected_AKD
    assert rough.dtype == torch.float32 and not torch.equal(rough, exact)
    assert (rough - exact).norm() < 0.05 * exact.norm()
    rough.sum().backward()
    assert all(parameter.grad.dtype == torch.float32 for parameter in drafter.parameters())


def test_no_anchor_is_no_crash():
    drafter = tiny_drafter("dfly")
    rows = tiny_rows(drafter.config, lengths=((2, 3), (3,)))
    assert rows.anchors.count == 0
    states = drafter(rows.taps_RTF, **rows.inputs())
    assert states.corrected_AKD.shape == (0, 3, 20)
    states.corrected_AKD.sum().backward()
