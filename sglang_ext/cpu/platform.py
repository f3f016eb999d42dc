"""The out-of-tree platform ``angelspec_cpu``: what SGLang asks of a device, answered for plain torch on a CPU.

SGLang loads this module in the middle of its own imports: of SGLang it imports only ``sglang.srt.platforms`` at the
top, and the rest inside the methods.
"""

from __future__ import annotations

import os

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform

from angelspec.core.engine import CPU_BACKEND as BACKEND
from angelspec.core.engine import CPU_PLATFORM, PLATFORM_VARIABLE

CPU_THREADS = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "10000"}
"""How OpenMP's threads wait, unless the user says otherwise: awake for some microseconds, since the next of a step's
many small products follows at once, then asleep, since the server's other processes need the cores, too."""


def chosen() -> bool:
    """Whether the environment names this platform."""
    return os.environ.get(PLATFORM_VARIABLE) == CPU_PLATFORM


def activate() -> str | None:
    """The platform's dotted path if the environment names it, else None: a CPU is never taken behind a user's back.

    The engine's processes start after this and inherit how their threads wait.
    """
    if not chosen():
        return None
    for name, value in CPU_THREADS.items():
        os.environ.setdefault(name, value)
    return f"{__name__}:CpuPlatform"


class CpuPlatform(CpuDeviceMixin, SRTPlatform):
    """A CPU without sgl_kernel: no Triton, no graphs, every operator in its plain torch form."""

    _enum = PlatformEnum.OOT
    capabilities = PlatformCapabilities()

    def get_default_attention_backend(self) -> str:
        """See :data:`angelspec.core.engine.CPU_BACKEND`."""
        return BACKEND

    def get_default_speculative_draft_attention_backend(self, algorithm: str) -> str:
        """See :data:`angelspec.core.engine.CPU_BACKEND`."""
        return BACKEND

    def supports_speculative_algorithm(self, algorithm: str) -> bool:
        """The algorithm's own checks decide."""
        return True

    def supports_speculative_draft_attention_backend(self, algorithm: str, backend: str) -> bool:
        """See :data:`angelspec.core.engine.CPU_BACKEND`."""
        return backend == BACKEND

    def get_compile_backend(self, mode: str | None = None) -> str:
        """Nothing is compiled."""
        return "eager"

    def get_dispatch_key_name(self) -> str:
        """Operators run their ``forward_native``."""
        return "native"

    def is_pin_memory_available(self, device=None) -> bool:
        """There is no device to copy to."""
        return False

    def get_kv_pool_cls(self, *, kind: str) -> type | None:
        """The pool of multi-head attention; other kinds stay SGLang's and are refused by the attention backend."""
        if kind != "mha":
            return None
        from sglang_ext.cpu.pool import TorchKVPool

        return TorchKVPool

    def get_speculative_cache_locs_fn(self):
        """Slots of the tokens that a verification writes."""
        from sglang_ext.cpu.locations import extend_cache_locations

        return extend_cache_locations

    def apply_server_args_defaults(self, server_args) -> None:
        """The scheduler polls for requests; asleep while it has none, it leaves its core to others."""
        server_args.sleep_on_idle = True

    def init_backend(self) -> None:
        """Plain torch forms of SGLang's operators that cost less than its own."""
        from sglang_ext.cpu.operators import register

        register(self.get_dispatch_key_name())

    def post_load_model(self, model: torch.nn.Module) -> None:
        """Lay out the weights of a model, target or drafter, for oneDNN."""
        from sglang_ext.cpu.weights import pack_weights

        pack_weights(model)
