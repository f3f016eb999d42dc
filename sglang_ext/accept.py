"""Acceptance: the target draws its own token at every verified slot; a draft is kept while it is that token.

This is the target-only rule: a proposal is accepted with the target's probability of it, and what replaces the first
one that is not is drawn from the rest, in one stroke. Each slot is drawn as the engine's sampler would draw it in plain
decoding, at its own position: temperature, top-k, top-p, min-p and seeds hold without a word about them here.

Shapes: B batch rows, W slots of a row, K = W - 1 proposals, N verified slots of all rows, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch
from torch import Tensor

_PER_ROW = ("temperatures", "top_ps", "top_ks", "min_ps", "sampling_seed")


class Accepted(NamedTuple):
    """What a verification committed."""

    tokens_BW: Tensor
    """int64: the target's own token at every slot, 0 where a slot was not verified."""
    correct_B: Tensor
    """int64: accepted proposals."""
    bonus_B: Tensor
    """int64: the token after them."""


def draw(sampler: Any, logits_NV: Tensor, sampling_info: Any, *, row_N: Tensor, position_N: Tensor) -> Tensor:
    """The target's token at every slot.

    Args:
        sampler: SGLang's.
        logits_NV: with penalties, biases and masks applied; changed in place where rows are sampled.
        sampling_info: of the batch; None: greedy.
        row_N: batch row of each slot.
        position_N: of each slot's input token.
    """
    if sampling_info is None or sampling_info.is_all_greedy:
        return logits_NV.argmax(dim=-1)
    from sglang_ext.compat import LogitsProcessorOutput

    per_slot = {name: value[row_N] for name in _PER_ROW if (value := getattr(sampling_info, name, None)) is not None}
    info = dataclasses.replace(
        sampling_info,
        **per_slot,
        grammars=None,
        grammar_mask=None,
        penalizer_orchestrator=None,
        acc_additive_penalties=None,
        acc_scaling_penalties=None,
        logit_bias=None,
        has_custom_logit_processor=False,
        custom_logit_processor=None,
        sampling_mask_batch_indices=None,
        sampling_support_logprobs_capture_indices=None,
    )
    output = LogitsProcessorOutput(next_token_logits=logits_NV)
    return sampler(output, info, False, [], [], position_N).to(torch.int64)


def accept(drawn_N: Tensor, draft_BK: Tensor, *, row_N: Tensor, offset_N: Tensor, kept_B: Tensor) -> Accepted:
    """Compare what the target drew with what was drafted.

    Args:
        drawn_N: from :func:`draw`.
        draft_BK: the proposals; anything beyond a row's ``kept_B``.
        row_N: batch row of each slot.
        offset_N: slot within its row, 0 for the anchor's.
        kept_B: proposals that were verified.
    """
    batch, depth = draft_BK.shape
    tokens_BW = drawn_N.new_zeros(batch, depth + 1)
    tokens_BW[row_N, offset_N] = drawn_N
    agrees_BK = (tokens_BW[:, :depth] == draft_BK) & (torch.arange(depth, device=draft_BK.device) < kept_B.unsqueeze(1))
    correct_B = agrees_BK.to(torch.int64).cumprod(dim=1).sum(dim=1)
    return Accepted(tokens_BW, correct_B, tokens_BW.gather(1, correct_B.unsqueeze(1)).squeeze(1))
