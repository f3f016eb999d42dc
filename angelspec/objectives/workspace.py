"""Scratch memory of the frugal head path: how much to use, and buffers that live across calls.

A fresh allocation of tens of megabytes costs a page fault per 4 KiB at its first write, about as long as the
elementwise work done in it; a trainer therefore keeps one :class:`Workspace` and passes it to every step.

Shapes: R rows of a chunk, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, prod

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Budget:
    """How large the pieces are in which positions and vocabulary are walked."""

    buffer_bytes: int
    """Largest size of the student's logits of one chunk. The teacher's may need as much again, and every channel but
    the last a buffer of the same size between them."""
    tile_columns: int
    """Vocabulary columns per elementwise pass, so that its temporaries stay in cache."""
    product_columns: int
    """Vocabulary columns per product of states with the head."""
    min_rows: int = 16
    """Rows per chunk even if they exceed buffer_bytes; fewer would make the matrix products memory-bound."""

    @staticmethod
    def for_device(device: torch.device) -> Budget:
        """Return the measured default: cache-sized pieces on a CPU, large ones on an accelerator."""
        if device.type == "cpu":
            return Budget(buffer_bytes=48 << 20, tile_columns=8192, product_columns=1024)
        return Budget(buffer_bytes=512 << 20, tile_columns=1 << 16, product_columns=1 << 16)

    def rows_per_chunk(self, num_rows: int, *, row_bytes: int) -> int:
        """Return the rows of each of the fewest equal chunks that respect the budget."""
        most = max(self.min_rows, self.buffer_bytes // row_bytes)
        return ceil(num_rows / max(1, ceil(num_rows / most)))


class Workspace:
    """Named scratch buffers that grow to the largest request and are reused.

    Not for two threads at once. The contents do not survive from one call of the head path to the next.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return uninitialised memory of the given shape; it shares storage with earlier takes of the same name."""
        key, size = (name, dtype, device), prod(shape)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.numel() < size:
            with torch.inference_mode(False):  # an inference tensor could not be written by a later training step
                buffer = self._buffers[key] = torch.empty(size, dtype=dtype, device=device)
        return buffer[:size].view(shape)

    @property
    def num_bytes(self) -> int:
        """Memory held now."""
        return sum(buffer.numel() * buffer.element_size() for buffer in self._buffers.values())
