"""A key/value cache with one length per row, written in place.

transformers' attention layers call ``update``; everything else is for the loop that decodes. A row's length is the
only truth about it: setting it back is a rollback, and what lies behind it is never read.

Legend: L layers, N rows of the cache, B rows of the next forward, T new tokens, G key/value heads, C head channels,
W allocated width (at least the longest row, rounded up to whole chunks),
S tokens that a forward looks at (W, or fewer where rows are gathered).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from angelspec.core.geometry import TargetGeometry

_CHUNK = 64
_SHRINK_AFTER = 3
"""Chunks of unused width at which the storage is made narrower."""


class SlotCache(Cache):
    """Keys and values of ``rows`` sequences, for models with full attention in every layer.

    One forward goes: ``select`` the rows, ``begin`` with the number of new tokens, run the model with ``mask()`` and
    ``positions()``, then ``commit`` how many of the new tokens count.

    Keys are stored channel-major ([N, G, C, W]): a decoding step multiplies queries with exactly this layout, and
    both storages are contiguous at their allocated width, which grows and shrinks in chunks.

    Args:
        geometry: the target's.
        rows: number of sequences, N.
        capacity: most tokens a row may hold.
        dtype: of keys and values.
        device: where they lie.
    """

    def __init__(
        self,
        geometry: TargetGeometry,
        *,
        rows: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        self.layers = []  # what transformers' Cache keeps its own layers in
        self.geometry = geometry
        self.capacity = capacity
        self.dtype = dtype
        self.device = torch.device(device)
        self.lengths = torch.zeros(rows, dtype=torch.long)
        """Committed tokens per row, on the CPU; set it to roll back."""
        self._width = 0
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self._rows: Tensor | None = None
        self._visible = 0
        self._fresh = False
        self._write_slice: slice | None = None
        self._row_index: Tensor | slice | None = None
        self._write_rows_B1: Tensor | None = None
        self._write_positions_BT: Tensor | None = None
        self._reallocate(rows=torch.arange(rows), width=0)

    @property
    def rows(self) -> int:
        """Sequences held, N."""
        return self.lengths.shape[0]

    @property
    def width(self) -> int:
        """Allocated tokens per row, W."""
        return self._width

    @property
    def num_bytes(self) -> int:
        """Bytes of keys and values."""
        return sum(tensor.numel() * tensor.element_size() for tensor in (*self._keys, *self._values))

    def select(self, rows: Tensor | None) -> None:
        """Choose the rows of the next forwards, in batch order; None: all of them.

        A run of consecutive rows is read without a copy, any other choice is gathered in each forward.
        """
        if rows is not None:
            rows = rows.to(dtype=torch.long, device="cpu")
            if rows.unique().numel() != rows.numel():
                raise ValueError(f"rows {rows.tolist()} repeat")
        self._rows = rows

    def begin(self, new_tokens: int) -> None:
        """Prepare a forward of so many new tokens in every selected row, written behind its length.

        Rows that need fewer are padded on the right: padding is written too, but lies behind the length once the
        true count is committed.

        Raises:
            ValueError: a row would outgrow the capacity.
        """
        lengths_B = self.lengths if self._rows is None else self.lengths[self._rows]
        longest = int(lengths_B.max())
        needed = longest + new_tokens
        if needed > self.capacity:
            raise ValueError(f"a row of {longest} tokens cannot take {new_tokens} more: capacity {self.capacity}")
        wanted = -(-max(needed, int(self.lengths.max())) // _CHUNK) * _CHUNK
        if wanted > self._width or wanted <= self._width - _SHRINK_AFTER * _CHUNK:
            self._reallocate(rows=None, width=wanted)
        self._fresh = longest == 0
        rows_B = torch.arange(self.rows) if self._rows is None else self._rows
        positions_BT = lengths_B[:, None] + torch.arange(new_tokens)
        self._row_index = _as_slice(rows_B)
        # A view is cheapest at its full width; a gathered copy need not be wider than what is looked at.
        self._visible = self._width if isinstance(self._row_index, slice) else needed
        aligned = new_tokens > 1 and bool((lengths_B == lengths_B[0]).all())
        self._write_slice = slice(longest, needed) if aligned else None
        self._write_rows_B1 = rows_B[:, None].to(self.device)
        self._write_positions_BT = positions_BT.to(self.device)

    def positions(self) -> Tensor:
        """int64 [B, T]: where the tokens of this forward stand in their rows."""
        assert self._write_positions_BT is not None, "begin() comes first"
        return self._write_positions_BT

    def mask(self) -> Tensor | None:
        """bool [B, 1, T, S], True where a new token may look: its row's committed tokens and the new ones up to itself.

        None where the selected rows are empty: then the new tokens look at each other, causally.
        """
        if self._fresh:
            return None
        return (torch.arange(self._visible, device=self.device) <= self.positions()[:, :, None])[:, None]

    def commit(self, counts: Tensor | int) -> None:
        """Add so many of this forward's tokens to the selected rows' lengths ([B] or one number for all)."""
        counts = counts.to(dtype=torch.long, device="cpu") if isinstance(counts, Tensor) else counts
        if self._rows is None:
            self.lengths += counts
        else:
            self.lengths[self._rows] += counts

    def compact(self, keep: Tensor) -> None:
        """Keep these rows only, in this order; the selection becomes all rows."""
        keep = keep.to(dtype=torch.long, device="cpu")
        lengths = self.lengths[keep]
        wanted = -(-int(lengths.max()) // _CHUNK) * _CHUNK if keep.numel() else 0
        self._reallocate(rows=keep, width=min(self._width, wanted))
        self.lengths = lengths
        self._rows = None

    def copy_from(self, other: SlotCache, *, row: int, targets: Tensor) -> None:
        """Let ``targets`` begin with the committed tokens of another cache's row (a shared prefix)."""
        targets = targets.to(dtype=torch.long, device="cpu")
        length = int(other.lengths[row])
        if length > self._width:
            self._reallocate(rows=None, width=-(-length // _CHUNK) * _CHUNK)
        index = targets.to(self.device)
        for layer in range(self.geometry.num_layers):
            self._keys[layer][index, :, :, :length] = other._keys[layer][row, :, :, :length]
            self._values[layer][index, :, :length] = other._values[layer][row, :, :length]
        self.lengths[targets] = length

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write one layer's new keys and values; return what its queries look at, both [B, G, S, C]."""
        rows_B1, positions_BT = self._write_rows_B1, self._write_positions_BT
        keys, values = self._keys[layer_idx], self._values[layer_idx]
        key_states, value_states = key_states.to(self.dtype), value_states.to(self.dtype)
        if self._write_slice is not None:
            keys[self._row_index, :, :, self._write_slice] = key_states.transpose(-1, -2)
            values[self._row_index, :, self._write_slice] = value_states
        else:
            keys[rows_B1, :, :, positions_BT] = key_states.permute(0, 2, 1, 3)
            values[rows_B1, :, positions_BT] = value_states.permute(0, 2, 1, 3)
        if self._fresh:
            return key_states, value_states
        if isinstance(self._row_index, slice):
            return keys[self._row_index].transpose(-1, -2), values[self._row_index]
        return (
            keys[self._row_index, :, :, : self._visible].transpose(-1, -2),
            values[self._row_index, :, : self._visible],
        )

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Longest committed length (transformers asks)."""
        return int(self.lengths.max()) if self.rows else 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """As ``get_seq_length``."""
        return self.get_seq_length(layer_idx)

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Keys that a mask must cover, and the first one's position (transformers asks)."""
        return (query_length if self._fresh else self._visible), 0

    def get_max_length(self, layer_idx: int = 0) -> int:
        """Most tokens a row may hold."""
        return self.capacity

    def _reallocate(self, *, rows: Tensor | None, width: int) -> None:
        """Other rows or another width, layer by layer, so that only one layer is held twice at a time."""
        geometry = self.geometry
        count = self.rows if rows is None else rows.shape[0]
        kept = min(width, self._width)
        index: Tensor | slice = slice(None) if rows is None else rows.to(self.device)
        shape = (count, geometry.num_kv_heads)
        for layer in range(geometry.num_layers):
            # Zeros, not garbage: a masked score of NaN would still be NaN.
            keys = torch.zeros(*shape, geometry.head_dim, width, dtype=self.dtype, device=self.device)
            values = torch.zeros(*shape, width, geometry.head_dim, dtype=self.dtype, device=self.device)
            if layer < len(self._keys):
                keys[..., :kept] = self._keys[layer][index][..., :kept]
                values[:, :, :kept] = self._values[layer][index][:, :, :kept]
                self._keys[layer], self._values[layer] = keys, values
            else:
                self._keys.append(keys)
                self._values.append(values)
        self._width = width


def _as_slice(rows_B: Tensor) -> Tensor | slice:
    """The rows as a slice where they are consecutive (a view), else as an index (a copy)."""
    start = int(rows_B[0])
    if rows_B.numel() == 1 or bool((rows_B[1:] - rows_B[:-1] == 1).all()):
        return slice(start, start + rows_B.numel())
    return rows_B
