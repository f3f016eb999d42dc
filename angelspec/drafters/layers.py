"""Parts of a drafter's decoder layer (pre-norm attention and SwiGLU, as in Llama and Qwen3), and a block's layer.

Shapes: A anchors (or batch rows), K block slots, Q slots that ask, D hidden, H query heads, G key-value heads, C head
channels, I inner width. ``...`` stands for any leading axes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from angelspec.core.drafter_config import BlockDrafterConfig, MtpDrafterConfig
from angelspec.ops.activation import gated_silu
from angelspec.ops.norm import rms_norm
from angelspec.ops.rope import rotate

Rotation = tuple[Tensor, Tensor]
"""Cosine and sine, broadcastable to [..., heads, E]."""
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, query_AQHC, key_AKGC, value_AKGC) -> [A, Q, H, C]: attention to the layer's context and the own block."""


def linear(states: Tensor, weight: Tensor, dtype: torch.dtype | None) -> Tensor:
    """``states @ weight.T``, multiplied in ``dtype`` (None: the weight's) and left in it."""
    dtype = weight.dtype if dtype is None else dtype
    return F.linear(states.to(dtype), weight.to(dtype))


def add_linear(residual: Tensor, states: Tensor, weight: Tensor, dtype: torch.dtype | None) -> Tensor:
    """``residual + linear(states)``, added inside the product where all of it has one dtype."""
    dtype = weight.dtype if dtype is None else dtype
    if residual.dtype == weight.dtype == dtype:
        flat = torch.addmm(residual.flatten(0, -2), states.flatten(0, -2).to(dtype), weight.t())
        return flat.view(residual.shape)
    return residual + linear(states, weight, dtype)


