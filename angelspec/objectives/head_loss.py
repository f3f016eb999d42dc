"""Losses through the frozen vocabulary head without ever holding [N,V] logits.

Positions are walked in chunks whose logits fit a budget. Two strategies for the gradient:

* **unit gradients**, when only the hidden states are trained: a token's loss touches no other token, so the chunk that
  computes the loss also computes its gradient with respect to the hidden state, for an upstream weight of 1; backward
  multiplies rows. One student product, one teacher product per distinct teacher row and one product per channel.
* **recomputation**, when a low-rank addition to the logits is trained too: the gradient of its weight sums over tokens
  and needs their final upstream weights, so backward walks the chunks again, all channels in one product.

Where several calls are judged by the same teacher rows (the depths of an unrolled drafter), ``judge_rows`` takes those
rows through the head once; they are then to be few enough to be held.

The slow equivalent is ``reference_head_loss``; ``tests/parity/test_head_loss.py`` compares them.

Shapes: N token positions, M distinct teacher rows, V vocabulary, D hidden, R rank, C channels, and inside a chunk
R rows, T teacher rows, X = R + T.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from angelspec.objectives.channels import (
    Channel,
    HeadLoss,
    Judged,
    JudgedTeacher,
    LowRank,
    Support,
    Teacher,
    TokenStatistics,
    check_request,
    compute_dtype,
)
from angelspec.objectives.closed_forms import channel_losses, combine, gradient_weights
from angelspec.objectives.vocabulary_sweep import ChunkInput, VocabularySweep
from angelspec.objectives.workspace import Budget, Workspace


def head_loss(
    hidden_ND: Tensor,
    *,
    head_VD: Tensor,
    labels_N: Tensor,
    channels: Mapping[str, Channel],
    teacher: Teacher | JudgedTeacher | None = None,
    low_rank: LowRank | None = None,
    support: Support | None = None,
    budget: Budget | None = None,
    workspace: Workspace | None = None,
) -> HeadLoss:
    """Return the per-token losses of every channel and the statistics of every position.

    Matrix products run in the head's dtype: pass a bfloat16 copy of the head for bfloat16 products (logits are then
    rounded to bfloat16 on leaving the product). Softmax, losses and accumulation are float32, or float64 with a
    float64 head. Without gradients to compute, only statistics and loss values are.

    Args:
        hidden_ND: student states that meet the head, already corrected; the trained input.
        head_VD: the frozen head.
        labels_N: int64 in [0, V); callers pass valid positions only.
        channels: name to mix of losses; may be empty.
        teacher: what comparisons are made with; needed by every loss but CE. Rows of ``judge_rows`` come with the
            channels, support and workspace that they were judged with.
        low_rank: trainable addition to the student's logits.
        support: where student and teacher are compared; default the whole vocabulary.
        budget: chunk and tile sizes; default by device.
        workspace: buffers to reuse across calls; default fresh ones.

    Raises:
        ValueError: shapes that do not fit, a head that requires a gradient, a comparison without a teacher.
    """
    support = support or Support()
    check_request(
        hidden_ND,
        head_VD=head_VD,
        labels_N=labels_N,
        channels=channels,
        teacher=teacher,
        low_rank=low_rank,
        support=support,
    )
    request = _Request(
        head_VD=head_VD.detach(),
        labels_N=labels_N,
        channels=tuple(channels.values()),
        teacher=teacher._replace(hidden_MD=teacher.hidden_MD.detach()) if isinstance(teacher, Teacher) else teacher,
        support=support,
        budget=budget or Budget.for_device(hidden_ND.device),
        workspace=workspace or Workspace(),
    )
    trains_hidden = torch.is_grad_enabled() and hidden_ND.requires_grad
    trains_addition = torch.is_grad_enabled() and low_rank is not None and any(x.requires_grad for x in low_rank)
    with torch.no_grad(), torch.autocast(hidden_ND.device.type, enabled=False):
        forward = _walk(request, hidden_ND, low_rank=low_rank, wants_gradient=trains_hidden and not trains_addition)
    losses_CN = forward.losses_CN
    if trains_addition:
        losses_CN = _Recomputed.apply(hidden_ND, low_rank.state_NR, low_rank.weight_VR, losses_CN, request)
    elif trains_hidden:
        losses_CN = _WithUnitGradients.apply(hidden_ND, losses_CN, forward.unit_gradients_CND)
    return HeadLoss(dict(zip(channels, losses_CN.unbind(0), strict=True)), forward.statistics)


@torch.no_grad()
def judge_rows(
    hidden_MD: Tensor,
    *,
    head_VD: Tensor,
    channels: Mapping[str, Channel],
    support: Support | None = None,
    budget: Budget | None = None,
    workspace: Workspace,
) -> Judged:
    """Take teacher rows through the head for several calls of ``head_loss`` with the same channels and support.

    The rows lie in the workspace, [M,V], until rows are judged again: give as many as a chunk of ``head_loss`` has
    (``Budget.rows_per_chunk``), not a whole batch.
    """
    request = _Request(
        head_VD=head_VD.detach(),
        labels_N=hidden_MD.new_zeros(0, dtype=torch.int64),
        channels=tuple(channels.values()),
        teacher=None,
        support=support or Support(),
        budget=budget or Budget.for_device(hidden_MD.device),
        workspace=workspace,
    )
    with torch.autocast(hidden_MD.device.type, enabled=False):
        return request.sweep(wants_gradient=False).judge_apart(hidden_MD.to(head_VD.dtype))


@dataclass(frozen=True, kw_only=True)
class _Request:
    """Everything of a call that is neither trained nor a result."""

    head_VD: Tensor
    labels_N: Tensor
    channels: tuple[Channel, ...]
    teacher: Teacher | JudgedTeacher | None
    support: Support
    budget: Budget
    workspace: Workspace

    def sweep(self, *, wants_gradient: bool) -> VocabularySweep:
        return VocabularySweep(
            head_VD=self.head_VD,
            support=self.support,
            needs_kl=any(channel.needs_kl for channel in self.channels),
            needs_tv_gradient=wants_gradient and any(channel.needs_tv for channel in self.channels),
            needs_ce_gradient=wants_gradient and any(channel.ce for channel in self.channels),
            exact_tv=any(channel.lk_alpha or (channel.ce and self.support.renormalise) for channel in self.channels),
            budget=self.budget,
            dtype=compute_dtype(self.head_VD),
            workspace=self.workspace,
        )

    def chunks(self, hidden_ND: Tensor, low_rank: LowRank | None) -> Iterator[tuple[Tensor, ChunkInput]]:
        """Yield position indices and inputs; positions that share a teacher row are neighbours."""
        head, dtype = self.head_VD, compute_dtype(self.head_VD)
        row_bytes = head.shape[0] * dtype.itemsize
        chunk_rows = self.budget.rows_per_chunk(len(hidden_ND), row_bytes=row_bytes)
        if low_rank is not None:
            low_rank = LowRank(low_rank.state_NR.to(dtype), low_rank.weight_VR.to(dtype))
        if isinstance(self.teacher, Teacher) and self.teacher.index_N is not None:
            order_N = self.teacher.index_N.argsort(stable=True)
        else:
            order_N = torch.arange(len(hidden_ND), device=hidden_ND.device)
        for positions_R in order_N.split(max(1, chunk_rows)) if len(order_N) else ():
            states_XD, teacher_row_R, judged = hidden_ND[positions_R].to(head.dtype), None, None
            if isinstance(self.teacher, JudgedTeacher):
                judged, teacher_row_R = self.teacher.rows, _as_slice(self.teacher.index_N[positions_R])
            elif self.teacher is not None:
                index_N = self.teacher.index_N
                judges_R = positions_R if index_N is None else index_N[positions_R]
                distinct_T, teacher_row_R = judges_R.unique_consecutive(return_inverse=True)
                states_XD = torch.cat([states_XD, self.teacher.hidden_MD[distinct_T].to(head.dtype)])
                teacher_row_R = _as_slice(teacher_row_R)
            chunk = ChunkInput(
                states_XD=states_XD,
                labels_R=self.labels_N[positions_R],
                teacher_row_R=teacher_row_R,
                low_rank=low_rank and LowRank(low_rank.state_NR[positions_R], low_rank.weight_VR),
                judged=judged,
            )
            yield positions_R, chunk


def _as_slice(rows_R: Tensor) -> Tensor | slice:
    """Neighbouring rows in order as a slice, which needs no copy; only a CPU can tell without waiting."""
    if rows_R.device.type != "cpu" or not len(rows_R):
        return rows_R
    first = int(rows_R[0])
    expected_R = torch.arange(first, first + len(rows_R))
    return slice(first, first + len(rows_R)) if torch.equal(rows_R, expected_R) else rows_R


@dataclass(frozen=True, kw_only=True)
class _Forward:
    losses_CN: Tensor
    unit_gradients_CND: Tensor | None
    statistics: TokenStatistics


def _walk(request: _Request, hidden_ND: Tensor, *, low_rank: LowRank | None, wants_gradient: bool) -> _Forward:
    """Compute losses and statistics chunk by chunk, and each channel's unit gradients if wanted."""
    sweep = request.sweep(wants_gradient=wants_gradient)
    num_positions, num_channels = len(hidden_ND), len(request.channels)
    new = {"dtype": sweep.dtype, "device": hidden_ND.device}
    losses_CN = torch.empty(num_channels, num_positions, **new)
    units_CND = torch.empty(num_channels, *hidden_ND.shape, **new) if wants_gradient else None
    statistics = TokenStatistics(
        ce_N=torch.empty(num_positions, **new),
        confidence_N=torch.empty(num_positions, **new),
        top_N=torch.empty(num_positions, dtype=torch.int64, device=hidden_ND.device),
        correct_N=torch.empty(num_positions, dtype=torch.bool, device=hidden_ND.device),
        alpha_N=None if request.teacher is None else torch.empty(num_positions, **new),
    )
    for positions_R, chunk in request.chunks(hidden_ND, low_rank):
        measured = sweep.measure(chunk)
        statistics.ce_N[positions_R] = measured.rows.ce_R
        statistics.confidence_N[positions_R] = measured.confidence_R
        statistics.top_N[positions_R] = measured.top_R
        statistics.correct_N[positions_R] = measured.correct_R
        if statistics.alpha_N is not None:
            statistics.alpha_N[positions_R] = measured.rows.alpha_R
        for number, channel in enumerate(request.channels):
            losses_CN[number, positions_R] = channel_losses(channel, measured.rows)
            if units_CND is None:
                continue
            is_last = number == num_channels - 1
            buffer_RV = measured.student_RV if is_last else sweep.gradient_buffer(len(positions_R))
            sweep.logit_gradient(chunk, measured, gradient_weights(channel, measured.rows), out_RV=buffer_RV)
            units_CND[number, positions_R] = sweep.pull_back(buffer_RV)
    return _Forward(losses_CN=losses_CN, unit_gradients_CND=units_CND, statistics=statistics)


