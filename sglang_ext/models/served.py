"""A drafter inside the engine: the reference module with attention and cache taken from SGLang.

A drafter's draft rule has one implementation, in ``angelspec.drafters``; what it attends to reaches it through a
callback. Here the callback writes keys and values into the engine's draft pool and asks the engine's attention backend,
so projections, fusion, correction and the choice of tokens are the very code that training and evaluation run.

What the target says of committed tokens becomes *entries*: keys and values in the draft pool, at the slots of these
tokens. They are written without any attention, for any number of tokens of any rows at once; a draft then needs one
uniform window per row: a block of Q slots, or one position for MTP.

Shapes: N tokens of all rows, B rows that are drafted for, Q block slots, K proposals, F width of the tapped target
features, D hidden, H query heads, G key-value heads, C head channels, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from torch import Tensor, nn
from torch.nn import functional as F

from angelspec.core.drafter_config import BlockDrafterConfig, MtpDrafterConfig
from angelspec.drafters.block import BlockDrafter
from angelspec.drafters.drafting import Drafts, Multiply, best_tokens, vocabulary_logits
from angelspec.drafters.mtp import MtpDrafter
from sglang_ext.compat import KVWriteLoc
from sglang_ext.models.graphs import ChoiceGraphs, Record

Window = Callable[[int], Any]
"""(offset) -> a forward batch, ready for attention, whose window of ``width`` tokens starts that many tokens after each
row's committed ones; negative: before their end."""


class DraftPool(Protocol):
    """The engine's pool of draft keys and values."""

    def set_kv_buffer(self, layer: Any, loc_info: Any, cache_k: Tensor, cache_v: Tensor) -> None: ...


def _attention(config: BlockDrafterConfig | MtpDrafterConfig, layer: int, *, kind: AttentionType) -> RadixAttention:
    return RadixAttention(
        config.num_heads, config.head_dim, config.head_dim**-0.5, config.num_kv_heads, layer_id=layer, attn_type=kind
    )


class ServedBlock(nn.Module):
    """DFlash, DFlare, DSpark or DFly.

    Args:
        drafter: the reference module, with its weights.
        first_layer: of the draft pool.
        tap_columns: which columns of the engine's captured features are this drafter's [F].
        shortlist: candidates per slot that a sequential head rescores; None: the whole vocabulary.
    """

    def __init__(
        self, drafter: BlockDrafter, *, first_layer: int, tap_columns: Tensor | None, shortlist: int | None
    ) -> None:
        super().__init__()
        self.drafter, self.shortlist = drafter, shortlist
        self.attention = nn.ModuleList(
            _attention(drafter.config, first_layer + layer, kind=AttentionType.ENCODER_ONLY)
            for layer in range(drafter.config.num_layers)
        )
        self._tap_columns = tap_columns
        self._graphs: ChoiceGraphs | None = None

    @property
    def depth(self) -> int:
        """Proposals per draft."""
        return self.drafter.config.num_proposals

    @property
    def width(self) -> int:
        """Tokens per row of a draft's window."""
        return self.drafter.config.block_size

    lag = 0
    """Committed tokens, the anchor not counted, that have no entry yet when a draft begins."""

    def write(
        self, pool: DraftPool, *, taps_NF: Tensor, hidden_ND: Tensor, next_N: Tensor, position_N: Tensor,
        slot_N: Tensor, embedding_VD: Tensor,
    ) -> None:  # fmt: skip
        """Entries of committed tokens, from the target's features at their positions."""
        if self._tap_columns is not None:
            taps_NF = taps_NF[:, self._tap_columns]
        where = KVWriteLoc(slot_N, None)
        layers = self.drafter.context_keys_values(taps_NF, position_N)
        for attention, (key_NGC, value_NGC) in zip(self.attention, layers, strict=True):
            pool.set_kv_buffer(attention, where, key_NGC, value_NGC)

    def draft(
        self, window: Window, *, anchor_B: Tensor, position_B: Tensor, embedding_VD: Tensor, head_VD: Tensor,
        multiply: Multiply = F.linear,
    ) -> Drafts:  # fmt: skip
        """Propose K tokens per row behind the anchors at these positions."""
        batch = window(0)

        def attend(layer: int, query_BQHC: Tensor, key_BQGC: Tensor, value_BQGC: Tensor) -> Tensor:
            if query_BQHC.shape[1] != key_BQGC.shape[1]:  # the last layer: nobody reads the anchor slot's output
                query_BQHC = torch.cat([query_BQHC[:, :1], query_BQHC], dim=1)
                return attend(layer, query_BQHC, key_BQGC, value_BQGC)[:, 1:]
            mixed = self.attention[layer](
                query_BQHC.flatten(0, 1).flatten(1), key_BQGC.flatten(0, 1), value_BQGC.flatten(0, 1), batch
            )
            return mixed.view(query_BQHC.shape)

        hidden_BKD = self.drafter.backbone(
            embedding_VD[anchor_B], embedding_VD[self.drafter.config.mask_token_id], position_B, attend
        )
        if self._graphs is not None:
            return self._graphs(hidden_BKD, anchor_B)
        return self._choose(hidden_BKD, anchor_B, embedding_VD=embedding_VD, head_VD=head_VD, multiply=multiply)

    def record_choices(
        self, sizes: Sequence[int], *, record: Record, embedding_VD: Tensor, head_VD: Tensor, multiply: Multiply
    ) -> None:
        """Choose tokens by CUDA graphs from now on; see ``graphs.ChoiceGraphs``.

        Args:
            sizes: rows of the graphs.
            record: makes one.
            embedding_VD: the target's; its storage is read at every replay, as the head's.
            head_VD: the target's.
            multiply: the product with it.

        Raises:
            RuntimeError: a graph can't be recorded, or gives something else.
        """
        config, dtype = self.drafter.config, self.drafter.dtype
        self._graphs = ChoiceGraphs(
            partial(self._choose, embedding_VD=embedding_VD, head_VD=head_VD, multiply=multiply),
            like_BKD=embedding_VD.new_zeros(1, config.num_proposals, config.hidden_size, dtype=dtype),
            vocab_size=config.vocab_size,
            sizes=sizes,
            record=record,
        )

    def _choose(
        self, hidden_BKD: Tensor, anchor_B: Tensor, *, embedding_VD: Tensor, head_VD: Tensor, multiply: Multiply
    ) -> Drafts:
        return self.drafter.choose(
            hidden_BKD,
            anchor_tokens_B=anchor_B,
            embedding_VD=embedding_VD,
            head_VD=head_VD,
            shortlist=self.shortlist,
            multiply=multiply,
        )


