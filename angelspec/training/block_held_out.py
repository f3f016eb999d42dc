"""Held-out acceptance of block drafters: one pass over the backbone, then the heads from slot to slot.

Shapes: A anchors, K proposals of a block, D hidden, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from angelspec.drafters.drafting import exact_scores
from angelspec.ops.anchors import Anchors
from angelspec.training.held_out import HEAD_ROWS, HeldOutAcceptance
from angelspec.training.steps import MicroBatch


class BlockHeldOut(HeldOutAcceptance):
    """Measures a ``BlockDrafter``; see the base class."""

    def _survivors(self, batch: MicroBatch, anchors: Anchors, labels_AK: Tensor) -> list[int]:
        states = self._drafter(
            batch.taps_RTF,
            document_RT=batch.document_RT,
            position_RT=batch.position_RT,
            tokens_RT=batch.tokens_RT,
            anchors=anchors,
            embedding_VD=self._embedding_VD,
        )
        alive_A = torch.arange(anchors.count, device=labels_AK.device)
        previous_A = batch.tokens_RT[anchors.row_A, anchors.position_A]
        through = []
        for slot in range(labels_AK.shape[1]):
            drafted_A = self._draft_slot(states.hidden_AKD[alive_A, slot], previous_A)
            right_A = drafted_A == labels_AK[alive_A, slot]
            alive_A, previous_A = alive_A[right_A], drafted_A[right_A]
            through.append(len(alive_A))
        return through

    def _draft_slot(self, hidden_AD: Tensor, previous_A: Tensor) -> Tensor:
        """Most probable token of one slot, given the token drafted before it."""
        markov = getattr(self._drafter, "markov_head", None)
        chosen = []
        for hidden, previous in zip(hidden_AD.split(HEAD_ROWS), previous_A.split(HEAD_ROWS), strict=True):
            score = exact_scores(
                hidden[:, None], self._head_VD, corrects=True, markov_bias=None if markov is None else markov.bias
            )
            states = self._drafter.apply_heads(hidden, previous, self._embedding_VD)
            chosen.append(score(0, states.corrected_AKD, states.markov_AKR)[0])
        return torch.cat(chosen)
