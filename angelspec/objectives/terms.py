"""Loss terms as numerators and denominators, and metrics as counts.

Sums of both over micro-batches, accumulation steps and ranks, divided once, give the update of the whole batch.

Shapes: K slots of a block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class Ratio(NamedTuple):
    """A mean that has not been divided yet: two scalars."""

    numerator: Tensor
    """Weighted sum of losses, with its graph."""
    denominator: Tensor
    """Sum of weights, detached."""


@dataclass(frozen=True, kw_only=True)
class SlotCounts:
    """Sums over the valid slots of some blocks, float64, [K] each and detached; additive."""

    valid_K: Tensor
    """Valid slots."""
    correct_K: Tensor
    """Slots whose most probable token is the label."""
    accepted_K: Tensor
    """Slots that are correct together with all valid slots before them (a training proxy of acceptance)."""
    ce_K: Tensor
    """Sum of the cross-entropy."""
    alpha_K: Tensor | None
    """Sum of alpha; None without a teacher."""


@dataclass(frozen=True, kw_only=True)
class LossTerms:
    """What one micro-batch contributes to the loss and to the metrics."""

    losses: Mapping[str, Ratio]
    """Term name to undivided mean; the objective's weights are already in the numerators."""
    counts: SlotCounts


def total_loss(losses: Mapping[str, Ratio]) -> Tensor:
    """Return the sum of the divided terms, a scalar; a term without any weight contributes 0 (and keeps its graph)."""
    divided = [term.numerator / torch.where(term.denominator > 0, term.denominator, 1.0) for term in losses.values()]
    return torch.stack(divided).sum()


def sum_losses(batches: Sequence[Mapping[str, Ratio]]) -> dict[str, Ratio]:
    """Return numerators and denominators added over micro-batches; every batch must name the same terms.

    Raises:
        ValueError: no batch, or batches of different objectives.
    """
    names = {tuple(sorted(losses)) for losses in batches}
    if len(names) != 1:
        raise ValueError(f"cannot add terms of different objectives: {sorted(names)}")
    return {
        name: Ratio(
            torch.stack([losses[name].numerator for losses in batches]).sum(),
            torch.stack([losses[name].denominator for losses in batches]).sum(),
        )
        for name in batches[0]
    }


def sum_counts(counts: Sequence[SlotCounts]) -> SlotCounts:
    """Return the counts added up; alpha is None unless every part has it.

    Raises:
        ValueError: nothing to add.
    """
    if not counts:
        raise ValueError("no counts to add")
    alphas = [part.alpha_K for part in counts if part.alpha_K is not None]
    return SlotCounts(
        valid_K=sum(part.valid_K for part in counts),
        correct_K=sum(part.correct_K for part in counts),
        accepted_K=sum(part.accepted_K for part in counts),
        ce_K=sum(part.ce_K for part in counts),
        alpha_K=sum(alphas) if len(alphas) == len(counts) else None,
    )
