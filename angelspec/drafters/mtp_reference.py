"""The training pass of an MTP drafter, slow and obvious: every depth at every position, one dense mask, every expert.

The parity tests compare it with :class:`~angelspec.drafters.mtp.MtpDrafter`, values and gradients.

Shapes: R rows, T tokens, S = R * T positions, N positions that ask, K depths above the first, D hidden, E experts.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from angelspec.drafters.experts import ExpertMLP
from angelspec.drafters.mtp import MtpDrafter
from angelspec.ops.masks import dense_unrolled_mask
from angelspec.ops.norm import rms_norm_reference
from angelspec.ops.rope import rotate_reference
from angelspec.ops.unrolled_attention import unrolled_attention_reference


def unroll_reference(
    drafter: MtpDrafter,
    hidden_RTD: Tensor,
    *,
    tokens_RT: Tensor,
    document_RT: Tensor,
    position_RT: Tensor,
    asked_RT: Tensor,
    embedding_VD: Tensor,
    next_tokens: Callable[[int, Tensor], Tensor],
    num_depths: int,
) -> list[Tensor]:
    """Each depth's outputs [N, D] at the asking positions, equal to those of the drafter's unroll to rounding.

    Args:
        next_tokens: (depth, output of the depth before [S, D]) -> the tokens [S] that this depth embeds.
        num_depths: depths to run, the first included.
    """
    config, eps, layer = drafter.config, drafter.config.rms_norm_eps, drafter.midlayer
    attention = layer.self_attn
    document_S, position_S = document_RT.flatten(), position_RT.flatten()
    everywhere_RT = torch.ones_like(document_RT, dtype=torch.bool)
    hidden_SD = hidden_RTD.flatten(0, 1).detach()
    tokens_S = torch.cat([tokens_RT.flatten()[1:], tokens_RT.new_zeros(1)])

    def heads(states_SD: Tensor, weight: Tensor) -> Tensor:
        return (states_SD @ weight.T).unflatten(-1, (-1, config.head_dim))

    def turned(states: Tensor, norm: str, positions: Tensor) -> Tensor:
        if config.qk_norm:
            states = rms_norm_reference(states, getattr(attention, norm).weight, eps=eps)
        return rotate_reference(states, *drafter.rotation(positions))

    outputs: list[Tensor] = []
    keys: list[Tensor] = []
    values: list[Tensor] = []
    for depth in range(num_depths):
        if depth:
            tokens_S = next_tokens(depth, hidden_SD)
        embedded_SD = embedding_VD[tokens_S].detach()
        embedded_SD = torch.where((position_S + depth == 0)[:, None], 0.0, embedded_SD)
        both = [
            rms_norm_reference(embedded_SD, drafter.enorm.weight, eps=eps),
            rms_norm_reference(hidden_SD, drafter.hnorm.weight, eps=eps),
        ]
        states_SD = torch.cat(both, dim=-1) @ drafter.eh_proj.weight.T

        normed_SD = rms_norm_reference(states_SD, layer.input_layernorm.weight, eps=eps)
        keys.append(turned(heads(normed_SD, attention.k_proj.weight), "k_norm", position_S + depth))
        values.append(heads(normed_SD, attention.v_proj.weight))
        mask = dense_unrolled_mask(document_RT, everywhere_RT, num_depths=depth)
        mask[document_S < 0, : document_S.shape[0]] = True  # padding sees anything, so that its softmax is finite
        mixed_SHC = unrolled_attention_reference(
            turned(heads(normed_SD, attention.q_proj.weight), "q_norm", position_S + depth),
            keys[0],
            values[0],
            torch.stack(keys[1:], dim=1) if depth else keys[0][:, None][:, :0],
            torch.stack(values[1:], dim=1) if depth else values[0][:, None][:, :0],
            mask,
        )
        states_SD = states_SD + mixed_SHC.flatten(1) @ attention.o_proj.weight.T
        normed_SD = rms_norm_reference(states_SD, layer.post_attention_layernorm.weight, eps=eps)
        states_SD = states_SD + mlp_reference(layer.mlp, normed_SD)
        hidden_SD = rms_norm_reference(states_SD, drafter.final_layernorm.weight, eps=eps)
        outputs.append(hidden_SD[asked_RT.flatten()])
    return outputs


def mlp_reference(mlp, states_SD: Tensor) -> Tensor:
    """A SwiGLU, or a mixture of experts in which every expert answers every token and most answers weigh nothing."""
    if not isinstance(mlp, ExpertMLP):
        gate, up = states_SD @ mlp.gate_proj.weight.T, states_SD @ mlp.up_proj.weight.T
        return (F.silu(gate) * up) @ mlp.down_proj.weight.T
    moe = mlp.moe
    logits_SE = states_SD @ mlp.router.gate.weight.T
    score_SE = torch.sigmoid(logits_SE) if moe.router_score == "sigmoid" else torch.softmax(logits_SE, dim=-1)
    ranked_SE = score_SE + mlp.expert_bias if moe.selection_bias else score_SE
    rank_SE = ranked_SE.argsort(dim=-1, descending=True).argsort(dim=-1)
    weight_SE = torch.where(rank_SE < moe.experts_per_token, score_SE, 0.0)
    if moe.normalise_routes:
        weight_SE = weight_SE / weight_SE.sum(-1, keepdim=True)
    answer_SD = mlp_reference(mlp.shared_mlp, states_SD) if moe.num_shared_experts else torch.zeros_like(states_SD)
    for expert in range(moe.num_experts):
        inner = F.silu(states_SD @ mlp.experts_gate_proj[expert]) * (states_SD @ mlp.experts_up_proj[expert])
        share_S1 = moe.router_scale * weight_SE[:, expert, None]
        answer_SD = answer_SD + share_S1 * (inner @ mlp.experts_down_proj[expert])
    return answer_SD
