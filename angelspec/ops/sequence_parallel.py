"""Ulysses sequence parallelism: ranks share a long row by positions, and attention by heads (arXiv 2309.14509).

Each rank holds the states of a run of positions. Around attention one exchange gives every rank all positions of its
share of the heads, and a second one brings each position back to its rank. Everything else of a layer stays where it
is.

Both exchanges are each other's transpose, so the backward pass is the same two with the roles changed. Every rank runs
the same exchanges in the same order, with however few positions: none is left out where a rank has none.

Shapes: n positions of this rank, N positions of all ranks, H heads (of queries, or of keys), S ranks, h = H / S heads
of this rank, C head channels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class SequenceGroup:
    """The ranks that share each row, and this one's place among them."""

    rank: int
    size: int
    group: dist.ProcessGroup | None = field(default=None, compare=False, repr=False)

    def bounds(self, num_positions: int) -> list[int]:
        """Where each rank's run of positions begins, and the end: size + 1 numbers. Runs differ by one at most."""
        return [num_positions * rank // self.size for rank in range(self.size + 1)]

    def spread_heads(self, states_nGC: Tensor, *, num_query_heads: int) -> Tensor:
        """Repeat key or value heads just so often that the ranks can share them evenly.

        Query heads g * M .. (g + 1) * M - 1 share head g before, and their rank holds a copy of it after.

        Raises:
            ValueError: the ranks cannot share the query heads evenly.
        """
        if num_query_heads % self.size:
            raise ValueError(f"{num_query_heads} query heads cannot be shared evenly by {self.size} ranks")
        num_groups = states_nGC.shape[1]
        copies = math.lcm(num_groups, self.size) // num_groups
        return states_nGC if copies == 1 else states_nGC.repeat_interleave(copies, dim=1)

    def to_heads(self, states_nHC: Tensor, counts: Sequence[int]) -> Tensor:
        """This rank's positions with all heads [n, H, C] to all positions with this rank's heads [N, h, C].

        Args:
            states_nHC: H a multiple of the number of ranks.
            counts: positions of each rank.
        """
        return _ToHeads.apply(states_nHC, self, tuple(counts))

    def to_positions(self, states_NhC: Tensor, counts: Sequence[int]) -> Tensor:
        """The way back: [N, h, C] to [n, H, C]."""
        return _ToPositions.apply(states_NhC, self, tuple(counts))


def _to_heads(states_nHC: Tensor, group: SequenceGroup, counts: tuple[int, ...]) -> Tensor:
    num_positions, num_heads, channels = states_nHC.shape
    heads = num_heads // group.size
    sent = states_nHC.unflatten(1, (group.size, heads)).transpose(0, 1).contiguous()
    received = states_nHC.new_empty(sum(counts), heads, channels)
    width = heads * channels
    dist.all_to_all_single(
        received.view(-1),
        sent.view(-1),
        output_split_sizes=[count * width for count in counts],
        input_split_sizes=[num_positions * width] * group.size,
        group=group.group,
    )
    return received


def _to_positions(states_NhC: Tensor, group: SequenceGroup, counts: tuple[int, ...]) -> Tensor:
    _, heads, channels = states_NhC.shape
    num_positions, width = counts[group.rank], heads * channels
    received = states_NhC.new_empty(group.size, num_positions, heads, channels)
    dist.all_to_all_single(
        received.view(-1),
        states_NhC.contiguous().view(-1),
        output_split_sizes=[num_positions * width] * group.size,
        input_split_sizes=[count * width for count in counts],
        group=group.group,
    )
    return received.transpose(0, 1).flatten(1, 2)


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx, states_nHC: Tensor, group: SequenceGroup, counts: tuple[int, ...]) -> Tensor:
        ctx.group, ctx.counts = group, counts
        return _to_heads(states_nHC, group, counts)

    @staticmethod
    def backward(ctx, gradient_NhC: Tensor) -> tuple[Tensor, None, None]:
        return _to_positions(gradient_NhC, ctx.group, ctx.counts), None, None


class _ToPositions(torch.autograd.Function):
    @staticmethod
    def forward(ctx, states_NhC: Tensor, group: SequenceGroup, counts: tuple[int, ...]) -> Tensor:
        ctx.group, ctx.counts = group, counts
        return _to_positions(states_NhC, group, counts)

    @staticmethod
    def backward(ctx, gradient_nHC: Tensor) -> tuple[Tensor, None, None]:
        return _to_heads(gradient_nHC, ctx.group, ctx.counts), None, None
