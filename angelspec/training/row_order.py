"""Which rows each step of a stage trains on: a pure function of (seed, stage, step), so nothing is to be saved.

A stage is one endless stream of rows, each epoch a permutation of its own; step s takes the stream's entries
s * G .. (s + 1) * G - 1 for G rows per step over all ranks. An epoch may begin inside a step; the last step of a stage
may be short.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from fractions import Fraction
from math import ceil

import torch


class RowOrder:
    """The stream of rows of one stage.

    Args:
        rows: ids of the rows to train on.
        rows_per_step: over all ranks.
        epochs: passes over the rows; fractions are allowed.
        steps: instead of epochs.
    """

    def __init__(
        self,
        rows: Sequence[int],
        *,
        rows_per_step: int,
        seed: int,
        stage: int,
        epochs: float | None = None,
        steps: int | None = None,
    ) -> None:
        if (epochs is None) == (steps is None):
            raise ValueError("give exactly one of epochs and steps")
        self._rows, self._rows_per_step = list(rows), rows_per_step
        self._seed, self._stage = seed, stage
        if steps is None:
            self.num_entries = max(1, round(Fraction(epochs) * len(self._rows)))
        else:
            self.num_entries = steps * rows_per_step
        self.num_steps = ceil(self.num_entries / rows_per_step)
        self._epoch: tuple[int, list[int]] | None = None

    def step(self, number: int) -> list[int]:
        """Row ids of one step of the stage, over all ranks."""
        first = number * self._rows_per_step
        return [self._entry(i) for i in range(first, min(first + self._rows_per_step, self.num_entries))]

    def epoch_of(self, number: int) -> float:
        """Passes over the rows that are done before this step."""
        return number * self._rows_per_step / len(self._rows)

    def _entry(self, index: int) -> int:
        epoch, offset = divmod(index, len(self._rows))
        if self._epoch is None or self._epoch[0] != epoch:
            digest = hashlib.blake2b(f"rows/{self._seed}/{self._stage}/{epoch}".encode(), digest_size=8).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
            order = torch.randperm(len(self._rows), generator=generator).tolist()
            self._epoch = (epoch, [self._rows[i] for i in order])
        return self._epoch[1][offset]
