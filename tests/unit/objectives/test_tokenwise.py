"""The reference formulas against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from angelspec.objectives import tokenwise

# p = (1/2, 1/4, 1/4) and q = (1/4, 1/4, 1/2): TV = 1/4, alpha = 3/4, KL = 1/2 log 2 + 0 - 1/4 log 2 = 1/4 log 2.
TEACHER = torch.tensor([[0.5, 0.25, 0.25]]).log()
STUDENT = torch.tensor([[0.25, 0.25, 0.5]]).log()
LOG2 = math.log(2.0)


def test_cross_entropy() -> None:
    assert tokenwise.cross_entropy(STUDENT, torch.tensor([2])).item() == pytest.approx(LOG2)
    assert tokenwise.cross_entropy(STUDENT + 7.0, torch.tensor([0])).item() == pytest.approx(2 * LOG2)


def test_forward_kl_over_the_whole_vocabulary() -> None:
    assert tokenwise.forward_kl(STUDENT, TEACHER).item() == pytest.approx(0.25 * LOG2)


def test_forward_kl_summed_over_the_top_k_without_renormalising() -> None:
    assert tokenwise.forward_kl(STUDENT, TEACHER, top_k=1).item() == pytest.approx(0.5 * LOG2)


def test_forward_kl_renormalised_inside_the_top_k() -> None:
    teacher = torch.tensor([[0.4, 0.4, 0.2]]).log()
    student = torch.tensor([[0.2, 0.1, 0.7]]).log()
    expected = 0.5 * math.log(0.5 / (2 / 3)) + 0.5 * math.log(0.5 / (1 / 3))
    assert tokenwise.forward_kl(student, teacher, top_k=2, renormalise=True).item() == pytest.approx(expected)


def test_total_variation_l1_and_acceptance() -> None:
    assert tokenwise.total_variation(STUDENT, TEACHER).item() == pytest.approx(0.25)
    assert tokenwise.l1(STUDENT, TEACHER).item() == pytest.approx(0.5)
    assert tokenwise.acceptance(STUDENT, TEACHER).item() == pytest.approx(0.75)


def test_total_variation_renormalised_inside_the_top_k() -> None:
    teacher = torch.tensor([[0.4, 0.4, 0.2]]).log()
    student = torch.tensor([[0.2, 0.1, 0.7]]).log()
    assert tokenwise.total_variation(student, teacher, top_k=2).item() == pytest.approx(1 / 6)


def test_lk_hybrid_mixes_by_the_acceptance() -> None:
    share = math.exp(-3.0 * 0.75)
    assert tokenwise.lk_hybrid(STUDENT, TEACHER).item() == pytest.approx(share * 0.25 * LOG2 + (1 - share) * 0.25)
    only_kl = tokenwise.lk_hybrid(STUDENT, TEACHER, eta=1e-9, top_k=1)
    assert only_kl.item() == pytest.approx(0.5 * LOG2)


def test_lk_hybrid_holds_its_mix_constant() -> None:
    student = STUDENT.clone().requires_grad_()
    (found,) = torch.autograd.grad(tokenwise.lk_hybrid(student, TEACHER).sum(), student)
    share = math.exp(-3.0 * 0.75)
    frozen = share * tokenwise.forward_kl(student, TEACHER) + (1 - share) * tokenwise.total_variation(student, TEACHER)
    torch.testing.assert_close(found, torch.autograd.grad(frozen.sum(), student)[0])


def test_lk_alpha() -> None:
    assert tokenwise.lk_alpha(STUDENT, TEACHER).item() == pytest.approx(-math.log(0.75))
    apart = torch.eye(2) * 500
    assert tokenwise.lk_alpha(apart[:1], apart[1:]).item() == pytest.approx(-math.log(tokenwise.ACCEPTANCE_FLOOR))


@pytest.mark.parametrize(
    "loss",
    [
        tokenwise.forward_kl,
        tokenwise.total_variation,
        tokenwise.lk_hybrid,
        tokenwise.lk_alpha,
        lambda s, t: tokenwise.forward_kl(s, t, top_k=4),
        lambda s, t: tokenwise.forward_kl(s, t, top_k=4, renormalise=True),
        lambda s, t: tokenwise.total_variation(s, t, top_k=4),
    ],
)
def test_losses_do_not_see_a_constant_added_to_the_logits_nor_train_the_teacher(loss) -> None:
    generator = torch.Generator().manual_seed(0)
    student = torch.randn(5, 9, generator=generator, requires_grad=True)
    teacher = torch.randn(5, 9, generator=generator, requires_grad=True)
    value = loss(student, teacher)
    assert value.shape == (5,)
    torch.testing.assert_close(loss(student + 3.0, teacher - 2.0), value)
    gradient, none = torch.autograd.grad(value.sum(), (student, teacher), allow_unused=True)
    torch.testing.assert_close(gradient.sum(-1), torch.zeros(5), rtol=0, atol=1e-6)
    assert none is None


def test_half_precision_logits_are_widened_and_float64_is_kept() -> None:
    assert tokenwise.total_variation(STUDENT.bfloat16(), TEACHER.bfloat16()).dtype == torch.float32
    assert tokenwise.total_variation(STUDENT.double(), TEACHER.double()).dtype == torch.float64


def test_renormalising_needs_a_subset() -> None:
    with pytest.raises(ValueError, match="top_k"):
        tokenwise.forward_kl(STUDENT, TEACHER, renormalise=True)
