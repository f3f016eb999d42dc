"""Loss terms of a block drafter: both paths, every objective, additivity, counts.

Shapes: A anchors, K supervised slots, N valid slots, M teacher rows, V vocabulary, D hidden, R rank.
"""

from __future__ import annotations

import pytest
import torch

from angelspec.core.objective import Objective
from angelspec.objectives import (
    LossTerms,
    LowRank,
    Teacher,
    block_loss_terms,
    sum_counts,
    sum_losses,
    tokenwise,
    total_loss,
)
from angelspec.objectives.compose import to_grid

A, K, M, V, D, R = 6, 4, 15, 40, 8, 3

OBJECTIVES = {
    "ce": Objective(ce=1.0),
    "d-pace ce": Objective(ce=1.0, position_weights="d-pace"),
    "cold start": Objective(lk=1.0, top_k=5, position_weights="d-pace"),
    "lk alpha": Objective(lk=1.0, lk_form="alpha"),
    "end-to-end": Objective(end_to_end_tv=1.0),
    "stated weights": Objective(kl=1.0, slot_weights=(1.0, 0.5, 0.25, 0.0)),
    "dspark": Objective(ce=0.1, l1=0.9, confidence=1.0, position_weights="decay", decay_gamma=4.0),
    "mtp": Objective(ce=0.1, kl=0.5, tv=0.3, end_to_end_tv=2.0, top_k=5, renormalise=True),
}


def batch(seed: int = 0) -> dict:
    generator = torch.Generator().manual_seed(seed)
    valid = torch.rand(A, K, generator=generator) < 0.7
    valid[0], valid[1] = True, False
    num_valid = int(valid.sum())
    return {
        "hidden_ND": torch.randn(num_valid, D, generator=generator, requires_grad=True),
        "head_VD": torch.randn(V, D, generator=torch.Generator().manual_seed(99)),
        "labels_N": torch.randint(0, V, (num_valid,), generator=generator),
        "valid_AK": valid,
        "teacher": Teacher(
            torch.randn(M, D, generator=generator), torch.randint(0, M, (num_valid,), generator=generator)
        ),
        "confidence_logit_N": torch.randn(num_valid, generator=generator, requires_grad=True),
    }


def terms(given: dict, objective: Objective, **options) -> LossTerms:
    given = dict(given)
    return block_loss_terms(given.pop("hidden_ND"), objective=objective, **given, **options)


@pytest.mark.parametrize("low_rank", [False, True])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_both_paths_agree_in_terms_gradients_and_counts(name: str, low_rank: bool) -> None:
    given = batch()
    parameters = [given["hidden_ND"]]
    if low_rank:
        generator = torch.Generator().manual_seed(5)
        state_NR = torch.randn(len(given["labels_N"]), R, generator=generator, requires_grad=True)
        given["low_rank"] = LowRank(state_NR, torch.randn(V, R, generator=generator, requires_grad=True))
        parameters += given["low_rank"]
    if OBJECTIVES[name].confidence:
        parameters.append(given["confidence_logit_N"])
    frugal, reference = (terms(given, OBJECTIVES[name], path=path) for path in ("frugal", "reference"))
    assert list(frugal.losses) == list(reference.losses)
    for term, ratio in frugal.losses.items():
        torch.testing.assert_close(ratio, reference.losses[term], rtol=1e-4, atol=1e-5)
        assert not ratio.denominator.requires_grad
    for field, count in vars(frugal.counts).items():
        torch.testing.assert_close(count, getattr(reference.counts, field), rtol=1e-4, atol=1e-5)
    found = torch.autograd.grad(total_loss(frugal.losses), parameters)
    wanted = torch.autograd.grad(total_loss(reference.losses), parameters)
    for gradient, expected in zip(found, wanted, strict=True):
        assert expected.abs().max() > 1e-4
        torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-5)


def test_the_token_term_is_the_weighted_mean_of_the_mixed_losses() -> None:
    given = batch()
    logits = given["hidden_ND"] @ given["head_VD"].T
    target = (given["teacher"].hidden_MD @ given["head_VD"].T)[given["teacher"].index_N]
    found = terms(given, Objective(ce=0.5, kl=2.0, top_k=3)).losses
    expected = 0.5 * tokenwise.cross_entropy(logits, given["labels_N"]) + 2.0 * tokenwise.forward_kl(
        logits, target, top_k=3
    )
    assert set(found) == {"token"}
    torch.testing.assert_close(total_loss(found), expected.mean(), rtol=1e-4, atol=1e-5)


def test_terms_with_the_same_weights_share_one_denominator_object() -> None:
    """The trainer then differentiates micro-batches as they come, and divides once at the end."""
    losses = terms(batch(), OBJECTIVES["dspark"]).losses
    assert losses["token"].denominator is losses["confidence"].denominator


