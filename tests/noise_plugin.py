"""Puts noise where it must not matter, and draws every wave from a seed of its own.

``ANGELSPEC_NOISE`` names a file that gets a letter for each draft (d) and each slot (s) that was made noise of.

Requests whose id begins with ``noise`` get random confidences for whatever was drafted. Every slot that is not verified
holds a random token. Where an id ends in ``@`` and a number, the engine's random numbers begin anew from this seed with
the first step of such requests.

SGLang loads this module as a plugin of its own, which puts itself around the worker's planning, drafting and packing.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import torch

PREFIX = "noise"
_dice = random.Random(6)
_seeds: list[str] = []
"""Those that were used."""


def register() -> None:
    """Entry point."""
    if "ANGELSPEC_NOISE" not in os.environ or "ANGELSPEC_BUNDLE" not in os.environ:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang_ext.worker.AngelSpecWorker._begin", _begin, HookType.AROUND)
    HookRegistry.register("sglang_ext.worker.AngelSpecWorker._draft", _draft, HookType.AROUND)
    HookRegistry.register("sglang_ext.worker.pack", _pack, HookType.AROUND)


def _begin(original: Any, worker: Any, rows: list[Any]) -> Any:
    seed = rows[0].rid.rpartition("@")[2]
    if seed not in _seeds:
        _seeds.append(seed)
        torch.manual_seed(int(seed))
    return original(worker, rows)


def _draft(original: Any, worker: Any, name: str, indices: list[int], rows: list[Any], *rest: Any) -> None:
    original(worker, name, indices, rows, *rest)
    confidences = rest[-1]
    for index in indices:
        if rows[index].rid.startswith(PREFIX):
            confidences[index] = [_dice.random() for _ in confidences[index]]
            _note("d")


def _note(letters: str) -> None:
    with Path(os.environ["ANGELSPEC_NOISE"]).open("a", encoding="utf-8") as file:
        file.write(letters)


def _pack(original: Any, runner: Any, window: Any, block_BW: Any, kept: Any) -> Any:
    for row, number in enumerate(kept):
        beyond = block_BW[row, number + 1 :]
        beyond[:] = torch.tensor([_dice.randrange(runner.model_config.vocab_size) for _ in beyond])
        _note("s" * len(beyond))
    return original(runner, window, block_BW, kept)
