"""Where blocks start: drawing anchors from packed rows.

Shapes: R rows, T tokens, A anchors.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Anchors:
    """The valid anchors of a micro-batch as one flat list, ordered by row and, within a row, by position."""

    row_A: Tensor
    """int64: row of each anchor."""
    position_A: Tensor
    """int64: index of the anchor's token within its row."""

    @property
    def count(self) -> int:
        """Number of anchors."""
        return self.row_A.shape[0]

    def to(self, device: torch.device | str) -> Anchors:
        """The same anchors on another device."""
        return Anchors(self.row_A.to(device), self.position_A.to(device))


def anchor_candidates(loss_mask_RT: Tensor, document_RT: Tensor, *, block_size: int) -> Tensor:
    """Mark the tokens that may start a block: supervised, with the whole block inside the row and the document.

    Token ``a`` is one if ``a <= T - block_size``, ``loss_mask[a]`` and ``document[a] == document[a + block_size - 1]
    >= 0``. A document is a contiguous run of one id, so its ends agreeing means that all of the block does.

    Returns:
        bool [R, T].
    """
    num_tokens = loss_mask_RT.shape[1]
    candidates_RT = torch.zeros_like(loss_mask_RT, dtype=torch.bool)
    starts = num_tokens - block_size + 1
    if starts > 0:
        first, last = document_RT[:, :starts], document_RT[:, block_size - 1 :]
        candidates_RT[:, :starts] = loss_mask_RT[:, :starts].bool() & (first == last) & (first >= 0)
    return candidates_RT


def sample_anchors(
    loss_mask_RT: Tensor,
    document_RT: Tensor,
    *,
    block_size: int,
    num_anchors: int,
    generator: torch.Generator | None = None,
) -> Anchors:
    """Draw up to ``num_anchors`` anchors per row, uniformly without replacement from its candidates.

    Rows with fewer candidates give all of theirs; nothing is padded. The draw happens on the CPU, so that a seed
    means the same anchors on every device.

    Args:
        loss_mask_RT: bool, supervised tokens.
        document_RT: document id of each token, -1 for padding.
        block_size: slots per block, anchor included.
        num_anchors: most anchors per row.
        generator: a CPU generator; None uses torch's default one.
    """
    candidates_RT = anchor_candidates(loss_mask_RT, document_RT, block_size=block_size).cpu()
    rows, num_tokens = candidates_RT.shape
    priority_RT = torch.rand(rows, num_tokens, generator=generator, dtype=torch.float64)
    priority_RT.masked_fill_(~candidates_RT, -1.0)
    chosen = priority_RT.topk(min(num_anchors, num_tokens), dim=1)
    kept_RT = torch.zeros_like(candidates_RT)
    kept_RT.scatter_(1, chosen.indices, chosen.values >= 0)
    row_A, position_A = kept_RT.nonzero(as_tuple=True)
    return Anchors(row_A, position_A).to(loss_mask_RT.device)


def document_starts(document_RT: Tensor) -> Tensor:
    """Index within the row of the first token of each token's document.

    Returns:
        int64 [R, T].

    Raises:
        ValueError: a row holds one document id in two separate runs, which attention would join.
    """
    rows, num_tokens = document_RT.shape
    opens_RT = torch.ones_like(document_RT, dtype=torch.bool)
    opens_RT[:, 1:] = document_RT[:, 1:] != document_RT[:, :-1]
    runs = torch.stack([opens_RT.nonzero(as_tuple=True)[0], document_RT[opens_RT].long()], dim=1)
    runs = runs[runs[:, 1] >= 0]
    if torch.unique(runs, dim=0).shape[0] != runs.shape[0]:
        raise ValueError("a packed row holds one document id in two separate runs")
    index_T = torch.arange(num_tokens, device=document_RT.device)
    return torch.where(opens_RT, index_T, 0).cummax(dim=1).values
