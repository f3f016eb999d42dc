"""Held-out acceptance of MTP: depth after depth, each fed with what the one before proposed.

The training pass is used, which equals drafting from a real cache depth by depth (``tests/parity``): before an anchor
lie the target's states, and behind it only the draft's own.

Shapes: R rows, T tokens, A anchors, K depths, D hidden, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from angelspec.drafters.drafting import best_tokens, vocabulary_logits
from angelspec.ops.anchors import Anchors
from angelspec.training.held_out import HEAD_ROWS, HeldOutAcceptance
from angelspec.training.steps import MicroBatch


class MtpHeldOut(HeldOutAcceptance):
    """Measures an ``MtpDrafter``; see the base class. A draft begins at the state before its anchor."""

    def _survivors(self, batch: MicroBatch, anchors: Anchors, labels_AK: Tensor) -> list[int]:
        asked_RT = torch.zeros_like(batch.loss_mask_RT)
        asked_RT[anchors.row_A, anchors.position_A - 1] = True
        unroll = self._drafter(
            batch.hidden_RTD,
            tokens_RT=batch.tokens_RT,
            document_RT=batch.document_RT,
            position_RT=batch.position_RT,
            asked_RT=asked_RT,
            embedding_VD=self._embedding_VD,
        )
        hidden_AD, through = unroll.hidden_ND, []
        alive_A = torch.arange(anchors.count, device=labels_AK.device)
        for depth in range(labels_AK.shape[1]):
            chosen_A = torch.cat(
                [best_tokens(vocabulary_logits(part, self._head_VD))[0] for part in hidden_AD[alive_A].split(HEAD_ROWS)]
            )
            # a draft that has missed goes on with any token: it is not looked at again
            tokens_A = labels_AK[:, depth].index_copy(0, alive_A, chosen_A)
            alive_A = alive_A[chosen_A == labels_AK[alive_A, depth]]
            through.append(len(alive_A))
            if depth + 1 < labels_AK.shape[1]:
                hidden_AD = unroll.advance(tokens_A)
        return through
