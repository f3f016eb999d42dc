"""The frozen-head losses in their plainest form: whole [N,V] logits and autograd.

Shapes: N token positions, V vocabulary, D hidden, R rank of the trainable addition.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from angelspec.objectives import tokenwise
from angelspec.objectives.channels import (
    Channel,
    HeadLoss,
    LowRank,
    Support,
    Teacher,
    TokenStatistics,
    check_request,
    compute_dtype,
)


def reference_head_loss(
    hidden_ND: Tensor,
    *,
    head_VD: Tensor,
    labels_N: Tensor,
    channels: Mapping[str, Channel],
    teacher: Teacher | None = None,
    low_rank: LowRank | None = None,
    support: Support | None = None,
) -> HeadLoss:
    """Return what ``head_loss`` returns, by materialising all logits; arguments and errors are the same."""
    support = support or Support()
    check_request(
        hidden_ND,
        head_VD=head_VD,
        labels_N=labels_N,
        channels=channels,
        teacher=teacher,
        low_rank=low_rank,
        support=support,
    )
    dtype = compute_dtype(head_VD)
    student_NV = (hidden_ND.to(head_VD.dtype) @ head_VD.T).to(dtype)
    if low_rank is not None:
        student_NV = student_NV + low_rank.state_NR.to(dtype) @ low_rank.weight_VR.to(dtype).T
    teacher_NV = None
    if teacher is not None:
        rows_ND = teacher.hidden_MD if teacher.index_N is None else teacher.hidden_MD[teacher.index_N]
        teacher_NV = (rows_ND.to(head_VD.dtype) @ head_VD.T).to(dtype)
    losses = {name: _mixed(channel, student_NV, teacher_NV, labels_N, support) for name, channel in channels.items()}
    return HeadLoss(losses, _statistics(student_NV.detach(), teacher_NV, labels_N, support))


def _mixed(
    channel: Channel, student_NV: Tensor, teacher_NV: Tensor | None, labels_N: Tensor, support: Support
) -> Tensor:
    top_k = support.alpha_top_k
    whole = {"top_k": support.top_k, "renormalise": support.renormalise}
    parts = [
        (channel.ce, lambda: tokenwise.cross_entropy(student_NV, labels_N)),
        (channel.kl, lambda: tokenwise.forward_kl(student_NV, teacher_NV, **whole)),
        (channel.tv, lambda: tokenwise.total_variation(student_NV, teacher_NV, top_k=top_k)),
        (channel.l1, lambda: tokenwise.l1(student_NV, teacher_NV, top_k=top_k)),
        (channel.lk_hybrid, lambda: tokenwise.lk_hybrid(student_NV, teacher_NV, eta=channel.eta, **whole)),
        (channel.lk_alpha, lambda: tokenwise.lk_alpha(student_NV, teacher_NV, top_k=top_k)),
    ]
    mixed_N = student_NV.new_zeros(len(student_NV)) + 0.0 * student_NV.sum(-1)
    for coefficient, loss in parts:
        if coefficient:
            mixed_N = mixed_N + coefficient * loss()
    return mixed_N


@torch.no_grad()
def _statistics(student_NV: Tensor, teacher_NV: Tensor | None, labels_N: Tensor, support: Support) -> TokenStatistics:
    alpha_N = None
    if teacher_NV is not None:
        alpha_N = tokenwise.acceptance(student_NV, teacher_NV, top_k=support.alpha_top_k)
    top_N = student_NV.argmax(-1) if student_NV.numel() else labels_N.new_zeros(len(student_NV))
    return TokenStatistics(
        ce_N=tokenwise.cross_entropy(student_NV, labels_N),
        confidence_N=student_NV.softmax(-1).amax(-1) if student_NV.numel() else student_NV.sum(-1),
        top_N=top_N,
        correct_N=top_N == labels_N,
        alpha_N=alpha_N,
    )
