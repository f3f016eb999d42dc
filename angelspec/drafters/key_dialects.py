"""The names that public checkpoints give to the same tensors, and which of them need not be there.

Where an MTP layer's tensors lie among a target's is told in ``mtp_layouts``.
"""

from __future__ import annotations

import re
from typing import Literal

Dialect = Literal["angelspec", "dflash", "dspark", "hy3", "qwen3", "vllm-speculators"]
"""angelspec: AngelSpec's own names, every drafter. dflash: what z-lab, SGLang and vLLM load as DFlash. dspark: what
SGLang loads as Qwen3DSparkModel. hy3: an MTP layer as Hy3 carries its own, under the target's configuration. qwen3: an
MTP layer inside a full copy of a Qwen3 target. vllm-speculators: DFlash and DSpark as the speculators library writes
them for vLLM."""

_PREFIXES = ("draft_model.", "module.")
_TO_NATIVE = {
    "fc.weight": "context_proj.weight",
    "hidden_norm.weight": "context_norm.weight",
    "norm.weight": "final_norm.weight",
}
_FROM_NATIVE = {native: public for public, native in _TO_NATIVE.items()}

EMBEDDING_KEY = "embed_tokens.weight"
HEAD_KEY = "lm_head.weight"
"""Never used: logits come from the target's own head."""

_KNOWN = re.compile(
    r"""^(?:
        (?:context_proj|context_norm|final_norm|embed_tokens|lm_head)\.weight
        | layer_fusion_weights
        | layers\.\d+\.(?:
            (?:input_layernorm|post_attention_layernorm)\.weight
            | self_attn\.(?:[qkvo]_proj|[kv]_proj_target|[qk]_norm)\.weight
            | mlp\.(?:gate|up|down)_proj\.weight)
        | hidden_correction\.(?:hidden_norm|embed_norm|gate_proj|up_proj|down_proj)\.weight
        | markov_head\.markov_w[12]\.weight
        | confidence_head\.proj\.(?:weight|bias)
        | (?:enorm|hnorm|eh_proj|final_layernorm)\.weight
        | midlayer\.(?:
            (?:input_layernorm|post_attention_layernorm)\.weight
            | self_attn\.(?:[qkvo]_proj|[qk]_norm)\.weight
            | mlp\.(?:shared_mlp\.)?(?:gate|up|down)_proj\.weight
            | mlp\.(?:router\.gate\.weight|expert_bias|experts_(?:gate|up|down)_proj))
    )$""",
    re.VERBOSE,
)


def native_key(name: str) -> str:
    """A block drafter's tensor in our dialect, from any other: prefixes stripped, z-lab's three names translated."""
    return _TO_NATIVE.get(stripped(name), stripped(name))


def stripped(name: str) -> str:
    """The name without the prefixes that training wrappers put before it."""
    _, found, rest = name.rpartition("draft_model.")
    name = rest if found else name
    while name.startswith(_PREFIXES):
        name = name.partition(".")[2]
    return name


def public_key(name: str, dialect: Dialect) -> str:
    """A tensor's name in ``dialect``, from ours."""
    return name if dialect == "angelspec" else _FROM_NATIVE.get(name, name)


def is_known_key(native_name: str) -> bool:
    """Whether any drafter has a tensor of this name."""
    return _KNOWN.match(native_name) is not None
