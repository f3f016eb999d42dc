"""What the plan of a step is worth, without any drafter: ``python -m tests.replay_bench TARGET OUT [options]``.

A replay drafter proposes the target's own recorded answers at no cost, each position right with a set probability. At
every probability, and for a mixture of requests with different ones, three kinds of choice are measured in turns in
one engine: plain decoding, every fixed depth, and the automatic choice, which knows nothing of the probabilities but
what it sees accepted (a draft's confidences say nothing). Every window runs for some seconds with a fixed number of
users; tokens are counted from the moment at which every user has had a token. Prints tables and writes every window to
OUT/replay.json.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import yaml

from tests.engine_builders import engine, plugin_environment

MIXTURE = (0.1, 0.5, 0.9)
AUTO, PLAIN = "auto", "plain"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", help="folder of the target")
    parser.add_argument("out", type=Path)
    parser.add_argument("--probability", action="append", help="a number, or 'mixture'; repeatable")
    parser.add_argument("--concurrency", type=int, action="append")
    parser.add_argument("--depth", type=int, action="append", help="fixed depths to compare with")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=12.0)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--dtype", default="float32")
    chosen = parser.parse_args()
    chosen.probability = chosen.probability or ["0.1", "0.3", "0.5", "0.7", "0.9", "mixture"]
    chosen.concurrency = chosen.concurrency or [1, 8]
    chosen.depth = chosen.depth or [1, 2, 3, 4, 5, 6, 7]
    chosen.out.mkdir(parents=True, exist_ok=True)
    os.environ.update(plugin_environment(chosen.out.resolve()))
    sys.path.insert(1, str(chosen.out.resolve() / "plugins"))
    os.environ["ANGELSPEC_BUNDLE"] = str(_bundle(chosen.out.resolve(), chosen.target))
    os.environ["ANGELSPEC_REPLAY"] = str(chosen.out.resolve() / "script.json")
    os.environ["ANGELSPEC_REPLAY_FREE"] = "1"
    os.environ["OMP_NUM_THREADS"] = str(len(os.sched_getaffinity(0)))
    import sglang

    arguments = engine(Path(chosen.target), dtype=chosen.dtype, max_total_tokens=16384, chunked_prefill_size=2048)
    running = sglang.Engine(**arguments, speculative_algorithm="ANGELSPEC")
    try:
        _measure(running, chosen)
    finally:
        running.shutdown()


def _bundle(folder: Path, target: str) -> Path:
    """A bundle of one drafter of random weights, whose proposals nobody asks for."""
    from angelspec.core.recipe_files import load_recipe
    from angelspec.drafters.checkpoint import save_drafter
    from angelspec.drafters.families import build_drafter

    config = load_recipe("smollm2-dfly-nothink").drafter_config()
    save_drafter(build_drafter(config).initialise(seed=0), folder / "dfly", dtype=torch.float32)
    document = {
        "name": "replay",
        "target": {"source": target, "mode_family": "smollm2"},
        "drafters": [
            {
                "name": "dfly",
                "source": "./dfly",
                "family": "block",
                "algorithm": "dfly",
                "mode": "no-think",
                "depth": 7,
            }
        ],
    }
    path = folder / "bundle.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


def _measure(running: Any, chosen: argparse.Namespace) -> None:
    prompts = _prompts(running, chosen.prompts)
    answers = running.loop.run_until_complete(_record(running, prompts, chosen.tokens))
    names = [PLAIN, AUTO, *(f"depth {depth}" for depth in chosen.depth)]
    script = {}
    for (i, output), text, name in itertools.product(enumerate(answers), chosen.probability, names):
        entry = {"prompt": len(prompts[i]), "output": output, "probability": _probability(text, i)}
        if name.startswith("depth"):
            entry["depth"] = int(name.split()[1])
        script[f"{i}|{text}|{name}"] = entry
    Path(os.environ["ANGELSPEC_REPLAY"]).write_text(json.dumps(script))
    windows: list[dict[str, Any]] = []
    for text, users in itertools.product(chosen.probability, chosen.concurrency):
        for repeat in range(chosen.repeats):
            for name in names[repeat % len(names) :] + names[: repeat % len(names)]:
                speed = running.loop.run_until_complete(
                    _window(running, prompts, chosen, text=text, name=name, users=users, repeat=repeat)
                )
                windows.append({"probability": text, "users": users, "choice": name, "repeat": repeat, **speed})
                (chosen.out / "replay.json").write_text(json.dumps(windows, indent=1))
        _table(windows, names, text, users)
    state = running.get_server_info()["internal_states"][0].get("angelspec")
    (chosen.out / "state.json").write_text(json.dumps(state, indent=1))


def _prompts(running: Any, count: int) -> list[list[int]]:
    """Token ids of the embedded evaluation prompts, workloads in turns."""
    from angelspec.core.locations import prompt_folder

    files = sorted((prompt_folder() / "eval").glob("*.jsonl"))
    rows = [[json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] for path in files]
    mixed = [row for turn in itertools.zip_longest(*rows) for row in turn if row is not None][:count]
    tokenizer = running.tokenizer_manager.tokenizer
    return [
        list(
            tokenizer.apply_chat_template(
                [{"role": "user", "content": row["turns"][0]}], add_generation_prompt=True, return_dict=False
            )
        )
        for row in mixed
    ]


def _probability(text: str, prompt: int) -> float:
    return MIXTURE[prompt % len(MIXTURE)] if text == "mixture" else float(text)


async def _record(running: Any, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    params = {"temperature": 0.0, "max_new_tokens": tokens, "custom_params": {"route": "ar"}}
    told = await asyncio.gather(*(running.async_generate(input_ids=ids, sampling_params=params) for ids in prompts))
    return [answer["output_ids"] for answer in told]


async def _window(
    running: Any, prompts: list[list[int]], chosen: argparse.Namespace, *, text: str, name: str, users: int, repeat: int
) -> dict[str, Any]:
    """Tokens per second of one choice."""
    label: dict[str, Any] = {"route": {PLAIN: "ar", AUTO: "auto"}.get(name, "dfly")}
    if name.startswith("depth"):
        label["dcut"] = "off"
    order = itertools.cycle(range(len(prompts)))
    arrivals: list[tuple[float, int]] = []
    first: dict[int, float] = {}
    met: list[dict[str, Any]] = []
    serial = itertools.count()
    over = asyncio.Event()

    async def user(who: int, turns: Iterator[int]) -> None:
        while not over.is_set():
            i = next(turns)
            rid = f"{i}|{text}|{name}#{users}.{repeat}.{next(serial)}"
            params = {"temperature": 0.0, "max_new_tokens": chosen.tokens, "custom_params": label}
            chunks = await running.async_generate(input_ids=prompts[i], sampling_params=params, rid=rid, stream=True)
            seen = 0
            async for chunk in chunks:
                count, now = chunk["meta_info"]["completion_tokens"], time.perf_counter()
                first.setdefault(who, now)
                arrivals.append((now, count - seen))
                seen = count
                if over.is_set() and not chunk["meta_info"].get("finish_reason"):
                    running.tokenizer_manager.abort_request(rid=rid)
            met.append(chunk["meta_info"].get("angelspec") or {})

    tasks = [asyncio.create_task(user(who, order)) for who in range(users)]
    while len(first) < users:
        await asyncio.sleep(0.01)
    began = time.perf_counter()
    await asyncio.sleep(chosen.seconds)
    ended = time.perf_counter()
    over.set()
    await asyncio.gather(*tasks)
    await running.tokenizer_manager.flush_cache()
    tokens = sum(count for at, count in arrivals if began < at <= ended)
    steps = sum(one.get("verify_steps", 0) for one in met)
    return {
        "tokens_per_second": tokens / (ended - began),
        "accepted_length": sum(one.get("generated_tokens", 0) for one in met) / max(steps, 1),
        "verified": sum(one.get("proposed_tokens", 0) for one in met) / max(steps, 1),
        "plain_steps": sum(one.get("steps_by_route", {}).get("ar", 0) for one in met) / max(steps, 1),
    }


def _table(windows: list[dict[str, Any]], names: list[str], text: str, users: int) -> None:
    """Speeds against plain decoding of the same repeat, and the automatic choice against each."""
    from angelspec.serving.intervals import paired_ratio

    mine = [one for one in windows if (one["probability"], one["users"]) == (text, users)]
    speeds = {name: [one["tokens_per_second"] for one in mine if one["choice"] == name] for name in names}
    print(f"\nprobability {text}, concurrency {users}", flush=True)
    print(f"{'choice':>10} {'tokens/s':>9} {'against plain':>22} {'auto against it':>22} accepted verified plain steps")
    for name in names:
        rows = [one for one in mine if one["choice"] == name]
        means = {key: sum(one[key] for one in rows) / len(rows) for key in rows[0] if isinstance(rows[0][key], float)}
        ratios = [_shown(paired_ratio(speeds[name], speeds[PLAIN])), _shown(paired_ratio(speeds[AUTO], speeds[name]))]
        print(
            f"{name:>10} {means['tokens_per_second']:9.1f} {ratios[0]:>22} {ratios[1]:>22} "
            f"{means['accepted_length']:8.2f} {means['verified']:8.2f} {means['plain_steps']:11.2f}",
            flush=True,
        )


def _shown(ratio: Any) -> str:
    return f"{ratio.value:.2f}" + ("" if ratio.low is None else f" ({ratio.low:.2f} to {ratio.high:.2f})")


if __name__ == "__main__":
    main()
