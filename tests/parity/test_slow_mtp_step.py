"""The MTP step against a slow one: a dense mask, whole logits, a sort of the vocabulary, and plain means, all by
autograd.

Shapes: R rows, T tokens, S = R * T positions, N positions with a supervised depth, K depths, V vocabulary, D hidden.
"""

import pytest
import torch
from training_builders import mtp_config, pattern_rows, tiny_target

from angelspec.core.objective import Objective
from angelspec.drafters.mtp_reference import unroll_reference
from angelspec.objectives import Budget, tokenwise
from angelspec.training.features import OnlineFeatures
from angelspec.training.mtp_step import MtpStep
from angelspec.training.run import new_drafter

WEIGHTS = (1.0, 0.8, 0.64)
OBJECTIVES = {
    "ce": Objective(ce=1.0),
    "weighted ce": Objective(ce=1.0, slot_weights=WEIGHTS),
    "kl": Objective(kl=1.0, top_k=150, slot_weights=WEIGHTS),
    "kl, renormalised": Objective(kl=1.0, top_k=150, renormalise=True),
    "lk hybrid": Objective(lk=1.0, top_k=150, renormalise=True),
    "lk alpha": Objective(lk=1.0, lk_form="alpha", top_k=150, renormalise=True, slot_weights=WEIGHTS),
    "tv": Objective(tv=1.0),
    "e2e": Objective(end_to_end_tv=1.0, top_k=150, renormalise=True),
    "e2e, whole vocabulary, with ce": Objective(ce=0.1, end_to_end_tv=1.0),
}
SMALL = Budget(buffer_bytes=24 * 320 * 4, tile_columns=100, product_columns=64, min_rows=1)


def rows_with_gaps():
    """Documents of several lengths, one of them too short for all depths, and unsupervised turns inside answers."""
    rows = pattern_rows(2, row_length=48)
    rows.loss_mask_RT[0, 12:15] = False
    rows.loss_mask_RT[1, 20] = False
    rows.document_RT[1, 41:] = -1
    rows.document_RT[1, 38:41], rows.position_RT[1, 38:41], rows.loss_mask_RT[1, 38:41] = 99, torch.arange(3), True
    rows.loss_mask_RT &= rows.document_RT >= 0
    return rows


def slow_step(drafter, rows, features, objective, *, on_policy):
    """The divided loss, from definitions alone."""
    target = tiny_target()
    head, embedding = target.head_VD, target.embedding_VD
    tokens, document, mask = rows.tokens_RT.long(), rows.document_RT, rows.loss_mask_RT
    num_rows, length = tokens.shape
    depths = drafter.config.num_depths
    hidden = features.fetch(range(num_rows)).hidden_RTD

    def next_tokens(depth, before_SD):
        if on_policy:
            return (before_SD @ head.T).argmax(1)
        flat = tokens.flatten()
        return torch.cat([flat[1 + depth :], flat[: 1 + depth]])

    outputs = unroll_reference(
        drafter, hidden, tokens_RT=tokens, document_RT=document, position_RT=rows.position_RT,
        asked_RT=torch.ones_like(mask), embedding_VD=embedding, next_tokens=next_tokens, num_depths=depths,
    )  # fmt: skip
    whole = {"top_k": objective.top_k, "renormalise": objective.renormalise}
    subset = objective.top_k if objective.renormalise else None
    losses, alphas = [[] for _ in range(depths)], []
    for row in range(num_rows):
        for j in range(length):
            here = []
            for k in range(depths):
                label = j + 2 + k
                if label >= length or document[row, j] < 0 or not mask[row, label]:
                    continue
                if len(set(document[row, j : label + 1].tolist())) > 1:
                    continue
                student = outputs[k][row * length + j][None] @ head.T
                teacher = hidden[row, j + 1 + k][None] @ head.T
                ce = tokenwise.cross_entropy(student, tokens[row, label][None])
                loss = objective.ce * ce
                if objective.kl:
                    loss = loss + objective.kl * tokenwise.forward_kl(student, teacher, **whole)
                if objective.tv:
                    loss = loss + objective.tv * tokenwise.total_variation(student, teacher, top_k=subset)
                if objective.lk and objective.lk_form == "hybrid":
                    loss = loss + objective.lk * tokenwise.lk_hybrid(student, teacher, eta=objective.lk_eta, **whole)
                elif objective.lk:
                    loss = loss + objective.lk * tokenwise.lk_alpha(student, teacher, top_k=subset)
                losses[k].append(loss)
                here.append(tokenwise.acceptance(student, teacher, top_k=subset))
            if len(here) == depths:
                alphas.append(torch.cat(here))
    weights = objective.slot_weights or (1.0,) * depths
    total = 0.0
    if any((objective.ce, objective.kl, objective.tv, objective.lk)):
        numerator = sum(weight * torch.cat(depth).sum() for weight, depth in zip(weights, losses, strict=True))
        total = total + numerator / sum(weight * len(depth) for weight, depth in zip(weights, losses, strict=True))
    if objective.end_to_end_tv:
        alpha_NK = torch.stack(alphas)
        total = total + objective.end_to_end_tv * (1 - alpha_NK.cumprod(1).mean(1)).mean()
    return total


@pytest.mark.parametrize("on_policy", [True, False], ids=["on-policy", "teacher-forced"])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_losses_and_gradients_are_those_of_the_slow_step(name, on_policy):
    compare(name, on_policy=on_policy)


def test_with_a_mixture_of_experts():
    compare("lk alpha", on_policy=True, mlp="moe")


def compare(name, *, on_policy, mlp="dense"):
    target, rows, objective = tiny_target(), rows_with_gaps(), OBJECTIVES[name]
    features = OnlineFeatures(target, rows, layer_ids=())
    drafter = new_drafter(mtp_config(mlp), seed=0)
    with torch.no_grad():  # spread out, so that proposals differ and no part is silently the identity
        for parameter in drafter.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.1)
    step = MtpStep(
        drafter, rows=rows, features=features, embedding_VD=target.embedding_VD, head_VD=target.head_VD,
        on_policy=on_policy, budget=SMALL,
    )  # fmt: skip
    wanted = slow_step(drafter, rows, features, objective, on_policy=on_policy)
    expected = torch.autograd.grad(wanted, list(drafter.parameters()))
    terms = step([0, 1], objective=objective, step=0)
    found = sum(ratio.numerator / ratio.denominator for ratio in terms.losses.values())
    gradients = torch.autograd.grad(found, list(drafter.parameters()))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    for (key, _), gradient, reference in zip(drafter.named_parameters(), gradients, expected, strict=True):
        scale = reference.abs().max()
        assert scale > 1e-6, key
        torch.testing.assert_close(
            gradient / scale, reference / scale, rtol=2e-3, atol=2e-3, msg=lambda t, k=key: f"{k}: {t}"
        )
