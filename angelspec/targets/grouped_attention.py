"""Attention for transformers' models that never repeats keys and values for grouped queries.

Registered under ``NAME`` with transformers' attention interface. The R query heads that share one key/value head
are folded into the query length where a cache is read (few queries, many keys), or attended one by one over the
same keys otherwise (many queries), so no copy of the cache is made.

Legend: B batch rows, H query heads, G key/value heads, R = H/G heads per group, T queries, S keys, C head channels.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

NAME = "angelspec_grouped"
FEW_QUERIES = 32
"""Up to so many, a row's scores are held whole: a drafted block, never the prefill of a prompt."""


def fold_mask(mask_B1TS: Tensor, *, group: int, dtype: torch.dtype) -> Tensor:
    """An additive mask for folded queries, made once per forward and shared by all layers.

    Args:
        mask_B1TS: bool [B, 1, T, S], True where a query may look.
        group: R.
        dtype: of the scores it is added to.

    Returns:
        [B, 1, R*T, S] (or [B, 1, 1, S] for one query): 0 where a query may look, -inf elsewhere.
    """
    additive = torch.zeros(mask_B1TS.shape, dtype=dtype, device=mask_B1TS.device).masked_fill_(~mask_B1TS, -torch.inf)
    return additive if mask_B1TS.shape[2] == 1 else additive.repeat(1, 1, group, 1)


def grouped_attention(
    module: nn.Module,
    query_BHTC: Tensor,
    key_BGSC: Tensor,
    value_BGSC: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers' attention interface calls it.

    Args:
        attention_mask: None (causal over equally many queries and keys; everything for a single query), bool
            [B, 1, T, S], or what ``fold_mask`` gives for up to ``FEW_QUERIES`` queries.

    Returns:
        [B, T, H, C], and None in place of attention weights.

    Raises:
        ValueError: the model asks for something this attention lacks (soft capping, attention sinks).
    """
    for unsupported in ("softcap", "s_aux", "position_bias"):
        if kwargs.get(unsupported) is not None:
            raise ValueError(f"{NAME} attention has no {unsupported}; load the target with another attention")
    batch, heads, queries, channels = query_BHTC.shape
    groups, keys = key_BGSC.shape[1], key_BGSC.shape[2]
    repeats = heads // groups
    scaling = channels**-0.5 if scaling is None else scaling
    folded = attention_mask is not None and attention_mask.dtype != torch.bool
    if folded or queries == 1:
        # [B, G, R*T, C] @ [B, G, C, S]: a plain product is faster than a blocked kernel for so few queries.
        query_BGQC = query_BHTC.reshape(batch, groups, repeats * queries, channels) * scaling
        scores_BGQS = query_BGQC @ key_BGSC.transpose(-1, -2)
        if attention_mask is not None:
            scores_BGQS = _masked(scores_BGQS, attention_mask)
        output = torch.softmax(scores_BGQS, dim=-1) @ value_BGSC
        return output.reshape(batch, heads, queries, channels).transpose(1, 2), None
    is_causal = attention_mask is None and bool(kwargs.get("is_causal", getattr(module, "is_causal", True)))
    if is_causal and keys != queries:
        raise ValueError(f"{queries} queries over {keys} keys need an explicit mask")
    query_BGRTC = query_BHTC.reshape(batch, groups, repeats, queries, channels)
    output_BGRTC = torch.stack(
        [
            F.scaled_dot_product_attention(
                query_BGRTC[:, :, member], key_BGSC, value_BGSC,
                attn_mask=attention_mask, is_causal=is_causal, dropout_p=dropout, scale=scaling,
            )
            for member in range(repeats)
        ],
        dim=2,
    )  # fmt: skip
    return output_BGRTC.reshape(batch, heads, queries, channels).transpose(1, 2), None


def _masked(scores_BGQS: Tensor, mask: Tensor) -> Tensor:
    """In place: the scores were made a line earlier."""
    return scores_BGQS.masked_fill_(~mask, -torch.inf) if mask.dtype == torch.bool else scores_BGQS.add_(mask)


def register() -> str:
    """Make ``NAME`` known to transformers (once is enough, more does no harm) and return it."""
    AttentionInterface.register(NAME, grouped_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    return NAME
