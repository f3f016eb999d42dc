"""Small drafters and packed rows for the tests of drafters and their parity."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from angelspec.core.drafter_config import BlockDrafterConfig
from angelspec.core.geometry import Rope
from angelspec.drafters.block import BlockDrafter
from angelspec.ops.anchors import Anchors, sample_anchors

COMBINATIONS = {
    "dflash": {"context": "projection", "head": "none"},
    "dflare": {"context": "fusion", "head": "none"},
    "dspark": {"context": "projection", "head": "markov", "markov_rank": 8, "confidence_head": True},
    "dfly": {"context": "hybrid", "head": "correction", "correction_intermediate_size": 24},
}


def tiny_config(name: str = "dfly", **changes) -> BlockDrafterConfig:
    """A drafter of a few thousand numbers: grouped heads, head_dim that is not hidden / heads, three taps."""
    base = {
        "num_layers": 3, "hidden_size": 20, "intermediate_size": 28, "num_heads": 4, "num_kv_heads": 2, "head_dim": 6,
        "vocab_size": 50, "rms_norm_eps": 1e-5, "max_position_embeddings": 128, "rope": Rope(theta=500.0),
        "target_hidden_size": 20, "target_num_layers": 8, "target_layer_ids": (1, 3, 6), "block_size": 4,
        "mask_token_id": 49,
    }  # fmt: skip
    return BlockDrafterConfig(**{**base, **COMBINATIONS[name], **changes})


def tiny_drafter(name: str = "dfly", *, seed: int = 0, **changes) -> BlockDrafter:
    """With every weight random (heads too), so that no part is silently the identity."""
    drafter = BlockDrafter(tiny_config(name, **changes)).initialise(seed=seed)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return drafter


@dataclass
class Rows:
    """Packed rows with features."""

    taps_RTF: Tensor
    document_RT: Tensor
    position_RT: Tensor
    tokens_RT: Tensor
    anchors: Anchors
    embedding_VD: Tensor

    def inputs(self) -> dict:
        """Arguments of the training pass after the first."""
        return {
            "document_RT": self.document_RT, "position_RT": self.position_RT, "tokens_RT": self.tokens_RT,
            "anchors": self.anchors, "embedding_VD": self.embedding_VD,
        }  # fmt: skip


def tiny_rows(config: BlockDrafterConfig, *, lengths=((13, 9), (5, 14, 2)), row_length=24, anchors=5, seed=0) -> Rows:
    """Rows of documents of the given lengths, padded with document -1."""
    generator = torch.Generator().manual_seed(seed)
    documents, positions = [], []
    number = 0
    for row in lengths:
        document, position = [], []
        for length in row:
            document += [number] * length
            position += list(range(length))
            number += 1
        padding = row_length - len(document)
        documents.append(document + [-1] * padding)
        positions.append(position + [0] * padding)
    document_RT, position_RT = torch.tensor(documents), torch.tensor(positions)
    shape = document_RT.shape
    features = len(config.target_layer_ids) * config.target_hidden_size
    return Rows(
        taps_RTF=torch.randn(*shape, features, generator=generator),
        document_RT=document_RT,
        position_RT=position_RT,
        tokens_RT=torch.randint(0, config.vocab_size - 1, shape, generator=generator),
        anchors=sample_anchors(
            document_RT >= 0, document_RT, block_size=config.block_size, num_anchors=anchors, generator=generator
        ),
        embedding_VD=torch.randn(config.vocab_size, config.hidden_size, generator=generator),
    )
