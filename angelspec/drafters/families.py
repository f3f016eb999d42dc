"""Which module a configuration builds: the one place that tells the families of drafters apart."""

from __future__ import annotations

import torch

from angelspec.core.drafter_config import DrafterConfig
from angelspec.drafters.block import BlockDrafter
from angelspec.drafters.mtp import MtpDrafter

Drafter = BlockDrafter | MtpDrafter
"""A drafter of either family."""


def build_drafter(config: DrafterConfig, *, matmul_dtype: torch.dtype | None = None) -> Drafter:
    """A drafter with weights yet to be initialised or loaded.

    Args:
        config: of either family.
        matmul_dtype: see ``base.DrafterModule``.

    Raises:
        CheckpointError: angelspec's drafters cannot be built so.
    """
    family = MtpDrafter if config.family == "mtp" else BlockDrafter
    return family(config, matmul_dtype=matmul_dtype)
