"""What a GPU must show of the serving extension: ``python -m tests.gpu_serving BUNDLE [--backend fa3]``.

Nobody has run this on a GPU yet; ``--device cpu`` was run with the shipped bundle (all as it must be) before it had
its control, whose plugin ``tests/e2e/serving/test_engine.py`` tests. It starts
engines one after another on the same greedy prompts: plain SGLang, the extension, the extension without CUDA graphs,
and the control, which verifies every row at full width and caps what is accepted by its cut (SGLang's cap-accept). Each
engine of the extension answers them plainly, with every drafter verified whole, with every drafter cut to a quarter and
step by step (rows of different widths in one compact window), and by its own choice.

A row per wave tells the share of answers that equal plain SGLang's, accepted length and kept ratio, the shares of steps
that drafted, cut and ran from a graph, milliseconds per step by part, and the GPU memory in use after the last wave. An
answer may differ where plain SGLang's two best tokens are within ``--near`` nats of each other. The script ends with a
list of what is not as it must be, and exit code 1 if there is anything.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from angelspec.cli.serving_parts import parts
from angelspec.core.bundle import Bundle, load_bundle
from angelspec.core.modes import mode_family
from angelspec.serving.resolving import resolve_bundle

_PARTS = ("draft", "plan", "verify", "other")


def main() -> None:
    """Run every engine, print what it showed, and end with what is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--backend", default="fa3")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--near", type=float, default=0.05, help="nats; below it two tokens are as good as tied")
    chosen = parser.parse_args()
    resolved = resolve_bundle(load_bundle(chosen.bundle), parts=parts())
    bundle, chosen.target = resolved.bundle, str(resolved.target.folder)
    labels = _labels(bundle)
    prompts = {mode: _prompts(chosen, bundle, mode) for mode in sorted({label["mode"] for label in labels.values()})}
    plain = {
        f"{mode}#{i}": _request(f"{mode}#{i}", ids, chosen, top_logprobs=2)
        for mode, some in prompts.items()
        for i, ids in enumerate(some)
    }
    truth = _run("plain SGLang", chosen, [list(plain.values())], {}, bundle)
    tokens, seconds = sum(len(one["ids"]) for one in truth["answers"].values()), sum(truth["seconds"])
    print(f"{truth['gpu_bytes'] or 0:,} bytes of GPU memory in use; {tokens} tokens in {seconds:.1f} s")
    waves = [
        [_request(f"{name}#{i}", ids, chosen, custom_params=label) for i, ids in enumerate(prompts[label["mode"]])]
        for name, label in labels.items()
    ]
    engines: dict[str, dict[str, Any]] = {"with graphs": {}, "without graphs": {"disable_cuda_graph": True}}
    if chosen.device == "cpu":
        engines = {"on a CPU": {}}
    engines[_CONTROL] = {}
    wrong: list[str] = []
    for engine, extra in engines.items():
        told = _run(engine, chosen, waves, {"speculative_algorithm": "ANGELSPEC", **extra}, bundle)
        print(f"\n{engine}: {told['gpu_bytes'] or 0:,} bytes of GPU memory in use\n{_HEADER}")
        before: dict[str, float] = {}
        for (name, label), seconds, state in zip(labels.items(), told["seconds"], told["states"], strict=True):
            counted = {key: value - before.get(key, 0) for key, value in _numbers(state["counters"]).items()}
            before = _numbers(state["counters"])
            answers = {rid: one for rid, one in told["answers"].items() if rid.rpartition("#")[0] == name}
            wrong += [
                f"{engine}, {problem}" for problem in _judge(name, label, answers, truth, counted, seconds, chosen)
            ]
        if engine == "with graphs" and not before["graphed_steps"]:
            wrong.append(f"{engine}: no step ran from a graph")
    print("\n" + ("\n".join(f"WRONG: {line}" for line in wrong) or "all is as it must be"))
    sys.exit(bool(wrong))


_CONTROL = "cap-accept control"
_HEADER = (
    f"{'wave':28} {'equal':>9} {'length':>7} {'kept':>5} {'drafted':>8} {'cut':>5} {'graphs':>7} {'s':>7} "
    + " ".join(f"{part:>7}" for part in _PARTS)
)


def _labels(bundle: Bundle) -> dict[str, dict[str, Any]]:
    """Waves by name: how their requests are labelled."""
    modes = sorted({drafter.mode for drafter in bundle.drafters})
    labels: dict[str, dict[str, Any]] = {f"plain, {mode}": {"mode": mode, "route": "ar"} for mode in modes}
    for drafter in bundle.drafters:
        for cut in ("off", 0.25, "auto"):
            label = {"mode": drafter.mode, "route": drafter.name, "dcut": cut}
            labels[f"{drafter.name}, cut {cut}"] = {key: value for key, value in label.items() if value != "auto"}
    return {**labels, **{f"auto, {mode}": {"mode": mode} for mode in modes}}


