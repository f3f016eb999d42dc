"""The training pass of a block drafter, slow and obvious: dense mask, every slot through every layer, nothing shared.

The parity tests compare it with :class:`~angelspec.drafters.block.BlockDrafter`, values and gradients.

Shapes: R rows, T tokens, A anchors, K block slots, D hidden, X keys (R * T context tokens, then A * K block tokens).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from angelspec.drafters.block import BlockDrafter, BlockStates
from angelspec.ops.anchors import Anchors
from angelspec.ops.block_attention import block_attention_reference
from angelspec.ops.masks import dense_block_mask
from angelspec.ops.norm import rms_norm_reference
from angelspec.ops.rope import rotate_reference


def forward_reference(
    drafter: BlockDrafter,
    taps_RTF: Tensor,
    *,
    document_RT: Tensor,
    position_RT: Tensor,
    tokens_RT: Tensor,
    anchors: Anchors,
    embedding_VD: Tensor,
) -> BlockStates:
    """Equal to ``drafter(...)`` to rounding, in the parameters' own precision."""
    config, eps, block = drafter.config, drafter.config.rms_norm_eps, drafter.config.block_size
    mask = dense_block_mask(document_RT, anchors, block_size=block)
    slot_K = torch.arange(block)
    token_index_AK = anchors.position_A[:, None] + slot_K
    position_AK = position_RT[anchors.row_A, anchors.position_A][:, None] + slot_K
    input_AK = torch.full_like(token_index_AK, config.mask_token_id)
    input_AK[:, 0] = tokens_RT[anchors.row_A, anchors.position_A]
    states = embedding_VD[input_AK]
    num_taps = len(config.target_layer_ids)

    for index, layer in enumerate(drafter.layers):
        attention = layer.self_attn
        context = 0.0
        if config.context in ("projection", "hybrid"):
            context = context + taps_RTF @ drafter.context_proj.weight.T
        if config.context in ("fusion", "hybrid"):
            share = torch.softmax(drafter.layer_fusion_weights[index], dim=-1)
            for tap in range(num_taps):
                width = config.target_hidden_size
                context = context + share[tap] * taps_RTF[..., tap * width : (tap + 1) * width]
        context = rms_norm_reference(context, drafter.context_norm.weight, eps=eps)
        normed = rms_norm_reference(states, layer.input_layernorm.weight, eps=eps)

        def heads(values: Tensor, weight: Tensor) -> Tensor:
            return (values @ weight.T).unflatten(-1, (-1, config.head_dim))

        def turned(values: Tensor, norm: Tensor, positions: Tensor) -> Tensor:
            return rotate_reference(rms_norm_reference(values, norm, eps=eps), *drafter.rotation(positions))

        own = config.context == "fusion"
        context_k = (attention.k_proj_target if own else attention.k_proj).weight
        context_v = (attention.v_proj_target if own else attention.v_proj).weight
        mixed = block_attention_reference(
            turned(heads(normed, attention.q_proj.weight), attention.q_norm.weight, position_AK),
            turned(heads(context, context_k), attention.k_norm.weight, position_RT),
            heads(context, context_v),
            turned(heads(normed, attention.k_proj.weight), attention.k_norm.weight, position_AK),
            heads(normed, attention.v_proj.weight),
            mask,
        )
        states = states + mixed.flatten(2) @ attention.o_proj.weight.T
        normed = rms_norm_reference(states, layer.post_attention_layernorm.weight, eps=eps)
        gate, up = normed @ layer.mlp.gate_proj.weight.T, normed @ layer.mlp.up_proj.weight.T
        states = states + (F.silu(gate) * up) @ layer.mlp.down_proj.weight.T

    hidden = rms_norm_reference(states, drafter.final_norm.weight, eps=eps)[:, 1:]
    previous = tokens_RT[anchors.row_A[:, None], token_index_AK[:, :-1]]
    corrected, features, confidence = hidden, None, None
    if config.head == "correction":
        head = drafter.hidden_correction
        inputs = torch.cat(
            [
                rms_norm_reference(hidden, head.hidden_norm.weight, eps=eps),
                rms_norm_reference(embedding_VD[previous], head.embed_norm.weight, eps=eps),
            ],
            dim=-1,
        )
        gate, up = inputs @ head.gate_proj.weight.T, inputs @ head.up_proj.weight.T
        corrected = hidden + (F.silu(gate) * up) @ head.down_proj.weight.T
    if config.head == "markov":
        features = drafter.markov_head.markov_w1.weight[previous]
    if config.confidence_head:
        inputs = corrected if features is None else torch.cat([corrected, features], dim=-1)
        confidence = (inputs @ drafter.confidence_head.proj.weight.T + drafter.confidence_head.proj.bias)[..., 0]
    return BlockStates(hidden, corrected, features, confidence)
