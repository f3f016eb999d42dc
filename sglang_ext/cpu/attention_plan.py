"""What the attention of a step depends on besides its numbers: groups of rows, the slots of their keys, their masks.

Built once per step and shared by all layers; nothing here needs SGLang.

Shapes: N tokens of the batch, R rows (requests), B rows of one group, Q queries of a row, T keys of a row, K keys of a
group, M query heads per key-value head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

WIDE = 64
"""Rows with more queries than this run alone."""

BLOCK = 256
"""Queries of a wide row that share one slice of the band."""

SLACK = 256
"""Padded keys that a group may hold: what reading them costs is about what one more group costs."""

NO_WINDOW = -1


def group_rows(lengths: Sequence[int], slack: int = SLACK) -> list[list[int]]:
    """Part rows into groups whose padding to the longest row stays within ``slack`` keys.

    Returns:
        row numbers, ascending within each group.
    """
    groups: list[list[int]] = []
    longest = waste = 0
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        waste += longest - lengths[row]
        if not groups or waste > slack:
            groups.append([])
            longest, waste = lengths[row], 0
        groups[-1].append(row)
    return [sorted(group) for group in groups]


@dataclass
class Group:
    """Narrow rows that are computed together."""

    rows: int
    width: int
    """Queries per row, of the widest."""
    length: int
    """Keys per row, of the longest."""
    slot_K: Tensor
    """int64 [B * T]: slot of every key; a row's padding repeats its last slot."""
    first_slot: int | None
    """The only row's first slot, where its slots follow one another; then keys are a view."""
    context_B: Tensor
    """int64: keys before a row's first query."""
    width_B: Tensor
    """int64: queries of a row."""
    even: bool
    """All rows are as wide and as long as the widest and the longest."""
    token_K: Tensor | None
    """int64 [B * Q]: token that asks each query, a row's padding repeating its last one; None: the batch's tokens in
    order."""
    kept_N: Tensor | None
    """int64: queries that are not padding; None: all."""
    token_N: Tensor | None
    """int64: the tokens of those queries; None: the batch's tokens in order."""
    masks: dict[tuple[bool, int, int, torch.dtype], Tensor | None] = field(default_factory=dict)

    def mask(self, *, causal: bool, window: int, heads: int, dtype: torch.dtype) -> Tensor | None:
        """What to add to the scores, [B, 1, Q * M or 1, T] with M = ``heads``, or None if all is visible."""
        key = (causal, window, heads, dtype)
        if key not in self.masks:
            self.masks[key] = self._build_mask(*key)
        return self.masks[key]

    def _build_mask(self, causal: bool, window: int, heads: int, dtype: torch.dtype) -> Tensor | None:
        if self.even and (not causal or (self.width == 1 and not 0 <= window < self.length)):
            return None
        key_T = torch.arange(self.length)
        # a padded query repeats the row's last one
        step_BQ = torch.arange(self.width).minimum(self.width_B.unsqueeze(1) - 1)
        position_BQ1 = (self.context_B.unsqueeze(1) + step_BQ).unsqueeze(2)
        if causal:
            visible_BQT = key_T <= position_BQ1
            if window >= 0:
                visible_BQT &= key_T >= position_BQ1 - window
        else:
            visible_BQT = (key_T < (self.context_B + self.width_B).unsqueeze(1)).unsqueeze(1)
        mask_BQT = torch.zeros(visible_BQT.shape, dtype=dtype).masked_fill_(~visible_BQT, float("-inf"))
        if mask_BQT.shape[1] > 1:
            mask_BQT = mask_BQT.repeat_interleave(heads, dim=1)
        return mask_BQT.unsqueeze(1)


@dataclass
class WideRow:
    """A row that is computed alone."""

    first_token: int
    width: int
    context: int
    slot_T: Tensor
    """int64: slot of every key."""


@dataclass
class Plan:
    """What all layers of one step share."""

    tokens: int
    """Queries of all rows; the batch may carry more, which are padding."""
    groups: list[Group]
    wide: list[WideRow]


