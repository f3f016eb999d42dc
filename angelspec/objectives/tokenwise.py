"""Per-token losses on full logits: the slow, obvious reference that every faster path is compared with.

Each function takes logits, computes in float32 (float64 stays float64), returns one unreduced value per
position and is differentiated by autograd with respect to the student. The teacher's logits are constants.

Notation: q = softmax(student), p = softmax(teacher), alpha = sum(min(p, q)) = 1 - TV(p, q).

Shapes: N token positions, V vocabulary, K teacher's most probable tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

ACCEPTANCE_FLOOR = 1e-10
"""Added to alpha under the logarithm of the LK-alpha loss."""


def cross_entropy(logits_NV: Tensor, labels_N: Tensor) -> Tensor:
    """Return -log q(label), [N]."""
    return F.cross_entropy(_wide(logits_NV), labels_N, reduction="none")


def forward_kl(
    student_NV: Tensor, teacher_NV: Tensor, *, top_k: int | None = None, renormalise: bool = False
) -> Tensor:
    """Return the forward KL divergence of the student from the teacher, [N].

    Without ``top_k``: sum_V p (log p - log q). With ``top_k`` and ``renormalise`` (AngelSpec's variant a) both
    distributions are first renormalised inside the teacher's top K. With ``top_k`` alone (variant b) both
    softmaxes run over the whole vocabulary and only the sum is restricted, so the value can be negative.

    Raises:
        ValueError: ``renormalise`` without ``top_k``.
    """
    student, teacher = _on_support(student_NV, teacher_NV, top_k=top_k, renormalise=renormalise)
    log_q, log_p = student.log_softmax(-1), teacher.log_softmax(-1)
    pointwise = log_p.exp() * (log_p - log_q)
    if top_k is not None and not renormalise:
        pointwise = pointwise.gather(-1, teacher.topk(top_k, -1).indices)
    return pointwise.sum(-1)


def total_variation(student_NV: Tensor, teacher_NV: Tensor, *, top_k: int | None = None) -> Tensor:
    """Return 1/2 sum |p - q|, [N]; with ``top_k`` both are renormalised inside the teacher's top K (MTP)."""
    q, p = _probabilities(student_NV, teacher_NV, top_k=top_k)
    return 0.5 * (p - q).abs().sum(-1)


def l1(student_NV: Tensor, teacher_NV: Tensor, *, top_k: int | None = None) -> Tensor:
    """Return sum |p - q| = 2 TV, [N] (DSpark, arXiv 2607.05147)."""
    return 2.0 * total_variation(student_NV, teacher_NV, top_k=top_k)


def acceptance(student_NV: Tensor, teacher_NV: Tensor, *, top_k: int | None = None) -> Tensor:
    """Return alpha = sum min(p, q), [N]: the chance that rejection sampling keeps a token drawn from q."""
    q, p = _probabilities(student_NV, teacher_NV, top_k=top_k)
    return torch.minimum(p, q).sum(-1)


def lk_hybrid(
    student_NV: Tensor,
    teacher_NV: Tensor,
    *,
    eta: float = 3.0,
    top_k: int | None = None,
    renormalise: bool = False,
) -> Tensor:
    """Return lambda KL + (1 - lambda) TV with lambda = exp(-eta clip(alpha, 0, 1)) held constant, [N].

    KL is :func:`forward_kl` on the given support. TV and alpha run over the whole vocabulary, or over the
    renormalised top K with ``renormalise`` (AngelSpec, arXiv 2607.25852, section on LK losses).
    """
    subset = top_k if renormalise else None
    alpha = acceptance(student_NV, teacher_NV, top_k=subset).detach().clamp(0, 1)
    kl_share = torch.exp(-eta * alpha)
    kl = forward_kl(student_NV, teacher_NV, top_k=top_k, renormalise=renormalise)
    return kl_share * kl + (1 - kl_share) * total_variation(student_NV, teacher_NV, top_k=subset)


def lk_alpha(student_NV: Tensor, teacher_NV: Tensor, *, top_k: int | None = None) -> Tensor:
    """Return -log(alpha + floor), [N] (arXiv 2607.25852 eq. 7; the floor is :data:`ACCEPTANCE_FLOOR`)."""
    return -torch.log(acceptance(student_NV, teacher_NV, top_k=top_k) + ACCEPTANCE_FLOOR)


def _wide(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def _on_support(
    student_NV: Tensor, teacher_NV: Tensor, *, top_k: int | None, renormalise: bool
) -> tuple[Tensor, Tensor]:
    """Widen both logits and, to renormalise, keep only the teacher's top K: a softmax over those is renormalised."""
    student, teacher = _wide(student_NV), _wide(teacher_NV).detach()
    if not renormalise:
        return student, teacher
    if top_k is None:
        raise ValueError("renormalise needs top_k")
    chosen_NK = teacher.topk(top_k, -1).indices
    return student.gather(-1, chosen_NK), teacher.gather(-1, chosen_NK)


def _probabilities(student_NV: Tensor, teacher_NV: Tensor, *, top_k: int | None) -> tuple[Tensor, Tensor]:
    student, teacher = _on_support(student_NV, teacher_NV, top_k=top_k, renormalise=top_k is not None)
    return student.softmax(-1), teacher.softmax(-1)
