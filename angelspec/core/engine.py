"""Facts of the engine that both sides must hold: what starts and asks a server, and the extension inside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

SGLANG_VERSION = "0.5.23"
"""The one version of SGLang that the extension is written for and tested with."""
ALGORITHM = "ANGELSPEC"
"""What ``--speculative-algorithm`` is to say."""
BUNDLE_VARIABLE = "ANGELSPEC_BUNDLE"
"""Environment variable that names the bundle file."""
SERVER_KEY_VARIABLE = "ANGELSPEC_SERVER_KEY"
"""Environment variable that holds the API key of the servers that a command asks."""
PLATFORM_VARIABLE = "SGLANG_PLATFORM"
"""SGLang's environment variable that names an out-of-tree platform."""
CPU_PLATFORM = "angelspec_cpu"
"""Name of the CPU platform's entry point, and the value of ``PLATFORM_VARIABLE`` that chooses it."""
CPU_BACKEND = "torch_native"
"""The only attention backend of the CPU platform; SGLang's own of that name is replaced."""
RUNNING_REQUESTS: Mapping[str, int] = {"cpu": 16, "cuda": 256}
"""Most requests that run at a time where nothing is said, by device: each has rows of the drafters' states."""
WAITING_STATES = 32
"""Tokens of a request whose target states may wait for their drafters' entries, beyond one verification."""
SPECULATION_SWITCH = "angelspec_speculation"
"""Key of ``/set_internal_state``: 1 is on, 0 is off (SGLang takes numbers alone)."""


@dataclass(frozen=True)
class RaggedBackend:
    """An attention backend that can verify rows of different widths in one forward."""

    device: Literal["cuda", "cpu"]
    graphs: bool = True
    """Whether it can do so inside a CUDA graph."""

    @property
    def where(self) -> str:
        """Under which condition, in words; empty: always."""
        if self.device == "cpu":
            return "on a CPU with angelspec's platform"
        return "" if self.graphs else "without CUDA graphs"


RAGGED_BACKENDS: Mapping[str, RaggedBackend] = {
    "fa3": RaggedBackend("cuda"),
    "fa4": RaggedBackend("cuda"),
    "trtllm_mha": RaggedBackend("cuda"),
    "flashinfer": RaggedBackend("cuda", graphs=False),
    CPU_BACKEND: RaggedBackend("cpu", graphs=False),
}
"""Every such backend by its name, the best first."""