def plan_step(req_to_token: Tensor, row_R: Tensor, contexts: Sequence[int], widths: Sequence[int]) -> Plan:
    """Lay out one step.

    Args:
        req_to_token: int32, the slot of every token of every request.
        row_R: the requests' rows of that table.
        contexts: keys before each row's first query.
        widths: queries of each row.
    """
    starts = [0, *accumulate(widths)]
    row_R = row_R.long()
    wide = [
        WideRow(
            first_token=starts[row],
            width=width,
            context=contexts[row],
            slot_T=req_to_token[row_R[row], : contexts[row] + width].long(),
        )
        for row, width in enumerate(widths)
        if width > WIDE
    ]
    narrow = [row for row, width in enumerate(widths) if 0 < width <= WIDE]
    lengths = [contexts[row] + widths[row] for row in narrow]
    groups = [
        _plan_group(req_to_token, row_R, [narrow[index] for index in group], contexts, widths, starts)
        for group in group_rows(lengths)
    ]
    return Plan(starts[-1], groups, wide)


def _plan_group(
    req_to_token: Tensor,
    row_R: Tensor,
    rows: list[int],
    contexts: Sequence[int],
    widths: Sequence[int],
    starts: Sequence[int],
) -> Group:
    whole = len(rows) == len(widths)
    row_widths, row_contexts = [widths[row] for row in rows], [contexts[row] for row in rows]
    row_lengths = [context + width for context, width in zip(row_contexts, row_widths, strict=True)]
    width, length = max(row_widths), max(row_lengths)
    width_B, context_B = torch.tensor(row_widths), torch.tensor(row_contexts)
    even_widths, even_lengths = min(row_widths) == width, min(row_lengths) == length

    slot_BT = req_to_token[row_R if whole else row_R[rows], :length].long()
    if not even_lengths:
        slot_BT = slot_BT.gather(1, torch.arange(length).minimum((context_B + width_B).unsqueeze(1) - 1))
    first_slot = None
    if len(rows) == 1 and bool((slot_BT[0, 1:] - slot_BT[0, :-1] == 1).all()):
        first_slot = int(slot_BT[0, 0])

    token_K = kept_N = token_N = None
    if not (whole and even_widths):
        step_Q = torch.arange(width)
        start_B1 = torch.tensor([starts[row] for row in rows]).unsqueeze(1)
        token_K = (start_B1 + step_Q.minimum(width_B.unsqueeze(1) - 1)).flatten()
        if even_widths:
            token_N = token_K
        else:
            kept_N = (step_Q < width_B.unsqueeze(1)).flatten().nonzero().squeeze(1)
            token_N = token_K[kept_N]
    return Group(
        rows=len(rows),
        width=width,
        length=length,
        slot_K=slot_BT.flatten(),
        first_slot=first_slot,
        context_B=context_B,
        width_B=width_B,
        even=even_widths and even_lengths,
        token_K=token_K,
        kept_N=kept_N,
        token_N=token_N,
    )


class Band:
    """Causal masks of blocks of queries behind contexts of any length: slices of one table."""

    def __init__(self) -> None:
        self._tables: dict[tuple[int, torch.dtype], Tensor] = {}

    def mask(self, context: int, width: int, window: int, dtype: torch.dtype) -> Tensor:
        """What to add to the scores of ``width`` (at most BLOCK) queries with ``context`` keys before the first.

        Returns:
            [1, 1, width, context + width]
        """
        table = self._tables.get((window, dtype))
        if table is None or table.shape[1] < context + BLOCK:
            room = context + context // 2
            distance = torch.arange(BLOCK).unsqueeze(1) - (torch.arange(room + BLOCK) - room)
            visible = distance >= 0
            if window >= 0:
                visible &= distance <= window
            table = torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, float("-inf"))
            self._tables[window, dtype] = table
        room = table.shape[1] - BLOCK
        return table[None, None, :width, room - context : room + width]
