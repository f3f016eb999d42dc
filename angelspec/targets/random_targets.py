"""Tiny random targets of each family, for tests and for the ``tiny-*`` recipes: seconds to make, no network.

They speak bytes: ids 0..255 are the bytes, 256..319 special tokens, of which the last is never used and masks.
Weights are drawn so that greedy answers are printable text that varies and sometimes ends by itself.

Legend: V vocabulary, D hidden.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from angelspec.core.errors import TargetError, suggest
from angelspec.core.files import write_sorted_json
from angelspec.core.fingerprint import fingerprint
from angelspec.core.geometry import TargetGeometry
from angelspec.core.known_targets import KNOWN_TARGETS, TINY_VOCABULARY
from angelspec.core.locations import cache_folder
from angelspec.targets.sources import TEMPLATE_FOLDER, Source, building

FAMILIES = ("llama", "qwen3", "hy3")
END_OF_TEXT, TURN_START, TURN_END = 256, 257, 258
_THINK_TAGS = {
    "llama": (),  # ordinary text there, as in SmolLM2
    "qwen3": ("<think>", "</think>"),
    "hy3": ("<think:opensource>", "</think:opensource>"),
}
_PRINTABLE = (10, *range(32, 127))
_SEED = 20_260_101
_FORMAT = 2
"""Raised when the same family would get other weights."""
_HY3_PARTS = {
    ".mlp.gate.weight": ".mlp.router.gate.weight",
    ".mlp.e_score_correction_bias": ".mlp.expert_bias",
    ".mlp.shared_experts.": ".mlp.shared_mlp.",
}
"""Parts of tensor names: transformers' own, and those of the released Hy3."""
_HY3_DENSE_LAYERS = 1


def materialise_random(source: Source) -> Path:
    """Make the tiny target of a family, or return the folder made earlier.

    Raises:
        TargetError: unknown family.
    """
    family = source.location
    if family not in FAMILIES:
        raise TargetError(
            f"no random target '{family}'{suggest(family, FAMILIES)}", mend=f"use one of: {', '.join(FAMILIES)}"
        )
    geometry = KNOWN_TARGETS[f"tiny-{family}"].geometry
    template = (TEMPLATE_FOLDER / f"tiny-{family}.jinja").read_text(encoding="utf-8")
    identity = [_FORMAT, _SEED, geometry.model_dump(mode="json"), template]
    folder = cache_folder() / "targets" / f"random-{family}-{fingerprint(identity, length=12)}"
    if not folder.is_dir():
        with building(folder, record={"source": str(source), "revision": f"seed:{_SEED}"}) as unfinished:
            write_random_target(unfinished, geometry, family=family, chat_template=template)
    return folder


def write_random_target(folder: Path, geometry: TargetGeometry, *, family: str, chat_template: str) -> None:
    """Fill ``folder`` with config, seeded weights, byte tokenizer and chat template."""
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(geometry.architecture, **_config_arguments(geometry))
    with torch.random.fork_rng(devices=[]):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    state = {
        name: _draw(name, tensor, geometry=geometry)
        for name, tensor in sorted(model.state_dict().items())
        if not (geometry.tied_head and name == "lm_head.weight")
    }
    written = {**config.to_dict(), "architectures": [type(model).__name__], "dtype": "float32"}
    written.pop("_name_or_path", None)
    if geometry.architecture == "hy_v3":
        state = _hy3_names(state)
        written |= {"route_norm": True, "qk_norm": True, "first_k_dense_replace": _HY3_DENSE_LAYERS}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    write_sorted_json(folder / "config.json", written)
    ends = {"bos_token_id": None, "eos_token_id": TURN_END, "pad_token_id": END_OF_TEXT}
    write_sorted_json(
        folder / "generation_config.json", {key: value for key, value in ends.items() if value is not None}
    )
    _write_tokenizer(folder, family=family, chat_template=chat_template, max_length=geometry.max_position_embeddings)


