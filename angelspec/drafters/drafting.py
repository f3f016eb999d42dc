"""Drafting: the context a drafter keeps per row, and choosing tokens from left to right.

Shapes: B batch rows, W rows of the cache, T new tokens of a row, N new tokens of all rows, S cached tokens, Q states
that ask (block slots; one for MTP), K proposals, V vocabulary, M candidates, D hidden, H query heads, G key-value
heads, C head channels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class Drafts:
    """The proposals of one draft per row."""

    tokens_BK: Tensor
    """int64 proposals, each the argmax given the ones before it."""
    confidence_BK: Tensor
    """float32 in 0..1: the probability that the drafter gives to the chosen token given the ones before it, or what its
    confidence head says. Over a shortlist the probability is an estimate: candidates count as corrected, all other
    tokens as before the correction."""


@dataclass(frozen=True)
class Placement:
    """Where new tokens go in a cache."""

    valid_BT: Tensor
    """bool: which of the given tokens count."""
    rows_N: Tensor
    """int64: row of the cache of each valid token, in the order of ``valid_BT``."""
    index_N: Tensor
    """int64: its place in the row, which is its position."""
    lengths: Tensor
    """int64 [W]: committed tokens of every row afterwards."""


class ContextCache:
    """Keys and values of every committed token's context, per draft layer and row; a row only grows,
    until it is emptied for another answer.

    Index in the cache and position in the answer are one: token i of a row lies at index i. Behind the capacity lies
    room for ``spare`` states, so that a draft's own keys join the context without a copy.
    """

    def __init__(
        self,
        *,
        rows: int,
        capacity: int,
        spare: int,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (rows, num_kv_heads, capacity + spare, head_dim)
        self.capacity, self.spare = capacity, spare
        self.lengths = torch.zeros(rows, dtype=torch.long, device=device)
        """int64 [W]: committed tokens per row."""
        self._keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        self._values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]

    @property
    def num_rows(self) -> int:
        """Rows held."""
        return self.lengths.shape[0]

    def select(self, rows: Tensor | None) -> Tensor:
        """Row indices [B]; None means all rows."""
        return torch.arange(self.num_rows, device=self.lengths.device) if rows is None else rows

    def place(
        self,
        shape: tuple[int, int],
        *,
        counts_B: Tensor | None = None,
        positions_BT: Tensor | None = None,
        rows: Tensor | None = None,
    ) -> Placement:
        """Where the next tokens of some rows go; nothing is written.

        Args:
            shape: rows and most tokens per row that are given, left-aligned.
            counts_B: valid tokens per row; None: all.
            positions_BT: checked, where given, against the positions that come next in each row.
            rows: rows of the cache [B]; None: all, in order.

        Raises:
            ValueError: a position is skipped or repeated, or a row outgrows the capacity.
        """
        batch, width = shape
        rows_B = self.select(rows)
        counts_B = torch.full_like(rows_B, width) if counts_B is None else counts_B.to(rows_B)
        offset_T = torch.arange(width, device=rows_B.device)
        valid_BT = offset_T < counts_B[:, None]
        next_BT = self.lengths[rows_B][:, None] + offset_T
        if positions_BT is not None and not torch.equal(positions_BT[valid_BT], next_BT[valid_BT]):
            raise ValueError("states must continue each row of the context without a gap or a repetition")
        lengths = self.lengths.clone()
        lengths[rows_B] += counts_B
        if batch != rows_B.shape[0]:
            raise ValueError(f"{batch} rows of tokens for {rows_B.shape[0]} rows of the context")
        if int(lengths.max()) > self.capacity:
            raise ValueError(f"context of {int(lengths.max())} tokens: capacity is {self.capacity}")
        return Placement(valid_BT, rows_B[:, None].expand_as(valid_BT)[valid_BT], next_BT[valid_BT], lengths)

    def append(
        self, rows_N: Tensor, index_N: Tensor, layers: Iterable[tuple[Tensor, Tensor]], *, lengths: Tensor | None
    ) -> None:
        """Write each layer's keys and values [N, G, C]; ``lengths`` [W] are the row lengths afterwards."""
        for layer, (key_NGC, value_NGC) in enumerate(layers):
            self._keys[layer][rows_N, :, index_N] = key_NGC.to(self._keys[layer].dtype)
            self._values[layer][rows_N, :, index_N] = value_NGC.to(self._values[layer].dtype)
        if lengths is not None:
            self.lengths = lengths

    def attend(
        self, rows: Tensor | None, layer: int, query_BQHC: Tensor, key: Tensor, value: Tensor, *, offset: int = 0
    ) -> Tensor:
        """Write Q states per row (keys and values [B, Q, G, C]) and attend to all up to and including them.

        ``offset`` is their distance from the end of the committed tokens: 0 for a block, k - 1 for depth k of MTP,
        whose earlier depths lie between, -1 for the last committed token itself.
        """
        batch_B = self.select(rows)
        keys, values, start_B = self._keys[layer], self._values[layer], self.lengths[batch_B] + offset
        index_BQ = start_B[:, None] + torch.arange(key.shape[1], device=key.device)
        keys[batch_B[:, None], :, index_BQ] = key.to(keys.dtype)
        values[batch_B[:, None], :, index_BQ] = value.to(values.dtype)
        visible_B = start_B + key.shape[1]
        span = int(visible_B.max())
        keys, values = keys[:, :, :span], values[:, :, :span]
        if rows is not None:
            keys, values = keys[batch_B], values[batch_B]
        mask = None
        if int(visible_B.min()) < span:
            mask = (torch.arange(span, device=key.device) < visible_B[:, None])[:, None, None]
        batch, queries, heads, channels = query_BQHC.shape
        groups = keys.shape[1]
        # The query heads that share keys become more queries of one head: keys are never repeated.
        folded = query_BQHC.unflatten(2, (groups, -1)).permute(0, 2, 1, 3, 4).flatten(2, 3)
        mixed = F.scaled_dot_product_attention(folded.to(keys.dtype), keys, values, attn_mask=mask)
        mixed = mixed.unflatten(2, (queries, -1)).permute(0, 2, 1, 3, 4)
        return mixed.reshape(batch, queries, heads, channels).to(query_BQHC.dtype)

    def reset(self, rows: Tensor) -> None:
        """Empty some rows for other answers."""
        self.lengths[rows] = 0


