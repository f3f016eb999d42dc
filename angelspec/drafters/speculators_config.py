"""``config.json`` of block drafters as the speculators library writes it and vLLM loads it.

Tensors have the names of the dialect dflash. The drafter's layers are described in a section of their own, the target
is called verifier, and layers are counted with the embedding as 0, so that every tap is one more than elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from angelspec.core.drafter_config import BlockDrafterConfig
from angelspec.drafters.problem import Findings

TYPE_KEY = "speculators_model_type"
_LAYERS, _TAPS = "transformer_layer_config", "aux_hidden_state_layer_ids"
_FORMAT_VERSION = "0.9.0"
"""Of the library whose keys these are."""
_ARCHITECTURES = {
    "dflash": ("DFlashSpeculator", "DFlashDraftModel"),
    "dspark": ("DSparkSpeculator", "DSparkDraftModel"),
}
"""By type: the name there, and the one that other readers know."""


def is_speculators(config: Mapping[str, Any]) -> bool:
    """Whether a parsed ``config.json`` is one of these."""
    return TYPE_KEY in config


def flattened(config: Mapping[str, Any], findings: Findings) -> dict[str, Any] | None:
    """The same in the keys of z-lab's DFlash; None, with a problem, for a drafter of a kind that can't be said so."""
    kind, layers, taps = config[TYPE_KEY], config.get(_LAYERS), config.get(_TAPS)
    if kind not in _ARCHITECTURES:
        findings.add(
            "unsupported", TYPE_KEY, f"{TYPE_KEY} '{kind}' is not supported", mend=f"known: {', '.join(_ARCHITECTURES)}"
        )
        return None
    if not isinstance(layers, Mapping):
        findings.add(
            "config-key-missing", _LAYERS, f"config.json does not state {_LAYERS}", mend=f"add {_LAYERS} to config.json"
        )
        return None
    flat = {key: value for key, value in config.items() if key not in (TYPE_KEY, _LAYERS, _TAPS)}
    if isinstance(taps, list) and all(isinstance(item, int) for item in taps):
        flat["target_layer_ids"] = [item - 1 for item in taps]
    flat.setdefault("sample_from_anchor", kind == "dspark")  # the library's defaults
    return {**layers, **flat, "architectures": [_ARCHITECTURES[kind][1]]}


def layer_keys(config: BlockDrafterConfig) -> dict[str, Any]:
    """The keys of a block drafter's layers that every format spells alike."""
    return {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        **config.rope.to_config(),
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
    }


def write_speculators_config(
    config: BlockDrafterConfig, *, dtype: str, verifier: str | None, architectures: list[str]
) -> dict[str, Any]:
    """The file's content.

    Args:
        config: of a DFlash or DSpark drafter.
        dtype: of the tensors.
        verifier: the target's name on the hub; None: it is not known.
        architectures: the target's; empty: not known.
    """
    kind = "dspark" if config.head == "markov" else "dflash"
    written: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[kind][0]],
        "model_type": "speculator_model",
        TYPE_KEY: kind,
        "speculators_version": _FORMAT_VERSION,
        "speculators_config": {
            "algorithm": kind,
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": config.num_proposals}],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": verifier, "architectures": architectures},
        },
        _LAYERS: {
            "model_type": "qwen3",
            **layer_keys(config),
        },
        _TAPS: [item + 1 for item in config.target_layer_ids],
        "block_size": config.block_size,
        "sample_from_anchor": config.sample_from_anchor,
        "mask_token_id": config.mask_token_id,
        "draft_vocab_size": config.vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "target_num_hidden_layers": config.target_num_layers,
        "tie_word_embeddings": False,
        "dtype": dtype,
        "torch_dtype": dtype,
    }
    if kind == "dspark":
        written["markov_rank"] = config.markov_rank
        written["markov_head_type"] = "vanilla"
        written["enable_confidence_head"] = config.confidence_head
        written["confidence_head_with_markov"] = config.confidence_head
    return written
