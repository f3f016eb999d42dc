"""What a GPU must show of the serving extension: ``python -m tests.gpu_serving TARGET BUNDLE [--backend fa3]``.

Nobody has run this yet. It starts three engines one after another on the same greedy prompts: plain SGLang, the
extension, and the extension without CUDA graphs (of the target, and of the drafters' choices: a warning names a drafter
that has none although the target has). The table shows how many answers equal the plain
engine's (one that differs must do so where the target's two best logits are close), seconds, and milliseconds per step
by part. SGLang's own log says on the way what memory pools and graphs take, and "cuda graph: True" of steps that ran
from a graph.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any


def main() -> None:
    """Run every check and print what it showed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("bundle")
    parser.add_argument("--backend", default="fa3")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=256)
    chosen = parser.parse_args()
    dice = random.Random(0)
    ids = [[dice.randrange(100, 20_000) for _ in range(dice.randrange(8, 400))] for _ in range(chosen.prompts)]
    params = {"temperature": 0.0, "max_new_tokens": chosen.tokens, "ignore_eos": True}
    wave = [{"rid": f"r{i}", "ids": prompt, "params": params} for i, prompt in enumerate(ids)]
    runs = {
        "plain": {},
        "extension": {"speculative_algorithm": "ANGELSPEC"},
        "extension, no graphs": {"speculative_algorithm": "ANGELSPEC", "disable_cuda_graph": True},
    }
    told = {name: _run(name, chosen, wave, extra) for name, extra in runs.items()}
    reference = told["plain"]["answers"]
    print(f"{'run':24} {'equal':>8} {'seconds':>8} {'draft':>8} {'plan':>8} {'verify':>8}  ms per step")
    for name, one in told.items():
        equal = sum(one["answers"][rid]["ids"] == reference[rid]["ids"] for rid in reference)
        counted = (one["state"] or {}).get("counters", {})
        steps = max(counted.get("steps", 0), 1)
        parts = [1e3 * counted.get(f"{part}_seconds", 0.0) / steps for part in ("draft", "plan", "verify")]
        print(
            f"{name:24} {equal:4}/{len(reference):<3} {one['seconds'][0]:8.1f} " + " ".join(f"{p:8.2f}" for p in parts)
        )


def _run(name: str, chosen: argparse.Namespace, wave: list[dict[str, Any]], extra: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        job, out = Path(folder) / "job.json", Path(folder) / "out.json"
        engine = {"model_path": chosen.target, "attention_backend": chosen.backend, "max_running_requests": 32, **extra}
        job.write_text(json.dumps({"engine": engine, "waves": [wave], "out": str(out)}))
        environment = dict(os.environ)
        if "speculative_algorithm" in extra:
            environment["ANGELSPEC_BUNDLE"] = str(Path(chosen.bundle).resolve())
        print(f"== {name}", flush=True)
        subprocess.run([sys.executable, "-m", "tests.engine_driver", str(job)], env=environment, check=True)
        return json.loads(out.read_text())


if __name__ == "__main__":
    main()
