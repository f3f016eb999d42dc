"""Resolved bundles and an installed fake of SGLang for the tests of serving."""

from __future__ import annotations

import json
import os
from pathlib import Path

from angelspec.core.acceptance import AcceptanceCounts
from angelspec.core.drafter_config import BlockDrafterConfig, MtpDrafterConfig
from angelspec.core.geometry import Rope
from angelspec.core.step_costs import MeasuredFor, StepCosts
from angelspec.serving.answers import EngineCounters, EngineState, ServedDrafter
from angelspec.serving.bench_result import (
    CONTROL,
    BenchResult,
    BenchSettings,
    Choice,
    PromptSet,
    Window,
    cells_of,
)
from angelspec.serving.plan import Hardware, ServePlan, make_plan
from angelspec.serving.resolving import Examined, FoundDrafter, FoundTarget, Parts, compose_bundle, resolve_bundle

ROOT = Path(__file__).parents[1]
CPU = Hardware("cpu", "2 cores")
GPU = Hardware("cuda", "one GPU", (9, 0))
TARGET = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 6,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 50, "dtype": "bfloat16",
    "tie_word_embeddings": True, "rms_norm_eps": 1e-5,
}  # fmt: skip
SHAPE = {
    "hidden_size": 32, "intermediate_size": 64, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "vocab_size": 50,
    "rms_norm_eps": 1e-5, "max_position_embeddings": 128, "rope": Rope(theta=1e4), "target_hidden_size": 32,
    "target_num_layers": 6,
}  # fmt: skip
MTP = MtpDrafterConfig(**SHAPE, num_depths=3)
DFLY = BlockDrafterConfig(
    **SHAPE, context="hybrid", head="correction", correction_intermediate_size=8, num_layers=2,
    target_layer_ids=(1, 3), block_size=8, mask_token_id=49,
)  # fmt: skip


def target_folder(folder: Path, **changes) -> Path:
    """A folder with a target's config.json and nothing else."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**TARGET, **changes}))
    return folder


def fake_parts(folder: Path, *, problems=(), manifests=None, mode="no-think", release=None, digest="d" * 64) -> Parts:
    """Parts that find ``mtp*`` and ``dfly*`` below ``folder``; nothing is loaded.

    Args:
        problems: of every drafter's files.
        manifests: by the name of a drafter's folder.
    """
    manifests = manifests or {}

    def find_drafter(text, *, bare_paths=True):
        place = Path(text)
        place.mkdir(parents=True, exist_ok=True)
        algorithm = "mtp" if place.name.startswith("mtp") else "dfly"
        return FoundDrafter(place, algorithm, mode, release)

    def examine(found, geometry):
        config = MTP if found.algorithm == "mtp" else DFLY
        conflicts = config.conflicts_with(geometry)
        return Examined((*problems, *conflicts), (), config, manifests.get(found.folder.name), 1000)

    return Parts(
        find_target=lambda text, bare_paths=True: FoundTarget(
            Path(text) if Path(text).is_absolute() else folder / "target", "smollm2", "org/tiny"
        ),
        find_drafter=find_drafter,
        examine=examine,
        digest=lambda place, template: digest,
    )


def resolved_bundle(folder: Path, names=("mtp", "dfly"), *, target_name=None, **changes):
    """A resolved bundle of tiny parts; ``target_name`` is what the user calls the target, if not by its folder."""
    parts = fake_parts(folder, **changes)
    target = target_folder(folder / "target")
    bundle = compose_bundle(
        target_name or str(target), [str(folder / name) for name in names], parts=parts, name="tiny"
    )
    return resolve_bundle(bundle, parts=parts)


def plan_of(resolved, *, port=30000, hardware=CPU, arguments=()) -> ServePlan:
    """A plan of it."""
    return make_plan(
        resolved, arguments=arguments, host="127.0.0.1", port=port, hardware=hardware, engine_version="0.5.23"
    )


def install_fake_sglang(folder: Path, monkeypatch, *, version="0.5.23", plugin=True, behaviour=None) -> Path:
    """A package ``sglang`` whose launcher is ``fake_sglang``, visible to this process and to its children."""
    package = folder / "site" / "sglang"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "launch_server.py").write_text("import sys\nfrom fake_sglang import main\nmain(sys.argv[1:])\n")
    facts = {f"sglang-{version}.dist-info": ("sglang", version, "")}
    if plugin:
        points = "[sglang.srt.plugins]\nangelspec = sglang_ext.plugin:register\n"
        facts["fake_plugin-1.dist-info"] = ("fake-plugin", "1", points)
    for name, (project, number, points) in facts.items():
        (folder / "site" / name).mkdir()
        (folder / "site" / name / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project}\nVersion: {number}\n")
        (folder / "site" / name / "entry_points.txt").write_text(points)
    monkeypatch.syspath_prepend(str(folder / "site"))
    paths = [str(folder / "site"), str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in paths if path))
    monkeypatch.setenv("FAKE_SGLANG", json.dumps(behaviour or {}))
    monkeypatch.setenv("ANGELSPEC_CACHE", str(folder / "cache"))
    return folder / "site"


def window_of(choice, repeat, *, tokens, seconds, **changes) -> Window:
    """A window of a load test."""
    values = {
        "traffic": "code", "concurrency": 4, "choice": choice, "repeat": repeat, "place": 0, "seconds": seconds,
        "tokens": tokens, "requests": 4, "stopped": 4, "user_tokens_per_second": 10.0, "first_token_median": 0.2,
        "acceptance": AcceptanceCounts(generated_tokens=20, verify_steps=10, proposed_tokens=30, drafted_tokens=70),
        "speculative_steps": 10, "failures": (), "counters": None, "too_short": False, "cache_emptied": True,
    }  # fmt: skip
    return Window(**{**values, **changes})


def engine_state(*drafters: ServedDrafter, target: str | None = "ab12" * 16) -> EngineState:
    """A server's state; ``target`` is the content hash of what it serves."""
    here = MeasuredFor(hardware="a machine", engine="SGLang", target=target) if target else None
    counters = dict.fromkeys(EngineCounters.model_fields, 0)
    return EngineState(
        bundle="tiny", target="/models/tiny", mode_family="smollm2", speculation="on", drafters=drafters,
        costs=StepCosts(measured_for=here), counters=counters,
    )  # fmt: skip


