"""A drafter for tests that proposes known output at no cost, each position right with a set probability.

SGLang loads this module as a plugin of its own, which puts itself around the worker's drafting. ``ANGELSPEC_REPLAY``
names a JSON file: {request id: {"prompt": length, "output": [..], "probability": p, "depth": k, "drafter": name,
"confidence": c}}; of a request's id only what stands before ``#`` counts. It stands in for the drafter of that name,
without one for ``dfly``, and without ``depth`` proposes as many tokens as a step holds. Whatever the probability, its
confidence is 0.5, which says nothing (its logit is 0), unless the script says another. A request that is not in the
file is drafted for as usual. With ``ANGELSPEC_REPLAY_FREE`` the engine also plans as if drafting took no time.
"""

from __future__ import annotations

import json
import os
import random
from functools import cache
from pathlib import Path
from typing import Any

NAME = "dfly"


@cache
def _script() -> dict[str, dict[str, Any]]:
    return json.loads(Path(os.environ["ANGELSPEC_REPLAY"]).read_text(encoding="utf-8"))


def register() -> None:
    """Entry point."""
    if "ANGELSPEC_REPLAY" not in os.environ or "ANGELSPEC_BUNDLE" not in os.environ:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang_ext.worker.AngelSpecWorker._draft", _draft, HookType.AROUND)
    if "ANGELSPEC_REPLAY_FREE" in os.environ:
        HookRegistry.register("sglang_ext.worker.AngelSpecWorker.use_costs", _free, HookType.AROUND)


def _free(original: Any, worker: Any, costs: Any) -> None:
    from angelspec.core.step_costs import DraftPoint

    if costs is not None:
        rows = max((point.batch_size for point in costs.verification), default=1)
        nothing = (DraftPoint(rows=1, seconds=0.0), DraftPoint(rows=rows, seconds=0.0))
        costs = costs.model_copy(update={"drafting": dict.fromkeys(costs.drafting, nothing)})
    original(worker, costs)


def _draft(
    original: Any, worker: Any, name: str, indices: list[int], rows: Any, slots: Any, lengths: list[int], batch: Any,
    block_BW: Any, confidences: list[list[float]],
) -> None:  # fmt: skip
    script = _script()
    known_rows = {i: script[key] for i in indices if (key := _key(rows[i].rid)) in script}
    others = [i for i in indices if i not in known_rows or known_rows[i].get("drafter", NAME) != name]
    if others:
        original(worker, name, others, rows, slots, lengths, batch, block_BW, confidences)
    most = block_BW.shape[1] - 1
    vocabulary = worker.plan.places[0].config.vocab_size
    for index in indices:
        if index in others:
            continue
        known = known_rows[index]
        depth = known.get("depth", most)
        begin = lengths[index] - known["prompt"] + 1  # the anchor is the output's token before it
        tokens = known["output"][begin : begin + depth]
        tokens += [0] * (depth - len(tokens))
        dice = random.Random(f"{rows[index].rid} {lengths[index]}")
        for k, token in enumerate(tokens):
            right = dice.random() < known["probability"]
            block_BW[index, k + 1] = token if right else (token + 1 + dice.randrange(vocabulary - 1)) % vocabulary
        confidences[index] = [known.get("confidence", 0.5)] * depth


def _key(rid: str) -> str:
    return rid.split("#")[0]
