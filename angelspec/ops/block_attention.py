"""Attention of blocks to packed rows: each block to its own document before the anchor, and to itself.

Shapes: R rows, T tokens, S context tokens of one group, A anchors, J anchors of one group, K block slots that serve
as keys, Q block slots that ask (K, or fewer in a last layer), H query heads, G key-value heads, M = H / G query heads
per key-value head, C head channels.

The frugal path sorts nothing and masks little: anchors come ordered, so neighbours see nearly the same context. Each
group of neighbours multiplies with its own stretch of the row and with its own blocks only. Its weights are kept for
the backward pass while they are few, and computed again where they would be many: the scores of one group are then the
largest thing that is ever held.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from angelspec.ops.anchors import Anchors, document_starts

GROUP_ANCHORS = 16
"""Anchors per group. Fewer waste less on masked scores, more make larger products; chosen by measurement."""
KEPT_WEIGHTS = 2**24
"""Attention weights that a layer may keep for its backward pass (64 MiB); beyond, they are computed again."""


@dataclass(frozen=True)
class _Group:
    """Consecutive anchors of one row, and the stretch of the row that any of them sees."""

    row: int
    first: int
    last: int
    low: int
    high: int
    mixed: int
    """Column of the stretch from which on some anchors see a token and others don't."""
    hidden_JS: Tensor | None
    """True where an anchor does not see a token, for the columns from ``mixed`` on; None: nothing is hidden."""


@dataclass(frozen=True)
class AttentionPlan:
    """How the anchors of a micro-batch are grouped; made once, used by every layer."""

    groups: tuple[_Group, ...]
    num_anchors: int

    @property
    def visible(self) -> int:
        """Context tokens of all groups, each counted once per anchor of its group."""
        return sum((group.high - group.low) * (group.last - group.first) for group in self.groups)


def plan_attention(document_RT: Tensor, anchors: Anchors, *, group_anchors: int = GROUP_ANCHORS) -> AttentionPlan:
    """Group ordered anchors for :func:`block_attention`.

    A group ends after ``group_anchors`` anchors, at the end of a row, or where a document ends and at least half a
    group is full (so that stretches rarely span documents that don't see each other).

    Raises:
        ValueError: anchors out of order, or a document in two separate runs of its row.
    """
    start_A = document_starts(document_RT)[anchors.row_A, anchors.position_A]
    rows, positions, starts = anchors.row_A.tolist(), anchors.position_A.tolist(), start_A.tolist()
    order = list(zip(rows, positions, strict=True))
    if order != sorted(set(order)):
        raise ValueError("anchors must be ordered by row and position, without doubles")
    groups: list[_Group] = []
    first = 0
    for last in range(1, anchors.count + 1):
        size = last - first
        if last < anchors.count and rows[last] == rows[first] and size < group_anchors:
            same_document = starts[last] == starts[last - 1]
            if same_document or 2 * size < group_anchors:
                continue
        low, high = starts[first], max(positions[first:last])
        one_document = starts[first] == starts[last - 1]
        mixed = positions[first] - low if one_document else 0
        hidden_JS = None
        if mixed < high - low:
            column_S = torch.arange(low + mixed, high, device=document_RT.device)
            hidden_JS = (column_S >= anchors.position_A[first:last, None]) | (column_S < start_A[first:last, None])
        groups.append(_Group(rows[first], first, last, low, high, mixed, hidden_JS))
        first = last
    return AttentionPlan(tuple(groups), anchors.count)


def block_attention_reference(
    query_AQHC: Tensor,
    context_key_RTGC: Tensor,
    context_value_RTGC: Tensor,
    block_key_AKGC: Tensor,
    block_value_AKGC: Tensor,
    mask_QX: Tensor,
) -> Tensor:
    """One softmax over all context and all block tokens under a dense mask (see ``masks.dense_block_mask``).

    Args:
        mask_QX: bool [A * Q, R * T + A * K]; a query that sees nothing yields zeros.

    Returns:
        [A, Q, H, C].
    """
    anchors, queries, heads, channels = query_AQHC.shape
    per_group = heads // block_key_AKGC.shape[2]
    key_XHC = torch.cat([context_key_RTGC.flatten(0, 1), block_key_AKGC.flatten(0, 1)]).repeat_interleave(per_group, 1)
    value_XHC = torch.cat([context_value_RTGC.flatten(0, 1), block_value_AKGC.flatten(0, 1)]).repeat_interleave(
        per_group, 1
    )
    scores_HQX = torch.einsum("qhc,xhc->hqx", query_AQHC.flatten(0, 1), key_XHC) / channels**0.5
    weight_HQX = torch.softmax(scores_HQX.masked_fill(~mask_QX, float("-inf")), dim=-1)
    weight_HQX = torch.where(mask_QX.any(-1)[:, None], weight_HQX, 0.0)
    return torch.einsum("hqx,xhc->qhc", weight_HQX, value_XHC).unflatten(0, (anchors, queries))


