"""Writes down every draft of an engine: ``ANGELSPEC_RECORD`` names a file that gets one JSON line per row and step.

SGLang loads this module as a plugin of its own, which puts itself around the worker's drafting.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def register() -> None:
    """Entry point."""
    if "ANGELSPEC_RECORD" not in os.environ or "ANGELSPEC_BUNDLE" not in os.environ:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang_ext.worker.AngelSpecWorker._draft", _draft, HookType.AROUND)


def _draft(original: Any, worker: Any, name: str, indices: list[int], rows: Any, *rest: Any) -> None:
    original(worker, name, indices, rows, *rest)
    _, lengths, _, block_BW, confidences = rest
    depth = worker.plan.bundle.depths[name]
    with Path(os.environ["ANGELSPEC_RECORD"]).open("a", encoding="utf-8") as file:
        for index in indices:
            draft = {
                "rid": rows[index].rid,
                "drafter": name,
                "position": lengths[index],
                "tokens": block_BW[index, 1 : depth + 1].tolist(),
                "confidences": confidences[index],
            }
            file.write(json.dumps(draft) + "\n")
