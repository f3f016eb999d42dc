"""The end-to-end loss: values, masks, and its gradient in both forms."""

from __future__ import annotations

import math

import pytest
import torch

from angelspec.objectives import end_to_end_tv
from angelspec.objectives.end_to_end import prefix_products


def random_blocks(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    alpha = torch.rand(6, 5, generator=generator, dtype=torch.float64)
    mask = torch.rand(6, 5, generator=generator) < 0.7
    mask[0], mask[1], mask[2] = True, False, torch.tensor([False, True, True, False, True])
    return alpha, mask


def test_value_of_a_full_block() -> None:
    found = end_to_end_tv(torch.tensor([[0.5, 0.5]]), mask_AK=torch.ones(1, 2, dtype=torch.bool))
    assert found.numerator.item() == pytest.approx(1 - (0.5 + 0.25) / 2)
    assert found.denominator.item() == 1


def test_masked_slots_count_as_accepted_and_are_not_averaged() -> None:
    alpha = torch.tensor([[0.5, 0.1, 0.5]])
    found = end_to_end_tv(alpha, mask_AK=torch.tensor([[True, False, True]]))
    assert found.numerator.item() == pytest.approx(1 - (0.5 + 0.25) / 2)


def test_blocks_without_a_valid_slot_are_in_neither_sum() -> None:
    alpha, mask = random_blocks()
    found = end_to_end_tv(alpha, mask_AK=mask)
    live = end_to_end_tv(alpha[mask.any(1)], mask_AK=mask[mask.any(1)])
    torch.testing.assert_close(found.numerator, live.numerator)
    assert found.denominator == live.denominator == mask.any(1).sum()


def test_nothing_to_supervise_is_zero_over_zero_with_a_graph() -> None:
    alpha = torch.rand(2, 3, requires_grad=True)
    found = end_to_end_tv(alpha, mask_AK=torch.zeros(2, 3, dtype=torch.bool))
    assert found.numerator == found.denominator == 0
    assert torch.autograd.grad(found.numerator, alpha)[0].eq(0).all()


def surrogate_weights(alpha_AK, mask_AK):
    """W such that sum_m W_m TV_m has the gradient of the block's end-to-end loss, slot by slot:

    W_m = prod_{k < m} alpha_k S_m / sum_j m_j with S_m = m_m + alpha_{m+1} S_{m+1}, how much accepted length hangs on
    slot m, given that it is reached.
    """
    weights = torch.zeros_like(alpha_AK)
    for block, (alpha, mask) in enumerate(zip(alpha_AK.tolist(), mask_AK.tolist(), strict=True)):
        chances = [value if valid else 1.0 for value, valid in zip(alpha, mask, strict=True)]
        for slot in range(len(chances)):
            if mask[slot]:
                hangs = sum(math.prod(chances[slot + 1 : last + 1]) for last in range(slot, len(chances)) if mask[last])
                weights[block, slot] = math.prod(chances[:slot]) * hangs / sum(mask)
    return weights


def test_direct_and_surrogate_losses_have_one_gradient() -> None:
    alpha, mask = random_blocks()
    alpha[0, 2] = 0.0
    alpha.requires_grad_()
    direct = torch.autograd.grad(end_to_end_tv(alpha, mask_AK=mask).numerator, alpha)[0]
    weights = surrogate_weights(alpha.detach(), mask)
    surrogate = torch.autograd.grad((weights * (1 - alpha)).sum(), alpha)[0]
    assert direct.abs().max() > 0.1
    torch.testing.assert_close(direct, surrogate)


def test_the_first_of_several_zero_alphas_still_gets_its_gradient() -> None:
    alpha = torch.tensor([[0.5, 0.0, 0.25, 0.0]], requires_grad=True)
    loss = end_to_end_tv(alpha, mask_AK=torch.ones(1, 4, dtype=torch.bool)).numerator
    (gradient,) = torch.autograd.grad(loss, alpha)
    torch.testing.assert_close(gradient, -torch.tensor([[1.0, 0.5 * 1.25, 0.0, 0.0]]) / 4)


def test_values_under_the_mask_reach_neither_loss_nor_gradient() -> None:
    alpha, mask = random_blocks()
    poisoned = torch.where(mask, alpha, float("nan")).requires_grad_()
    found = end_to_end_tv(poisoned, mask_AK=mask).numerator
    assert torch.equal(found, end_to_end_tv(alpha, mask_AK=mask).numerator)
    assert torch.autograd.grad(found, poisoned)[0].isfinite().all()


def test_prefix_products_match_cumprod() -> None:
    alpha, _ = random_blocks()
    torch.testing.assert_close(prefix_products(alpha), alpha.cumprod(-1))
