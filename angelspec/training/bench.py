"""How fast a training step is on this machine, and what it takes: the work behind ``angelspec bench train``.

A step is measured in positions per second and in *yardsticks*: one forward and backward of the frozen vocabulary head
with plain cross-entropy in float32 on as many positions, which no method of training through the full vocabulary can
do without. Yardstick and step take turns in one process, so a busy machine slows both.

Every case runs in a process of its own, because a process has one peak of memory.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from angelspec.core.errors import MissingRequirement, TrainingError
from angelspec.training.bench_cases import BenchCase, Precision, Reference, recipe_cases, reference_cases
from angelspec.training.bench_step import BenchResult


def bench_training(
    recipe: str | None = None,
    *,
    overrides: Sequence[str] = (),
    preset: str | None = None,
    objectives: Sequence[str] = (),
    matmuls: Sequence[Precision] = (),
    reference: Reference = "dfly",
    repeats: int = 5,
    device: str = "cpu",
) -> list[BenchResult]:
    """Measure the stages of a recipe, or a reference configuration, on a device.

    Raises:
        RecipeError: the recipe is wrong.
        TrainingError: a case failed; with its message.
        MissingRequirement: a case was killed, most likely for want of memory.
    """
    if recipe is None:
        cases = reference_cases(objectives, matmuls, reference=reference, repeats=repeats)
    else:
        cases = recipe_cases(
            recipe, overrides=overrides, preset=preset, matmuls=matmuls, repeats=repeats, device=device
        )
    return [run_apart(case.model_copy(update={"device": device})) for case in cases]


def run_apart(case: BenchCase) -> BenchResult:
    """Measure a case in a process of its own."""
    root = str(Path(__file__).resolve().parents[2])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))}
    child = subprocess.run(
        [sys.executable, "-m", "angelspec.training.bench_step", str(torch.get_num_threads())],
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


def print_bench(results: Sequence[BenchResult]) -> None:
    """Print the results as a table."""
    from rich.console import Console
    from rich.table import Table

    where = f"{results[0].threads} threads" if results and results[0].device == "cpu" else "a GPU"
    table = Table(title=f"one training step, {where}" if results else None)
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
