"""Dense attention masks: slow, obvious, and the truth that the frugal attention is compared with.

Shapes: R rows, T tokens, A anchors, N positions that ask, K block slots, or depths above the first. A true entry may be
attended to.
"""

from __future__ import annotations

import torch
from torch import Tensor

from angelspec.ops.anchors import Anchors


def dense_block_mask(document_RT: Tensor, anchors: Anchors, *, block_size: int) -> Tensor:
    """Who may look at whom when blocks attend to packed rows (DFlash, arXiv 2602.06036).

    Keys are all R*T context tokens followed by all A*K block tokens. A block's query sees a context token iff it
    lies in the anchor's row and document and strictly before the anchor (the target state at the anchor does not
    exist yet when the block is drafted), and it sees every token of its own block, before and after it.

    Returns:
        bool [A * K, R * T + A * K].
    """
    rows, num_tokens = document_RT.shape
    device = document_RT.device
    token_row_RT = torch.arange(rows, device=device)[:, None].expand(rows, num_tokens)
    token_index_RT = torch.arange(num_tokens, device=device)[None, :].expand(rows, num_tokens)
    anchor_document_A = document_RT[anchors.row_A, anchors.position_A]
    context_ART = (
        (token_row_RT[None] == anchors.row_A[:, None, None])
        & (token_index_RT[None] < anchors.position_A[:, None, None])
        & (document_RT[None] == anchor_document_A[:, None, None])
        & (document_RT[None] >= 0)
    )
    blocks_AA = torch.eye(anchors.count, dtype=torch.bool, device=device)
    context = context_ART.flatten(1).repeat_interleave(block_size, dim=0)
    own = blocks_AA.repeat_interleave(block_size, dim=0).repeat_interleave(block_size, dim=1)
    return torch.cat([context, own], dim=1)


def dense_unrolled_mask(document_RT: Tensor, asked_RT: Tensor, *, num_depths: int) -> Tensor:
    """Who a query of depth ``num_depths`` may look at when depths are unrolled over packed rows (Training-Time Test).

    Keys are those of depth 0 at all R*T positions, then those of depths 1..K at each asking position. A query sees the
    depth-0 keys of its row and document up to and including its own position, and the deeper keys of its own position.

    Returns:
        bool [N, R * T + N * K], K being ``num_depths``.
    """
    rows, num_tokens = document_RT.shape
    row_N, position_N = asked_RT.nonzero(as_tuple=True)
    token_row = torch.arange(rows, device=document_RT.device).repeat_interleave(num_tokens)
    token_index = torch.arange(num_tokens, device=document_RT.device).repeat(rows)
    document_N = document_RT[row_N, position_N]
    prefix = (
        (token_row == row_N[:, None])
        & (token_index <= position_N[:, None])
        & (document_RT.flatten() == document_N[:, None])
        & (document_RT.flatten() >= 0)
    )
    own = torch.eye(row_N.shape[0], dtype=torch.bool, device=document_RT.device).repeat_interleave(num_depths, dim=1)
    return torch.cat([prefix, own], dim=1)