class _WithUnitGradients(torch.autograd.Function):
    """Losses whose gradient with respect to each hidden row is already known up to its upstream weight."""

    @staticmethod
    def forward(ctx, hidden_ND: Tensor, losses_CN: Tensor, units_CND: Tensor) -> Tensor:
        ctx.save_for_backward(units_CND)
        ctx.hidden_dtype = hidden_ND.dtype
        return losses_CN.view_as(losses_CN)

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream_CN: Tensor) -> tuple[Tensor | None, ...]:
        (units_CND,) = ctx.saved_tensors
        hidden_gradient_ND = torch.einsum("cn,cnd->nd", upstream_CN, units_CND)
        return hidden_gradient_ND.to(ctx.hidden_dtype), None, None


class _Recomputed(torch.autograd.Function):
    """Losses whose gradients are computed by a second walk over the chunks, once the upstream weights are known."""

    @staticmethod
    def forward(
        ctx, hidden_ND: Tensor, state_NR: Tensor, weight_VR: Tensor, losses_CN: Tensor, request: _Request
    ) -> Tensor:
        ctx.save_for_backward(hidden_ND, state_NR, weight_VR)
        ctx.request = request
        return losses_CN.view_as(losses_CN)

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream_CN: Tensor) -> tuple[Tensor | None, ...]:
        hidden_ND, state_NR, weight_VR = ctx.saved_tensors
        request: _Request = ctx.request
        sweep = request.sweep(wants_gradient=True)
        hidden_gradient_ND, state_gradient_NR, weight_gradient_VR = (
            torch.zeros_like(x, dtype=sweep.dtype) for x in (hidden_ND, state_NR, weight_VR)
        )
        with torch.autocast(hidden_ND.device.type, enabled=False):
            for positions_R, chunk in request.chunks(hidden_ND, LowRank(state_NR, weight_VR)):
                measured = sweep.measure(chunk)
                per_channel = [gradient_weights(channel, measured.rows) for channel in request.channels]
                weights = combine(per_channel, upstream_CN[:, positions_R])
                sweep.logit_gradient(chunk, measured, weights, out_RV=measured.student_RV)
                if ctx.needs_input_grad[0]:
                    hidden_gradient_ND[positions_R] = sweep.pull_back(measured.student_RV)
                state_gradient_NR[positions_R] = measured.student_RV @ chunk.low_rank.weight_VR
                weight_gradient_VR.addmm_(measured.student_RV.T, chunk.low_rank.state_NR)
        return (
            hidden_gradient_ND.to(hidden_ND.dtype),
            state_gradient_NR.to(state_NR.dtype),
            weight_gradient_VR.to(weight_VR.dtype),
            None,
            None,
        )
