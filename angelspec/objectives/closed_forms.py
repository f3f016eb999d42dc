"""Losses of a channel from a row's statistics, and the gradient with respect to the logits in closed form.

With q = softmax(z) of the student, p of the teacher, and A = the sum of q where q <= p:

    dCE/dz   = q - onehot(label)
    dKL/dz   = q * mass - p on the support      (mass = sum of p on the support: 1 if full or renormalised)
    dTV/dz   = q * A - [q where q <= p]
    dalpha   = -dTV

Every loss here is a function of CE, KL, TV and alpha whose mix is known once a row's statistics are, so its gradient
is ``ce * dCE + kl * dKL + tv * dTV`` with one number each per row.

Shapes: R rows (positions of a chunk).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from angelspec.objectives.channels import Channel
from angelspec.objectives.tokenwise import ACCEPTANCE_FLOOR


class RowStatistics(NamedTuple):
    """What the losses of a position depend on, [R] each."""

    ce_R: Tensor
    kl_R: Tensor | None = None
    """None when no channel asks for it."""
    alpha_R: Tensor | None = None
    """None without a teacher."""


class GradientWeights(NamedTuple):
    """Weights of dCE/dz, dKL/dz and dTV/dz in every row, [R] each; None where that part is absent."""

    ce_R: Tensor | None
    kl_R: Tensor | None
    tv_R: Tensor | None


def channel_losses(channel: Channel, rows: RowStatistics) -> Tensor:
    """Return the channel's loss of every row, [R]."""
    losses_R = channel.ce * rows.ce_R if channel.ce else torch.zeros_like(rows.ce_R)
    if channel.kl:
        losses_R = losses_R + channel.kl * rows.kl_R
    if channel.tv or channel.l1:
        losses_R = losses_R + (channel.tv + 2 * channel.l1) * (1 - rows.alpha_R)
    if channel.lk_hybrid:
        kl_share_R = _kl_share(channel, rows)
        losses_R = losses_R + channel.lk_hybrid * (kl_share_R * rows.kl_R + (1 - kl_share_R) * (1 - rows.alpha_R))
    if channel.lk_alpha:
        losses_R = losses_R - channel.lk_alpha * torch.log(rows.alpha_R + ACCEPTANCE_FLOOR)
    return losses_R


def gradient_weights(channel: Channel, rows: RowStatistics) -> GradientWeights:
    """Return how the channel's gradient mixes those of CE, KL and TV in every row."""
    kl_R = torch.full_like(rows.ce_R, channel.kl)
    tv_R = torch.full_like(rows.ce_R, channel.tv + 2 * channel.l1)
    if channel.lk_hybrid:
        kl_share_R = _kl_share(channel, rows)
        kl_R += channel.lk_hybrid * kl_share_R
        tv_R += channel.lk_hybrid * (1 - kl_share_R)
    if channel.lk_alpha:
        tv_R += channel.lk_alpha / (rows.alpha_R + ACCEPTANCE_FLOOR)
    return GradientWeights(
        ce_R=torch.full_like(rows.ce_R, channel.ce) if channel.ce else None,
        kl_R=kl_R if channel.needs_kl else None,
        tv_R=tv_R if channel.needs_tv else None,
    )


def combine(weights: list[GradientWeights], upstream_CR: Tensor) -> GradientWeights:
    """Return the weights of sum_c upstream_c * loss_c: the gradient of all channels as that of one."""

    def mixed(parts: tuple[Tensor | None, ...]) -> Tensor | None:
        present = [part * upstream for part, upstream in zip(parts, upstream_CR, strict=True) if part is not None]
        return torch.stack(present).sum(0) if present else None

    return GradientWeights(*(mixed(parts) for parts in zip(*weights, strict=True)))


def _kl_share(channel: Channel, rows: RowStatistics) -> Tensor:
    return torch.exp(-channel.eta * rows.alpha_R.clamp(0, 1))