class RMSNorm(nn.Module):
    """:func:`angelspec.ops.norm.rms_norm` with its weight."""

    def __init__(self, channels: int, *, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.eps = eps

    def forward(self, states: Tensor) -> Tensor:
        """Normalise the last axis; the result has the weight's dtype."""
        return rms_norm(states.to(self.weight.dtype), self.weight, eps=self.eps)


def _matrix(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


class SelfAttention(nn.Module):
    """Projections of one layer; with ``own_context`` the context has keys and values of its own (DFlare), without
    ``qk_norm`` queries and keys are not normalised."""

    def __init__(
        self, config: BlockDrafterConfig | MtpDrafterConfig, *, own_context: bool = False, qk_norm: bool = True
    ) -> None:
        super().__init__()
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.head_dim = config.head_dim
        self.q_proj = _matrix(config.hidden_size, queries)
        self.k_proj = _matrix(config.hidden_size, keys)
        self.v_proj = _matrix(config.hidden_size, keys)
        self.o_proj = _matrix(queries, config.hidden_size)
        if own_context:
            self.k_proj_target = _matrix(config.hidden_size, keys)
            self.v_proj_target = _matrix(config.hidden_size, keys)
        if qk_norm:
            self.q_norm = RMSNorm(config.head_dim, eps=config.rms_norm_eps)
            self.k_norm = RMSNorm(config.head_dim, eps=config.rms_norm_eps)
        self.qk_norm = qk_norm
        self.own_context = own_context

    def _heads(self, states: Tensor, weight: Tensor, dtype: torch.dtype | None) -> Tensor:
        return linear(states, weight, dtype).unflatten(-1, (-1, self.head_dim))

    def queries(self, states: Tensor, dtype: torch.dtype | None) -> Tensor:
        """[..., D] to normalised, not yet rotated queries [..., H, C]."""
        query = self._heads(states, self.q_proj.weight, dtype)
        return self.q_norm(query) if self.qk_norm else query.to(self.q_proj.weight.dtype)

    def keys_values(self, states: Tensor, dtype: torch.dtype | None) -> tuple[Tensor, Tensor]:
        """[..., D] to normalised, not yet rotated keys and values [..., G, C]."""
        key = self._heads(states, self.k_proj.weight, dtype)
        key = self.k_norm(key) if self.qk_norm else key.to(self.k_proj.weight.dtype)
        return key, self._heads(states, self.v_proj.weight, dtype).to(key.dtype)

    def context_keys_values(
        self, context: Tensor, rotation: Rotation, dtype: torch.dtype | None
    ) -> tuple[Tensor, Tensor]:
        """[..., D] of context (normalised by context_norm alone) to rotated keys and values [..., G, C]."""
        keys, values = (self.k_proj_target, self.v_proj_target) if self.own_context else (self.k_proj, self.v_proj)
        key = self.k_norm(self._heads(context, keys.weight, dtype))
        return rotate(key, *rotation), self._heads(context, values.weight, dtype).to(key.dtype)


class DenseMLP(nn.Module):
    """SwiGLU."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = _matrix(hidden_size, intermediate_size)
        self.up_proj = _matrix(hidden_size, intermediate_size)
        self.down_proj = _matrix(intermediate_size, hidden_size)

    def forward(self, residual: Tensor, states: Tensor, dtype: torch.dtype | None) -> Tensor:
        """``residual`` plus the gated product of ``states``, [..., D] both."""
        gate = linear(states, self.gate_proj.weight, dtype)
        inner = gated_silu(gate, linear(states, self.up_proj.weight, dtype))
        return add_linear(residual, inner, self.down_proj.weight, dtype)


def _per_slot(shared: Tensor, num_slots: int, *, from_slot: int) -> Tensor:
    """[A + 1, ...] (each anchor's vector, then the mask token's) to [A, num_slots - from_slot, ...]."""
    anchors, mask = shared[:-1].unsqueeze(1), shared[-1:].unsqueeze(1)
    masks = mask.expand(anchors.shape[0], num_slots - max(from_slot, 1), *mask.shape[2:])
    return masks if from_slot else torch.cat([anchors, masks], dim=1)


class BlockLayer(nn.Module):
    """One decoder layer of a block drafter; the layer's context reaches it through ``attend``."""

    def __init__(self, config: BlockDrafterConfig, *, index: int) -> None:
        super().__init__()
        self.index = index
        self.is_last = index == config.num_layers - 1
        self.self_attn = SelfAttention(config, own_context=config.context == "fusion")
        self.mlp = DenseMLP(config.hidden_size, config.intermediate_size)
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, states: Tensor, rotation: Rotation, attend: Attend, dtype: torch.dtype | None) -> Tensor:
        """Run the layer on whole blocks.

        Two savings change no result. In the first layer every mask slot holds the same vector, so it is normalised
        and projected once and only rotated per slot. In the last layer slot 0 serves as key and value alone, since
        nobody reads its output.

        Args:
            states: first layer: [A + 1, D], the anchors' embeddings and then the mask token's; else [A, K, D].
            rotation: of the block's positions, [A, K, 1, E].

        Returns:
            [A, K, D]; of the last layer [A, K - 1, D], slots 1 and on.
        """
        cos, sin = rotation
        num_slots, from_slot = cos.shape[1], 1 if self.is_last else 0
        shared = self.index == 0
        normed = self.input_layernorm(states)
        key, value = self.self_attn.keys_values(normed, dtype)
        if shared:
            query = _per_slot(self.self_attn.queries(normed, dtype), num_slots, from_slot=from_slot)
            key, value = (_per_slot(item, num_slots, from_slot=0) for item in (key, value))
            residual = _per_slot(states, num_slots, from_slot=from_slot)
        else:
            query = self.self_attn.queries(normed[:, from_slot:], dtype)
            residual = states[:, from_slot:]
        query = rotate(query, cos[:, from_slot:], sin[:, from_slot:])
        mixed = attend(self.index, query, rotate(key, cos, sin), value).flatten(2)
        residual = add_linear(residual, mixed, self.self_attn.o_proj.weight, dtype)
        return self.mlp(residual, self.post_attention_layernorm(residual), dtype)