Multiply = Callable[[Tensor, Tensor], Tensor]
"""(states [..., D], head_VD) -> logits [..., V]: the head's product. An engine has a faster one for its own head."""


def vocabulary_logits(states: Tensor, head_VD: Tensor, multiply: Multiply = F.linear) -> Tensor:
    """The target's head on drafter states [..., D]: float32 logits [..., V], multiplied in the head's dtype."""
    return multiply(states.to(head_VD.dtype), head_VD).float()


def best_tokens(logits_BV: Tensor) -> tuple[Tensor, Tensor]:
    """The likeliest token [B] of each row and its probability [B]."""
    best_B, token_B = logits_BV.max(dim=-1)
    return token_B, (best_B - logits_BV.logsumexp(-1)).exp()


Score = Callable[[int, Tensor, "Tensor | None"], tuple[Tensor, Tensor]]
"""(slot, corrected_BD, markov_BR) -> the chosen token [B] and its probability [B]."""


def exact_scores(
    hidden_BKD: Tensor, head_VD: Tensor, *, corrects: bool, markov_bias, multiply: Multiply = F.linear
) -> Score:
    """Choose over the whole vocabulary.

    A hidden correction changes the state, so it needs the head again at every slot; otherwise one pass serves all.
    """
    base_BKV = None if corrects else vocabulary_logits(hidden_BKD, head_VD, multiply)

    def score(slot: int, corrected_BD: Tensor, markov_BR: Tensor | None) -> tuple[Tensor, Tensor]:
        logits_BV = vocabulary_logits(corrected_BD, head_VD, multiply) if base_BKV is None else base_BKV[:, slot]
        if markov_BR is not None:
            logits_BV = logits_BV + markov_bias(markov_BR, None)
        return best_tokens(logits_BV)

    return score


def shortlist_scores(
    hidden_BKD: Tensor, head_VD: Tensor, *, size: int, corrects: bool, markov_bias, multiply: Multiply = F.linear
) -> Score:
    """Choose among each slot's ``size`` best tokens before correction: one head pass for the whole block."""
    base_BKV = vocabulary_logits(hidden_BKD, head_VD, multiply)
    top_BKM, candidate_BKM = base_BKV.topk(min(size, base_BKV.shape[-1]), dim=-1)
    total_BK = base_BKV.logsumexp(-1)
    # log of the mass outside the shortlist, before correction; -inf where nothing is outside
    outside_BK = total_BK + torch.log(-torch.expm1((top_BKM.logsumexp(-1) - total_BK).clamp(max=0.0)))
    rows_BKMD = head_VD[candidate_BKM] if corrects else None

    def score(slot: int, corrected_BD: Tensor, markov_BR: Tensor | None) -> tuple[Tensor, Tensor]:
        logits_BM = top_BKM[:, slot]
        if rows_BKMD is not None:
            logits_BM = (rows_BKMD[:, slot] @ corrected_BD.to(head_VD.dtype)[..., None]).squeeze(-1).float()
        if markov_BR is not None:
            logits_BM = logits_BM + markov_bias(markov_BR, candidate_BKM[:, slot])
        best_B, choice_B = logits_BM.max(dim=-1)
        token_B = candidate_BKM[:, slot].gather(-1, choice_B[:, None]).squeeze(-1)
        return token_B, (best_B - torch.logaddexp(logits_BM.logsumexp(-1), outside_BK[:, slot])).exp()

    return score
