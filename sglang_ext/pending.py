"""What the target said of committed tokens that some drafter has not entered yet.

A drafter's entries are written when it drafts, not at every commit: a request that decodes plainly for a while costs
its drafters nothing, and then one batched pass over all that waited. Every state is kept in a ring by position, so a
row may wait for ``capacity`` tokens before it must be entered.

Shapes: N tokens of all rows, R slots of the request pool, C capacity, F width of the target's features, D hidden.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from sglang_ext.transfer import on_device


@dataclass(frozen=True)
class Waiting:
    """Tokens without an entry, row by row."""

    taps_NF: Tensor
    hidden_ND: Tensor
    next_N: Tensor
    """The token after each; for a row's last one its anchor."""
    position_N: Tensor
    request_N: Tensor
    """Slot of the request pool."""
    last_B: Tensor
    """Index of each row's last one; rows without any are missing."""


class PendingStates:
    """The rings of all requests, and how far each drafter's entries reach.

    Args:
        slots: of the request pool.
        capacity: C; at least the widest verification.
        tap_width: F.
        hidden_size: D.
        drafters: names.
        dtype: of the states.
        device: of the states.
    """

    def __init__(
        self,
        slots: int,
        *,
        capacity: int,
        tap_width: int,
        hidden_size: int,
        drafters: Iterable[str],
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self.capacity = capacity
        self._taps_RCF = torch.zeros(slots, capacity, tap_width, dtype=dtype, device=device)
        self._hidden_RCD = torch.zeros(slots, capacity, hidden_size, dtype=dtype, device=device)
        self._token_RC = torch.zeros(slots, capacity, dtype=torch.int64, device=device)
        self._device = device
        self.length = [0] * slots
        """Committed tokens whose states were seen, by slot."""
        self._entered = {name: [0] * slots for name in drafters}

    def reset(self, slot: int, position: int) -> None:
        """A new request in the slot, whose first ``position`` tokens came from the prefix cache with their entries."""
        self.length[slot] = position
        for entered in self._entered.values():
            entered[slot] = position

    def waiting(self, drafter: str, slot: int) -> int:
        """Tokens of the slot without an entry of this drafter."""
        return self.length[slot] - self._entered[drafter][slot]

    def enter(self, drafter: str, slot: int, position: int) -> None:
        """The drafter's entries now reach up to (not including) this position."""
        self._entered[drafter][slot] = position

    def append(
        self, slots: Sequence[int], counts: Sequence[int], *, taps_NF: Tensor, hidden_ND: Tensor, token_N: Tensor
    ) -> None:
        """Committed tokens of some rows with their states, row by row; those that don't fit the ring overwrite.

        The caller sees to it that what would be overwritten has been entered.
        """
        request_N, position_N = self._places(slots, [self.length[slot] for slot in slots], counts)
        index_N = position_N % self.capacity
        self._taps_RCF[request_N, index_N] = taps_NF
        self._hidden_RCD[request_N, index_N] = hidden_ND
        self._token_RC[request_N, index_N] = token_N
        for slot, count in zip(slots, counts, strict=True):
            self.length[slot] += count

    def take(self, drafter: str, slots: Sequence[int], *, anchors: Tensor) -> Waiting | None:
        """Everything of these slots that the drafter has not entered; None: nothing.

        Args:
            anchors: the token after each slot's last committed one [len(slots)].
        """
        starts = [self._entered[drafter][slot] for slot in slots]
        counts = [self.length[slot] - start for slot, start in zip(slots, starts, strict=True)]
        if not any(counts):
            return None
        request_N, position_N = self._places(slots, starts, counts)
        index_N = position_N % self.capacity
        next_N = self._token_RC[request_N, (position_N + 1) % self.capacity]
        last = [end - 1 for end, count in zip(accumulate(counts), counts, strict=True) if count]
        some = [row for row, count in enumerate(counts) if count]
        last_B, row_B = on_device([last, some], self._device)
        next_N = next_N.index_copy(0, last_B, anchors[row_B])  # what follows the newest is the anchor
        return Waiting(
            self._taps_RCF[request_N, index_N],
            self._hidden_RCD[request_N, index_N],
            next_N,
            position_N,
            request_N,
            last_B,
        )

    def _places(self, slots: Sequence[int], starts: Sequence[int], counts: Sequence[int]) -> tuple[Tensor, Tensor]:
        requests = [slot for slot, count in zip(slots, counts, strict=True) for _ in range(count)]
        positions = [start + i for start, count in zip(starts, counts, strict=True) for i in range(count)]
        request_N, position_N = on_device([requests, positions], self._device)
        return request_N, position_N
