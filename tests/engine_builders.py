"""A tiny random target, random drafters of it, and their bundle, for tests of serving."""

from __future__ import annotations

from pathlib import Path

import torch
import yaml

from angelspec.core.drafter_config import BlockDrafterConfig, MtpDrafterConfig
from angelspec.core.geometry import Rope
from angelspec.drafters.checkpoint import save_drafter
from angelspec.drafters.families import build_drafter

SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
    "vocab_size": 258,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 2048,
    "rope": Rope(theta=10000.0),
    "target_hidden_size": 64,
    "target_num_layers": 4,
}
DRAFTERS = {
    "mtp": MtpDrafterConfig(num_depths=3, **SHAPE),
    "dfly": BlockDrafterConfig(
        context="hybrid", head="correction", num_layers=2, target_layer_ids=(0, 2), block_size=8, mask_token_id=250,
        correction_intermediate_size=32, **SHAPE,
    ),
    "dspark": BlockDrafterConfig(
        context="projection", head="markov", confidence_head=True, markov_rank=8, num_layers=1,
        target_layer_ids=(1, 2), block_size=5, mask_token_id=250, **SHAPE,
    ),
}  # fmt: skip
DEPTHS = {"mtp": 3, "dfly": 7, "dspark": 4}


def write_tiny_target(folder: Path) -> Path:
    """A Llama of random weights with the geometry of ``SHAPE``, varied enough that answers don't repeat at once."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, vocab_size=258, max_position_embeddings=2048, rms_norm_eps=1e-6, initializer_range=0.15,
        bos_token_id=256, eos_token_id=257, tie_word_embeddings=False,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def write_tiny_bundle(folder: Path, *, target: Path | None = None, costs: bool = True) -> Path:
    """Drafters of random weights and a bundle file that names them."""
    for seed, (name, config) in enumerate(DRAFTERS.items()):
        drafter = build_drafter(config).initialise(seed=seed)
        with torch.no_grad():
            for parameter in drafter.parameters():
                if parameter.ndim > 1:
                    parameter.mul_(4)
        save_drafter(drafter, folder / name, dtype=torch.float32)
    document = {
        "name": "tiny",
        "target": {"source": str(target or folder / "target"), "mode_family": "plain"},
        "drafters": [
            {
                "name": name,
                "source": f"./{name}",
                "family": config.family,
                "algorithm": name,
                "mode": "no-think",
                "depth": DEPTHS[name],
            }
            for name, config in DRAFTERS.items()
        ],
    }
    if costs:
        draft = [{"rows": 1, "seconds": 0.001}, {"rows": 16, "seconds": 0.002}]
        document["costs"] = {
            "drafting": dict.fromkeys(DRAFTERS, draft),
            "verification": [
                {"batch_size": 1, "slots": 1, "seconds": 0.010},
                {"batch_size": 1, "slots": 8, "seconds": 0.012},
                {"batch_size": 16, "slots": 16, "seconds": 0.020},
                {"batch_size": 16, "slots": 128, "seconds": 0.050},
            ],
        }
    path = folder / "bundle.yaml"
    path.write_text(yaml.safe_dump(document, sort_keys=False))
    return path
