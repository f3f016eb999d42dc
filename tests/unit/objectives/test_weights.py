"""Slot weights against numbers worked out by hand, and their masks."""

from __future__ import annotations

import math

import pytest
import torch

from angelspec.core.objective import Objective
from angelspec.objectives import weights

HALF = math.log(2.0)  # the cross-entropy of a token with probability 1/2


def test_decay_starts_at_one_and_never_exceeds_it() -> None:
    found = weights.position_decay(torch.tensor([0.0, 1.0, 2.0, 8.0]), gamma=7.0)
    torch.testing.assert_close(found, torch.tensor([1.0, 1.0, math.exp(-1 / 7), math.exp(-1.0)]))


def test_d_pace_sums_the_survivals_from_the_slot_on() -> None:
    ce = torch.full((1, 3), HALF)
    found = weights.d_pace(ce, mask_AK=torch.ones(1, 3, dtype=torch.bool), rho=0.0)
    torch.testing.assert_close(found, torch.tensor([[0.875, 0.375, 0.125]]))
    lifted = weights.d_pace(ce, mask_AK=torch.ones(1, 3, dtype=torch.bool), rho=0.5)
    torch.testing.assert_close(lifted, torch.tensor([[0.75 + 0.75**2 + 0.75**3, 0.75**2 + 0.75**3, 0.75**3]]))


def test_d_pace_with_rho_one_counts_the_slots_that_follow() -> None:
    found = weights.d_pace(torch.rand(2, 4), mask_AK=torch.ones(2, 4, dtype=torch.bool), rho=1.0)
    torch.testing.assert_close(found, torch.tensor([[4.0, 3.0, 2.0, 1.0]] * 2))


@pytest.mark.parametrize("hidden_ce", [0.0, 50.0, float("nan"), float("inf")])
def test_d_pace_gives_valid_slots_the_weights_they_have_without_the_masked_ones(hidden_ce: float) -> None:
    ce = torch.tensor([[0.3, hidden_ce, 0.9, 0.2, hidden_ce]])
    mask = torch.tensor([[True, False, True, True, False]])
    found = weights.d_pace(ce, mask_AK=mask, rho=0.5)
    dense = weights.d_pace(ce[:, mask[0]], mask_AK=torch.ones(1, 3, dtype=torch.bool), rho=0.5)
    torch.testing.assert_close(found[:, mask[0]], dense)
    assert found[:, ~mask[0]].eq(0).all()


def test_d_pace_is_detached_and_shows_a_non_finite_loss() -> None:
    ce = torch.tensor([[0.1, float("nan")]], requires_grad=True)
    found = weights.d_pace(ce, mask_AK=torch.ones(1, 2, dtype=torch.bool), rho=0.5)
    assert not found.requires_grad
    assert found.isnan().any()


@pytest.mark.parametrize("kind", ["uniform", "decay", "d-pace"])
def test_the_objective_chooses_the_weights_and_masked_slots_weigh_nothing(kind: str) -> None:
    mask = torch.tensor([[True, True, False]])
    ce = torch.full((1, 3), HALF)
    found = weights.slot_weights(
        Objective(ce=1, position_weights=kind, decay_gamma=2, d_pace_rho=0), ce_AK=ce, mask_AK=mask
    )
    expected = {"uniform": [1, 1, 0], "decay": [1, math.exp(-0.5), 0], "d-pace": [0.75, 0.25, 0]}
    torch.testing.assert_close(found, torch.tensor([expected[kind]], dtype=torch.float32))


def test_stated_weights_are_taken_as_they_are() -> None:
    mask = torch.tensor([[True, True, False], [True, False, True]])
    objective = Objective(ce=1, slot_weights=(1.0, 0.8, 0.0))
    found = weights.slot_weights(objective, ce_AK=torch.zeros(2, 3), mask_AK=mask)
    torch.testing.assert_close(found, torch.tensor([[1.0, 0.8, 0.0], [1.0, 0.0, 0.0]]))
    with pytest.raises(ValueError, match="3 weights for 2 proposals"):
        weights.slot_weights(objective, ce_AK=torch.zeros(2, 2), mask_AK=mask[:, :2])
