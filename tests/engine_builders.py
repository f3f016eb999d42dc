"""A tiny random target, random drafters of it, and their bundle, for tests of serving."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file, save_file

from angelspec.core.drafter_config import BlockDrafterConfig, MtpDrafterConfig
from angelspec.core.engine import BUNDLE_VARIABLE, CPU_PLATFORM, PLATFORM_VARIABLE
from angelspec.core.known_targets import KNOWN_TARGETS
from angelspec.drafters.checkpoint import save_drafter
from angelspec.drafters.families import build_drafter
from angelspec.serving.client import Client
from angelspec.serving.launch import free_port

GEOMETRY = KNOWN_TARGETS["tiny-llama"].geometry
SHAPE = {
    "hidden_size": GEOMETRY.hidden_size,
    "intermediate_size": GEOMETRY.intermediate_size,
    "num_heads": GEOMETRY.num_heads,
    "num_kv_heads": GEOMETRY.num_kv_heads,
    "head_dim": GEOMETRY.head_dim,
    "vocab_size": GEOMETRY.vocab_size,
    "rms_norm_eps": GEOMETRY.rms_norm_eps,
    "max_position_embeddings": GEOMETRY.max_position_embeddings,
    "rope": GEOMETRY.rope,
    "target_hidden_size": GEOMETRY.hidden_size,
    "target_num_layers": GEOMETRY.num_layers,
}
DRAFTERS = {
    "mtp": MtpDrafterConfig(num_depths=3, **SHAPE),
    "dfly": BlockDrafterConfig(
        context="hybrid", head="correction", num_layers=2, target_layer_ids=(0, 2), block_size=8, mask_token_id=250,
        correction_intermediate_size=32, **SHAPE,
    ),
    "dflash": BlockDrafterConfig(
        context="projection", head="none", num_layers=2, target_layer_ids=(1, 2), block_size=6, mask_token_id=250,
        **SHAPE,
    ),
    "dflare": BlockDrafterConfig(
        context="fusion", head="none", num_layers=2, target_layer_ids=(0, 1), block_size=5, mask_token_id=250, **SHAPE,
    ),
    "dspark": BlockDrafterConfig(
        context="projection", head="markov", confidence_head=True, markov_rank=8, num_layers=1,
        target_layer_ids=(1, 2), block_size=5, mask_token_id=250, **SHAPE,
    ),
}  # fmt: skip
DEPTHS = {name: config.num_proposals for name, config in DRAFTERS.items()}
ROOT = Path(__file__).parents[1]
TARGET_SHARE = 0.15
"""Of the layers' own say in ``write_markov_target``."""
_SURENESS = 0.12
"""Of the drafters that ``write_markov_drafters`` makes: what their logits are multiplied by."""
_HEARING = 8
"""Of the same: what their attention is multiplied by, twice."""
SEED = 5
_HEALTHY_WITHIN = 240
"""Seconds that a server has to become healthy."""


def write_markov_target(folder: Path) -> Path:
    """The tiny target, made to answer a token mostly with a fixed other one, so that drafters can be right."""
    from angelspec.targets.sources import materialise

    shutil.copytree(materialise("random:llama"), folder)
    weights = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    embedding = torch.randn(GEOMETRY.vocab_size, GEOMETRY.hidden_size, generator=generator)
    weights["model.embed_tokens.weight"] = embedding
    for name, tensor in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.mul_(TARGET_SHARE)
    weights["lm_head.weight"] = embedding[torch.randperm(GEOMETRY.vocab_size, generator=generator)].contiguous()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    return folder


GUESSING = ("dfly", "dspark", "mtp")
"""Of the drafters that ``write_markov_drafters`` makes, those that guess well."""


def write_markov_bundle(folder: Path, names: Sequence[str] = GUESSING, **changes: Any) -> Path:
    """That target in ``target``, its drafters, and a bundle of those called ``names``; ``changes`` hold for each."""
    write_markov_target(folder / "target")
    write_markov_drafters(folder)
    entries = []
    for name in names:
        config = DRAFTERS["dspark" if name == "broken" else name]
        facts = {"family": config.family, "mode": "no-think", "depth": config.num_proposals}
        entries.append({"name": name, "source": f"./{name}", **facts, **changes})
    path = folder / "bundle.yaml"
    path.write_text(yaml.safe_dump({"target": {"source": str(folder / "target")}, "drafters": entries}))
    return path


