"""Slots of a request's tokens: the plain torch forms of two Triton kernels of SGLang.

Shapes: B requests, N tokens of all requests together. ``req_to_token`` is SGLang's table, int32 [pool rows, context
length]: the slot of every token of every request.
"""

from __future__ import annotations

import torch
from torch import Tensor


def _flat_positions(req_pool_indices: Tensor, start_offset: Tensor, end_offset: Tensor) -> tuple[Tensor, Tensor]:
    """Row and column in ``req_to_token`` of every token of ``[start, end)`` of every request, request by request."""
    start_B, lengths_B = start_offset.long(), (end_offset - start_offset).long()
    row_N = req_pool_indices.long().repeat_interleave(lengths_B)
    first_B = lengths_B.cumsum(0) - lengths_B
    column_N = torch.arange(row_N.shape[0], device=row_N.device) + (start_B - first_B).repeat_interleave(lengths_B)
    return row_N, column_N


def assign_req_to_token(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    out_cache_loc: Tensor,
    batch_size: int,
) -> None:
    """Write the new slots ``out_cache_loc`` [N] into the table, for tokens ``[start, end)`` of each request."""
    row_N, column_N = _flat_positions(req_pool_indices, start_offset, end_offset)
    req_to_token[row_N, column_N] = out_cache_loc[: row_N.shape[0]].to(req_to_token.dtype)


def extend_cache_locations(
    *,
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    batch_size: int,
    draft_token_num: int,
    device: torch.device | str,
) -> Tensor:
    """Read the slots of tokens ``[start, end)`` of each request.

    Returns:
        int64 [batch_size * draft_token_num]; where the requests have fewer tokens, the rest is zero (the pool's
        padding slot).
    """
    row_N, column_N = _flat_positions(req_pool_indices, start_offset, end_offset)
    locations = torch.zeros(batch_size * draft_token_num, dtype=torch.int64, device=device)
    locations[: row_N.shape[0]] = req_to_token[row_N, column_N]
    return locations
