"""Attention of unrolled depths (Training-Time Test): a causal prefix of depth 0, and the asking position's own depths.

A query of depth k at position j attends, in one softmax, to the depth-0 keys of its document up to and including j, and
to the keys of depths 1..k at the same j (AngelSpec, arXiv 2607.25852). The softmax splits: the causal part is computed
as for any depth and leaves its logsumexp behind, which the few diagonal scores then join.

The causal part is walked in groups of neighbouring queries of one document and tiles of keys, so the scores of one
group and tile are the largest thing that is ever held, whatever the length. On a GPU FlexAttention does the same.

Shapes: R rows, T tokens, P positions whose keys any query sees, N positions that ask (all depths ask at the same ones),
K diagonal keys of each (depths 1..k), J asking positions of one group, S keys of one tile (of all positions in the
reference), X all keys, H query heads, G key-value heads, M = H / G query heads per key-value head, C head channels, Y =
N * M rows of folded queries.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from angelspec.ops.anchors import document_starts

GROUP_QUERIES = 32
"""Asking positions per group. Fewer waste less on masked scores, more make larger products."""
TILE_KEYS = 2048
"""Keys per product: bounds the memory of a group, whatever its document's length."""


@dataclass(frozen=True)
class _Group:
    """Consecutive asking positions of one document."""

    first: int
    last: int
    low: int
    """Their document's first key."""
    clear: int
    """Keys before this one are seen by all of them."""
    high: int

    def tiles(self) -> Iterator[tuple[int, int]]:
        """Stretches of keys, first and behind last."""
        for low in range(self.low, self.high, TILE_KEYS):
            yield low, min(low + TILE_KEYS, self.high)


@dataclass(frozen=True)
class UnrolledPlan:
    """Who asks and what is seen, for all depths of a micro-batch; made once."""

    visible_P: Tensor
    """int64: the positions that any query sees, as indices into the flattened [R * T] tokens, ascending. Keys of others
    are never needed: padding, documents that nobody asks in, and what lies behind a document's last question."""
    own_N: Tensor
    """int64: the place of each asking position among the visible ones."""
    start_N: Tensor
    """int64: the place of its document's first token."""
    group_queries: int
    groups: tuple[_Group, ...]

    @property
    def count(self) -> int:
        """Asking positions."""
        return self.own_N.shape[0]

    def split(self, sizes: Sequence[int]) -> list[tuple[UnrolledPlan, slice]]:
        """Plans of consecutive runs of the asking positions, each with the stretch of the keys that it sees.

        Args:
            sizes: of the runs, zeros allowed; they add up to N.
        """
        pieces = []
        for own_N, start_N in zip(self.own_N.split(sizes), self.start_N.split(sizes), strict=True):
            low, high = (int(start_N[0]), int(own_N[-1]) + 1) if len(own_N) else (0, 0)
            seen = slice(low, high)
            pieces.append((_grouped(self.visible_P[seen], own_N - low, start_N - low, self.group_queries), seen))
        return pieces

    def select(self, runs: Sequence[slice]) -> UnrolledPlan:
        """The plan of some runs of the asking positions, joined in order; what is seen stays as it is.

        No group reaches from one run into the next, which may lie far behind it.
        """
        own_N = torch.cat([self.own_N[run] for run in runs])
        start_N = torch.cat([self.start_N[run] for run in runs])
        groups, first = [], 0
        for run in runs:
            part = _grouped(self.visible_P, self.own_N[run], self.start_N[run], self.group_queries)
            groups += [replace(group, first=group.first + first, last=group.last + first) for group in part.groups]
            first += part.count
        return UnrolledPlan(self.visible_P, own_N, start_N, self.group_queries, tuple(groups))


