"""The step of block drafters (DFlash, DFlare, DSpark, DFly): blocks at random anchors of packed rows.

Shapes: R rows of a micro-batch, T tokens of a row, A anchors, K proposals of a block (block size - 1), N valid (anchor,
slot) pairs, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from angelspec.core.objective import Objective
from angelspec.drafters.block import BlockDrafter
from angelspec.objectives import LowRank, Teacher, Workspace, block_loss_terms
from angelspec.ops.anchors import Anchors, anchor_candidates, sample_anchors
from angelspec.training.features import FeatureSource
from angelspec.training.steps import StepClock, row_generator, take_rows
from angelspec.training.update import StepTerms

if TYPE_CHECKING:
    from angelspec.data.dataset import PackedRows


class Supervision(NamedTuple):
    """What each slot 1.. of each block is to predict, and who judges it."""

    labels_AK: Tensor
    """int64: the data's token."""
    valid_AK: Tensor
    """bool: whether the slot is supervised."""
    judge_AK: Tensor
    """int64: index into the flattened [R * T] tokens of the target state that predicts the slot's token."""


def supervise(tokens_RT: Tensor, loss_mask_RT: Tensor, anchors: Anchors, *, block_size: int) -> Supervision:
    """Align blocks with the data: slot k of a block at anchor a predicts token a + k, judged by target state a + k - 1.

    Anchors lie so that the whole block is inside its row and document (``ops.anchors``).
    """
    num_tokens = tokens_RT.shape[1]
    slots_K = torch.arange(1, block_size, device=tokens_RT.device)
    flat_AK = (anchors.row_A * num_tokens + anchors.position_A)[:, None] + slots_K
    return Supervision(
        labels_AK=tokens_RT.reshape(-1)[flat_AK].long(),
        valid_AK=loss_mask_RT.reshape(-1)[flat_AK],
        judge_AK=flat_AK - 1,
    )


class BlockStep:
    """Trains a block drafter (DFlash, DFlare, DSpark, DFly) on packed rows.

    Args:
        drafter: called as a module, so that FSDP's hooks run.
        features: of the same rows.
        embedding_VD: the target's frozen embedding.
        head_VD: the target's frozen head; its dtype is that of the head's matrix products.
        compute_dtype: of the drafter's matrix products; parameters and losses stay float32.
        seed: of the anchors.
        timed: whether to stamp the parts of a step with the clock, which waits for a GPU at each.
    """

    def __init__(
        self,
        drafter: BlockDrafter,
        *,
        rows: PackedRows,
        features: FeatureSource,
        embedding_VD: Tensor,
        head_VD: Tensor,
        anchors_per_row: int,
        seed: int,
        compute_dtype: torch.dtype = torch.float32,
        timed: bool = False,
    ) -> None:
        self.drafter = drafter
        self.drafter.matmul_dtype = None if compute_dtype == torch.float32 else compute_dtype
        self.config = drafter.config
        self._rows, self._features = rows, features
        self._embedding_VD, self._head_VD = embedding_VD, head_VD
        self._anchors_per_row, self._seed = anchors_per_row, seed
        self._timed = timed
        self._device = embedding_VD.device
        self._workspace = Workspace()

    def trainable_rows(self) -> list[int]:
        """Rows that host at least one anchor whose next token is supervised."""
        rows = self._rows
        block_size = self.config.block_size
        hosts_RT = anchor_candidates(rows.loss_mask_RT, rows.document_RT, block_size=block_size)
        supervised_RT = torch.zeros_like(hosts_RT)
        for slot in range(1, block_size):
            supervised_RT[:, :-slot] |= rows.loss_mask_RT[:, slot:]
        return (hosts_RT & supervised_RT).any(1).nonzero().flatten().tolist()

    def draw_anchors(self, row_ids: Sequence[int], loss_mask_RT: Tensor, document_RT: Tensor, *, step: int) -> Anchors:
        """Anchors of these rows, each drawn from its own random stream."""
        drawn = [
            sample_anchors(
                loss_mask_RT[number : number + 1],
                document_RT[number : number + 1],
                block_size=self.config.block_size,
                num_anchors=self._anchors_per_row,
                generator=row_generator(self._seed, step=step, row=row),
            )
            for number, row in enumerate(row_ids)
        ]
        return Anchors(
            torch.cat([anchors.row_A + number for number, anchors in enumerate(drawn)]),
            torch.cat([anchors.position_A for anchors in drawn]),
        )

    def __call__(self, row_ids: Sequence[int], *, objective: Objective, step: int) -> StepTerms:
        """Forward pass and loss terms of one micro-batch, ready for ``backward``."""
        clock = StepClock(running=self._timed, device=self._head_VD.device)
        batch = take_rows(self._rows, self._features, row_ids, device=self._device)
        clock.lap("target")
        anchors = self.draw_anchors(row_ids, batch.loss_mask_RT, batch.document_RT, step=step)
        states = self.drafter(
            batch.taps_RTF,
            document_RT=batch.document_RT,
            position_RT=batch.position_RT,
            tokens_RT=batch.tokens_RT,
            anchors=anchors,
            embedding_VD=self._embedding_VD,
        )
        clock.lap("backbone")

        labels_AK, valid_AK, judge_AK = supervise(
            batch.tokens_RT, batch.loss_mask_RT, anchors, block_size=self.config.block_size
        )
        low_rank = None
        if states.markov_AKR is not None:
            low_rank = LowRank(states.markov_AKR[valid_AK], self.drafter.markov_head.markov_w2.weight)
        confidence_AK = states.confidence_AK if objective.confidence else None
        hidden_ND = states.corrected_AKD[valid_AK]
        terms = block_loss_terms(
            hidden_ND,
            objective=objective,
            head_VD=self._head_VD,
            labels_N=labels_AK[valid_AK],
            valid_AK=valid_AK,
            teacher=Teacher(batch.hidden_RTD.flatten(0, 1), judge_AK[valid_AK]) if objective.needs_teacher else None,
            low_rank=low_rank,
            confidence_logit_N=None if confidence_AK is None else confidence_AK[valid_AK],
            workspace=self._workspace,
        )
        clock.watch(hidden_ND)
        clock.lap("head")
        return StepTerms(
            losses=terms.losses,
            counts=terms.counts,
            num_positions=int(valid_AK.sum()),
            num_refused_rows=batch.num_refused_rows,
            seconds=clock.seconds,
        )
