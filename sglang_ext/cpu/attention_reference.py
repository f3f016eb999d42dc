"""The slow reference of the CPU platform's attention.

Shapes: N tokens of the batch, Q queries of a row, T keys of a row, H query heads, G key-value heads, C channels of a
head, S slots of the pool.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sglang_ext.cpu.attention_plan import NO_WINDOW


def reference_attention(
    queries_NHC: Tensor,
    keys_SGC: Tensor,
    values_SGC: Tensor,
    slots: Sequence[Tensor],
    widths: Sequence[int],
    *,
    causal: bool,
    scaling: float,
    window: int = NO_WINDOW,
) -> Tensor:
    """What the backend computes, row by row with a plain softmax in float32.

    Args:
        queries_NHC: the rows' queries, one row after another.
        keys_SGC, values_SGC: the pool of one layer.
        slots: per row, int64 [T]: the slots of its tokens in order; its queries are the last ones.
        widths: queries of each row.
        causal: query i sees what lies before it and itself; else every query sees the whole row.
        scaling: factor of the scores.
        window: a causal query sees itself and this many tokens before it; negative for all.

    Returns:
        [N, H, C], in the queries' dtype.
    """
    outputs, start = [], 0
    for slot_T, width in zip(slots, widths, strict=True):
        query_QHC = queries_NHC[start : start + width].float()
        start += width
        repeats = query_QHC.shape[1] // keys_SGC.shape[1]
        key_THC = keys_SGC[slot_T].float().repeat_interleave(repeats, dim=1)
        value_THC = values_SGC[slot_T].float().repeat_interleave(repeats, dim=1)
        scores_HQT = torch.einsum("qhc,thc->hqt", query_QHC, key_THC) * scaling
        if causal:
            key_position_T = torch.arange(slot_T.shape[0])
            position_Q1 = key_position_T[-width:].unsqueeze(1)
            visible_QT = key_position_T <= position_Q1
            if window >= 0:
                visible_QT &= key_position_T >= position_Q1 - window
            scores_HQT = scores_HQT.masked_fill(~visible_QT, float("-inf"))
        outputs.append(torch.einsum("hqt,thc->qhc", scores_HQT.softmax(-1), value_THC))
    return torch.cat(outputs).to(queries_NHC.dtype)
