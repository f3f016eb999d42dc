"""What the CPU platform changes in SGLang, applied by the plugin before the engine is built."""

from __future__ import annotations

import torch

from angelspec.core.errors import MissingRequirement
from sglang_ext.cpu import internals
from sglang_ext.cpu.accept import sample_chain
from sglang_ext.cpu.locations import assign_req_to_token
from sglang_ext.cpu.platform import BACKEND

STAND_INS = {
    internals.ASSIGN_REQ_TO_TOKEN: assign_req_to_token,
    internals.CHAIN_SAMPLING: sample_chain,
}
"""Dotted path of a function of SGLang: ours in its place."""


def register() -> None:
    """Put the platform's functions and its attention backend in the place of SGLang's.

    Raises:
        MissingRequirement: this SGLang lacks a name that we build on.
    """
    if troubles := internals.missing():
        raise MissingRequirement(
            "this SGLang is not the one that the CPU platform was written for: " + "; ".join(troubles),
            mend="install the version that angelspec's extra `serve` pins",
        )
    from sglang.srt.arg_groups.choices import add_draft_attention_backend_choices
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from sglang_ext.cpu.attention import TorchAttention

    for target, stand_in in STAND_INS.items():
        HookRegistry.register(target, stand_in, HookType.REPLACE)
    # a draft backend outside this list is replaced by flashinfer with nothing but a warning
    add_draft_attention_backend_choices([BACKEND])
    ATTENTION_BACKENDS[BACKEND] = TorchAttention
    # tensors on a CPU belong to no stream and refuse the call
    torch.Tensor.record_stream = lambda self, stream: None
