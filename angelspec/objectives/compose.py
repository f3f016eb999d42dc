"""From an objective and a block drafter's states to loss terms: the one place where losses are composed.

Shapes: A anchors (blocks), K supervised slots of a block (block size - 1), N valid (anchor, slot) pairs in row-major
order, M distinct teacher rows, V vocabulary, D hidden.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from angelspec.core.objective import Objective
from angelspec.objectives.channels import Channel, HeadLoss, LowRank, Support, Teacher, TokenStatistics
from angelspec.objectives.end_to_end import end_to_end_tv, prefix_products
from angelspec.objectives.head_loss import head_loss
from angelspec.objectives.head_loss_reference import reference_head_loss
from angelspec.objectives.terms import LossTerms, Ratio, SlotCounts
from angelspec.objectives.weights import slot_weights
from angelspec.objectives.workspace import Budget, Workspace

TOKEN, END_TO_END_TV, CONFIDENCE = "token", "end_to_end_tv", "confidence"
"""Names of the loss terms."""


def block_loss_terms(
    hidden_ND: Tensor,
    *,
    objective: Objective,
    head_VD: Tensor,
    labels_N: Tensor,
    valid_AK: Tensor,
    teacher: Teacher | None = None,
    low_rank: LowRank | None = None,
    confidence_logit_N: Tensor | None = None,
    path: Literal["frugal", "reference"] = "frugal",
    budget: Budget | None = None,
    workspace: Workspace | None = None,
) -> LossTerms:
    """Return the objective's terms and the counts of one micro-batch of blocks.

    The terms are, each present only if the objective weighs it: ``token`` (the mix of ce, kl, tv, l1 and lk, weighted
    by slot), ``end_to_end_tv`` (mean over blocks) and ``confidence`` (weighted by slot). Terms with the same weights
    hold the same denominator object. N = 0 is a batch like any other: its terms are 0 / 0 with a graph.

    Args:
        hidden_ND: corrected states of the valid slots only, ordered as ``valid_AK`` reads row by row.
        objective: what to compute.
        head_VD: the frozen head; its dtype is that of the matrix products.
        labels_N: the data's token of each valid slot.
        valid_AK: bool, which slots are supervised; N of them are true.
        teacher: needed if ``objective.needs_teacher``; otherwise ignored, and alpha is not measured.
        low_rank: the Markov head's trainable addition to the logits.
        confidence_logit_N: needed if the objective weighs ``confidence``.
        path: ``frugal`` never holds [N,V]; ``reference`` is the readable equivalent.
        budget, workspace: see ``head_loss``; the reference ignores them.

    Raises:
        ValueError: shapes that do not fit, or an input that the objective needs and that is missing.
    """
    if objective.needs_teacher and teacher is None:
        raise ValueError("the objective compares with the target, and no teacher was given")
    if objective.confidence and confidence_logit_N is None:
        raise ValueError("the objective trains a confidence head, and no confidence logit was given")
    request = {
        "head_VD": head_VD,
        "labels_N": labels_N,
        "channels": channels_of(objective),
        "teacher": teacher if objective.needs_teacher else None,
        "low_rank": low_rank,
        "support": support_of(objective),
    }
    match path:
        case "frugal":
            result = head_loss(hidden_ND, **request, budget=budget, workspace=workspace)
        case "reference":
            result = reference_head_loss(hidden_ND, **request)
    losses = _terms(objective, result, valid_AK=valid_AK, confidence_logit_N=confidence_logit_N)
    return LossTerms(losses=losses, counts=_counts(result.statistics, valid_AK))


def channels_of(objective: Objective) -> dict[str, Channel]:
    """Return what the objective asks of the vocabulary head: one channel per set of per-token weights."""
    token = Channel(
        ce=objective.ce,
        kl=objective.kl,
        tv=objective.tv,
        l1=objective.l1,
        lk_hybrid=objective.lk if objective.lk_form == "hybrid" else 0.0,
        lk_alpha=objective.lk if objective.lk_form == "alpha" else 0.0,
        eta=objective.lk_eta,
    )
    channels = {}
    if token.ce or token.compares:
        channels[TOKEN] = token
    if objective.end_to_end_tv:
        channels[END_TO_END_TV] = Channel(tv=1.0)
    return channels


def support_of(objective: Objective) -> Support:
    """Return where the objective compares student and teacher."""
    return Support(top_k=objective.top_k, renormalise=objective.renormalise)


def to_grid(values_N: Tensor, *, valid_AK: Tensor) -> Tensor:
    """Return the values of the valid slots in their places and 0 elsewhere, [A,K]; differentiable."""
    return values_N.new_zeros(valid_AK.shape).masked_scatter(valid_AK, values_N)


def _terms(
    objective: Objective, result: HeadLoss, *, valid_AK: Tensor, confidence_logit_N: Tensor | None
) -> dict[str, Ratio]:
    statistics = result.statistics
    ce_AK = to_grid(statistics.ce_N, valid_AK=valid_AK)
    weights_AK = slot_weights(objective, ce_AK=ce_AK, mask_AK=valid_AK)
    total_weight = weights_AK.sum()
    terms = {}
    if TOKEN in result.losses:
        loss_AK = to_grid(result.losses[TOKEN], valid_AK=valid_AK)
        terms[TOKEN] = Ratio((weights_AK * loss_AK).sum(), total_weight)
    if END_TO_END_TV in result.losses:
        alpha_AK = to_grid(1.0 - result.losses[END_TO_END_TV], valid_AK=valid_AK)
        blocks = end_to_end_tv(alpha_AK, mask_AK=valid_AK)
        terms[END_TO_END_TV] = Ratio(objective.end_to_end_tv * blocks.numerator, blocks.denominator)
    if objective.confidence:
        loss_N = F.binary_cross_entropy_with_logits(
            confidence_logit_N.to(statistics.ce_N.dtype), statistics.alpha_N.clamp(0, 1), reduction="none"
        )
        loss_AK = to_grid(loss_N, valid_AK=valid_AK)
        terms[CONFIDENCE] = Ratio(objective.confidence * (weights_AK * loss_AK).sum(), total_weight)
    return terms


@torch.no_grad()
def _counts(statistics: TokenStatistics, valid_AK: Tensor) -> SlotCounts:
    def per_slot(values_N: Tensor) -> Tensor:
        return to_grid(values_N.double(), valid_AK=valid_AK).sum(0)

    correct_AK = to_grid(statistics.correct_N.double(), valid_AK=valid_AK)
    prefix_AK = prefix_products(torch.where(valid_AK, correct_AK, 1.0))
    return SlotCounts(
        valid_K=valid_AK.double().sum(0),
        correct_K=correct_AK.sum(0),
        accepted_K=(prefix_AK * valid_AK).sum(0),
        ce_K=per_slot(statistics.ce_N),
        alpha_K=None if statistics.alpha_N is None else per_slot(statistics.alpha_N),
    )
