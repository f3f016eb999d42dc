"""The step of MTP: Training-Time Test, every depth fed with what the depth before proposed (arXiv 2607.25852).

At position j, depth k (zero-based) is fed with depth k - 1's most probable token at the same position (on-policy) or
the data's token j + 1 + k (teacher-forced), and predicts the data's token j + 2 + k, which the target's state at j + 1
+ k judges. Labels and judges are the data's either way; a wrong token of the rollout never becomes one.

Positions go through all their depths in pieces (``objectives.UnrolledHead``). A depth's most probable tokens fall off
the sweep over the vocabulary that computes its losses, so drafting on-policy costs no product with the head.

Ranks may share the rows by positions (``ops.sequence_parallel``). All of them align labels, gates and judges on whole
rows and then take their own positions, whose judges reach up to K states into the next rank's: they are read where the
features lie, and only those that a rank needs go to its device.

Shapes: R rows of a micro-batch, T tokens of a row, K depths, N positions with a supervised depth, P positions of a
piece, M judges of a piece, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from angelspec.core.objective import Objective
from angelspec.drafters.mtp import MtpDrafter, Unroll
from angelspec.objectives import Budget, UnrolledHead, Workspace
from angelspec.training.distributed import Ranks
from angelspec.training.features import FeatureSource
from angelspec.training.steps import StepClock, take_rows
from angelspec.training.update import StepTerms

if TYPE_CHECKING:
    from angelspec.data.dataset import PackedRows


class DepthSupervision(NamedTuple):
    """What each depth at each position is to predict, and who judges it, [R,T,K] each."""

    labels_RTK: Tensor
    """int64: the data's token j + 2 + k; the row's last one where that is outside the row."""
    valid_RTK: Tensor
    """bool: whether it is supervised."""
    judge_RTK: Tensor
    """int64: index into the flattened [R * T] tokens of the target state that predicts the label."""


def supervise_depths(
    tokens_RT: Tensor, loss_mask_RT: Tensor, document_RT: Tensor, *, num_depths: int
) -> DepthSupervision:
    """Align depths with the data.

    Depth k at position j is valid if token j + 2 + k is supervised and j .. j + 2 + k all lie in one document: no depth
    is supervised across a document's end.
    """
    rows, num_tokens = tokens_RT.shape
    index_T = torch.arange(num_tokens, device=tokens_RT.device)
    label_TK = index_T[:, None] + 2 + torch.arange(num_depths, device=tokens_RT.device)
    inside_TK = label_TK.clamp(max=num_tokens - 1)
    # steps_RT: how far to the right of a token its document goes on without a border
    border_RT = torch.ones_like(document_RT, dtype=torch.bool)
    border_RT[:, :-1] = document_RT[:, 1:] != document_RT[:, :-1]
    last_RT = torch.where(border_RT, index_T, num_tokens).flip(1).cummin(1).values.flip(1)
    valid_RTK = (label_TK <= last_RT[:, :, None]) & (document_RT >= 0)[:, :, None] & loss_mask_RT[:, inside_TK]
    row_R11 = num_tokens * torch.arange(rows, device=tokens_RT.device)[:, None, None]
    return DepthSupervision(
        labels_RTK=tokens_RT[:, inside_TK].long(),
        valid_RTK=valid_RTK,
        judge_RTK=row_R11 + (inside_TK - 1),
    )


class MtpStep:
    """Trains an MTP drafter on packed rows, at every position that has a supervised depth.

    Args:
        drafter: called as a module, so that FSDP's hooks run.
        features: of the same rows; only the last hidden states are read.
        embedding_VD: the target's frozen embedding.
        head_VD: the target's frozen head; its dtype is that of the head's matrix products.
        on_policy: feed each depth with what the one before proposed; otherwise with the data.
        recompute: run the depths above the first again in the backward pass instead of holding their activations.
        compute_dtype: of the drafter's matrix products; parameters and losses stay float32.
        budget: sizes of the pieces; None: by device.
        ranks: this process among several, some of which may share its rows.
        timed: whether to stamp the parts of a step with the clock, which waits for a GPU at each.
    """

    def __init__(
        self,
        drafter: MtpDrafter,
        *,
        rows: PackedRows,
        features: FeatureSource,
        embedding_VD: Tensor,
        head_VD: Tensor,
        on_policy: bool = True,
        recompute: bool = False,
        compute_dtype: torch.dtype = torch.float32,
        budget: Budget | None = None,
        ranks: Ranks | None = None,
        timed: bool = False,
    ) -> None:
        self.drafter = drafter
        self.drafter.matmul_dtype = None if compute_dtype == torch.float32 else compute_dtype
        self.config = drafter.config
        self._rows, self._features = rows, features
        self._embedding_VD, self._head_VD = embedding_VD, head_VD
        self._on_policy, self._recompute, self._timed = on_policy, recompute, timed
        self._device = embedding_VD.device
        self._budget, self._workspace = budget, Workspace()
        self._ranks = ranks or Ranks()

    def trainable_rows(self) -> list[int]:
        """Rows with a supervised depth."""
        rows = self._rows
        # deeper labels are labels of the first depth at a later position
        valid_RTK = supervise_depths(rows.tokens_RT, rows.loss_mask_RT, rows.document_RT, num_depths=1).valid_RTK
        return valid_RTK.flatten(1).any(1).nonzero().flatten().tolist()

    def __call__(self, row_ids: Sequence[int], *, objective: Objective, step: int) -> StepTerms:
        """Forward pass and loss terms of one micro-batch, ready for ``backward``; the same for every ``step``."""
        clock = StepClock(running=self._timed, device=self._head_VD.device)
        batch = take_rows(self._rows, self._features, row_ids, device=self._device, moves_features=False)
        clock.lap("target")
        supervision = supervise_depths(
            batch.tokens_RT, batch.loss_mask_RT, batch.document_RT, num_depths=self.config.num_depths
        )
        asked_RT = supervision.valid_RTK.any(2)
        unroll = self.drafter(
            batch.hidden_RTD,
            tokens_RT=batch.tokens_RT,
            document_RT=batch.document_RT,
            position_RT=batch.position_RT,
            asked_RT=asked_RT,
            embedding_VD=self._embedding_VD,
            sequence=self._ranks.sequence,
            recompute=self._recompute,
        )
        clock.lap("backbone")
        mine = unroll.own
        labels_NK, valid_NK, judge_NK = (grid_RTK[asked_RT][mine] for grid_RTK in supervision)
        head = UnrolledHead(
            objective,
            head_VD=self._head_VD,
            num_depths=self.config.num_depths,
            budget=self._budget,
            workspace=self._workspace,
        )
        states_XD = batch.hidden_RTD.flatten(0, 1)
        first = 0
        for piece in self._pieces(unroll, head):
            part = slice(first, first + len(piece.hidden_ND))
            self._run_piece(
                piece, head, clock, states_XD, DepthSupervision(labels_NK[part], valid_NK[part], judge_NK[part]), first
            )
            first = part.stop
        terms = head.terms(valid_NK)
        clock.lap("head")
        return StepTerms(
            losses=terms.losses,
            counts=terms.counts,
            num_positions=int(valid_NK.sum()),
            num_refused_rows=batch.num_refused_rows if self._ranks.counts_rows else 0,
            seconds=clock.seconds,
        )

    def _pieces(self, unroll: Unroll, head: UnrolledHead) -> list[Unroll]:
        """Pieces that fit the budget: equally many on all ranks that share the rows, which go through them in step."""
        if self._ranks.sequence is None:
            return unroll.split(head.piece_sizes(unroll.counts[0]))
        num_pieces = max(len(head.piece_sizes(count)) for count in unroll.counts)
        return unroll.split_shared([head.piece_sizes(count, num_pieces=num_pieces) for count in unroll.counts])

    def _run_piece(
        self,
        piece: Unroll,
        head: UnrolledHead,
        clock: StepClock,
        states_XD: Tensor,
        supervision: DepthSupervision,
        first: int,
    ) -> None:
        """Take one piece, which begins at position ``first`` of N, through all its depths."""
        labels_PK, valid_PK, judge_PK = supervision
        judges_M = judge_PK[valid_PK].unique()
        head.begin_piece(states_XD[judges_M.to(states_XD.device)].to(self._device))
        hidden_PD = piece.hidden_ND
        for depth in range(self.config.num_depths):
            # asked for as long as a deeper depth is supervised, which must be fed with a token
            asked_P = valid_PK[:, depth:].any(1).nonzero().flatten()
            whole = len(asked_P) == len(hidden_PD)
            hidden_AD = hidden_PD if whole else hidden_PD[asked_P]
            clock.watch(hidden_AD)
            top_A = head.measure(
                hidden_AD,
                depth=depth,
                positions_P=first + asked_P,
                labels_P=labels_PK[asked_P, depth],
                judge_P=torch.searchsorted(judges_M, judge_PK[asked_P, depth]).clamp(max=max(0, len(judges_M) - 1)),
            )
            clock.lap("head")
            if depth + 1 == self.config.num_depths:
                return
            tokens_P = labels_PK[:, depth]
            if self._on_policy:
                tokens_P = tokens_P.index_copy(0, asked_P, top_A)
            hidden_PD = piece.advance(tokens_P)
            clock.lap("backbone")
