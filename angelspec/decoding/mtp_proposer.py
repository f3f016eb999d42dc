"""MTP in the loop, drafting as a server does.

Depth 0 at position j reads the target's state of token j and the embedding of token j + 1. The last observed token's
successor is the next anchor, which is known only when the loop asks for proposals: until then the states of a verified
window wait. ``propose`` then runs depth 0 over the whole window in one call, with the target's own states (nothing of
the draft before survives), and drafts from its last output.

Legend: B batch rows, T tokens, F width of the tapped target features, D hidden, K proposals, W rows of the loop,
Q positions that may wait (K + 1: an anchor and its accepted proposals).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from angelspec.decoding.proposer import Observed, Proposals
from angelspec.decoding.trained_proposer import TrainedProposer, whole

if TYPE_CHECKING:
    from angelspec.drafters.mtp import MtpDrafter


class MtpProposer(TrainedProposer):
    """A trained MTP drafter beside its target; see ``TrainedProposer``."""

    drafter: MtpDrafter

    @property
    def identity(self) -> Mapping[str, Any]:
        return {"kind": "mtp", "digest": self.digest}

    def start(self, num_rows: int, *, capacity: int) -> None:
        device, shape = self.target.device, (num_rows, self.depth + 1)
        self._cache = self.drafter.context_cache(num_rows, capacity=capacity)
        self._hidden_WQD = torch.zeros(
            *shape, self.drafter.config.target_hidden_size, dtype=self.target.dtype, device=device
        )
        self._tokens_WQ = torch.zeros(shape, dtype=torch.int64, device=device)
        self._waiting_W = torch.zeros(num_rows, dtype=torch.int64, device=device)

    def reset(self, rows: Tensor) -> None:
        self._cache.reset(rows)
        self._waiting_W[rows] = 0

    def observe(self, rows: Tensor, observed: Observed) -> None:
        if int(self._waiting_W[rows].max()):
            raise ValueError("proposals must be asked for between two observations of a row")
        tokens_BT, hidden_BTD, counts_B = observed.tokens_BT, observed.hidden_BTD, observed.counts_B
        if tokens_BT.shape[1] > self._tokens_WQ.shape[1]:  # prompts: all successors but the last token's are known
            long = counts_B > 1
            if bool(long.any()):
                self._extend(rows[long], hidden_BTD[long, :-1], tokens_BT[long, 1:], counts_B[long] - 1)
            index_B1 = (counts_B - 1).unsqueeze(1)
            hidden_BTD = hidden_BTD.take_along_dim(index_B1.unsqueeze(-1), dim=1)
            tokens_BT, counts_B = tokens_BT.gather(1, index_B1), torch.ones_like(counts_B)
        width = tokens_BT.shape[1]
        # the states may be those of the same target in another precision, when exactness is measured
        self._hidden_WQD[rows, :width] = hidden_BTD.to(self._hidden_WQD.dtype)
        self._tokens_WQ[rows, :width] = tokens_BT
        self._waiting_W[rows] = counts_B

    def propose(
        self, rows: Tensor, *, histories: Sequence[Sequence[int]], last_token_B: Tensor, position_B: Tensor
    ) -> Proposals:
        counts_B = self._waiting_W[rows]
        width = int(counts_B.max())
        next_BT = self._tokens_WQ[rows, 1:width]
        next_BT = torch.cat([next_BT, next_BT.new_zeros(len(rows), 1)], dim=1)
        next_BT = next_BT.scatter(1, (counts_B - 1).unsqueeze(1), last_token_B.unsqueeze(1))
        hidden_BD = self._extend(rows, self._hidden_WQD[rows, :width], next_BT, counts_B)
        self._waiting_W[rows] = 0
        drafts = self.drafter.draft(
            self._cache,
            hidden_BD,
            num_depths=self.depth,
            embedding_VD=self.target.embedding_VD,
            head_VD=self.target.head_VD,
            rows=self._whole(rows),
        )
        return Proposals(drafts.tokens_BK, drafts.confidence_BK, torch.full_like(position_B, self.depth))

    def _extend(self, rows: Tensor, hidden_BTD: Tensor, next_tokens_BT: Tensor, counts_B: Tensor) -> Tensor:
        return self.drafter.extend(
            self._cache,
            hidden_BTD,
            next_tokens_BT,
            counts_B=counts_B,
            rows=self._whole(rows),
            embedding_VD=self.target.embedding_VD,
        )

    def _whole(self, rows: Tensor) -> Tensor | None:
        return whole(rows, num_rows=self._cache.num_rows)
