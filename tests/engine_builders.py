"""A tiny random target, random drafters of it, and their bundle, for tests of serving."""

from __future__ import annotations

from pathlib import Path

import torch
import yaml

from angelspec.core.drafter_config import BlockDrafterConfig, MtpDrafterConfig
from angelspec.core.known_targets import KNOWN_TARGETS
from angelspec.drafters.checkpoint import save_drafter
from angelspec.drafters.families import build_drafter

GEOMETRY = KNOWN_TARGETS["tiny-llama"].geometry
SHAPE = {
    "hidden_size": GEOMETRY.hidden_size,
    "intermediate_size": GEOMETRY.intermediate_size,
    "num_heads": GEOMETRY.num_heads,
    "num_kv_heads": GEOMETRY.num_kv_heads,
    "head_dim": GEOMETRY.head_dim,
    "vocab_size": GEOMETRY.vocab_size,
    "rms_norm_eps": GEOMETRY.rms_norm_eps,
    "max_position_embeddings": GEOMETRY.max_position_embeddings,
    "rope": GEOMETRY.rope,
    "target_hidden_size": GEOMETRY.hidden_size,
    "target_num_layers": GEOMETRY.num_layers,
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