def _prompts(chosen: argparse.Namespace, bundle: Bundle, mode: Any) -> list[list[int]]:
    from transformers import AutoTokenizer

    from angelspec.pipeline.serve_prompts import traffics_of

    tokenizer = AutoTokenizer.from_pretrained(chosen.target)
    arguments = mode_family(bundle.target.mode_family).arguments(mode)
    mixed = traffics_of([f"builtin:eval/{name}" for name in ("chat", "code", "math")])[-1]
    texts = [
        tokenizer.apply_chat_template(
            [dict(message) for message in prompt.messages], add_generation_prompt=True, tokenize=False, **arguments
        )
        for prompt in mixed.prompts[: chosen.prompts]
    ]
    return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]


def _request(rid: str, ids: list[int], chosen: argparse.Namespace, *, custom_params: Any = None, **more: Any) -> Any:
    params = {"temperature": 0.0, "max_new_tokens": chosen.tokens}
    return {"rid": rid, "ids": ids, "params": {**params, "custom_params": custom_params}, **more}


def _numbers(counters: dict[str, Any]) -> dict[str, float]:
    return {key: value for key, value in counters.items() if isinstance(value, int | float)}


def _judge(
    name: str, label: dict[str, Any], answers: dict[str, Any], truth: dict[str, Any], counted: dict[str, float],
    seconds: float, chosen: argparse.Namespace,
) -> list[str]:  # fmt: skip
    """Print a wave's row; returns what is wrong with it."""
    wrong, equal, tied = [], 0, 0
    for rid, answer in answers.items():
        theirs = truth["answers"][f"{label['mode']}#{rid.rpartition('#')[2]}"]
        if answer["ids"] == theirs["ids"]:
            equal += 1
            continue
        pairs = zip(answer["ids"], theirs["ids"], strict=False)
        at = next((i for i, (ours, its) in enumerate(pairs) if ours != its), None)
        if at is not None and _gap(theirs, at) < chosen.near:
            tied += 1
        else:
            wrong.append(f"{rid}: differs from plain SGLang at token {at}, where nothing is tied")
    metadata = [answer["meta"]["angelspec"] for answer in answers.values()]
    steps, length = sum(one["verify_steps"] for one in metadata), 0.0
    if steps:
        length = sum(one["generated_tokens"] for one in metadata) / steps
    drafted, proposed = (sum(one[f"{kind}_tokens"] for one in metadata) for kind in ("drafted", "proposed"))
    kept = (steps + proposed) / max(steps + drafted, 1)
    whole = max(counted["steps"], 1)
    shares = [counted[f"{kind}_steps"] / whole for kind in ("speculative", "cut", "graphed")]
    print(
        f"{name:28} {equal:3}+{tied}/{len(answers):<3} {length:7.2f} {kept:5.2f} {shares[0]:8.2f} {shares[1]:5.2f} "
        f"{shares[2]:7.2f} {seconds:7.1f} " + " ".join(f"{1e3 * counted[f'{p}_seconds'] / whole:7.2f}" for p in _PARTS)
    )
    route = label.get("route")
    if route == "ar" and shares[0]:
        wrong.append(f"{name}: {shares[0]:.0%} of the steps drafted")
    if route not in (None, "ar"):
        if shares[0] < 0.99:
            wrong.append(f"{name}: only {shares[0]:.0%} of the steps drafted")
        if length < 1.02:
            wrong.append(f"{name}: accepted length {length:.2f}")
        if label.get("dcut") == "off" and kept < 0.999 or label.get("dcut") == 0.25 and kept > 0.5:
            wrong.append(f"{name}: {kept:.2f} of the slots were kept")
    return wrong


def _gap(answer: dict[str, Any], at: int) -> float:
    best, second = answer["meta"]["output_top_logprobs"][at][:2]
    return best[0] - second[0]


def _run(
    name: str, chosen: argparse.Namespace, waves: list[Any], extra: dict[str, Any], bundle: Bundle
) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        job, out = Path(folder) / "job.json", Path(folder) / "out.json"
        engine = {"model_path": chosen.target, "max_running_requests": 32, "attention_backend": chosen.backend, **extra}
        environment = dict(os.environ)
        if chosen.device == "cpu":
            from tests.engine_builders import engine as cpu_engine
            from tests.engine_builders import plugin_environment

            engine = cpu_engine(Path(chosen.target), dtype="float32", max_total_tokens=16384) | extra
            environment |= plugin_environment(Path(folder))
            environment["OMP_NUM_THREADS"] = str(len(os.sched_getaffinity(0)))
        if name == _CONTROL:
            from tests.engine_builders import announce_plugins

            environment |= {"PYTHONPATH": announce_plugins(Path(folder)), "ANGELSPEC_UNIFORM": "1"}
        job.write_text(json.dumps({"engine": engine, "waves": waves, "out": str(out), "flush": True}))
        if "speculative_algorithm" in extra:
            environment["ANGELSPEC_BUNDLE"] = str(bundle.save(Path(folder) / "bundle.yaml"))
        print(f"== {name}", flush=True)
        subprocess.run([sys.executable, "-m", "tests.engine_driver", str(job)], env=environment, check=True)
        return json.loads(out.read_text())


if __name__ == "__main__":
    main()
