"""The control for windows of different widths: every row is verified at full width, and its cut caps what is accepted.

This is what SGLang calls cap-accept: the same tokens as compact windows, without their gain. ``ANGELSPEC_UNIFORM``
switches it on.

SGLang loads this module as a plugin of its own, which puts itself around what reads the widths of the worker's window.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from sglang_ext.transfer import on_device

_cap: list[int] = []
"""Proposals per row that may be accepted, of the step that runs."""


def register() -> None:
    """Entry point."""
    if "ANGELSPEC_UNIFORM" not in os.environ or "ANGELSPEC_BUNDLE" not in os.environ:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang_ext.worker.pack", _pack, HookType.AROUND)
    HookRegistry.register("sglang_ext.worker.accept", _accept, HookType.AROUND)
    HookRegistry.register("sglang_ext.worker.adjust_logits", _widened, HookType.AROUND)
    HookRegistry.register("sglang_ext.drafting.DraftRunner.keep", _widened, HookType.AROUND)


def _full(block_BW: Any) -> list[int]:
    rows, width = block_BW.shape
    return [width - 1] * rows


def _pack(original: Any, runner: Any, window: Any, block_BW: Any, kept: Sequence[int]) -> Any:
    _cap[:] = kept
    return original(runner, window, block_BW, _full(block_BW))


def _accept(original: Any, drawn_N: Any, draft_BK: Any, *, kept_B: Any, **places: Any) -> Any:
    return original(drawn_N, draft_BK, kept_B=on_device(_cap, kept_B.device).to(kept_B.dtype), **places)


def _widened(original: Any, *parts: Any, kept: Sequence[int], **rest: Any) -> Any:
    block_BW = rest["block_BW"] if "block_BW" in rest else parts[-1]
    return original(*parts, kept=_full(block_BW), **rest)
