"""The causal part of unrolled attention on a GPU: FlexAttention over blocks that are known without any dense mask.

Shapes: N queries, P keys, Q blocks of queries, B blocks of keys, H query heads, G key-value heads, C head channels.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

BLOCK = 128
"""Queries and keys per block of the mask, FlexAttention's own size."""


def range_block_mask(start_N: Tensor, own_N: Tensor, *, num_keys: int) -> BlockMask:
    """FlexAttention's mask where query n sees keys ``start_N[n]`` to ``own_N[n]``; [Q, B] is the most that is held.

    Both bounds ascend with n. A block of queries touches the blocks of keys from its first start to its last own key;
    one is full where every query of the block sees all of it.
    """
    num_queries, device = start_N.shape[0], start_N.device
    blocks = -(-num_queries // BLOCK)
    head_Q = torch.arange(blocks, device=device) * BLOCK
    tail_Q = (head_Q + BLOCK - 1).clamp(max=num_queries - 1)
    low_B = torch.arange(-(-num_keys // BLOCK), device=device) * BLOCK
    high_B = (low_B + BLOCK - 1).clamp(max=num_keys - 1)
    touched_QB = (high_B >= start_N[head_Q, None]) & (low_B <= own_N[tail_Q, None])
    full_QB = (low_B >= start_N[tail_Q, None]) & (high_B <= own_N[head_Q, None])
    full_QB &= (head_Q + BLOCK <= num_queries)[:, None] & (low_B + BLOCK <= num_keys)

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key >= start_N[query]) & (key <= own_N[query])

    partial, full = _listed(touched_QB & ~full_QB), _listed(full_QB)
    return BlockMask.from_kv_blocks(
        *partial, *full, BLOCK_SIZE=BLOCK, mask_mod=sees, seq_lengths=(num_queries, num_keys)
    )


def _listed(chosen_QB: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks of each row are chosen, and which: chosen ones first."""
    index_QB = chosen_QB.to(torch.int8).argsort(dim=1, descending=True, stable=True)
    return chosen_QB.sum(1, dtype=torch.int32)[None, None], index_QB.to(torch.int32)[None, None]


@functools.cache
def _compiled() -> Callable:
    return torch.compile(flex_attention, dynamic=True)


def flex_causal_attention(
    query_NHC: Tensor, key_PGC: Tensor, value_PGC: Tensor, *, start_N: Tensor, own_N: Tensor
) -> tuple[Tensor, Tensor]:
    """See ``unrolled_attention.causal_attention``. Compiled on a GPU; elsewhere as plain operations, with all scores.

    Returns:
        [N, H, C], and the logsumexp of the scores [N, H] in float32.
    """
    mask = range_block_mask(start_N, own_N, num_keys=key_PGC.shape[0])
    attend = _compiled() if query_NHC.is_cuda else flex_attention
    mixed, aux = attend(
        query_NHC.transpose(0, 1)[None],
        key_PGC.transpose(0, 1)[None],
        value_PGC.transpose(0, 1)[None],
        block_mask=mask,
        enable_gqa=True,
        return_aux=AuxRequest(lse=True),
        # the decoding kernel, which fewer queries than a block would get, refuses blocks of this size
        kernel_options={"FORCE_USE_FLEX_ATTENTION": True},
    )
    return mixed[0].transpose(0, 1), aux.lse[0].transpose(0, 1).to(query_NHC.dtype)
