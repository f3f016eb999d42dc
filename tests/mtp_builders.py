"""Small MTP drafters for tests."""

from __future__ import annotations

import torch

from angelspec.core.drafter_config import MoeConfig, MtpDrafterConfig
from angelspec.core.geometry import Rope, TargetGeometry
from angelspec.drafters.mtp import MtpDrafter

MOE = MoeConfig(
    num_experts=5, experts_per_token=2, num_shared_experts=1, intermediate_size=12, router_scale=1.7,
    router_score="sigmoid", normalise_routes=True, selection_bias=True,
)  # fmt: skip


def tiny_mtp_config(mlp: str = "dense", **changes) -> MtpDrafterConfig:
    """A few thousand numbers: grouped heads, head_dim that is not hidden / heads."""
    base = {
        "mlp": mlp, "moe": MOE if mlp == "moe" else None, "num_depths": 3, "hidden_size": 20, "intermediate_size": 28,
        "num_heads": 4, "num_kv_heads": 2, "head_dim": 6, "qk_norm": True, "vocab_size": 50, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 128, "rope": Rope(theta=500.0), "target_hidden_size": 20, "target_num_layers": 8,
    }  # fmt: skip
    return MtpDrafterConfig(**{**base, **changes})


def tiny_mtp(mlp: str = "dense", *, seed: int = 0, spread: float = 0.3, **changes) -> MtpDrafter:
    """With every weight random, so that no part is silently the identity."""
    drafter = MtpDrafter(tiny_mtp_config(mlp, **changes)).initialise(seed=seed)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for weight in (*drafter.parameters(), *drafter.buffers()):
            weight.add_(torch.randn(weight.shape, generator=generator) * spread)
    return drafter


def fitting_mtp(geometry: TargetGeometry, mlp: str = "dense", **changes) -> MtpDrafter:
    """One for a target of this geometry, in evaluation mode."""
    fit = {
        "hidden_size": geometry.hidden_size, "target_hidden_size": geometry.hidden_size,
        "vocab_size": geometry.vocab_size, "target_num_layers": geometry.num_layers,
        "max_position_embeddings": geometry.max_position_embeddings,
    }  # fmt: skip
    return tiny_mtp(mlp, **{**fit, **changes}).eval().requires_grad_(False)