def _hy3_names(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors by the names of the released Hy3, which engines read; transformers fuses experts and renames the rest."""
    named: dict[str, Tensor] = {}
    for name, tensor in state.items():
        prefix, found, part = name.partition(".mlp.experts.")
        if not found:
            for ours, released in _HY3_PARTS.items():
                name = name.replace(ours, released)
            named[name] = tensor
            continue
        for expert, weight in enumerate(tensor):
            parts = ("gate_proj", "up_proj") if part == "gate_up_proj" else (part,)
            for projection, piece in zip(parts, weight.chunk(len(parts)), strict=True):
                named[f"{prefix}.mlp.experts.{expert}.{projection}.weight"] = piece.contiguous()
    return named


def _config_arguments(geometry: TargetGeometry) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "vocab_size": geometry.vocab_size,
        "hidden_size": geometry.hidden_size,
        "intermediate_size": geometry.intermediate_size,
        "num_hidden_layers": geometry.num_layers,
        "num_attention_heads": geometry.num_heads,
        "num_key_value_heads": geometry.num_kv_heads,
        "head_dim": geometry.head_dim,
        "rms_norm_eps": geometry.rms_norm_eps,
        "max_position_embeddings": geometry.max_position_embeddings,
        "tie_word_embeddings": geometry.tied_head,
        "rope_parameters": {"rope_type": geometry.rope.type, "rope_theta": geometry.rope.theta},
        "eos_token_id": TURN_END,
        "pad_token_id": END_OF_TEXT,
        "bos_token_id": None,
    }
    if geometry.architecture == "hy_v3":
        arguments |= {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "num_shared_experts": 1,
            "moe_intermediate_size": geometry.intermediate_size // 2,
        }
    return arguments


def _draw(name: str, tensor: Tensor, *, geometry: TargetGeometry) -> Tensor:
    """One tensor's values, a function of its name and shape alone."""
    generator = torch.Generator().manual_seed(
        int.from_bytes(hashlib.sha256(f"{_SEED}/{geometry.architecture}/{name}".encode()).digest()[:7], "big")
    )
    noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float32)
    if tensor.dim() == 1:
        # Norm weights away from 1, so that a state taken on the wrong side of a norm shows.
        return 1.0 + 0.2 * noise if name.endswith("norm.weight") else 0.1 * noise
    is_embedding, is_head = name.endswith("embed_tokens.weight"), name.endswith("lm_head.weight")
    if is_embedding or is_head:
        if is_head or geometry.tied_head:
            scale_V = torch.full((tensor.shape[0],), 0.5)
            scale_V[list(_PRINTABLE)] = 1.0
            scale_V[TURN_END] = 1.1
            scale_V[TINY_VOCABULARY - 1] = 0.05
            noise = noise * scale_V[:, None]
        return noise
    # Larger than usual, so that a token depends on more than the one before it.
    return noise * (2.0 / tensor.shape[-1] ** 0.5)


def _byte_alphabet() -> list[str]:
    """The printable stand-in of each byte in byte-level tokenizers (GPT-2, Radford et al. 2019), by byte."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(256, 512))
    return [chr(value) if value in plain else chr(next(others)) for value in range(256)]


def _write_tokenizer(folder: Path, *, family: str, chat_template: str, max_length: int) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE(vocab={char: byte for byte, char in enumerate(_byte_alphabet())}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tags = _THINK_TAGS[family]
    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *tags]
    names += [f"<|reserved_{index}|>" for index in range(TINY_VOCABULARY - 256 - len(names))]
    for name in names:
        # Think tags are part of an answer's text, so decoding keeps them.
        tokenizer.add_tokens([AddedToken(name, special=name not in tags, normalized=False)])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", model_max_length=max_length
    )
    wrapped.chat_template = chat_template
    wrapped.save_pretrained(folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    settings["chat_template"] = chat_template
    for key in ("backend", "is_local", "local_files_only"):
        settings.pop(key, None)
    write_sorted_json(folder / "tokenizer_config.json", settings)