def test_the_end_to_end_term_multiplies_alphas_along_each_block() -> None:
    given = batch()
    logits = given["hidden_ND"] @ given["head_VD"].T
    target = (given["teacher"].hidden_MD @ given["head_VD"].T)[given["teacher"].index_N]
    alpha = to_grid(tokenwise.acceptance(logits, target), valid_AK=given["valid_AK"])
    blocks = []
    for row, mask in zip(alpha, given["valid_AK"], strict=True):
        if mask.any():
            blocks.append(1 - row[mask].cumprod(0).mean())
    found = terms(given, Objective(end_to_end_tv=1.0)).losses
    assert set(found) == {"end_to_end_tv"}
    torch.testing.assert_close(total_loss(found), torch.stack(blocks).mean(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_micro_batches_give_the_update_of_the_whole_batch(name: str) -> None:
    parts = [batch(1), batch(2)]
    together = {
        "hidden_ND": torch.cat([part["hidden_ND"] for part in parts]),
        "head_VD": parts[0]["head_VD"],
        "labels_N": torch.cat([part["labels_N"] for part in parts]),
        "valid_AK": torch.cat([part["valid_AK"] for part in parts]),
        "teacher": Teacher(
            torch.cat([part["teacher"].hidden_MD for part in parts]),
            torch.cat([part["teacher"].index_N + number * M for number, part in enumerate(parts)]),
        ),
        "confidence_logit_N": torch.cat([part["confidence_logit_N"] for part in parts]),
    }
    states = [part["hidden_ND"] for part in parts]
    whole = terms(together, OBJECTIVES[name])
    pieces = [terms(part, OBJECTIVES[name]) for part in parts]
    summed = sum_losses([piece.losses for piece in pieces])
    torch.testing.assert_close(total_loss(summed), total_loss(whole.losses), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        torch.autograd.grad(total_loss(summed), states),
        torch.autograd.grad(total_loss(whole.losses), states),
        rtol=1e-4,
        atol=1e-6,
    )
    counts = sum_counts([piece.counts for piece in pieces])
    for field, count in vars(counts).items():
        torch.testing.assert_close(count, getattr(whole.counts, field))


def test_counts_by_slot() -> None:
    head = torch.eye(V, D)
    valid = torch.tensor([[True, True, True], [True, False, True], [False, True, False]])
    labels = torch.tensor([0, 1, 2, 3, 4, 5])
    predicted = torch.tensor([0, 7, 2, 3, 4, 6])
    hidden = torch.eye(V, D)[predicted] * 9.0
    found = block_loss_terms(hidden, objective=Objective(ce=1.0), head_VD=head, labels_N=labels, valid_AK=valid).counts
    assert found.valid_K.tolist() == [2, 2, 2]
    assert found.correct_K.tolist() == [2, 0, 2]
    assert found.accepted_K.tolist() == [2, 0, 1]
    assert found.alpha_K is None


@pytest.mark.parametrize("path", ["frugal", "reference"])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_batch_without_valid_slots_is_zero_over_zero_with_a_graph(name: str, path: str) -> None:
    given = batch()
    given |= {
        "hidden_ND": torch.zeros(0, D, requires_grad=True),
        "labels_N": given["labels_N"][:0],
        "valid_AK": torch.zeros(A, K, dtype=torch.bool),
        "teacher": Teacher(given["teacher"].hidden_MD, given["teacher"].index_N[:0]),
        "confidence_logit_N": torch.zeros(0, requires_grad=True),
    }
    found = terms(given, OBJECTIVES[name], path=path)
    loss = total_loss(found.losses)
    assert loss == 0
    assert torch.autograd.grad(loss, given["hidden_ND"])[0].shape == (0, D)
    assert all(ratio.denominator == 0 for ratio in found.losses.values())
    assert found.counts.valid_K.eq(0).all()


def test_a_non_finite_state_shows_in_the_loss() -> None:
    for name, objective in OBJECTIVES.items():
        given = batch()
        given["hidden_ND"].data[0, 0] = float("nan")
        assert not total_loss(terms(given, objective).losses).isfinite(), name


def test_missing_inputs_are_named() -> None:
    given = batch()
    with pytest.raises(ValueError, match="teacher"):
        terms(given | {"teacher": None}, Objective(tv=1.0))
    with pytest.raises(ValueError, match="confidence"):
        terms(given | {"confidence_logit_N": None}, OBJECTIVES["dspark"])
    with pytest.raises(ValueError, match="different objectives"):
        sum_losses([terms(given, OBJECTIVES["ce"]).losses, terms(given, OBJECTIVES["end-to-end"]).losses])


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({}, "no loss term"),
        ({"confidence": 1.0}, "no loss term"),
        ({"ce": -1.0, "tv": 1.0}, "greater than or equal"),
        ({"kl": 1.0, "renormalise": True}, "renormalise needs top_k"),
        ({"kl": 1.0, "renormalise": True, "top_k": 1}, "top_k 1"),
        ({"ce": 1.0, "renormalise": True, "top_k": 5}, "renormalise has no effect"),
        ({"tv": 1.0, "top_k": 5}, "top_k has no effect"),
        ({"lk": 1.0, "lk_form": "alpha", "top_k": 5}, "top_k has no effect"),
        ({"cross_entropy": 1.0}, "Extra inputs"),
        ({"ce": 1.0, "slot_weights": (0.0, 0.0)}, "all 0"),
        ({"ce": 1.0, "slot_weights": (1.0, -0.5)}, "greater than or equal"),
        ({"ce": 1.0, "slot_weights": (1.0, 0.5), "position_weights": "d-pace"}, "take the place of"),
    ],
)
def test_objectives_that_make_no_sense_are_refused(fields: dict, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        Objective(**fields)
