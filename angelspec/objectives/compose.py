"""From an objective and a drafter's states to loss terms: the one place where losses are composed.

A block drafter's states meet the head in one call (``block_loss_terms``); an unrolled drafter's do so depth by depth
(``unrolled``) and are composed from what comes back. Either way the results stand in a grid of draft and proposal.

Shapes: A anchors (blocks, or positions of an unrolled drafter), K supervised slots of a block (block size - 1; or
depths), N valid (anchor, slot) pairs in row-major order, M distinct teacher rows, V vocabulary, D hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from angelspec.core.objective import Objective
from angelspec.objectives.channels import Channel, LowRank, Support, Teacher
from angelspec.objectives.end_to_end import end_to_end_tv, prefix_products
from angelspec.objectives.head_loss import head_loss
from angelspec.objectives.head_loss_reference import reference_head_loss
from angelspec.objectives.terms import LossTerms, Ratio, SlotCounts
from angelspec.objectives.weights import slot_weights
from angelspec.objectives.workspace import Budget, Workspace

TOKEN, END_TO_END_TV, CONFIDENCE = "token", "end_to_end_tv", "confidence"
"""Names of the loss terms."""


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Per-token results in their places, [A,K] each, and 0 where a slot is not valid."""

    valid_AK: Tensor
    """bool."""
    losses: dict[str, Tensor]
    """By channel, with their graph."""
    ce_AK: Tensor
    correct_AK: Tensor
    """1 where the most probable token is the label."""
    alpha_AK: Tensor | None
    """None without a teacher."""


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
    statistics = result.statistics
    grid = Grid(
        valid_AK=valid_AK,
        losses={name: to_grid(loss_N, valid_AK=valid_AK) for name, loss_N in result.losses.items()},
        ce_AK=to_grid(statistics.ce_N, valid_AK=valid_AK),
        correct_AK=to_grid(statistics.correct_N.to(statistics.ce_N.dtype), valid_AK=valid_AK),
        alpha_AK=None if statistics.alpha_N is None else to_grid(statistics.alpha_N, valid_AK=valid_AK),
    )
    confidence_AK = None
    if objective.confidence:
        confidence_AK = to_grid(confidence_logit_N.to(statistics.ce_N.dtype), valid_AK=valid_AK)
    return grid_terms(objective, grid, end_to_end_AK=valid_AK, confidence_logit_AK=confidence_AK)


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


def grid_terms(
    objective: Objective, grid: Grid, *, end_to_end_AK: Tensor, confidence_logit_AK: Tensor | None = None
) -> LossTerms:
    """Return the objective's terms and counts of results that stand in their places.

    Args:
        objective: what to compute.
        grid: results of the channels that ``channels_of`` names.
        end_to_end_AK: bool, the slots that enter the end-to-end term.
        confidence_logit_AK: needed if the objective weighs ``confidence``.
    """
    weights_AK = slot_weights(objective, ce_AK=grid.ce_AK, mask_AK=grid.valid_AK)
    total_weight = weights_AK.sum()
    terms = {}
    if TOKEN in grid.losses:
        terms[TOKEN] = Ratio((weights_AK * grid.losses[TOKEN]).sum(), total_weight)
    if END_TO_END_TV in grid.losses:
        drafts = end_to_end_tv(1.0 - grid.losses[END_TO_END_TV], mask_AK=end_to_end_AK)
        terms[END_TO_END_TV] = Ratio(objective.end_to_end_tv * drafts.numerator, drafts.denominator)
    if objective.confidence:
        loss_AK = F.binary_cross_entropy_with_logits(confidence_logit_AK, grid.alpha_AK.clamp(0, 1), reduction="none")
        terms[CONFIDENCE] = Ratio(objective.confidence * (weights_AK * loss_AK).sum(), total_weight)
    return LossTerms(losses=terms, counts=_counts(grid))


@torch.no_grad()
def _counts(grid: Grid) -> SlotCounts:
    valid_AK, correct_AK = grid.valid_AK.double(), grid.correct_AK.double()
    prefix_AK = prefix_products(torch.where(grid.valid_AK, correct_AK, 1.0))
    return SlotCounts(
        valid_K=valid_AK.sum(0),
        correct_K=correct_AK.sum(0),
        accepted_K=(prefix_AK * valid_AK).sum(0),
        ce_K=grid.ce_AK.double().sum(0),
        alpha_K=None if grid.alpha_AK is None else grid.alpha_AK.double().sum(0),
    )
