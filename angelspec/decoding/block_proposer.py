"""A block drafter (DFlash, DFlare, DSpark, DFly) in the loop.

Legend: B batch rows, T tokens, F width of the tapped target features, D hidden, K proposals.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from angelspec.decoding.proposer import Observed, Proposals
from angelspec.decoding.trained_proposer import TrainedProposer, whole

if TYPE_CHECKING:
    from angelspec.drafters.block import BlockDrafter
    from angelspec.targets.target import Target


class BlockProposer(TrainedProposer):
    """A trained block drafter beside its target; see ``TrainedProposer``.

    Args:
        shortlist: candidates per slot that a sequential head rescores; None: the whole vocabulary (exact).
    """

    drafter: BlockDrafter

    def __init__(self, drafter: BlockDrafter, *, target: Target, name: str, shortlist: int | None = None) -> None:
        super().__init__(drafter, target=target, name=name)
        self.shortlist = shortlist

    @property
    def identity(self) -> Mapping[str, Any]:
        # Without a sequential head there is nothing to rescore.
        shortlist = None if self.drafter.config.head == "none" else self.shortlist
        return {"kind": "block", "digest": self.digest, "shortlist": shortlist}

    def start(self, num_rows: int, *, capacity: int) -> None:
        self._context = self.drafter.context_cache(num_rows, capacity=capacity)

    def reset(self, rows: Tensor) -> None:
        self._context.reset(rows)

    def observe(self, rows: Tensor, observed: Observed) -> None:
        self.drafter.extend_context(
            self._context,
            observed.taps_BTF,
            counts_B=observed.counts_B,
            positions_BT=observed.positions_BT,
            rows=self._whole(rows),
        )

    def propose(
        self, rows: Tensor, *, histories: Sequence[Sequence[int]], last_token_B: Tensor, position_B: Tensor
    ) -> Proposals:
        drafts = self.drafter.draft(
            self._context,
            anchor_tokens_B=last_token_B,
            anchor_positions_B=position_B,
            embedding_VD=self.target.embedding_VD,
            head_VD=self.target.head_VD,
            rows=self._whole(rows),
            shortlist=self.shortlist,
        )
        return Proposals(drafts.tokens_BK, drafts.confidence_BK, torch.full_like(position_B, self.depth))

    def _whole(self, rows: Tensor) -> Tensor | None:
        return whole(rows, num_rows=self._context.num_rows)