def plan_unrolled(document_RT: Tensor, asked_RT: Tensor, *, group_queries: int = GROUP_QUERIES) -> UnrolledPlan:
    """Order the asking positions for :func:`unrolled_attention`.

    Args:
        document_RT: document ids, -1 for padding; one id is one contiguous run.
        asked_RT: bool; the N positions that ask, taken row by row.
        group_queries: most asking positions per group.

    Raises:
        ValueError: padding asks, or a document lies in two separate runs of its row.
    """
    if bool((asked_RT & (document_RT < 0)).any()):
        raise ValueError("padding can't ask: an asked position lies outside all documents")
    num_tokens = document_RT.shape[1]
    row_N, position_N = asked_RT.nonzero(as_tuple=True)
    asked_N = row_N * num_tokens + position_N
    first_N = row_N * num_tokens + document_starts(document_RT)[row_N, position_N]
    is_last_N = torch.ones_like(asked_N, dtype=torch.bool)
    is_last_N[:-1] = first_N[1:] != first_N[:-1]
    edges = torch.zeros(document_RT.numel() + 1, dtype=torch.int64, device=document_RT.device)
    edges[first_N[is_last_N]] += 1
    edges[asked_N[is_last_N] + 1] -= 1
    is_visible = edges.cumsum(0)[:-1] > 0
    place = is_visible.cumsum(0) - 1
    return _grouped(is_visible.nonzero().flatten(), place[asked_N], place[first_N], group_queries)


def _grouped(visible_P: Tensor, own_N: Tensor, start_N: Tensor, group_queries: int) -> UnrolledPlan:
    own, groups, first = own_N.tolist(), [], 0
    starts, sizes = torch.unique_consecutive(start_N, return_counts=True)
    for low, size in zip(starts.tolist(), sizes.tolist(), strict=True):
        end = first + size
        for begin in range(first, end, group_queries):
            stop = min(begin + group_queries, end)
            groups.append(_Group(begin, stop, low, own[begin] + 1, own[stop - 1] + 1))
        first = end
    return UnrolledPlan(visible_P, own_N, start_N, group_queries, tuple(groups))


def unrolled_attention_reference(
    query_NHC: Tensor,
    key_SGC: Tensor,
    value_SGC: Tensor,
    diagonal_key_NKGC: Tensor,
    diagonal_value_NKGC: Tensor,
    mask_NX: Tensor,
) -> Tensor:
    """One softmax over all keys under a dense mask (see ``masks.dense_unrolled_mask``).

    Args:
        key_SGC, value_SGC: of all R * T positions.
        mask_NX: bool [N, R * T + N * K].

    Returns:
        [N, H, C].
    """
    per_group = query_NHC.shape[1] // key_SGC.shape[1]
    key_XHC = torch.cat([key_SGC, diagonal_key_NKGC.flatten(0, 1)]).repeat_interleave(per_group, 1)
    value_XHC = torch.cat([value_SGC, diagonal_value_NKGC.flatten(0, 1)]).repeat_interleave(per_group, 1)
    scores_HNX = torch.einsum("nhc,xhc->hnx", query_NHC, key_XHC) / query_NHC.shape[2] ** 0.5
    weight_HNX = torch.softmax(scores_HNX.masked_fill(~mask_NX, float("-inf")), dim=-1)
    return torch.einsum("hnx,xhc->nhc", weight_HNX, value_XHC)


