"""How fast a training step is on this machine, and what it takes: the work behind ``angelspec bench train``.

A step is measured in positions per second and in *yardsticks*: one forward and backward of the frozen vocabulary head
with plain cross-entropy in float32 on as many positions, which no method of training through the full vocabulary can
do without. Yardstick and step take turns in one process, so a busy machine slows both.

No model is downloaded: the features, head and embedding are random with the target's shape, and so are the weights of
a target that is measured online. Every case runs in a process of its own, because a process has one peak of memory.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Literal, get_args

import psutil
import torch
import torch.nn.functional as F
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from angelspec.core.drafter_config import BlockDrafterConfig, DrafterConfig, MtpDrafterConfig
from angelspec.core.errors import AngelspecError, MissingRequirement, TrainingError
from angelspec.core.geometry import TargetGeometry, spread_layer_ids
from angelspec.core.known_targets import KNOWN_TARGETS
from angelspec.core.objective import Objective
from angelspec.core.recipe import OptimizerSection
from angelspec.core.recipe_files import load_recipe
from angelspec.training.distributed import Ranks
from angelspec.training.families import training_step
from angelspec.training.features import Features, FeatureSource, OnlineFeatures
from angelspec.training.optimisers import Optimiser
from angelspec.training.precision import product_dtype
from angelspec.training.run import new_drafter
from angelspec.training.update import compute_gradients

Precision = Literal["float32", "bfloat16"]

Reference = Literal["dfly", "mtp"]
REFERENCES: tuple[Reference, ...] = get_args(Reference)
OBJECTIVES: dict[Reference, dict[str, Objective]] = {
    "dfly": {
        "ce": Objective(ce=1.0, position_weights="d-pace"),
        "lk": Objective(lk=1.0, position_weights="d-pace"),
        "e2e": Objective(end_to_end_tv=1.0),
    },
    "mtp": {
        "ce": Objective(ce=1.0),
        "lk": Objective(lk=1.0, top_k=10_000, renormalise=True),
        "e2e": Objective(end_to_end_tv=1.0, top_k=10_000, renormalise=True),
    },
}
"""Objectives of the reference configurations. DFly: D-PACE cross-entropy, hybrid LK, end-to-end TV. MTP: cross-entropy,
and hybrid LK and end-to-end TV on the teacher's 10000 most probable tokens."""
_LARGEST_ONLINE_TARGET = 1_000_000_000
"""Parameters above which a random target is not built to be timed."""


class BenchCase(BaseModel):
    """One step to measure."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    objective_name: str
    objective: Objective
    drafter: DrafterConfig
    target: TargetGeometry
    matmul: Precision = "float32"
    """Of the drafter's and the head's matrix products."""
    row_length: int = 512
    rows_per_step: int = 1
    rows_per_micro_batch: int = 1
    anchors_per_row: int = 64
    """Read by block drafters."""
    on_policy: bool = True
    """Read by MTP."""
    recompute_depths: bool = False
    """Read by MTP."""
    optimizer: OptimizerSection = OptimizerSection()
    online: bool = False
    """Whether the target runs inside the step."""
    repeats: int = Field(default=5, ge=1)
    yardstick: bool = True
    """Whether the step is measured in yardsticks, which take as long again."""
    seed: int = 0


class BenchResult(BaseModel):
    """What one case takes."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    objective: str
    matmul: str
    """Precision of the drafter's products, and of the head's after a plus where it differs."""
    row_length: int
    positions_per_step: int
    """Supervised positions."""
    positions_per_second: float
    step_seconds: float
    """Median."""
    yardstick_seconds: float | None = None
    """Median; the yardstick is always float32. None, as the next two: not measured."""
    yardsticks: float | None = None
    """Median step by median yardstick."""
    yardsticks_of_minima: float | None = None
    """Fastest step by fastest yardstick."""
    peak_process_bytes: int
    """Largest resident size of the process while it trained, libraries included."""
    peak_training_bytes: int
    """The same, less the resident size before anything was built."""
    shares: dict[str, float]
    """Of the step's time: target (only online), backbone, head (losses included), optimiser, other."""
    num_parameters: int
    threads: int
    repeats: int
    note: str = ""


