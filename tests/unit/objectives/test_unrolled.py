"""The head under an unrolled drafter: both paths, any pieces, per-depth weights, the end-to-end form.

Shapes: N positions, K depths, M target states, V vocabulary, D hidden.
"""

from __future__ import annotations

import pytest
import torch

from angelspec.core.objective import Objective
from angelspec.objectives import Budget, UnrolledHead, Workspace, tokenwise, total_loss, unrolled
from angelspec.objectives.vocabulary_sweep import VocabularySweep

N, K, V, D = 23, 3, 200, 12

OBJECTIVES = {
    "ce": Objective(ce=1.0),
    "weights": Objective(ce=1.0, slot_weights=(1.0, 0.5, 0.25)),
    "lk alpha": Objective(lk=1.0, lk_form="alpha", top_k=120, renormalise=True),
    "kl": Objective(kl=1.0, top_k=120, position_weights="decay"),
    "d-pace": Objective(ce=0.3, tv=1.0, position_weights="d-pace"),
    "end-to-end": Objective(end_to_end_tv=1.0, top_k=120, renormalise=True),
    "both": Objective(ce=0.1, end_to_end_tv=2.0),
}


def batch(seed: int = 0) -> dict:
    """Positions in a row; the last ones lack depths, one lacks its first, and one its middle one."""
    generator = torch.Generator().manual_seed(seed)
    valid = torch.ones(N, K, dtype=torch.bool)
    for depth in range(K):
        valid[N - depth :, depth] = False
    valid[2, 0], valid[5, 1] = False, False
    states = torch.randn(N + K, D, generator=generator)
    noise = torch.randn(K, N, D, generator=generator)
    return {
        "hidden": [(0.7 * states[k + 1 : k + 1 + N] + 0.5 * noise[k]).requires_grad_() for k in range(K)],
        "labels": torch.randint(0, V, (N, K), generator=generator),
        "states": states,
        "head": torch.randn(V, D, generator=generator),
        "valid": valid,
    }


def terms(given: dict, objective: Objective, *, sizes=(N,), path="frugal", **options):
    head = UnrolledHead(objective, head_VD=given["head"], num_depths=K, path=path, **options)
    tops, first = [[] for _ in range(K)], 0
    for size in sizes:
        head.begin_piece(given["states"][first : first + size + K])
        for depth in range(K):
            # a position is asked for as long as a deeper one is supervised
            asked = given["valid"][first : first + size, depth:].any(1).nonzero()[:, 0]
            positions = first + asked
            tops[depth].append(
                head.measure(
                    given["hidden"][depth][positions], depth=depth, positions_P=positions,
                    labels_P=given["labels"][positions, depth], judge_P=asked + depth + 1,
                )
            )  # fmt: skip
        first += size
    return head.terms(given["valid"]), [torch.cat(top) for top in tops]


@pytest.mark.parametrize("sizes", [(N,), (9, 0, 8, 6)], ids=["one piece", "pieces"])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_both_paths_agree_in_terms_gradients_counts_and_tokens(name, sizes):
    given = batch()
    found, tops = terms(given, OBJECTIVES[name], sizes=sizes, workspace=Workspace())
    wanted, top_tokens = terms(given, OBJECTIVES[name], path="reference")
    assert list(found.losses) == list(wanted.losses)
    for term, ratio in found.losses.items():
        torch.testing.assert_close(ratio, wanted.losses[term], rtol=1e-4, atol=1e-5)
    for field, count in vars(found.counts).items():
        torch.testing.assert_close(count, getattr(wanted.counts, field), rtol=1e-4, atol=1e-5)
    assert all(torch.equal(a, b) for a, b in zip(tops, top_tokens, strict=True))
    gradients = torch.autograd.grad(total_loss(found.losses), given["hidden"])
    for gradient, reference in zip(
        gradients, torch.autograd.grad(total_loss(wanted.losses), given["hidden"]), strict=True
    ):
        assert reference.abs().max() > 1e-4
        torch.testing.assert_close(gradient, reference, rtol=1e-4, atol=1e-5)


