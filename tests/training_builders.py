"""Tiny rows, targets and drafters for the tests of training."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import Tensor

from angelspec.core.drafter_config import BlockDrafterConfig, MoeConfig, MtpDrafterConfig
from angelspec.core.known_targets import KNOWN_TARGETS
from angelspec.core.objective import Objective
from angelspec.core.recipe import OptimizerSection, TargetSection, TrainingSection, TrainingStage

CE = Objective(ce=1.0, position_weights="d-pace")
LK = Objective(lk=1.0, position_weights="d-pace")
E2E = Objective(end_to_end_tv=1.0)
DEPTHS = Objective(lk=1.0, lk_form="alpha", top_k=150, renormalise=True, slot_weights=(1.0, 0.8, 0.64))
"""The cold start of MTP's recipes, on a smaller vocabulary."""


@dataclass
class Rows:
    """The part of ``PackedRows`` that training reads."""

    tokens_RT: Tensor
    loss_mask_RT: Tensor
    document_RT: Tensor
    position_RT: Tensor


def pattern_rows(num_rows: int, *, row_length: int = 48, seed: int = 0, prompt: int = 4) -> Rows:
    """Rows of documents that count upwards by a step of their own, modulo 26: predictable from what came before."""
    generator = torch.Generator().manual_seed(seed)
    columns = {name: [] for name in ("tokens", "mask", "document", "position")}
    document = 0
    for _ in range(num_rows):
        row = {name: [] for name in columns}
        while len(row["tokens"]) < row_length - 12:
            room = row_length - len(row["tokens"])
            length = min(room, int(torch.randint(14, 30, (1,), generator=generator)))
            start, step = torch.randint(0, 26, (2,), generator=generator).tolist()
            row["tokens"] += [97 + (start + step % 3 * i + i) % 26 for i in range(length)]
            row["mask"] += [i >= prompt for i in range(length)]
            row["document"] += [document] * length
            row["position"] += list(range(length))
            document += 1
        padding = row_length - len(row["tokens"])
        for name, filler in (("tokens", 256), ("mask", False), ("document", -1), ("position", 0)):
            columns[name].append(row[name] + [filler] * padding)
    return Rows(
        torch.tensor(columns["tokens"], dtype=torch.int32),
        torch.tensor(columns["mask"]),
        torch.tensor(columns["document"], dtype=torch.int32),
        torch.tensor(columns["position"], dtype=torch.int32),
    )


@functools.cache
def tiny_target():
    """The random llama in float32; shared, so never changed by a test."""
    from angelspec.targets.target import load_target

    return load_target(TargetSection(source="random:llama", mode_family="smollm2"), dtype=torch.float32)


class ToyTarget:
    """A target without transformers, for processes that should start fast: mixtures of each token and those before."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.geometry = KNOWN_TARGETS["tiny-llama"].geometry
        self.digest, self.device, self.dtype = "toy", torch.device("cpu"), torch.float32
        self.embedding_VD = torch.randn(320, 64, generator=generator)
        self.head_VD = torch.randn(320, 64, generator=generator) * 0.2
        self.mix_LDD = torch.randn(6, 64, 64, generator=generator) / 8

    def forward(self, tokens_BT, *, positions_BT, layer_ids):
        seen_BTT = (1.0 / (1.0 + (positions_BT[:, :, None] - positions_BT[:, None, :]).abs())).tril()
        states, taps = self.embedding_VD[tokens_BT], []
        for layer, mix_DD in enumerate(self.mix_LDD):
            states = torch.tanh(seen_BTT @ states @ mix_DD) + states
            if layer in layer_ids:
                taps.append(states)
        taps_BTF = torch.cat(taps, -1) if taps else states[..., :0]
        return SimpleNamespace(taps_BTF=taps_BTF, hidden_BTD=states)


def tiny_config(name: str = "dfly", **changes) -> BlockDrafterConfig:
    """A two-layer drafter of the tiny target."""
    parts = {
        "dflash": {"context": "projection", "head": "none"},
        "dflare": {"context": "fusion", "head": "none"},
        "dspark": {"context": "projection", "head": "markov", "markov_rank": 8, "confidence_head": True},
        "dfly": {"context": "hybrid", "head": "correction", "correction_intermediate_size": 64},
    }[name]
    geometry = KNOWN_TARGETS["tiny-llama"].geometry
    base = {
        "num_layers": 2, "hidden_size": 64, "intermediate_size": 96, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16,
        "vocab_size": geometry.vocab_size, "rms_norm_eps": 1e-5, "max_position_embeddings": 1024,
        "rope": geometry.rope, "target_hidden_size": 64, "target_num_layers": 6, "target_layer_ids": (1, 2, 3),
        "block_size": 4, "mask_token_id": 319,
    }  # fmt: skip
    return BlockDrafterConfig(**{**base, **parts, **changes})


def mtp_config(mlp: str = "dense", **changes) -> MtpDrafterConfig:
    """MTP of three depths for the tiny target."""
    geometry = KNOWN_TARGETS["tiny-llama"].geometry
    moe = MoeConfig(num_experts=4, experts_per_token=2, intermediate_size=24) if mlp == "moe" else None
    base = {
        "mlp": mlp, "moe": moe, "num_depths": 3, "hidden_size": 64, "intermediate_size": 96, "num_heads": 4,
        "num_kv_heads": 2, "head_dim": 16, "vocab_size": geometry.vocab_size, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 1024, "rope": geometry.rope, "target_hidden_size": 64, "target_num_layers": 6,
    }  # fmt: skip
    return MtpDrafterConfig(**{**base, **changes})


def section(*, objective: Objective = CE, stages=None, **changes) -> TrainingSection:
    """One short stage in float32 unless told otherwise."""
    base = {
        "features": "online", "rows_per_step": 2, "rows_per_micro_batch": 2, "anchors_per_row": 6,
        "stages": stages or (TrainingStage(name="cold", objective=objective, steps=4),),
        "dtype": "float32", "evaluate_every": 100, "held_out_anchors": 32, "save_every": 100, "log_every": 1,
        "optimizer": OptimizerSection(learning_rate=3e-3),
    }  # fmt: skip
    return TrainingSection(**{**base, **changes})
