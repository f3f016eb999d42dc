"""One forward step per drafter family: row ids in, named loss terms out. The loop knows nothing more.

Shapes: R rows of a micro-batch, T tokens of a row, A anchors, K proposals of a block (block size - 1), N valid (anchor,
slot) pairs, D hidden, V vocabulary.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from angelspec.core.objective import Objective
from angelspec.drafters.block import BlockDrafter
from angelspec.objectives import LowRank, Teacher, Workspace, block_loss_terms
from angelspec.ops.anchors import Anchors, anchor_candidates, sample_anchors
from angelspec.training.features import FeatureSource
from angelspec.training.update import HEAD_DONE, StepTerms

if TYPE_CHECKING:
    from angelspec.data.dataset import PackedRows

IDLE_ROW = -1
"""A row id that stands for no row: its rank runs the same graph as the others and supervises nothing."""


class TrainingStep(Protocol):
    """What the loop needs of a drafter family."""

    def trainable_rows(self) -> list[int]:
        """Rows that can supervise something."""
        ...

    def __call__(self, row_ids: Sequence[int], *, objective: Objective, step: int) -> StepTerms:
        """Forward pass and loss terms of one micro-batch, ready for ``backward``."""
        ...


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


def row_generator(seed: int, *, step: int, row: int) -> torch.Generator:
    """Random stream of one row in one step: the same for any micro-batches, ranks and interruptions."""
    digest = hashlib.blake2b(f"{seed}/{step}/{row}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


class BlockStep:
    """Trains a block drafter (DFlash, DFlare, DSpark, DFly) on packed rows.

    Args:
        drafter: called as a module, so that FSDP's hooks run.
        features: of the same rows.
        embedding_VD: the target's frozen embedding.
        head_VD: the target's frozen head; its dtype is that of the head's matrix products.
        compute_dtype: of the drafter's matrix products; parameters and losses stay float32.
        seed: of the anchors.
        timed: whether to stamp the parts of a step with the clock (meaningful on a CPU).
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
        stamps = [time.perf_counter()]
        real = [max(row, 0) for row in row_ids]
        index_R = torch.as_tensor(real, dtype=torch.int64)
        idle_R = torch.as_tensor([row == IDLE_ROW for row in row_ids])
        features = self._features.fetch(real).to(self._device)
        stamps.append(time.perf_counter())

        tokens_RT = self._rows.tokens_RT[index_R].to(self._device, torch.int64)
        document_RT = self._rows.document_RT[index_R].to(self._device)
        position_RT = self._rows.position_RT[index_R].to(self._device)
        usable_R = features.finite_R & ~idle_R.to(self._device)
        loss_mask_RT = self._rows.loss_mask_RT[index_R].to(self._device) & usable_R[:, None]
        anchors = self.draw_anchors(row_ids, loss_mask_RT, document_RT, step=step)
        states = self.drafter(
            features.taps_RTF,
            document_RT=document_RT,
            position_RT=position_RT,
            tokens_RT=tokens_RT,
            anchors=anchors,
            embedding_VD=self._embedding_VD,
        )
        stamps.append(time.perf_counter())

        labels_AK, valid_AK, judge_AK = supervise(tokens_RT, loss_mask_RT, anchors, block_size=self.config.block_size)
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
            teacher=Teacher(features.hidden_RTD.flatten(0, 1), judge_AK[valid_AK]) if objective.needs_teacher else None,
            low_rank=low_rank,
            confidence_logit_N=None if confidence_AK is None else confidence_AK[valid_AK],
            workspace=self._workspace,
        )
        seconds = self._seconds(stamps, hidden_ND) if self._timed else {}
        return StepTerms(
            losses=terms.losses,
            counts=terms.counts,
            num_positions=int(valid_AK.sum()),
            num_refused_rows=int((~features.finite_R & ~idle_R.to(self._device)).sum()),
            seconds=seconds,
        )

    @staticmethod
    def _seconds(stamps: list[float], hidden_ND: Tensor) -> dict[str, float]:
        """Time of each part; the head's backward pass ends when the gradient reaches its input."""
        stamps.append(time.perf_counter())
        seconds = {name: stamps[i + 1] - stamps[i] for i, name in enumerate(("target", "backbone", "head"))}
        if hidden_ND.requires_grad:

            def reached(gradient: Tensor) -> None:
                seconds[HEAD_DONE] = time.perf_counter()

            hidden_ND.register_hook(reached)
        return seconds
