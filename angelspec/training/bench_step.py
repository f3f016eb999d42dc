"""Measures one training step; run as a module it is the process of its own that a case is measured in.

No model is downloaded: the features, head and embedding are random with the target's shape, and so are the weights of
a target that is measured online.

Shapes: R rows, T tokens of a row, F width of the taps, D hidden, N positions, V vocabulary.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import psutil
import torch
import torch.nn.functional as F
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from angelspec.core.errors import AngelspecError, TrainingError
from angelspec.core.geometry import TargetGeometry
from angelspec.training.bench_cases import BenchCase
from angelspec.training.distributed import Ranks
from angelspec.training.families import training_step
from angelspec.training.features import Features, FeatureSource, OnlineFeatures
from angelspec.training.optimisers import Optimiser
from angelspec.training.run import new_drafter
from angelspec.training.update import compute_gradients, now

_LARGEST_ONLINE_TARGET = 1_000_000_000
"""Parameters above which a random target is not built to be timed."""


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
    """Largest resident size of the process while it trained, libraries included; on a GPU of its memory there."""
    peak_training_bytes: int
    """The same, less the resident size before anything was built."""
    shares: dict[str, float]
    """Of the step's time: target (only online), backbone, head (losses included), optimiser, other."""
    num_parameters: int
    threads: int
    device: str = "cpu"
    repeats: int
    note: str = ""


def measure(case: BenchCase) -> BenchResult:
    """Measure a case in this process."""
    device = torch.device(case.device)
    before = psutil.Process().memory_info().rss if device.type == "cpu" else 0
    torch.manual_seed(case.seed)
    world = _World(case)
    stepper = _Stepper(case, world)
    for _ in range(2):
        stepper.step()
    peak_bytes = _peak_bytes(device)
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
        started = now(device)
        parts.append(stepper.step())
        step_seconds.append(now(device) - started)
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
        device=device.type,
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
        head_VD = torch.randn(geometry.vocab_size, geometry.hidden_size, generator=generator) * scale
        self.embedding_VD = self.head_VD = head_VD.to(case.device)
        if not geometry.tied_head:
            self.embedding_VD = (torch.randn(head_VD.shape, generator=generator) * scale).to(case.device)
        self.note = ""
        self.features: FeatureSource = _SyntheticFeatures(case, generator)
        if case.online and geometry.num_parameters > _LARGEST_ONLINE_TARGET:
            self.note = f"target not measured: {geometry.num_parameters / 1e9:.1f}B parameters"
        elif case.online:
            self.features = OnlineFeatures(
                _random_target(geometry, case.device), self.rows, layer_ids=case.drafter.target_layer_ids
            )


def _random_target(geometry: TargetGeometry, device: str) -> SimpleNamespace:
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
    model = AutoModel.from_config(config, dtype=torch.bfloat16).eval().requires_grad_(False).to(device)

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

    return SimpleNamespace(device=torch.device(device), dtype=torch.bfloat16, geometry=geometry, forward=forward)


class _Stepper:
    """A whole training step, as the loop makes it."""

    def __init__(self, case: BenchCase, world: _World) -> None:
        self.case = case
        self.drafter = new_drafter(case.drafter, seed=case.seed, device=case.device)
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
        device = torch.device(self.case.device)
        started = now(device)
        self.optimiser.set_factor(1e-3)
        self.optimiser.step()
        self.optimiser.zero_grad()
        self.positions = gradients.num_positions
        return {**gradients.seconds, "optimiser": now(device) - started}


class _Yardstick:
    """One forward and backward of the frozen head with plain cross-entropy, float32."""

    def __init__(self, world: _World, *, positions: int) -> None:
        generator = torch.Generator().manual_seed(1)
        vocabulary, width = world.head_VD.shape
        self.head_VD = world.head_VD
        self.hidden_ND = torch.randn(positions, width, generator=generator).to(self.head_VD.device).requires_grad_()
        self.labels_N = torch.randint(0, vocabulary, (positions,), generator=generator).to(self.head_VD.device)

    def __call__(self) -> float:
        self.hidden_ND.grad = None
        started = now(self.head_VD.device)
        F.cross_entropy(self.hidden_ND @ self.head_VD.T, self.labels_N).backward()
        return now(self.head_VD.device) - started


def _peak_bytes(device: torch.device) -> int:
    """The largest resident size of this process since it started (Linux), or the size now elsewhere; of a GPU's memory
    the largest part that was allocated."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii")
    except OSError:
        return psutil.Process().memory_info().rss
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:"))


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