def logits_of(given: dict, depth: int) -> tuple[torch.Tensor, torch.Tensor]:
    return given["hidden"][depth] @ given["head"].T, given["states"][depth + 1 : depth + 1 + N] @ given["head"].T


def test_the_token_term_weighs_each_depth_over_its_valid_positions():
    given, weights = batch(), (1.0, 0.5, 0.25)
    found, _ = terms(given, Objective(kl=1.0, slot_weights=weights))
    loss = weight = 0.0
    for depth in range(K):
        valid = given["valid"][:, depth]
        loss += weights[depth] * tokenwise.forward_kl(*logits_of(given, depth))[valid].sum()
        weight += weights[depth] * valid.sum()
    torch.testing.assert_close(total_loss(found.losses), loss / weight, rtol=1e-4, atol=1e-5)


def test_the_end_to_end_term_is_the_mean_over_positions_that_have_all_depths():
    given = batch()
    found, _ = terms(given, Objective(end_to_end_tv=1.0))
    alpha = torch.stack([tokenwise.acceptance(*logits_of(given, depth)) for depth in range(K)], 1)
    whole = given["valid"].all(1)
    assert 0 < whole.sum() < given["valid"].any(1).sum()
    torch.testing.assert_close(
        total_loss(found.losses), (1 - alpha[whole].cumprod(1).mean(1)).mean(), rtol=1e-4, atol=1e-5
    )
    gradients = torch.autograd.grad(total_loss(found.losses), given["hidden"])
    assert all(gradient[~whole].eq(0).all() for gradient in gradients)


def test_nothing_leaks_from_positions_that_are_only_asked_for_their_token():
    given = batch()
    found, _ = terms(given, Objective(ce=1.0))
    assert found.counts.valid_K.tolist() == given["valid"].sum(0).tolist()
    gradients = torch.autograd.grad(total_loss(found.losses), given["hidden"])
    for depth, gradient in enumerate(gradients):
        assert gradient[~given["valid"][:, depth]].eq(0).all()
        assert gradient[given["valid"][:, depth]].abs().sum(1).gt(0).all()


def test_the_judges_of_a_piece_meet_the_head_once(monkeypatch):
    rows = []
    original = VocabularySweep._product

    def counting(self, states, *, name):
        rows.append((name, len(states)))
        return original(self, states, name=name)

    monkeypatch.setattr(VocabularySweep, "_product", counting)
    terms(batch(), OBJECTIVES["both"], sizes=(12, 11))
    assert [count for name, count in rows if name == "teacher"] == [12 + K, 11 + K]
    monkeypatch.setattr(unrolled, "judge_rows", None)
    terms(batch(), OBJECTIVES["ce"])  # cross-entropy asks no judge


def test_an_empty_micro_batch_is_zero_over_zero_with_a_graph():
    given = batch() | {"valid": torch.zeros(N, K, dtype=torch.bool)}
    for objective in OBJECTIVES.values():
        found, _ = terms(given, objective)
        loss = total_loss(found.losses)
        assert loss == 0 and all(ratio.denominator == 0 for ratio in found.losses.values())
        gradients = torch.autograd.grad(loss, given["hidden"])
        assert all(gradient.eq(0).all() for gradient in gradients)


@pytest.mark.parametrize(("positions", "sizes"), [(0, [0]), (5, [5]), (16, [16]), (17, [9, 8]), (50, [13, 13, 12, 12])])
def test_pieces_are_of_equal_size_within_the_budget(positions, sizes):
    budget = Budget(buffer_bytes=16 * V * 4, tile_columns=64, product_columns=64, min_rows=1)
    head = UnrolledHead(Objective(ce=1.0), head_VD=torch.zeros(V, D), num_depths=K, budget=budget)
    assert head.piece_sizes(positions) == sizes


def test_a_stated_number_of_pieces_is_kept():
    head = UnrolledHead(Objective(ce=1.0), head_VD=torch.zeros(V, D), num_depths=K)
    assert head.piece_sizes(3, num_pieces=5) == [1, 1, 1, 0, 0]


def test_a_confidence_head_is_refused():
    with pytest.raises(ValueError, match="MTP has none"):
        UnrolledHead(Objective(ce=1.0, confidence=1.0), head_VD=torch.zeros(V, D), num_depths=K)
