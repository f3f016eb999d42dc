"""Runs one SGLang engine in a process of its own and prints what it answered: ``python -m tests.engine_driver JOB``.

The job is a JSON file: {"engine": arguments of sglang.Engine, "waves": [[request, ..], ..], "out": path}. A request is
{"rid", "ids", "params"}; with "stream" it is streamed, with "abort_after" streamed, and aborted so many seconds after
its first token; "top_logprobs" asks for so many of each token, "token_logprobs" for those of certain tokens.
Waves run one after another, the requests of a wave together. Told are the answers (of one that is to be aborted,
whether it was), the seconds of every wave, the extension's state after each and at the end, and the GPU memory in use.
"""

from __future__ import annotations

import asyncio
import json
import math
import sys
import time
from pathlib import Path
from typing import Any


def main() -> None:
    """Run the job that the command line names."""
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    import sglang

    engine = sglang.Engine(**job["engine"])
    answers: dict[str, Any] = {}
    seconds, states = [], []
    for wave in job["waves"]:
        began = time.perf_counter()
        engine.loop.run_until_complete(_wave(engine, wave, answers))
        seconds.append(time.perf_counter() - began)
        states.append(engine.get_server_info()["internal_states"][0].get("angelspec"))
        if job.get("flush"):
            engine.flush_cache()
    told = {"answers": answers, "seconds": seconds, "states": states, "state": states[-1], "gpu_bytes": _gpu_bytes()}
    Path(job["out"]).write_text(json.dumps(told), encoding="utf-8")
    engine.shutdown()


def _gpu_bytes() -> int | None:
    """Of the first GPU, by all processes; None: there is none."""
    import torch

    if not torch.cuda.is_available():
        return None
    free, whole = torch.cuda.mem_get_info()
    return whole - free


async def _wave(engine: Any, wave: list[dict[str, Any]], answers: dict[str, Any]) -> None:
    await asyncio.gather(*(_one(engine, request, answers) for request in wave))


async def _one(engine: Any, request: dict[str, Any], answers: dict[str, Any]) -> None:
    call = {"input_ids": request["ids"], "sampling_params": request["params"], "rid": request["rid"]}
    call["return_logprob"] = "top_logprobs" in request or "token_logprobs" in request
    call["top_logprobs_num"] = request.get("top_logprobs", 0)
    call["token_ids_logprob"] = request.get("token_logprobs")
    if not request.get("stream") and "abort_after" not in request:
        answer = await engine.async_generate(**call)
        answers[request["rid"]] = {"ids": answer["output_ids"], "text": answer.get("text"), "meta": answer["meta_info"]}
        return
    began, pieces, asked = None, 0, False
    async for answer in await engine.async_generate(**call, stream=True):
        pieces, began = pieces + 1, began or time.perf_counter()
        answers[request["rid"]] = {
            "ids": answer["output_ids"],
            "text": answer.get("text"),
            "meta": answer["meta_info"],
            "pieces": pieces,
        }
        if not asked and time.perf_counter() - began > request.get("abort_after", math.inf):
            engine.tokenizer_manager.abort_request(rid=request["rid"])
            asked = True
    if "abort_after" in request:
        reason = answers[request["rid"]]["meta"]["finish_reason"]
        answers[request["rid"]]["aborted"] = reason is not None and reason["type"] == "abort"


if __name__ == "__main__":
    main()
