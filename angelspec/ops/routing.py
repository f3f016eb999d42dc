"""Which experts a token goes to, and with what weight (DeepSeek-V3, arXiv 2412.19437, equations 13-16; Hy3).

Shapes: N tokens, E experts, M chosen experts of a token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from angelspec.core.drafter_config import MoeConfig

_TINY = 1e-20
"""Keeps a token whose chosen scores are all zero finite."""


def choose_experts(logits_NE: Tensor, bias_E: Tensor | None, *, moe: MoeConfig) -> tuple[Tensor, Tensor]:
    """The experts with the highest score plus bias; the bias chooses and never weighs.

    Args:
        logits_NE: float32, of the router.
        bias_E: selection bias; None: none. It gets no gradient.
        moe: how logits become scores, and scores become weights.

    Returns:
        experts int64 [N, M] and their weights [N, M].
    """
    scores_NE = torch.sigmoid(logits_NE) if moe.router_score == "sigmoid" else torch.softmax(logits_NE, dim=-1)
    ranked_NE = scores_NE.detach() if bias_E is None else scores_NE.detach() + bias_E
    expert_NM = ranked_NE.topk(moe.experts_per_token, dim=-1).indices
    weight_NM = scores_NE.gather(-1, expert_NM)
    if moe.normalise_routes:
        weight_NM = weight_NM / (weight_NM.sum(-1, keepdim=True) + _TINY)
    return expert_NM, weight_NM * moe.router_scale