class _CausalAttention(torch.autograd.Function):
    """The causal part and the logsumexp of its scores; weights are computed again for the backward pass."""

    @staticmethod
    def forward(ctx, query_NHC, key_PGC, value_PGC, plan):
        num_groups = key_PGC.shape[1]
        heads_per_group = query_NHC.shape[1] // num_groups
        query_GYC = _fold(query_NHC, num_groups).mul_(query_NHC.shape[2] ** -0.5)
        key_GPC, value_GPC = key_PGC.transpose(0, 1), value_PGC.transpose(0, 1)
        out_GYC, total_GY1 = torch.empty_like(query_GYC), query_GYC.new_empty(*query_GYC.shape[:2], 1)
        for group in plan.groups:
            span = slice(group.first * heads_per_group, group.last * heads_per_group)
            rows_GYC = query_GYC[:, span]
            peak_GY1 = rows_GYC.new_full((*rows_GYC.shape[:2], 1), float("-inf"))
            mass_GY1, mixed_GYC = torch.zeros_like(peak_GY1), torch.zeros_like(rows_GYC)
            for low, high in group.tiles():
                weight_GYS = _scores(rows_GYC, key_GPC[:, low:high], plan, group, low)
                higher_GY1 = torch.maximum(peak_GY1, weight_GYS.amax(-1, keepdim=True))
                weight_GYS.sub_(higher_GY1).exp_()
                fade_GY1 = peak_GY1.sub_(higher_GY1).exp_()
                mass_GY1.mul_(fade_GY1).add_(weight_GYS.sum(-1, keepdim=True))
                mixed_GYC.mul_(fade_GY1).add_(weight_GYS @ value_GPC[:, low:high])
                peak_GY1 = higher_GY1
            torch.div(mixed_GYC, mass_GY1, out=out_GYC[:, span])
            torch.add(peak_GY1, mass_GY1.log_(), out=total_GY1[:, span])
        ctx.save_for_backward(query_GYC, key_PGC, value_PGC, out_GYC, total_GY1)
        ctx.plan, ctx.query_shape = plan, query_NHC.shape
        return _unfold(out_GYC, heads_per_group), _unfold(total_GY1, heads_per_group).squeeze(-1)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_NHC, grad_total_NH):
        query_GYC, key_PGC, value_PGC, out_GYC, total_GY1 = ctx.saved_tensors
        num_groups = key_PGC.shape[1]
        heads_per_group = ctx.query_shape[1] // num_groups
        key_GPC, value_GPC = key_PGC.transpose(0, 1), value_PGC.transpose(0, 1)
        grad_out_GYC = _fold(grad_NHC, num_groups)
        inner_GY1 = (grad_out_GYC * out_GYC).sum(-1, keepdim=True) - _fold(grad_total_NH.unsqueeze(-1), num_groups)
        grad_query_GYC = torch.zeros_like(query_GYC)
        grad_key_PGC, grad_value_PGC = torch.zeros_like(key_PGC), torch.zeros_like(value_PGC)
        for group in ctx.plan.groups:
            span = slice(group.first * heads_per_group, group.last * heads_per_group)
            rows_GYC, grad_GYC = query_GYC[:, span], grad_out_GYC[:, span]
            for low, high in group.tiles():
                weight_GYS = _scores(rows_GYC, key_GPC[:, low:high], ctx.plan, group, low)
                weight_GYS.sub_(total_GY1[:, span]).exp_()
                grad_value_PGC[low:high] += (weight_GYS.mT @ grad_GYC).transpose(0, 1)
                slope_GYS = grad_GYC @ value_GPC[:, low:high].mT
                slope_GYS.sub_(inner_GY1[:, span]).mul_(weight_GYS)
                grad_query_GYC[:, span] += slope_GYS @ key_GPC[:, low:high]
                grad_key_PGC[low:high] += (slope_GYS.mT @ rows_GYC).transpose(0, 1)
        grad_query_GYC *= ctx.query_shape[2] ** -0.5
        return _unfold(grad_query_GYC, heads_per_group), grad_key_PGC, grad_value_PGC, None


def _fold(states_NHC: Tensor, num_groups: int) -> Tensor:
    """A copy [G, N*M, C] of [N, H, C]: the query heads that share keys become more rows of one product."""
    folded_GNMC = states_NHC.unflatten(1, (num_groups, -1)).transpose(0, 1)
    return folded_GNMC.clone(memory_format=torch.contiguous_format).flatten(1, 2)


def _unfold(folded_GYC: Tensor, heads_per_group: int) -> Tensor:
    """The inverse of :func:`_fold`."""
    return folded_GYC.unflatten(1, (-1, heads_per_group)).transpose(0, 1).flatten(1, 2)


