"""Acceptance of a chain of drafts at a temperature: the plain torch form of SGLang's Triton kernel.

Shapes: B requests, W slots of a chain (the anchor and W - 1 drafts), V tokens of the vocabulary.

Draft k is accepted if all before it are and ``u_k * q_k(x_k) < p_k(x_k)``. At the first rejection the token is drawn
from the normalised ``max(p_k - q_k, 0)``, behind the last draft from p (Leviathan et al., arXiv 2211.17192). A q that
is no probability (NaN, infinite, out of [0, 1]) accepts nothing and takes nothing away from p.
"""

from __future__ import annotations

import torch
from torch import Tensor


def sample_chain(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    uniform_samples: Tensor,
    uniform_samples_for_final_sampling: Tensor,
    target_probs: Tensor,
    draft_probs: Tensor,
    threshold_single: float,
    threshold_acc: float,
    deterministic: bool,
    *,
    block_verification: bool = False,
) -> None:
    """Accept drafts and draw the token behind them, for all requests at once.

    Args:
        predicts: int32 [B * W], written: the token that follows each accepted slot.
        accept_index: int32 [B, W], written: the index into ``predicts`` of the anchor and of each accepted draft.
        accept_token_num: int32 [B], written: accepted drafts.
        candidates: int64 [B, W]: the anchor and the drafts.
        retrive_index: int64 [B, W]: the index into ``predicts`` of each slot.
        uniform_samples: float [B, >= W - 1], in [0, 1): one per draft.
        uniform_samples_for_final_sampling: float [B], in [0, 1).
        target_probs: float [B, W, V]: row k is the law of the token behind slot k.
        draft_probs: float [B, >= W - 1, V]: row k is the law that draft k + 1 was drawn from.
        retrive_next_token, retrive_next_sibling, threshold_single, threshold_acc, deterministic: unused, as in the
            kernel.

    Raises:
        NotImplementedError: for block verification.
    """
    if block_verification:
        raise NotImplementedError("block verification is not supported on the CPU platform of angelspec")
    batch, width = candidates.shape
    steps = width - 1
    index_BW = retrive_index.long()
    draft_BS = candidates[:, 1:].long()
    p_BS = target_probs[:, :steps].gather(2, draft_BS.unsqueeze(2)).squeeze(2)
    q_BS = draft_probs[:, :steps].gather(2, draft_BS.unsqueeze(2)).squeeze(2)
    passes_BS = (q_BS > 0) & (q_BS <= 1) & (uniform_samples[:, :steps] * q_BS < p_BS)
    accepted_BS = passes_BS.long().cumprod(1).bool()
    accepted_B = accepted_BS.sum(1)

    row_B = torch.arange(batch, device=candidates.device)
    weight_BV = target_probs[row_B, accepted_B].clone()
    rejected_R = (accepted_B < steps).nonzero().squeeze(1)
    if rejected_R.numel():
        q_RV = draft_probs[rejected_R, accepted_B[rejected_R]]
        q_RV = torch.where((q_RV >= 0) & (q_RV <= 1), q_RV, 0)
        weight_BV[rejected_R] = (weight_BV[rejected_R] - q_RV).clamp_min_(0)
    mass_BV = weight_BV.cumsum(1)
    threshold_B1 = (uniform_samples_for_final_sampling * mass_BV[:, -1]).unsqueeze(1)
    final_B = torch.searchsorted(mass_BV, threshold_B1, right=True).squeeze(1).clamp_max_(weight_BV.shape[1] - 1)

    accept_token_num.copy_(accepted_B)
    accept_index[:, 0] = index_BW[:, 0].to(accept_index.dtype)
    accept_index[:, 1:] = torch.where(accepted_BS, index_BW[:, 1:].to(accept_index.dtype), accept_index[:, 1:])
    predicts[index_BW[:, :-1][accepted_BS]] = draft_BS[accepted_BS].to(predicts.dtype)
    predicts[index_BW[row_B, accepted_B]] = final_B.to(predicts.dtype)