def write_markov_drafters(folder: Path) -> None:
    """Drafters of that target, made by hand: each looks at the token before, and a little at its context.

    Two more, ``dflash`` and ``dflare``, are random; another, ``broken``, gives numbers that are not finite.
    """
    size = GEOMETRY.hidden_size
    configs = {
        "mtp": DRAFTERS["mtp"],
        "dspark": DRAFTERS["dspark"].model_copy(update={"markov_rank": size}),
        "dfly": DRAFTERS["dfly"].model_copy(update={"correction_intermediate_size": 2 * size}),
    }
    target = load_file(folder / "target" / "model.safetensors")
    embedding, head = target["model.embed_tokens.weight"], target["lm_head.weight"]
    for seed, (name, config) in enumerate(configs.items()):
        drafter = build_drafter(config).initialise(seed=seed)
        _listen(drafter, seed=seed)
        with torch.no_grad():
            if name == "mtp":
                drafter.eh_proj.weight[:, :size] += torch.eye(size)
            if name == "dspark":
                drafter.markov_head.markov_w1.weight.copy_(embedding)
                drafter.markov_head.markov_w2.weight.copy_(_SURENESS * head)
            if name == "dfly":  # a signed square of the token's embedding, by two halves of a SwiGLU
                both = torch.cat([torch.eye(size), -torch.eye(size)])
                correction = drafter.hidden_correction
                correction.gate_proj.weight[:, size:] += 4 * both
                correction.up_proj.weight[:, size:] += both
                correction.down_proj.weight += _SURENESS / 5 * both.t()
        save_drafter(drafter, folder / name, dtype=torch.float32)
    for seed, name in enumerate(("dflash", "dflare")):
        drafter = _listen(random_drafter(DRAFTERS[name], seed=seed), seed=seed)
        save_drafter(drafter, folder / name, dtype=torch.float32)
    broken = build_drafter(DRAFTERS["dspark"]).initialise(seed=9)
    with torch.no_grad():  # finite as it is stored, not so what it computes
        broken.layers[0].self_attn.v_proj.weight.fill_(1e20)
        broken.layers[0].self_attn.o_proj.weight.fill_(3e38)
    save_drafter(broken, folder / "broken", dtype=torch.float32)


def _listen(drafter: Any, *, seed: int) -> Any:
    """Let what the drafter attends to have its say, which fresh weights barely do, and leave it in doubt: drafts that
    do not depend on the context, or confidences of 0 and 1, would look right whatever was entered."""
    generator = torch.Generator().manual_seed(100 + seed)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if name.endswith(("v_proj.weight", "o_proj.weight")):
                parameter.mul_(_HEARING)
            if name.startswith("confidence_head."):
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
            if name.endswith("norm.weight"):  # norms that are all one could be mistaken for each other
                parameter.mul_(1 + 0.2 * torch.randn(parameter.shape, generator=generator))
            if name.startswith("final_"):
                parameter.mul_(_SURENESS)
    return drafter


def random_drafter(config: BlockDrafterConfig | MtpDrafterConfig, *, seed: int) -> Any:
    drafter = build_drafter(config).initialise(seed=seed)
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)
    return drafter


def write_tiny_bundle(folder: Path, *, target: Path | None = None, costs: bool = True) -> Path:
    """Drafters of random weights and a bundle file that names them."""
    drafters = {name: DRAFTERS[name] for name in ("mtp", "dfly", "dspark")}
    for seed, (name, config) in enumerate(drafters.items()):
        save_drafter(random_drafter(config, seed=seed), folder / name, dtype=torch.float32)
    document = {
        "name": "tiny",
        "target": {"source": str(target or folder / "target"), "mode_family": "plain"},
        "drafters": [
            {
                "name": name,
                "source": f"./{name}",
                "family": config.family,
                "algorithm": name,
                "mode": "no-think",
                "depth": DEPTHS[name],
            }
            for name, config in drafters.items()
        ],
    }
    if costs:
        draft = [{"rows": 1, "seconds": 0.001}, {"rows": 16, "seconds": 0.002}]
        document["costs"] = {
            "drafting": dict.fromkeys(drafters, draft),
            "verification": [
                {"batch_size": 1, "slots": 1, "seconds": 0.010},
                {"batch_size": 1, "slots": 8, "seconds": 0.012},
                {"batch_size": 16, "slots": 16, "seconds": 0.020},
                {"batch_size": 16, "slots": 128, "seconds": 0.050},
            ],
        }
    path = folder / "bundle.yaml"
    path.write_text(yaml.safe_dump(document, sort_keys=False))
    return path