def _scores(rows_GYC: Tensor, key_GSC: Tensor, plan: UnrolledPlan, group: _Group, low: int) -> Tensor:
    """Products of one group with one tile of keys, which begins at ``low``; minus infinity where a key is unseen."""
    scores_GYS = rows_GYC @ key_GSC.mT
    high = low + key_GSC.shape[1]
    if high > group.clear:
        first = max(low, group.clear)
        column_S = torch.arange(first, high, device=rows_GYC.device)
        unseen_JS = column_S > plan.own_N[group.first : group.last, None]
        scores_GYS.unflatten(1, (group.last - group.first, -1))[..., first - low :].masked_fill_(
            unseen_JS[:, None, :], float("-inf")
        )
    return scores_GYS


def _join_diagonal(
    query_NHC: Tensor, mixed_NHC: Tensor, total_NH: Tensor, key_NKGC: Tensor, value_NKGC: Tensor
) -> Tensor:
    """One softmax over the causal part, which counts as one key of score ``total_NH``, and the diagonal keys."""
    groups = key_NKGC.shape[2]
    query_NGMC = query_NHC.unflatten(1, (groups, -1)) * query_NHC.shape[2] ** -0.5
    scores_NGMK = query_NGMC @ key_NKGC.permute(0, 2, 3, 1)
    weight_NHX = torch.softmax(torch.cat([total_NH.unsqueeze(-1), scores_NGMK.flatten(1, 2)], dim=-1), dim=-1)
    diagonal_NGMC = weight_NHX[..., 1:].unflatten(1, (groups, -1)) @ value_NKGC.transpose(1, 2)
    return torch.addcmul(diagonal_NGMC.flatten(1, 2), weight_NHX[..., :1], mixed_NHC)


def causal_attention(
    query_NHC: Tensor, key_PGC: Tensor, value_PGC: Tensor, plan: UnrolledPlan
) -> tuple[Tensor, Tensor]:
    """Attention of each asking position to the visible keys of its document up to its own, and nothing else.

    Returns:
        [N, H, C], and the logsumexp of the scores [N, H]; both carry gradients.
    """
    if query_NHC.is_cuda and plan.count:  # FlexAttention takes no query of length 0, as an idle rank's rows make it
        from angelspec.ops.unrolled_flex import flex_causal_attention

        return flex_causal_attention(query_NHC, key_PGC, value_PGC, start_N=plan.start_N, own_N=plan.own_N)
    return _CausalAttention.apply(query_NHC, key_PGC, value_PGC, plan)


def unrolled_attention(
    query_NHC: Tensor,
    *,
    key_PGC: Tensor,
    value_PGC: Tensor,
    diagonal_key_NKGC: Tensor | None,
    diagonal_value_NKGC: Tensor | None,
    plan: UnrolledPlan,
) -> Tensor:
    """Softmax attention of one depth under the mask of ``masks.dense_unrolled_mask``, without that mask.

    Equal to :func:`unrolled_attention_reference` to rounding, gradients included.

    Args:
        query_NHC: of the asking positions, float32 or wider.
        key_PGC, value_PGC: of depth 0 at ``plan.visible_P``.
        diagonal_key_NKGC, diagonal_value_NKGC: of depths 1..k at the asking positions; None at depth 0.

    Returns:
        [N, H, C].

    Raises:
        ValueError: queries or keys are not those of the plan.
    """
    if (query_NHC.shape[0], key_PGC.shape[0]) != (plan.count, plan.visible_P.shape[0]):
        raise ValueError(
            f"{query_NHC.shape[0]} queries and {key_PGC.shape[0]} keys; the plan holds {plan.count} and "
            f"{plan.visible_P.shape[0]}"
        )
    mixed_NHC, total_NH = causal_attention(query_NHC, key_PGC, value_PGC, plan)
    if diagonal_key_NKGC is None or diagonal_value_NKGC is None:
        return mixed_NHC
    return _join_diagonal(query_NHC, mixed_NHC, total_NH, diagonal_key_NKGC, diagonal_value_NKGC)
