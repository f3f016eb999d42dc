"""Makes requests change their drafter while they run: ``ANGELSPEC_WANDER`` names the drafters, with commas between.

Each request whose id begins with ``wander`` is drafted for by all of them in turn, a few tokens long, and in between
either decodes plainly or is drafted for by another, for more tokens than wait for their entries. While such requests
run, SGLang takes one back every ``RETRACT_EVERY`` steps.

SGLang loads this module as a plugin of its own, which puts itself around the worker's planning.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from angelspec.core.engine import WAITING_STATES

PREFIX = "wander"
SHORT, LONG = 12, WAITING_STATES + 16
"""Tokens of a stretch: with the drafter whose turn it is, and without it. The second is more than the ring holds."""
RETRACT_EVERY = 30


def register() -> None:
    """Entry point."""
    if "ANGELSPEC_WANDER" not in os.environ or "ANGELSPEC_BUNDLE" not in os.environ:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang_ext.worker.AngelSpecWorker._begin", _begin, HookType.AROUND)


def _begin(original: Any, worker: Any, rows: list[Any]) -> Any:
    from sglang.srt.managers import scheduler

    step = original(worker, rows)
    names = os.environ["ANGELSPEC_WANDER"].split(",")
    wandering = [row for row, known in enumerate(rows) if known.rid.startswith(PREFIX)]
    scheduler.TEST_RETRACT, scheduler.TEST_RETRACT_INTERVAL = bool(wandering), RETRACT_EVERY
    drafters, probes = list(step.drafters), dict(step.probes)
    for row in wandering:
        drafters[row] = _drafter(rows[row], names)
        probes.pop(row, None)
    return replace(step, drafters=tuple(drafters), probes=probes)


def _drafter(known: Any, names: list[str]) -> str | None:
    number = int(known.rid.removeprefix(PREFIX))
    turn, place = divmod(known.length - len(known.req.origin_input_ids), SHORT + LONG)
    if place < SHORT:
        return names[(number + turn) % len(names)]
    return names[(number + turn + 1) % len(names)] if number % 2 else None
