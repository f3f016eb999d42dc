"""What a drafter must do to take part in the draft-verify loop, and the one that proposes nothing.

Legend: B batch rows, T tokens, F width of the tapped target features, D hidden, K proposals.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class Proposals:
    """What was drafted for each row of a batch."""

    tokens_BK: Tensor
    """int64; any value behind a row's length."""
    confidence_BK: Tensor
    """Estimated acceptance of each proposal given that those before it were accepted, in [0, 1]."""
    lengths_B: Tensor
    """int64: proposals per row, 0 to K."""


@dataclass(frozen=True)
class Observed:
    """Newly committed tokens of each row of a batch, and the target's states of them."""

    tokens_BT: Tensor
    """int64; behind ``counts_B`` padding."""
    positions_BT: Tensor
    """int64, each token's position in its sequence; consecutive, following the last observed one."""
    taps_BTF: Tensor
    """Target states after the proposer's ``layer_ids``, concatenated in that order."""
    hidden_BTD: Tensor
    """The target's last hidden states, after its final norm."""
    counts_B: Tensor
    """int64, tokens per row."""


class Proposer(Protocol):
    """Drafts continuations of committed tokens, deterministically: equal histories and features, equal proposals.

    The loop keeps ``num_rows`` rows; a row serves one request after another. Its calls are, per row: ``reset``, one
    ``observe`` of the whole prompt, then alternately ``propose`` and ``observe`` of the tokens that a verify forward
    committed: the anchor and the accepted proposals, never the bonus token, which is the next anchor and has no
    target state yet.
    """

    name: str
    """Shown in tables."""
    depth: int
    """Most proposals per step."""
    layer_ids: tuple[int, ...]
    """Target layers whose states ``observe`` needs; empty: none."""

    @property
    def identity(self) -> Mapping[str, Any]:
        """Plain data naming all that the proposals depend on besides the target: equal identity, equal results."""
        ...

    def start(self, num_rows: int, *, capacity: int) -> None:
        """Forget everything and hold ``num_rows`` empty rows of up to ``capacity`` tokens each."""
        ...

    def reset(self, rows: Tensor) -> None:
        """Empty these rows (int64 [B]) for new requests."""
        ...

    def observe(self, rows: Tensor, observed: Observed) -> None:
        """Take the target's states of newly committed tokens; rows are int64 [B], distinct."""
        ...

    def propose(
        self, rows: Tensor, *, histories: Sequence[Sequence[int]], last_token_B: Tensor, position_B: Tensor
    ) -> Proposals:
        """Draft what follows each row's last committed token.

        Args:
            rows: int64 [B], distinct.
            histories: per row all committed tokens, prompt and answer, the last one included.
            last_token_B: int64, the anchors: each row's last committed token, not observed yet.
            position_B: int64, the anchors' positions.
        """
        ...


class NoProposer:
    """Plain decoding through the same loop: every step verifies the anchor alone."""

    name = "plain"
    depth = 0
    layer_ids: tuple[int, ...] = ()

    @property
    def identity(self) -> Mapping[str, Any]:
        return {"kind": "none"}

    def start(self, num_rows: int, *, capacity: int) -> None:
        pass

    def reset(self, rows: Tensor) -> None:
        pass

    def observe(self, rows: Tensor, observed: Observed) -> None:
        pass

    def propose(
        self, rows: Tensor, *, histories: Sequence[Sequence[int]], last_token_B: Tensor, position_B: Tensor
    ) -> Proposals:
        empty_B0 = last_token_B.new_empty(len(rows), 0)
        return Proposals(empty_B0, empty_B0.float(), torch.zeros_like(last_token_B))