def reference_drafter(reference: Reference) -> DrafterConfig:
    """The drafters of the published comparison, for SmolLM2's geometry: DFly of 5 layers, 5 taps and blocks of 8, or
    dense MTP of 3 depths."""
    target = KNOWN_TARGETS["smollm2-135m-instruct"]
    geometry = target.geometry
    shape = {
        "hidden_size": geometry.hidden_size,
        "intermediate_size": geometry.intermediate_size,
        "num_heads": geometry.num_heads,
        "num_kv_heads": geometry.num_kv_heads,
        "head_dim": geometry.head_dim,
        "vocab_size": geometry.vocab_size,
        "rms_norm_eps": geometry.rms_norm_eps,
        "max_position_embeddings": geometry.max_position_embeddings,
        "rope": geometry.rope,
        "target_hidden_size": geometry.hidden_size,
        "target_num_layers": geometry.num_layers,
    }
    if reference == "mtp":
        return MtpDrafterConfig(**shape, num_depths=3)
    return BlockDrafterConfig(
        **shape,
        context="hybrid",
        head="correction",
        num_layers=5,
        target_layer_ids=spread_layer_ids(geometry.num_layers, 5),
        block_size=8,
        mask_token_id=target.mask_token_ids[0],
        correction_intermediate_size=geometry.hidden_size,
    )


def reference_cases(
    objectives: Sequence[str] = (),
    matmuls: Sequence[Precision] = (),
    *,
    reference: Reference = "dfly",
    repeats: int = 5,
) -> list[BenchCase]:
    """The configurations of the published comparison: one row of 512 tokens (DFly: 64 anchors), AdamW."""
    return [
        BenchCase(
            name=f"reference {reference}",
            objective_name=objective,
            objective=OBJECTIVES[reference][objective],
            drafter=reference_drafter(reference),
            target=KNOWN_TARGETS["smollm2-135m-instruct"].geometry,
            matmul=matmul,
            repeats=repeats,
        )
        for matmul in (matmuls or ("float32", "bfloat16"))
        for objective in (objectives or tuple(OBJECTIVES[reference]))
    ]


def recipe_cases(
    name_or_path: str,
    *,
    overrides: Sequence[str] = (),
    preset: str | None = None,
    matmuls: Sequence[Precision] = (),
    repeats: int = 5,
) -> list[BenchCase]:
    """One case per stage of a recipe, in its own precision unless ``matmuls`` names others.

    Raises:
        RecipeError: the recipe is wrong.
    """
    recipe = load_recipe(name_or_path, preset=preset, overrides=overrides)
    training = recipe.training
    own = str(product_dtype(training)).removeprefix("torch.")
    return [
        BenchCase(
            name=recipe.name,
            objective_name=stage.name,
            objective=stage.objective,
            drafter=recipe.drafter_config(),
            target=recipe.target.geometry,
            matmul=matmul,
            row_length=recipe.pack.row_length,
            rows_per_step=training.rows_per_step,
            rows_per_micro_batch=training.rows_per_micro_batch,
            anchors_per_row=training.anchors_per_row,
            on_policy=training.on_policy,
            recompute_depths=training.recompute_depths,
            optimizer=training.optimizer,
            online=training.features == "online",
            repeats=repeats,
        )
        for matmul in (matmuls or (own,))
        for stage in training.stages
    ]


def bench_training(
    recipe: str | None = None,
    *,
    overrides: Sequence[str] = (),
    preset: str | None = None,
    objectives: Sequence[str] = (),
    matmuls: Sequence[Precision] = (),
    reference: Reference = "dfly",
    repeats: int = 5,
) -> list[BenchResult]:
    """Measure the stages of a recipe, or a reference configuration.

    Raises:
        RecipeError: the recipe is wrong.
        TrainingError: a case failed; with its message.
        MissingRequirement: a case was killed, most likely for want of memory.
    """
    if recipe is None:
        cases = reference_cases(objectives, matmuls, reference=reference, repeats=repeats)
    else:
        cases = recipe_cases(recipe, overrides=overrides, preset=preset, matmuls=matmuls, repeats=repeats)
    return [run_apart(case) for case in cases]


