"""The vocabulary head under an unrolled drafter (MTP): depth after depth, piece after piece.

A piece is a run of positions that goes through all its depths before the next piece begins. Depth k of position j is
judged by the target's state at j + 1 + k, so the depths of a piece share nearly all their judges: these meet the head
once per piece, and neither they nor the drafter's logits are ever held for more than one piece.

What a call leaves behind of each depth (losses with their gradients, statistics) does not depend on how the depths are
weighed: that happens at the end, over all pieces, in ``compose.grid_terms``.

Shapes: N positions of the micro-batch, K depths, P positions of a piece that are asked at a depth, M distinct judges of
a piece, V vocabulary, D hidden.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from angelspec.core.objective import Objective
from angelspec.objectives.channels import HeadLoss, JudgedTeacher, Teacher, compute_dtype
from angelspec.objectives.compose import Grid, channels_of, grid_terms, support_of
from angelspec.objectives.head_loss import head_loss, judge_rows
from angelspec.objectives.head_loss_reference import reference_head_loss
from angelspec.objectives.terms import LossTerms
from angelspec.objectives.workspace import Budget, Workspace


class UnrolledHead:
    """Losses of one micro-batch of an unrolled drafter.

    Args:
        objective: what to compute.
        head_VD: the frozen head; its dtype is that of the matrix products.
        num_depths: K.
        path: ``frugal`` never holds [N,V]; ``reference`` is the readable equivalent.
        budget, workspace: see ``head_loss``; the reference ignores them.

    Raises:
        ValueError: the objective trains a confidence head, which an unrolled drafter has not.
    """

    def __init__(
        self,
        objective: Objective,
        *,
        head_VD: Tensor,
        num_depths: int,
        path: Literal["frugal", "reference"] = "frugal",
        budget: Budget | None = None,
        workspace: Workspace | None = None,
    ) -> None:
        if objective.confidence:
            raise ValueError("the objective trains a confidence head, and MTP has none; set confidence to 0")
        self._objective, self._head_VD, self._path = objective, head_VD, path
        self._budget = budget or Budget.for_device(head_VD.device)
        self._workspace = workspace or Workspace()
        self._request = {
            "head_VD": head_VD, "channels": channels_of(objective), "support": support_of(objective),
        }  # fmt: skip
        self._rows: Teacher | JudgedTeacher | None = None
        self._parts: list[list[tuple[Tensor, HeadLoss]]] = [[] for _ in range(num_depths)]

    def piece_sizes(self, num_positions: int, *, num_pieces: int | None = None) -> list[int]:
        """Positions of each piece: pieces of equal size that respect the budget, at least one.

        Args:
            num_positions: N.
            num_pieces: so many instead, some of them empty if need be (ranks that work in step need equal numbers).
        """
        if num_pieces is None:
            row_bytes = self._head_VD.shape[0] * compute_dtype(self._head_VD).itemsize
            num_pieces = max(
                1, -(-num_positions // self._budget.rows_per_chunk(max(1, num_positions), row_bytes=row_bytes))
            )
        size, longer = divmod(num_positions, num_pieces)
        return [size + (number < longer) for number in range(num_pieces)]

    def begin_piece(self, judge_MD: Tensor) -> None:
        """Take the target's states that judge the next piece (after its final norm) through the head."""
        self._rows = None
        if self._objective.needs_teacher and self._path == "reference":
            self._rows = Teacher(judge_MD, None)
        elif self._objective.needs_teacher:
            rows = judge_rows(judge_MD, **self._request, budget=self._budget, workspace=self._workspace)
            self._rows = JudgedTeacher(rows, torch.empty(0, dtype=torch.int64, device=judge_MD.device))

    def measure(
        self, hidden_PD: Tensor, *, depth: int, positions_P: Tensor, labels_P: Tensor, judge_P: Tensor
    ) -> Tensor:
        """Compute one depth of the piece; call it once per depth and piece, also with no positions.

        Args:
            hidden_PD: the drafter's normed outputs that meet the head.
            depth: k.
            positions_P: which of the N positions they are, each at most once.
            labels_P: the data's tokens.
            judge_P: which of the piece's judges judges each of them.

        Returns:
            int64 [P], the drafter's most probable tokens: what the next depth is fed on-policy.
        """
        teacher = None if self._rows is None else self._rows._replace(index_N=judge_P)
        request = {**self._request, "labels_N": labels_P, "teacher": teacher}
        if self._path == "reference":
            result = reference_head_loss(hidden_PD, **request)
        else:
            result = head_loss(hidden_PD, **request, budget=self._budget, workspace=self._workspace)
        self._parts[depth].append((positions_P, result))
        return result.statistics.top_N

    def terms(self, valid_NK: Tensor) -> LossTerms:
        """Return the objective's terms over everything measured.

        ``token`` is sum_k w_k sum_j loss / sum_k w_k n_k over the n_k positions that are valid at depth k: the mean of
        the depths' means with the weights normalised, where all depths have as many positions. ``end_to_end_tv`` is the
        mean over the positions that are valid at all depths.

        Args:
            valid_NK: bool, what is supervised; all of it has been measured.
        """
        columns: dict[str, list[Tensor]] = {name: [] for name in self._request["channels"]}
        facts: dict[str, list[Tensor]] = {"ce_N": [], "correct_N": [], "alpha_N": []}
        for parts in self._parts:
            positions = torch.cat([positions_P for positions_P, _ in parts])
            for name, column in columns.items():
                column.append(_placed(positions, [result.losses[name] for _, result in parts], len(valid_NK)))
            for name, column in facts.items():
                values = [getattr(result.statistics, name) for _, result in parts]
                if values[0] is not None:
                    dtype = parts[0][1].statistics.ce_N.dtype
                    column.append(_placed(positions, [value.to(dtype) for value in values], len(valid_NK)))

        def grid(column: list[Tensor]) -> Tensor | None:
            return torch.where(valid_NK, torch.stack(column, 1), 0.0) if column else None

        whole = Grid(
            valid_AK=valid_NK,
            losses={name: grid(column) for name, column in columns.items()},
            ce_AK=grid(facts["ce_N"]),
            correct_AK=grid(facts["correct_N"]),
            alpha_AK=grid(facts["alpha_N"]),
        )
        return grid_terms(self._objective, whole, end_to_end_AK=valid_NK & valid_NK.all(1, keepdim=True))


def _placed(positions: Tensor, values: list[Tensor], num_positions: int) -> Tensor:
    """Values of some positions in their places among all, 0 elsewhere; differentiable."""
    joined = torch.cat(values)
    return joined.new_zeros(num_positions).index_copy(0, positions, joined)