class _BlockAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query_AQHC, context_key_RTGC, context_value_RTGC, block_key_AKGC, block_value_AKGC, plan):
        heads_per_group = query_AQHC.shape[2] // block_key_AKGC.shape[2]
        folded_GYC = _fold(query_AQHC, heads_per_group)
        out_GYC = torch.empty_like(folded_GYC)
        rows_per_anchor = query_AQHC.shape[1] * heads_per_group
        keys = plan.visible + plan.num_anchors * block_key_AKGC.shape[1]
        kept = [] if keys * rows_per_anchor * block_key_AKGC.shape[2] <= KEPT_WEIGHTS else None
        for group in plan.groups:
            span = slice(group.first * rows_per_anchor, group.last * rows_per_anchor)
            key_GSC, value_GSC, key_GJKC, value_GJKC = _group_keys(
                group, context_key_RTGC, context_value_RTGC, block_key_AKGC, block_value_AKGC
            )
            weight_GYX = _weights(folded_GYC[:, span], key_GSC, key_GJKC, group)
            _combine(weight_GYX, value_GSC, value_GJKC, out_GYC[:, span])
            if kept is not None:
                kept.append(weight_GYX)
        ctx.kept = kept
        ctx.save_for_backward(
            folded_GYC, context_key_RTGC, context_value_RTGC, block_key_AKGC, block_value_AKGC, out_GYC
        )
        ctx.plan, ctx.query_shape = plan, query_AQHC.shape
        return _unfold(out_GYC, query_AQHC.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_AQHC):
        folded_GYC, context_key, context_value, block_key, block_value, out_GYC = ctx.saved_tensors
        heads_per_group = ctx.query_shape[2] // block_key.shape[2]
        rows_per_anchor = ctx.query_shape[1] * heads_per_group
        scale = ctx.query_shape[3] ** -0.5
        grad_out_GYC = _fold(grad_AQHC, heads_per_group)
        inner_GY1 = (grad_out_GYC * out_GYC).sum(-1, keepdim=True)
        grad_query_GYC = torch.empty_like(folded_GYC)
        grad_context_key, grad_context_value = torch.zeros_like(context_key), torch.zeros_like(context_value)
        grad_block_key, grad_block_value = torch.empty_like(block_key), torch.empty_like(block_value)
        for number, group in enumerate(ctx.plan.groups):
            span = slice(group.first * rows_per_anchor, group.last * rows_per_anchor)
            stretch = slice(group.low, group.high)
            key_GSC, value_GSC, key_GJKC, value_GJKC = _group_keys(
                group, context_key, context_value, block_key, block_value
            )
            query_GYC, grad_GYC = folded_GYC[:, span], grad_out_GYC[:, span]
            num_context = group.high - group.low
            weight_GYX = _weights(query_GYC, key_GSC, key_GJKC, group) if ctx.kept is None else ctx.kept[number]
            grad_GJYC, query_GJYC = _by_block(grad_GYC, group), _by_block(query_GYC, group)

            own_GJYK = _by_block(weight_GYX[..., num_context:], group)
            grad_block_value[group.first : group.last] = (own_GJYK.mT @ grad_GJYC).permute(1, 2, 0, 3)
            if num_context:
                grad_context_value[group.row, stretch] += (weight_GYX[..., :num_context].mT @ grad_GYC).transpose(0, 1)

            slope_GYX = torch.empty_like(weight_GYX)
            _scores(grad_GYC, value_GSC, value_GJKC, group, out=slope_GYX)
            slope_GYX.sub_(inner_GY1[:, span]).mul_(weight_GYX).mul_(scale)

            own_GJYK = _by_block(slope_GYX[..., num_context:], group)
            _combine(slope_GYX, key_GSC, key_GJKC, grad_query_GYC[:, span])
            grad_block_key[group.first : group.last] = (own_GJYK.mT @ query_GJYC).permute(1, 2, 0, 3)
            if num_context:
                grad_context_key[group.row, stretch] += (slope_GYX[..., :num_context].mT @ query_GYC).transpose(0, 1)
        return (
            _unfold(grad_query_GYC, ctx.query_shape), grad_context_key, grad_context_value, grad_block_key,
            grad_block_value, None,
        )  # fmt: skip