def run_apart(case: BenchCase) -> BenchResult:
    """Measure a case in a process of its own."""
    root = str(Path(__file__).resolve().parents[2])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))}
    child = subprocess.run(
        [sys.executable, "-m", "angelspec.training.bench", str(torch.get_num_threads())],
        input=case.model_dump_json(),
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    what = f"measuring {case.name} with {case.objective_name}"
    if child.returncode == -signal.SIGKILL:
        raise MissingRequirement(
            f"{what} was killed, most likely for want of memory",
            mend="measure a smaller case, for example --set training.rows_per_micro_batch=1",
        )
    if child.returncode:
        reason = (child.stderr.strip().splitlines() or [f"status {child.returncode}"])[-1]
        raise TrainingError(f"{what} failed: {reason}")
    return BenchResult.model_validate(json.loads(child.stdout.strip().splitlines()[-1]))


def measure(case: BenchCase) -> BenchResult:
    """Measure a case in this process."""
    before = psutil.Process().memory_info().rss
    torch.manual_seed(case.seed)
    world = _World(case)
    stepper = _Stepper(case, world)
    peak = _PeakMemory()
    for _ in range(2):
        stepper.step()
    peak_bytes = peak.read()
    if not stepper.positions:
        raise TrainingError(
            f"rows of {case.row_length} tokens host no draft of {case.drafter.num_proposals} tokens after an anchor"
        )
    yardstick = _Yardstick(world, positions=stepper.positions) if case.yardstick else None
    if yardstick is not None:
        yardstick()
    step_seconds, yardstick_seconds, parts = [], [], []
    for _ in range(case.repeats):
        if yardstick is not None:
            yardstick_seconds.append(yardstick())
        started = time.perf_counter()
        parts.append(stepper.step())
        step_seconds.append(time.perf_counter() - started)
    step = statistics.median(step_seconds)
    units = {}
    if yardstick_seconds:
        unit = statistics.median(yardstick_seconds)
        units = {
            "yardstick_seconds": unit,
            "yardsticks": step / unit,
            "yardsticks_of_minima": min(step_seconds) / min(yardstick_seconds),
        }
    shares = {
        name: round(sum(part.get(name, 0.0) for part in parts) / sum(step_seconds), 4)
        for name in ("target", "backbone", "head", "optimiser")
    }
    if not case.online:
        shares.pop("target")
    shares["other"] = round(1.0 - sum(shares.values()), 4)
    return BenchResult(
        name=case.name,
        objective=case.objective_name,
        matmul=case.matmul,
        row_length=case.row_length,
        positions_per_step=stepper.positions,
        positions_per_second=stepper.positions / step,
        step_seconds=step,
        **units,
        peak_process_bytes=peak_bytes,
        peak_training_bytes=peak_bytes - before,
        shares=shares,
        num_parameters=stepper.drafter.num_parameters,
        threads=torch.get_num_threads(),
        repeats=case.repeats,
        note=world.note,
    )


@dataclass
class _Rows:
    """Packed rows of one whole supervised document each."""

    tokens_RT: Tensor
    loss_mask_RT: Tensor
    document_RT: Tensor
    position_RT: Tensor


class _SyntheticFeatures:
    def __init__(self, case: BenchCase, generator: torch.Generator) -> None:
        self.layer_ids = case.drafter.target_layer_ids
        shape, hidden_size = (case.rows_per_step, case.row_length), case.target.hidden_size
        self._taps = torch.randn(*shape, len(self.layer_ids) * hidden_size, generator=generator)
        self._hidden = torch.randn(*shape, hidden_size, generator=generator)

    def fetch(self, row_ids: Sequence[int]) -> Features:
        index = torch.as_tensor(list(row_ids))
        return Features(self._taps[index], self._hidden[index], torch.ones(len(index), dtype=torch.bool))


class _World:
    """Everything of a case that is given: rows, features, embedding and head."""

    def __init__(self, case: BenchCase) -> None:
        generator = torch.Generator().manual_seed(case.seed)
        shape, geometry = (case.rows_per_step, case.row_length), case.target
        self.rows = _Rows(
            tokens_RT=torch.randint(0, geometry.vocab_size, shape, generator=generator, dtype=torch.int32),
            loss_mask_RT=torch.ones(shape, dtype=torch.bool),
            document_RT=torch.arange(shape[0], dtype=torch.int32)[:, None].expand(shape).contiguous(),
            position_RT=torch.arange(shape[1], dtype=torch.int32)[None].expand(shape).contiguous(),
        )
        scale = 3.0 / geometry.hidden_size**0.5
        self.head_VD = torch.randn(geometry.vocab_size, geometry.hidden_size, generator=generator) * scale
        self.embedding_VD = self.head_VD
        if not geometry.tied_head:
            self.embedding_VD = torch.randn(self.head_VD.shape, generator=generator) * scale
        self.note = ""
        self.features: FeatureSource = _SyntheticFeatures(case, generator)
        if case.online and geometry.num_parameters > _LARGEST_ONLINE_TARGET:
            self.note = f"target not measured: {geometry.num_parameters / 1e9:.1f}B parameters"
        elif case.online:
            self.features = OnlineFeatures(_random_target(geometry), self.rows, layer_ids=case.drafter.target_layer_ids)


def _random_target(geometry: TargetGeometry) -> SimpleNamespace:
    """A target of random weights in bfloat16, which is only good for its time."""
    from transformers import AutoConfig, AutoModel

    config = AutoConfig.for_model(
        geometry.architecture,
        vocab_size=geometry.vocab_size,
        hidden_size=geometry.hidden_size,
        intermediate_size=geometry.intermediate_size,
        num_hidden_layers=geometry.num_layers,
        num_attention_heads=geometry.num_heads,
        num_key_value_heads=geometry.num_kv_heads,
        head_dim=geometry.head_dim,
        max_position_embeddings=geometry.max_position_embeddings,
    )
    model = AutoModel.from_config(config, dtype=torch.bfloat16).eval().requires_grad_(False)

    def forward(tokens_BT, *, positions_BT, layer_ids):
        output = model(
            input_ids=tokens_BT,
            position_ids=positions_BT,
            output_hidden_states=True,
            use_cache=False,
        )
        hidden_BTD = output.last_hidden_state
        taps = [output.hidden_states[layer + 1] for layer in layer_ids]
        taps_BTF = torch.cat(taps, -1) if taps else hidden_BTD[..., :0]
        return SimpleNamespace(taps_BTF=taps_BTF, hidden_BTD=hidden_BTD)

    return SimpleNamespace(device=torch.device("cpu"), dtype=torch.bfloat16, geometry=geometry, forward=forward)


class _Stepper:
    """A whole training step, as the loop makes it."""

    def __init__(self, case: BenchCase, world: _World) -> None:
        self.case = case
        self.drafter = new_drafter(case.drafter, seed=case.seed)
        self.optimiser = Optimiser(self.drafter, case.optimizer)
        head_VD = world.head_VD.to(getattr(torch, case.matmul))
        self.forward = training_step(
            self.drafter,
            rows=world.rows,
            features=world.features,
            embedding_VD=world.embedding_VD,
            head_VD=head_VD,
            anchors_per_row=case.anchors_per_row,
            on_policy=case.on_policy,
            recompute_depths=case.recompute_depths,
            seed=case.seed,
            compute_dtype=getattr(torch, case.matmul),
            timed=True,
        )
        rows, size = list(range(case.rows_per_step)), case.rows_per_micro_batch
        self.micro_batches = [rows[start : start + size] for start in range(0, len(rows), size)]
        self.number = 0
        self.positions = 0

    def step(self) -> dict[str, float]:
        number = self.number = self.number + 1
        gradients = compute_gradients(
            self.micro_batches,
            lambda row_ids: self.forward(row_ids, objective=self.case.objective, step=number),
            model=self.drafter,
            ranks=Ranks(),
            clip_norm=self.case.optimizer.clip_norm,
        )
        started = time.perf_counter()
        self.optimiser.set_factor(1e-3)
        self.optimiser.step()
        self.optimiser.zero_grad()
        self.positions = gradients.num_positions
        return {**gradients.seconds, "optimiser": time.perf_counter() - started}


class _Yardstick:
    """One forward and backward of the frozen head with plain cross-entropy, float32."""

    def __init__(self, world: _World, *, positions: int) -> None:
        generator = torch.Generator().manual_seed(1)
        vocabulary, width = world.head_VD.shape
        self.head_VD = world.head_VD
        self.hidden_ND = torch.randn(positions, width, generator=generator).requires_grad_()
        self.labels_N = torch.randint(0, vocabulary, (positions,), generator=generator)

    def __call__(self) -> float:
        self.hidden_ND.grad = None
        started = time.perf_counter()
        F.cross_entropy(self.hidden_ND @ self.head_VD.T, self.labels_N).backward()
        return time.perf_counter() - started


class _PeakMemory:
    """The largest resident size of this process since it started (Linux), or the size now elsewhere."""

    def read(self) -> int:
        try:
            status = Path("/proc/self/status").read_text(encoding="ascii")
        except OSError:
            return psutil.Process().memory_info().rss
        return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:"))


def print_bench(results: Sequence[BenchResult]) -> None:
    """Print the results as a table."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"one training step, {results[0].threads} threads" if results else None)
    for column in ("case", "objective", "products", "positions/s", "yardsticks", "peak memory", "time"):
        table.add_column(column, justify="left" if column in ("case", "objective", "products", "time") else "right")
    for result in results:
        table.add_row(
            result.name,
            result.objective,
            result.matmul,
            f"{result.positions_per_second:.0f}",
            "–" if result.yardsticks is None else f"{result.yardsticks:.2f}",
            f"{result.peak_process_bytes / 2**30:.2f} GiB",
            " ".join(f"{name} {share:.0%}" for name, share in result.shares.items())
            + (f" ({result.note})" if result.note else ""),
        )
    console = Console()
    console = console if console.is_terminal else Console(width=140)
    console.print(table)
    console.print(
        "A yardstick is one forward and backward of the frozen vocabulary head with cross-entropy, in float32 on the "
        "same positions, measured in turns with the steps.",
        highlight=False,
    )


def _main() -> int:
    torch.set_num_threads(int(sys.argv[1]))
    try:
        result = measure(BenchCase.model_validate_json(sys.stdin.read()))
    except AngelspecError as error:
        print(error.message, file=sys.stderr)
        return 1
    print(result.model_dump_json())
    return 0


if __name__ == "__main__":
    raise SystemExit(_main())
