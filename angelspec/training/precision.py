"""Which precision matrix products run in, by what the processor has."""

from __future__ import annotations

import torch

from angelspec.core.recipe import TrainingSection


def has_bfloat16_products(device: torch.device | str = "cpu") -> bool:
    """Whether bfloat16 matrix products are fast there: any GPU, or a CPU with AVX512-BF16 or AMX."""
    if torch.device(device).type != "cpu":
        return True
    supported = getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    return bool(supported()) or bool(getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)())


def product_dtype(section: TrainingSection, device: torch.device | str = "cpu") -> torch.dtype:
    """Precision of matrix products that ``training.dtype`` stands for on a device."""
    if section.dtype == "auto":
        return torch.bfloat16 if has_bfloat16_products(device) else torch.float32
    return getattr(torch, section.dtype)