def _fold(states_AQHC: Tensor, heads_per_group: int) -> Tensor:
    """[A, Q, H, C] to [G, A*Q*M, C]: the query heads that share keys become more rows of one product."""
    groups = states_AQHC.shape[2] // heads_per_group
    return states_AQHC.unflatten(2, (groups, heads_per_group)).permute(2, 0, 1, 3, 4).flatten(1, 3).contiguous()


def _unfold(folded_GYC: Tensor, shape: torch.Size) -> Tensor:
    """The inverse of :func:`_fold`."""
    anchors, queries, heads, channels = shape
    groups = folded_GYC.shape[0]
    return folded_GYC.view(groups, anchors, queries, heads // groups, channels).permute(1, 2, 0, 3, 4).reshape(shape)


def _by_block(states_GYX: Tensor, group: _Group) -> Tensor:
    """[G, J*Q*M, X] to [G, J, Q*M, X]."""
    return states_GYX.unflatten(1, (group.last - group.first, -1))


def _group_keys(group, context_key, context_value, block_key, block_value):
    stretch, span = slice(group.low, group.high), slice(group.first, group.last)
    return (
        context_key[group.row, stretch].transpose(0, 1), context_value[group.row, stretch].transpose(0, 1),
        block_key[span].permute(2, 0, 1, 3), block_value[span].permute(2, 0, 1, 3),
    )  # fmt: skip


def _scores(rows_GYC: Tensor, context_GSC: Tensor, block_GJKC: Tensor, group: _Group, *, out: Tensor) -> Tensor:
    """Products of every row with the stretch, then with its own block: [G, Y, S + K]."""
    num_context = group.high - group.low
    if num_context:
        torch.matmul(rows_GYC, context_GSC.mT, out=out[..., :num_context])
    _by_block(out[..., num_context:], group).copy_(_by_block(rows_GYC, group) @ block_GJKC.mT)
    return out


def _weights(query_GYC: Tensor, key_GSC: Tensor, key_GJKC: Tensor, group: _Group) -> Tensor:
    num_context = group.high - group.low
    groups, num_rows, channels = query_GYC.shape
    scores_GYX = query_GYC.new_empty(groups, num_rows, num_context + key_GJKC.shape[2])
    _scores(query_GYC * channels**-0.5, key_GSC, key_GJKC, group, out=scores_GYX)
    if group.hidden_JS is not None:
        mixed = _by_block(scores_GYX[..., group.mixed : num_context], group)
        mixed.masked_fill_(group.hidden_JS[:, None, :], float("-inf"))
    return torch.softmax(scores_GYX, dim=-1)


def _combine(weight_GYX: Tensor, context_GSC: Tensor, block_GJKC: Tensor, out_GYC: Tensor) -> None:
    num_context = context_GSC.shape[1]
    out_GYC.unflatten(1, (block_GJKC.shape[1], -1)).copy_(
        weight_GYX[..., num_context:].unflatten(1, (block_GJKC.shape[1], -1)) @ block_GJKC
    )
    if num_context:
        out_GYC += weight_GYX[..., :num_context] @ context_GSC


def block_attention(
    query_AQHC: Tensor,
    *,
    context_key_RTGC: Tensor,
    context_value_RTGC: Tensor,
    block_key_AKGC: Tensor,
    block_value_AKGC: Tensor,
    plan: AttentionPlan,
) -> Tensor:
    """Softmax attention of blocks under the mask of ``masks.dense_block_mask``, without that mask.

    Equal to :func:`block_attention_reference` to rounding, gradients included.

    Returns:
        [A, Q, H, C].
    """
    if plan.num_anchors != query_AQHC.shape[0]:
        raise ValueError(f"the plan holds {plan.num_anchors} anchors, the queries {query_AQHC.shape[0]}")
    return _BlockAttention.apply(
        query_AQHC, context_key_RTGC, context_value_RTGC, block_key_AKGC, block_value_AKGC, plan
    )
