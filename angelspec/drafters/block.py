"""The block drafter: DFlash, DFlare, DSpark and DFly are one backbone with a context variant and a head variant.

A block holds block_size slots. Slot 0 is the anchor, the last committed token; slots 1.. hold the mask token and
predict the tokens that follow. A block attends to the target's features strictly before its anchor, and to itself.

Shapes: R packed rows (last in ``markov_AKR``: the Markov rank), T tokens, A anchors, B batch rows, Q block slots, K = Q
- 1 proposals (slots 1..), F tapped features, D hidden, V vocabulary, H query heads, G key-value heads, C head channels.
``...`` stands for any leading axes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from angelspec.core.drafter_config import BlockDrafterConfig
from angelspec.core.errors import CheckpointError
from angelspec.drafters.base import DrafterModule
from angelspec.drafters.context import distance_prior, mix_taps
from angelspec.drafters.drafting import ContextCache, Drafts, Multiply, exact_scores, shortlist_scores
from angelspec.drafters.heads import ConfidenceHead, HiddenCorrection, MarkovHead
from angelspec.drafters.layers import Attend, BlockLayer, RMSNorm, linear
from angelspec.ops.anchors import Anchors
from angelspec.ops.block_attention import block_attention, plan_attention


@dataclass(frozen=True)
class BlockStates:
    """What the drafter says of every proposal of every block, teacher-forced."""

    hidden_AKD: Tensor
    """Final-normed backbone outputs of slots 1.., before any head."""
    corrected_AKD: Tensor
    """The states that the target's vocabulary head turns into logits: corrected with head 'correction', else the same
    tensor as ``hidden_AKD``."""
    markov_AKR: Tensor | None
    """With head 'markov': rank features of the token before each slot; logits gain ``features @ markov_w2.T``."""
    confidence_AK: Tensor | None
    """With a confidence head: its logits."""


class BlockDrafter(DrafterModule):
    """A block-parallel drafter; see ``DrafterModule`` for its arguments.

    Raises:
        CheckpointError: the configuration lets the anchor slot predict (another slot convention).
    """

    def __init__(self, config: BlockDrafterConfig, *, matmul_dtype: torch.dtype | None = None) -> None:
        super().__init__(config, matmul_dtype=matmul_dtype)
        if config.sample_from_anchor:
            raise CheckpointError(
                "sample_from_anchor is true: the anchor slot predicts, which angelspec's drafters don't do",
                mend="use a checkpoint whose slot 0 is input only (sample_from_anchor false)",
            )
        if config.context != "fusion":
            features = len(config.target_layer_ids) * config.target_hidden_size
            self.context_proj = nn.Linear(features, config.hidden_size, bias=False)
        if config.context != "projection":
            self.layer_fusion_weights = nn.Parameter(torch.empty(config.num_layers, len(config.target_layer_ids)))
        self.context_norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(BlockLayer(config, index=index) for index in range(config.num_layers))
        self.final_norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        if config.head == "correction":
            self.hidden_correction = HiddenCorrection(
                config.hidden_size, config.correction_intermediate_size, eps=config.rms_norm_eps
            )
        if config.head == "markov":
            self.markov_head = MarkovHead(config.vocab_size, config.markov_rank)
        if config.confidence_head:
            self.confidence_head = ConfidenceHead(config.hidden_size + (config.markov_rank or 0))

    @property
    def dtype(self) -> torch.dtype:
        """Of the norms, and so of the residual stream."""
        return self.context_norm.weight.dtype

    def fixed_start(self, name: str, shape: torch.Size) -> Tensor | None:
        """Fusion starts at the distance prior, and heads at the identity (a zero correction, a zero Markov bias, a
        confidence of one half)."""
        if name == "layer_fusion_weights":
            return distance_prior(*shape)
        zeroed = ("hidden_correction.down_proj.weight", "markov_head.markov_w2.weight")
        if name in zeroed or name.startswith("confidence_head."):
            return torch.zeros(shape)
        return super().fixed_start(name, shape)

    def contexts(self, taps: Tensor) -> Iterator[Tensor]:
        """Each layer's context [..., D] from the target's features [..., F]; features get no gradient."""
        taps = taps.detach().to(self.dtype)
        kind, num_layers = self.config.context, self.config.num_layers
        projected = None if kind == "fusion" else linear(taps, self.context_proj.weight, self.matmul_dtype)
        if kind == "projection":
            context = self.context_norm(projected)
            for _ in range(num_layers):
                yield context
            return
        for mixed in mix_taps(taps, self.layer_fusion_weights):
            yield self.context_norm(mixed if projected is None else projected + mixed)

    def context_keys_values(self, taps: Tensor, positions: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Each layer's rotated keys and values [..., G, C] of features [..., F] at positions [...]."""
        turned = self.rotation(positions)
        for layer, context in zip(self.layers, self.contexts(taps), strict=True):
            yield layer.self_attn.context_keys_values(context, turned, self.matmul_dtype)

    def backbone(
        self, anchor_embedding_AD: Tensor, mask_embedding_D: Tensor, position_A: Tensor, attend: Attend
    ) -> Tensor:
        """Run whole blocks through all layers; training and drafting differ in ``attend`` alone.

        Args:
            anchor_embedding_AD: embeddings of the anchors.
            mask_embedding_D: embedding of the mask token.
            position_A: the anchors' positions.
            attend: see ``layers.Attend``.

        Returns:
            final-normed states [A, K, D] of slots 1...
        """
        slot_Q = torch.arange(self.config.block_size, device=position_A.device)
        turned = self.rotation(position_A[:, None] + slot_Q)
        states = torch.cat([anchor_embedding_AD, mask_embedding_D[None]]).detach()
        states = states.to(self.dtype)
        for layer in self.layers:
            states = layer(states, turned, attend, self.matmul_dtype)
        return self.final_norm(states)

    def forward(
        self,
        taps_RTF: Tensor,
        *,
        document_RT: Tensor,
        position_RT: Tensor,
        tokens_RT: Tensor,
        anchors: Anchors,
        embedding_VD: Tensor,
    ) -> BlockStates:
        """Teacher-forced training pass over all blocks of a micro-batch.

        Args:
            taps_RTF: target features; no gradient flows into them.
            document_RT: document ids, -1 for padding; one id is one contiguous run.
            position_RT: positions within the document.
            tokens_RT: token ids.
            anchors: where blocks start; each block lies inside its document.
            embedding_VD: the target's frozen embedding.
        """
        plan = plan_attention(document_RT, anchors)
        context = list(self.context_keys_values(taps_RTF, position_RT))

        def attend(layer: int, query_AQHC: Tensor, key_AQGC: Tensor, value_AQGC: Tensor) -> Tensor:
            context_key_RTGC, context_value_RTGC = context[layer]
            return block_attention(
                query_AQHC,
                context_key_RTGC=context_key_RTGC,
                context_value_RTGC=context_value_RTGC,
                block_key_AKGC=key_AQGC,
                block_value_AKGC=value_AQGC,
                plan=plan,
            )

        slot_K = torch.arange(self.config.block_size - 1, device=tokens_RT.device)
        previous_AK = tokens_RT[anchors.row_A[:, None], anchors.position_A[:, None] + slot_K].long()
        hidden_AKD = self.backbone(
            embedding_VD[previous_AK[:, 0]],
            embedding_VD[self.config.mask_token_id],
            position_A=position_RT[anchors.row_A, anchors.position_A],
            attend=attend,
        )
        return self.apply_heads(hidden_AKD, previous_AK, embedding_VD)

    def apply_heads(self, hidden: Tensor, previous_tokens: Tensor, embedding_VD: Tensor) -> BlockStates:
        """Correct states [..., D] by the tokens [...] before each slot: teacher-forced ones, or those drafted."""
        corrected, features, confidence = hidden, None, None
        if self.config.head == "correction":
            embedded = embedding_VD[previous_tokens].detach()
            corrected = self.hidden_correction(hidden, embedded, self.matmul_dtype)
        elif self.config.head == "markov":
            features = self.markov_head.features(previous_tokens)
        if self.config.confidence_head:
            confidence = self.confidence_head(corrected, features)
        return BlockStates(hidden, corrected, features, confidence)

    def context_cache(self, rows: int, *, capacity: int) -> ContextCache:
        """An empty cache for that many rows of up to ``capacity`` committed tokens."""
        config = self.config
        return ContextCache(
            rows=rows, capacity=capacity, spare=config.block_size, num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads, head_dim=config.head_dim, dtype=self.dtype,
            device=self.context_norm.weight.device,
        )  # fmt: skip

    @torch.no_grad()
    def extend_context(
        self,
        cache: ContextCache,
        taps_BTF: Tensor,
        *,
        counts_B: Tensor | None = None,
        positions_BT: Tensor | None = None,
        rows: Tensor | None = None,
    ) -> None:
        """Add the target's features of newly committed tokens.

        Args:
            cache: grows by ``counts_B``.
            taps_BTF: features of each row's next tokens, left-aligned.
            counts_B: valid tokens per row; None: all T.
            positions_BT: checked, where given, against the positions that come next in each row.
            rows: rows of the cache [B]; None: all, in order.

        Raises:
            ValueError: a position is skipped or repeated, or a row outgrows the capacity.
        """
        new = cache.place(taps_BTF.shape[:2], counts_B=counts_B, positions_BT=positions_BT, rows=rows)
        layers = self.context_keys_values(taps_BTF[new.valid_BT], new.index_N)
        cache.append(new.rows_N, new.index_N, layers, lengths=new.lengths)

    @torch.no_grad()
    def draft_states(
        self,
        cache: ContextCache,
        *,
        anchor_tokens_B: Tensor,
        anchor_positions_B: Tensor,
        embedding_VD: Tensor,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Final-normed states [B, K, D] of slots 1.. of one block per row: the backbone's one pass.

        Raises:
            ValueError: an anchor is not the token right after its row's context.
        """
        if not torch.equal(anchor_positions_B.to(cache.lengths), cache.lengths[cache.select(rows)]):
            raise ValueError(
                f"anchors at {anchor_positions_B.tolist()} must follow contexts of "
                f"{cache.lengths[cache.select(rows)].tolist()} tokens"
            )
        return self.backbone(
            embedding_VD[anchor_tokens_B],
            embedding_VD[self.config.mask_token_id],
            position_A=anchor_positions_B,
            attend=lambda layer, query, key, value: cache.attend(rows, layer, query, key, value),
        )

    @torch.no_grad()
    def draft(
        self,
        cache: ContextCache,
        *,
        anchor_tokens_B: Tensor,
        anchor_positions_B: Tensor,
        embedding_VD: Tensor,
        head_VD: Tensor,
        rows: Tensor | None = None,
        shortlist: int | None = None,
    ) -> Drafts:
        """Propose K tokens per row: the backbone once, then the heads from left to right, argmax at each slot.

        Args:
            cache: context of everything before the anchors.
            anchor_tokens_B: each row's last committed token, whose target features do not exist yet.
            anchor_positions_B: its position, which is the length of its row's context.
            embedding_VD: the target's embedding.
            head_VD: the target's vocabulary head.
            rows: rows of the cache [B]; None: all, in order.
            shortlist: with a head, rescore only so many candidates per slot; None: the whole vocabulary (exact).
        """
        hidden_BKD = self.draft_states(
            cache,
            anchor_tokens_B=anchor_tokens_B,
            anchor_positions_B=anchor_positions_B,
            embedding_VD=embedding_VD,
            rows=rows,
        )
        return self.choose(
            hidden_BKD,
            anchor_tokens_B=anchor_tokens_B,
            embedding_VD=embedding_VD,
            head_VD=head_VD,
            shortlist=shortlist,
        )

    @torch.no_grad()
    def choose(
        self,
        hidden_BKD: Tensor,
        *,
        anchor_tokens_B: Tensor,
        embedding_VD: Tensor,
        head_VD: Tensor,
        shortlist: int | None = None,
        multiply: Multiply = F.linear,
    ) -> Drafts:
        """The sequential half of :meth:`draft`: tokens from backbone states, each corrected by the one before.

        ``multiply`` is the product with the whole head.
        """
        kind = self.config.head
        parts = {
            "corrects": kind == "correction",
            "markov_bias": self.markov_head.bias if kind == "markov" else None,
            "multiply": multiply,
        }
        if shortlist is None or kind == "none":
            score = exact_scores(hidden_BKD, head_VD, **parts)
        else:
            score = shortlist_scores(hidden_BKD, head_VD, size=shortlist, **parts)
        previous_B, tokens, confidences = anchor_tokens_B, [], []
        for slot in range(self.config.block_size - 1):
            states = self.apply_heads(hidden_BKD[:, slot], previous_B, embedding_VD)
            previous_B, probability_B = score(slot, states.corrected_AKD, states.markov_AKR)
            tokens.append(previous_B)
            confidence = states.confidence_AK
            confidences.append(probability_B if confidence is None else confidence.float().sigmoid())
        return Drafts(torch.stack(tokens, dim=1), torch.stack(confidences, dim=1))
