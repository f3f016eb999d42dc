"""The decoder layer of MTP against the layers of the targets that it is loaded from: transformers' Hy3 and Qwen3."""

import pytest
import torch
from mtp_builders import MOE, tiny_mtp, tiny_mtp_rows


def their_layer(drafter):
    """transformers' layer of the same shape with the drafter's weights, and its rotary embedding."""
    config, ours = drafter.config, drafter.midlayer.state_dict()
    shape = {
        "vocab_size": config.vocab_size, "hidden_size": config.hidden_size, "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size, "num_attention_heads": config.num_heads, "num_hidden_layers": 2,
        "num_key_value_heads": config.num_kv_heads, "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope.theta},
    }  # fmt: skip
    if config.moe is None:
        from transformers.models.qwen3.modeling_qwen3 import Qwen3Config, Qwen3DecoderLayer, Qwen3RotaryEmbedding

        theirs = Qwen3Config(**shape, attn_implementation="eager")
        layer, rotary = Qwen3DecoderLayer(theirs, 1), Qwen3RotaryEmbedding(theirs)
        layer.load_state_dict(ours)
        return layer, rotary
    from transformers.models.hy_v3.modeling_hy_v3 import HYV3Config, HYV3DecoderLayer, HYV3RotaryEmbedding

    moe = config.moe
    theirs = HYV3Config(
        **shape, num_experts=moe.num_experts, num_experts_per_tok=moe.experts_per_token,
        num_shared_experts=moe.num_shared_experts, moe_intermediate_size=moe.intermediate_size,
        router_scaling_factor=moe.router_scale, attn_implementation="eager",
    )  # fmt: skip
    layer, rotary = HYV3DecoderLayer(theirs, 1), HYV3RotaryEmbedding(theirs)
    both = torch.cat([ours.pop("mlp.experts_gate_proj"), ours.pop("mlp.experts_up_proj")], dim=2)
    ours["mlp.experts.gate_up_proj"] = both.mT
    ours["mlp.experts.down_proj"] = ours.pop("mlp.experts_down_proj").mT
    ours["mlp.gate.weight"] = ours.pop("mlp.router.gate.weight")
    ours["mlp.e_score_correction_bias"] = ours.pop("mlp.expert_bias")
    layer.load_state_dict({key.replace("shared_mlp", "shared_experts"): value for key, value in ours.items()})
    return layer, rotary


@pytest.mark.parametrize("variant", ["qwen3", "hy3", "hy3 with two shared experts"])
def test_depth_zero_is_the_targets_layer(variant):
    """Same weights, same states, one causal pass: fused as published, then the layer, then the last norm."""
    moe = MOE.model_copy(update={"num_shared_experts": 2}) if "two" in variant else MOE
    drafter = tiny_mtp() if variant == "qwen3" else tiny_mtp("moe", moe=moe)
    rows = tiny_mtp_rows(drafter.config, lengths=((20,),), row_length=20)
    layer, rotary = their_layer(drafter)
    embedded = rows.embedding_VD[rows.tokens_RT[:, 1:]]
    embedded[:, 0] = 0
    fused = torch.cat([drafter.enorm(embedded), drafter.hnorm(rows.hidden_RTD[:, :-1])], dim=-1)
    fused = fused @ drafter.eh_proj.weight.T
    position = rows.position_RT[:, :-1]
    mask = torch.full((19, 19), float("-inf")).triu(1)[None, None]
    theirs = layer(fused, attention_mask=mask, position_embeddings=rotary(fused, position))
    expected = drafter.final_layernorm(theirs[0] if isinstance(theirs, tuple) else theirs)
    found = drafter(rows.hidden_RTD, **rows.inputs()).hidden_ND
    torch.testing.assert_close(found, expected[0], rtol=1e-4, atol=1e-5)