def bench_result() -> BenchResult:
    """Two rounds of plain decoding, DFly and a control at 4 users; DFly's first window is too short."""
    counters = EngineCounters(
        steps=100, speculative_steps=75, mixed_steps=20, cut_steps=50, draft_seconds=1.0, plan_seconds=0.5,
        verify_seconds=8.0, other_seconds=0.5, nan_rows=3, costed_seconds=8.0, misjudged_seconds=0.4,
    )  # fmt: skip
    windows = [
        window_of("ar", 0, tokens=100, seconds=10.0),
        window_of("dfly", 0, tokens=200, seconds=10.0, counters=counters, too_short=True),
        window_of(CONTROL, 0, tokens=110, seconds=10.0, acceptance=AcceptanceCounts(), speculative_steps=0),
        window_of("ar", 1, tokens=100, seconds=10.0),
        window_of("dfly", 1, tokens=180, seconds=10.0, failures=("p1: gone",)),
        window_of(CONTROL, 1, tokens=110, seconds=10.0, acceptance=AcceptanceCounts(), speculative_steps=0),
    ]
    return BenchResult(
        created="2026-11-30T00:00:00+00:00", url="http://s", control_url="http://c", engine_version="0.5.23",
        control_version="0.5.23", engine=None, engine_arguments={"dtype": "float32"}, control_arguments=None,
        hardware="a machine", command="angelspec bench serve --url http://s",
        settings=BenchSettings(
            concurrency=(4,), requests=8, max_tokens=32, temperature=0.0, repeats=2, seed=0, mode=None,
            minimum_seconds=10.0,
        ),
        baseline="ar",
        choices=(Choice(name="ar", route="ar"), Choice(name="dfly", route="dfly"), Choice(name=CONTROL, route=None)),
        prompt_sets=(PromptSet(name="code", source="file:c", prompts=5, workloads={"code": 5}, digest="d" * 64),),
        windows=tuple(windows),
        cells=tuple(cells_of(windows, baseline="ar")),
    )  # fmt: skip
