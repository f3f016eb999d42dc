"""Small MTP drafters and packed rows for tests."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

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


@dataclass
class MtpRows:
    """Packed rows with the target's last hidden states, and the positions that ask."""

    hidden_RTD: Tensor
    tokens_RT: Tensor
    document_RT: Tensor
    position_RT: Tensor
    asked_RT: Tensor
    embedding_VD: Tensor
    head_VD: Tensor

    def inputs(self) -> dict:
        """Arguments of the training pass after the first."""
        return {
            "tokens_RT": self.tokens_RT, "document_RT": self.document_RT, "position_RT": self.position_RT,
            "asked_RT": self.asked_RT, "embedding_VD": self.embedding_VD,
        }  # fmt: skip

    def teacher_tokens(self, depth: int) -> Tensor:
        """The data's token j + 1 + depth at every flattened position j; 0 behind the end."""
        flat = self.tokens_RT.flatten()
        return torch.cat([flat[1 + depth :], flat.new_zeros(1 + depth)])


def tiny_mtp_rows(
    config: MtpDrafterConfig, *, lengths=((13, 9), (5, 14, 2)), row_length=24, asked: float = 1.0, seed=0
) -> MtpRows:
    """Rows of documents of the given lengths, padded with document -1; a share of the possible positions asks."""
    generator = torch.Generator().manual_seed(seed)
    document_RT = torch.full((len(lengths), row_length), -1)
    position_RT = torch.zeros_like(document_RT)
    number = 0
    for row, sizes in enumerate(lengths):
        begin = 0
        for size in sizes:
            document_RT[row, begin : begin + size] = number
            position_RT[row, begin : begin + size] = torch.arange(size)
            begin, number = begin + size, number + 1
    shape = document_RT.shape
    asked_RT = torch.zeros(shape, dtype=torch.bool)
    asked_RT[:, :-1] = (document_RT[:, 1:] == document_RT[:, :-1]) & (document_RT[:, 1:] >= 0)
    asked_RT &= torch.rand(shape, generator=generator) < asked
    return MtpRows(
        hidden_RTD=torch.randn(*shape, config.hidden_size, generator=generator),
        tokens_RT=torch.randint(0, config.vocab_size, shape, generator=generator),
        document_RT=document_RT,
        position_RT=position_RT,
        asked_RT=asked_RT,
        embedding_VD=torch.randn(config.vocab_size, config.hidden_size, generator=generator),
        head_VD=torch.randn(config.vocab_size, config.hidden_size, generator=generator),
    )