class ServedMtp(nn.Module):
    """Multi-token prediction.

    The entry of position j reads the target's last hidden state there and the token after it, so a draft begins with
    one committed token (the one before the anchor) that has no entry yet.

    Args:
        drafter: the reference module, with its weights.
        first_layer: of the draft pool.
        depth: proposals per draft; None: as many as it was trained for.
    """

    lag = 1

    def __init__(self, drafter: MtpDrafter, *, first_layer: int, depth: int | None = None) -> None:
        super().__init__()
        self.drafter = drafter
        self.attention = nn.ModuleList([_attention(drafter.config, first_layer, kind=AttentionType.DECODER)])
        self._depth = depth

    @property
    def depth(self) -> int:
        """Proposals per draft."""
        return self._depth or self.drafter.config.num_proposals

    width = 1

    def _begin(
        self, pool: DraftPool, batch: Any, *, hidden_ND: Tensor, next_N: Tensor, position_N: Tensor, slot_N: Tensor,
        asking_B: Tensor, embedding_VD: Tensor,
    ) -> Tensor:  # fmt: skip
        attention = self.attention[0]

        def attend(query_BHC: Tensor, key_NGC: Tensor, value_NGC: Tensor) -> Tensor:
            pool.set_kv_buffer(attention, KVWriteLoc(slot_N, None), key_NGC, value_NGC)
            if batch is None:
                return query_BHC
            last = key_NGC[asking_B], value_NGC[asking_B]
            return attention(query_BHC.flatten(1), *last, batch, save_kv_cache=False).view(query_BHC.shape)

        return self.drafter.begin(
            hidden_ND.to(self.drafter.dtype),
            embedded_PD=embedding_VD[next_N].to(self.drafter.dtype),
            position_P=position_N,
            attend=attend,
            asking_N=asking_B,
        )

    def write(
        self, pool: DraftPool, *, taps_NF: Tensor, hidden_ND: Tensor, next_N: Tensor, position_N: Tensor,
        slot_N: Tensor, embedding_VD: Tensor,
    ) -> None:  # fmt: skip
        """Entries of committed tokens, from the target's last hidden states and the token after each."""
        self._begin(
            pool, None, hidden_ND=hidden_ND, next_N=next_N, position_N=position_N, slot_N=slot_N,
            asking_B=position_N[:0], embedding_VD=embedding_VD,
        )  # fmt: skip

    def draft(
        self, window: Window, *, pool: DraftPool, hidden_ND: Tensor, next_N: Tensor, position_N: Tensor,
        slot_N: Tensor, asking_B: Tensor, embedding_VD: Tensor, head_VD: Tensor, multiply: Multiply = F.linear,
    ) -> Drafts:  # fmt: skip
        """Entries of what is not written yet, of each row at least the token before the anchor, and proposals.

        Args:
            window: see ``Window``.
            pool: of the engine.
            hidden_ND: the target's last hidden states of the tokens without an entry, row by row.
            next_N: the token after each; for a row's last one, the anchor.
            position_N: their positions.
            slot_N: their places in the pool.
            asking_B: each row's last one.
            embedding_VD: the target's.
            head_VD: the target's.
            multiply: the product with it.
        """
        hidden_BD = self._begin(
            pool, window(-1), hidden_ND=hidden_ND, next_N=next_N, position_N=position_N, slot_N=slot_N,
            asking_B=asking_B, embedding_VD=embedding_VD,
        )  # fmt: skip
        position_B, tokens, confidences = position_N[asking_B], [], []
        for depth in range(1, self.depth + 1):
            token_B, confidence_B = best_tokens(vocabulary_logits(hidden_BD, head_VD, multiply))
            tokens.append(token_B)
            confidences.append(confidence_B)
            if depth == self.depth:
                break
            batch = window(depth - 1)

            def attend(query_BHC: Tensor, key_BGC: Tensor, value_BGC: Tensor, batch: Any = batch) -> Tensor:
                return self.attention[0](query_BHC.flatten(1), key_BGC, value_BGC, batch).view(query_BHC.shape)

            hidden_BD = self.drafter.deepen(
                hidden_BD,
                embedded_ND=embedding_VD[token_B].to(self.drafter.dtype),
                position_N=position_B + depth,
                attend=attend,
            )
        return Drafts(torch.stack(tokens, dim=1), torch.stack(confidences, dim=1))


Served = ServedBlock | ServedMtp
