"""Makes every rank but the first go wrong: ``ANGELSPEC_PERTURB`` set, its drafts, drawn tokens and first tokens differ.

SGLang loads this module as a plugin of its own. Answers can be right only where the first rank's values are taken.
"""

from __future__ import annotations

import os
from typing import Any


def register() -> None:
    """Entry point."""
    if "ANGELSPEC_PERTURB" not in os.environ or "ANGELSPEC_BUNDLE" not in os.environ:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang_ext.drafting.DraftRunner._draft", _draft, HookType.AROUND)
    HookRegistry.register("sglang_ext.worker.draw", _draw, HookType.AROUND)
    HookRegistry.register(
        "sglang.srt.managers.tp_worker.TpModelWorker.forward_batch_generation", _forward, HookType.AROUND
    )


def _is_wrong() -> bool:
    from sglang_ext.compat import get_parallel

    return get_parallel().tp_rank > 0


def _draft(original: Any, runner: Any, name: str, rows: Any) -> Any:
    drafts = original(runner, name, rows)
    if not _is_wrong():
        return drafts
    return type(drafts)((drafts.tokens_BK + 1) % 100, drafts.confidence_BK * 0.5)


def _draw(original: Any, *args: Any, **kwargs: Any) -> Any:
    drawn_N = original(*args, **kwargs)
    return (drawn_N + 1) % 100 if _is_wrong() else drawn_N


def _forward(original: Any, worker: Any, *args: Any, **kwargs: Any) -> Any:
    result = original(worker, *args, **kwargs)
    if _is_wrong() and result.next_token_ids is not None:
        result.next_token_ids = (result.next_token_ids + 1) % 100
    return result