def plugin_environment(folder: Path) -> dict[str, str]:
    """Environment of an engine with the extension, the CPU platform and the tests' plugins, announced in ``folder``."""
    return {
        "PYTHONPATH": announce_plugins(folder),
        "SGLANG_PLATFORM": "angelspec_cpu",
        "SGLANG_CUDA_COREDUMP_BEFORE_CRASH_WAIT_SECS": "0",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "ANGELSPEC_CACHE": str(folder / "cache"),
    }


def announce_plugins(folder: Path) -> str:
    """Announce the tests' plugins to SGLang in ``folder``; returns the PYTHONPATH with which it sees them."""
    metadata = folder / "plugins" / "angelspec_tests-0.1.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: angelspec-tests\nVersion: 0.1\n")
    lines = ["[sglang.srt.plugins]"]
    names = ("replay", "fault", "record", "ranks", "wander", "noise", "uniform")
    lines += [f"{name} = tests.{name}_plugin:register" for name in names]
    if not entry_points(group="sglang.srt.plugins", name="angelspec"):  # not installed: run from the tree
        lines += ["angelspec = sglang_ext.plugin:register", "[sglang.srt.platforms]"]
        lines += ["angelspec_cpu = sglang_ext.cpu.platform:activate"]
    (metadata / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return f"{ROOT}:{folder / 'plugins'}"


def run(folder: Path, name: str, job: dict[str, Any], **environment: str) -> dict[str, Any]:
    """Run a job in an engine of its own."""
    path, out = folder / f"{name}.json", folder / f"{name}.out.json"
    path.write_text(json.dumps({**job, "out": str(out)}))
    done = subprocess.run(
        [sys.executable, "-m", "tests.engine_driver", str(path)],
        cwd=ROOT,
        env={
            **{key: value for key, value in os.environ.items() if not key.startswith("ANGELSPEC_")},
            **plugin_environment(folder),
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert out.is_file(), f"the engine failed:\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    return json.loads(out.read_text())


@contextmanager
def served(*arguments: str, log: Path) -> Iterator[Client]:
    """``angelspec serve`` with these arguments, healthy; it must end well when it is told to."""
    port = free_port("127.0.0.1")
    command = [Path(sys.executable).with_name("angelspec"), "serve", "--port", str(port), "--quiet", *arguments]
    with _healthy(command, port=port, log=log) as client:
        yield client


@contextmanager
def launched(*arguments: str, bundle: Path, log: Path) -> Iterator[Client]:
    """SGLang's own launcher with these arguments and our algorithm, on a CPU; healthy, and it must end well."""
    port = free_port("127.0.0.1")
    command = [
        Path(sys.executable).with_name("sglang"), "serve", "--port", str(port), "--speculative-algorithm", "ANGELSPEC",
        "--device", "cpu", *arguments,
    ]  # fmt: skip
    environment = {BUNDLE_VARIABLE: str(bundle), PLATFORM_VARIABLE: CPU_PLATFORM, "CUDA_VISIBLE_DEVICES": ""}
    with _healthy(command, port=port, log=log, environment=environment) as client:
        yield client


@contextmanager
def _healthy(
    command: Sequence[str | Path], *, port: int, log: Path, environment: Mapping[str, str] | None = None
) -> Iterator[Client]:
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env={**os.environ, **(environment or {})})
    try:
        with Client(f"http://127.0.0.1:{port}") as client:
            deadline = time.monotonic() + _HEALTHY_WITHIN
            while not client.healthy():
                assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-4000:]
                time.sleep(0.5)
            yield client
    finally:  # also of one that never came up
        process.send_signal(signal.SIGTERM)
        ended = process.wait(60)
    assert ended == 0, log.read_text()[-4000:]


def engine(target: Path, **changes: Any) -> dict[str, Any]:
    return {
        "model_path": str(target), "device": "cpu", "dtype": "float32", "random_seed": SEED, "mem_fraction_static": 0.2,
        "max_running_requests": 8, "max_total_tokens": 8192, "chunked_prefill_size": 64, "log_level": "warning",
        **changes,
    }  # fmt: skip
