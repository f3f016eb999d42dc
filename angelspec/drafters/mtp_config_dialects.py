"""``config.json`` of an MTP drafter: AngelSpec's own, and those of the Hy3 and Qwen3 targets that carry an MTP layer.

No public spelling says how many depths a layer was trained for; our exports keep it in a section of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from angelspec.core.drafter_config import MtpDrafterConfig
from angelspec.core.geometry import TargetGeometry
from angelspec.drafters.config_reader import ConfigReader
from angelspec.drafters.mtp_layouts import MtpDialect
from angelspec.drafters.problem import Findings

MTP_ARCHITECTURES: dict[str, MtpDialect] = {
    "MTPDraftModel": "angelspec",
    "HYV3ForCausalLM": "hy3",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MTPForCausalLM": "qwen3",
}
"""Architecture names under which an MTP layer is found; the latter three are whole targets."""
_PUBLISHED_DEPTHS = 3
"""What AngelSpec's released MTP drafters are trained for and served with."""


def mtp_fields(
    read: ConfigReader,
    dialect: MtpDialect,
    findings: Findings,
    *,
    geometry: TargetGeometry | None,
    overrides: Mapping[str, Any],
    has_own_section: bool,
) -> dict[str, Any]:
    """Fields of ``MtpDrafterConfig`` by public keys; absent ones have the values of the public code (Hy3's)."""
    fields: dict[str, Any] = {"family": "mtp", **read.layer_shape(overrides), "qk_norm": read.get("qk_norm", True)}
    fields["mlp"] = {"hy3": "moe", "qwen3": "dense"}.get(dialect) or read.get("mlp_type", "moe")
    if fields["mlp"] == "moe":
        fields["moe"] = {
            "num_experts": read.need("num_experts"),
            "experts_per_token": read.need("num_experts_per_tok"),
            "num_shared_experts": read.get("num_shared_experts", 1),
            "intermediate_size": read.need("moe_intermediate_size"),
            "router_scale": read.get("router_scaling_factor", 2.826),
            "router_score": "sigmoid" if read.get("moe_router_use_sigmoid", True) else "softmax",
            "normalise_routes": bool(read.get("route_norm", True)),
            "selection_bias": bool(read.get("moe_router_enable_expert_bias", True)),
        }
    if read.get("tie_lm_head", True) is False:
        findings.add("unsupported", "tie_lm_head", "tie_lm_head is false: a drafter with a vocabulary head of its own")
    layers_key = "target_num_hidden_layers" if dialect == "angelspec" else "num_hidden_layers"
    count = read.get(layers_key)
    if count is None and geometry is not None:
        count = geometry.num_layers
    if count is None and "target_num_layers" not in overrides:
        findings.add(
            "config-key-missing", layers_key, "config.json does not say how deep the target is",
            mend=f"add {layers_key} to config.json",
        )  # fmt: skip
    fields["target_num_layers"] = count
    fields["num_depths"] = _PUBLISHED_DEPTHS
    if not has_own_section and "num_depths" not in overrides:
        findings.note(f"num_depths is not stated; {_PUBLISHED_DEPTHS}, as published MTP drafters are trained for")
    return fields


def mtp_dialects_of(config: MtpDrafterConfig) -> tuple[MtpDialect, ...]:
    """The dialects that can say this drafter without loss."""
    moe = config.moe
    if not config.qk_norm:
        return ("angelspec",)
    if moe is None:
        return ("angelspec", "qwen3")
    is_hy3 = moe.router_score == "sigmoid" and moe.normalise_routes and moe.selection_bias and moe.num_shared_experts
    return ("angelspec", "hy3") if is_hy3 else ("angelspec",)


def write_mtp_config(
    config: MtpDrafterConfig, *, dialect: MtpDialect, dtype: str, target_config: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Public keys of an export's ``config.json``.

    Args:
        config: ours.
        dialect: one of :func:`mtp_dialects_of`.
        dtype: of the tensors that are written, e.g. "bfloat16".
        target_config: of the target, whose configuration hy3 and qwen3 keep.
    """
    if dialect == "qwen3":
        return {**target_config, "num_nextn_predict_layers": 1}
    if dialect == "hy3":
        return {
            **target_config,
            "num_nextn_predict_layers": 1,
            "_mtp_spec_layer": config.target_num_layers,
            "dtype": dtype,
            "torch_dtype": dtype,
        }
    written: dict[str, Any] = {
        "architectures": ["MTPDraftModel"],
        "model_type": "mtp",
        "mlp_type": config.mlp,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "qk_norm": config.qk_norm,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.vocab_size,
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        **config.rope.to_config(),
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "tie_lm_head": True,
        "target_hidden_size": config.target_hidden_size,
        "target_num_hidden_layers": config.target_num_layers,
        "dtype": dtype,
        "torch_dtype": dtype,
    }
    if config.moe is not None:
        written |= {
            "num_experts": config.moe.num_experts,
            "num_experts_per_tok": config.moe.experts_per_token,
            "num_shared_experts": config.moe.num_shared_experts,
            "moe_intermediate_size": config.moe.intermediate_size,
            "router_scaling_factor": config.moe.router_scale,
            "moe_router_use_sigmoid": config.moe.router_score == "sigmoid",
            "moe_router_enable_expert_bias": config.moe.selection_bias,
            "route_norm": config.moe.normalise_routes,
        }
    return written
