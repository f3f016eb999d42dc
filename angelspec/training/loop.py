"""The training loop. It knows rows, steps, stages and checkpoints, and no algorithm.

A run is a row of stages (cold start, then end-to-end) over one model and one optimiser. What happens in a step is a
pure function of (seed, step, parameters): row order and anchors are seeded, not drawn from a running generator. A
checkpoint therefore holds tensors and counters only, and a run that was stopped anywhere and resumed goes through the
same numbers, bit for bit on a CPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor, nn

from angelspec.core.errors import CheckpointError, TrainingError
from angelspec.core.recipe import TrainingSection, TrainingStage
from angelspec.training.checkpoints import Checkpoints, Reason, Snapshot
from angelspec.training.distributed import Ranks
from angelspec.training.held_out import HeldOutResult
from angelspec.training.interruption import Interruption
from angelspec.training.metrics import MetricsLog
from angelspec.training.optimisers import Optimiser
from angelspec.training.row_order import RowOrder
from angelspec.training.schedules import learning_rate_factor
from angelspec.training.steps import IDLE_ROW, TrainingStep
from angelspec.training.update import Gradients, compute_gradients

Report = Callable[[int, int, str], None]
"""Called after every step with steps done, steps in all (an upper bound where a stage may end early) and a note."""


@dataclass(frozen=True)
class TrainingResult:
    """How a call of ``train`` ended."""

    status: Literal["finished", "interrupted"]
    was_finished: bool
    """Whether the run had been finished before this call, which then changed nothing."""
    step: int
    """Updates done, skipped ones included."""
    best_step: int | None
    best_accepted_length: float | None
    """Largest held-out accepted length, bonus token included."""
    skipped_steps: int
    """Steps whose loss or gradient was not finite."""
    empty_steps: int
    """Steps that supervised nothing, because all their rows were refused."""
    refused_rows: int
    """Rows that were left out of a step because their features were not finite, counted each time."""
    supervised_positions: int
    """Block slots, or depths, that entered the loss, over all steps that were applied."""


class Progress(BaseModel):
    """Everything of a run that changes and is no tensor; saved in every checkpoint."""

    model_config = ConfigDict(extra="forbid")

    step: int = 0
    stage: int = 0
    """Index of the current stage; the number of stages once the run is finished."""
    stage_started: int = 0
    """Step at which it began."""
    stage_best: float | None = None
    """Best held-out accepted length of this stage, by which a plateau is told."""
    stale_evaluations: int = 0
    """Held-out evaluations of this stage since the last gain."""
    best_step: int | None = None
    best_accepted_length: float | None = None
    skipped_steps: int = 0
    empty_steps: int = 0
    refused_rows: int = 0
    supervised_positions: int = 0
    rows_per_step: int = 0
    """Over all ranks; a resumed run must keep it."""
    window: dict[str, list[float]] = {}
    """Sums since the last logged step."""


@dataclass
class _Clock:
    """What is measured, and therefore neither saved nor reproducible."""

    started: float = field(default_factory=time.perf_counter)
    seconds: dict[str, float] = field(default_factory=dict)
    positions: int = 0

    def add(self, seconds: dict[str, float]) -> None:
        for key, value in seconds.items():
            self.seconds[key] = self.seconds.get(key, 0.0) + value


def train(
    section: TrainingSection,
    *,
    model: nn.Module,
    step: TrainingStep,
    evaluate: Callable[[], HeldOutResult] | None,
    folder: Path,
    run_id: str,
    ranks: Ranks | None = None,
    report: Report | None = None,
) -> TrainingResult:
    """Train ``model`` through all stages, or go on where an earlier call stopped.

    Args:
        section: the recipe's training section.
        model: parameters as they should be at step 0; replaced by the newest checkpoint's where there is one.
        step: forward pass of the model's family.
        evaluate: held-out accepted length of the model as it is; None: no best checkpoint and no plateaus.
        folder: of the run: ``checkpoints/`` and ``metrics.jsonl``.
        run_id: names everything the weights depend on (recipe, data, target); checkpoints of another are refused.
        ranks: this process among several.
        report: see ``Report``.

    Raises:
        TrainingError: nothing to train on, or too many non-finite steps.
        CheckpointError: the folder's checkpoints can't be resumed.
        MissingRequirement: the tracker isn't installed.
    """
    with torch.random.fork_rng():
        torch.manual_seed(section.seed)  # nothing here draws from it; a model of another family may
        return _Run(section, model, step, evaluate, folder, run_id, ranks or Ranks(), report).go()


class _Run:
    def __init__(
        self,
        section: TrainingSection,
        model: nn.Module,
        step: TrainingStep,
        evaluate: Callable[[], HeldOutResult] | None,
        folder: Path,
        run_id: str,
        ranks: Ranks,
        report: Report | None,
    ) -> None:
        self.section, self.model, self.forward, self.evaluate = section, model, step, evaluate
        self.folder, self.ranks, self.report = folder, ranks, report
        self.checkpoints = Checkpoints(
            folder / "checkpoints", run_id=run_id, keep=section.keep_checkpoints, ranks=ranks
        )
        self.optimiser = Optimiser(model, section.optimizer)
        self.rows_per_step = section.rows_per_step * ranks.data_size
        self.progress = Progress(rows_per_step=self.rows_per_step)
        rows = step.trainable_rows()
        if not rows:
            raise TrainingError(
                "no packed row can be trained on: every document is too short, or nothing in it is supervised",
                mend="look at the pack stage's counts; use longer answers, or a drafter that proposes fewer tokens",
            )
        self.orders = [
            RowOrder(
                rows,
                rows_per_step=self.rows_per_step,
                seed=section.seed,
                stage=number,
                epochs=stage.epochs,
                steps=stage.steps,
            )
            for number, stage in enumerate(section.stages)
        ]
        self.clock = _Clock()
        self.log: MetricsLog | None = None

    # ---- the run

    def go(self) -> TrainingResult:
        snapshot = self.checkpoints.latest()
        if snapshot is not None:
            self._resume(snapshot)
        if self.progress.stage == len(self.section.stages):
            return self._result("finished", was_finished=True)
        if self.ranks.is_first:
            self.log = MetricsLog(self.folder, resume_step=self.progress.step, tracker=self.section.tracker)
        try:
            with Interruption() as interruption:
                if self.progress.step == 0 and self.evaluate is not None:
                    self._write("held_out", self._evaluate().record())
                while self.progress.stage < len(self.section.stages):
                    if self._advance(interruption):
                        return self._result("interrupted")
        finally:
            if self.log is not None:
                self.log.close()
        return self._result("finished")

    def _advance(self, interruption: Interruption) -> bool:
        """One step with all that is due after it; whether the run is to stop."""
        progress, section = self.progress, self.section
        stage, order = section.stages[progress.stage], self.orders[progress.stage]
        in_stage = progress.step - progress.stage_started
        name = stage.name
        self._set_learning_rate(stage, in_stage, order.num_steps)
        gradients = self._update(order.step(in_stage), stage)
        progress.step += 1
        self._add_to_window(gradients)
        stage_ends = in_stage + 1 == order.num_steps
        if progress.step % section.log_every == 0 or stage_ends:
            self._log_window(name, epoch=order.epoch_of(in_stage + 1))

        is_best = False
        if self.evaluate is not None and (progress.step % section.evaluate_every == 0 or stage_ends):
            result = self._evaluate()
            self._write("held_out", result.record(), stage=name)
            is_best = self._note_evaluation(result, stage)
            plateau = stage.plateau_evaluations
            if not stage_ends and plateau is not None and progress.stale_evaluations >= plateau:
                stage_ends = True
                self._log_window(name, epoch=order.epoch_of(in_stage + 1))
                self._write("plateau", {"evaluations": progress.stale_evaluations}, stage=name)
        if stage_ends:
            progress.stage += 1
            progress.stage_started = progress.step
            progress.stage_best, progress.stale_evaluations = None, 0

        finished = progress.stage == len(section.stages)
        stops = self.ranks.any(interruption.requested) and not finished
        due = progress.step % section.save_every == 0 or stage_ends
        if due or is_best or stops:
            reason: Reason = "final" if finished else "regular" if due else "best" if is_best else "interrupted"
            self._save(reason, is_best=is_best)
        if self.report is not None and self.ranks.is_first:
            self.report(progress.step, self._steps_in_all(), self._note(name))
        return stops

    def _update(self, rows: list[int], stage: TrainingStage) -> Gradients:
        """Compute the step's gradient and apply it if it is finite."""
        section, progress = self.section, self.progress
        mine = rows[self.ranks.data_rank :: self.ranks.data_size]
        if self.ranks.data_size > 1:
            mine = mine + [IDLE_ROW] * (section.rows_per_step - len(mine))
        size = section.rows_per_micro_batch
        self.model.train()
        gradients = compute_gradients(
            [mine[start : start + size] for start in range(0, len(mine), size)],
            lambda row_ids: self.forward(row_ids, objective=stage.objective, step=progress.step),
            model=self.model,
            ranks=self.ranks,
            clip_norm=section.optimizer.clip_norm,
        )
        progress.refused_rows += gradients.num_refused_rows
        started = time.perf_counter()
        if gradients.is_empty:
            progress.empty_steps += 1
        elif not gradients.is_finite:
            progress.skipped_steps += 1
            self._write(
                "skipped", {"gradient_norm": gradients.norm, "loss": gradients.numerators}, step=progress.step + 1
            )
            if progress.skipped_steps > section.max_nonfinite_steps:
                raise TrainingError(
                    f"{progress.skipped_steps} steps had a non-finite loss or gradient, the last at step "
                    f"{progress.step + 1} of stage '{stage.name}'",
                    mend="lower optimizer.learning_rate or clip_norm, use dtype=float32, or look at the features; "
                    "the newest checkpoint is whole",
                )
        else:
            self.optimiser.step()
        self.optimiser.zero_grad()
        self.clock.add({**gradients.seconds, "optimiser": time.perf_counter() - started})
        return gradients

    def _set_learning_rate(self, stage: TrainingStage, in_stage: int, num_steps: int) -> None:
        optimizer = self.section.optimizer
        factor = learning_rate_factor(
            in_stage,
            total=num_steps,
            schedule=optimizer.schedule,
            warmup_fraction=optimizer.warmup_fraction,
            decay_fraction=optimizer.decay_fraction,
            floor=min(1.0, optimizer.min_learning_rate / optimizer.learning_rate),
        )
        self.optimiser.set_factor(factor * stage.learning_rate_scale)

    def _steps_in_all(self) -> int:
        progress = self.progress
        return progress.stage_started + sum(order.num_steps for order in self.orders[progress.stage :])

    # ---- evaluation

    def _evaluate(self) -> HeldOutResult:
        self.model.eval()
        with torch.no_grad():
            return self.evaluate()

    def _note_evaluation(self, result: HeldOutResult, stage: TrainingStage) -> bool:
        """Update best and plateau; whether this is the best of the run."""
        progress, length = self.progress, result.accepted_length
        if progress.stage_best is None or length >= progress.stage_best + stage.plateau_gain:
            progress.stage_best, progress.stale_evaluations = length, 0
        else:
            progress.stale_evaluations += 1
        if progress.best_accepted_length is not None and length <= progress.best_accepted_length:
            return False
        progress.best_step, progress.best_accepted_length = progress.step, length
        return True

    # ---- checkpoints

    def _tensors(self) -> dict[str, dict[str, Tensor]]:
        rng = {f"rank{self.ranks.rank}": torch.get_rng_state()}
        if torch.cuda.is_available():
            rng[f"rank{self.ranks.rank}-cuda"] = torch.cuda.get_rng_state()
        return {
            "model": dict(self.model.state_dict()),
            "optimiser": self.optimiser.state_tensors(),
            "rng": rng,
        }

    def _save(self, reason: Reason, *, is_best: bool) -> None:
        self.optimiser.create_state()
        self.checkpoints.save(
            self._tensors(),
            step=self.progress.step,
            progress=self.progress.model_dump(mode="json"),
            reason=reason,
            is_best=is_best,
        )

    def _resume(self, snapshot: Snapshot) -> None:
        stored = Progress(**snapshot.progress)
        if stored.rows_per_step != self.rows_per_step:
            raise CheckpointError(
                f"{snapshot.path} was saved by {snapshot.world_size} rank(s) with {stored.rows_per_step} rows per "
                f"step in all; this run has {self.ranks.world_size} rank(s) with {self.rows_per_step}",
                mend="start as many ranks, or set training.rows_per_step so that the product is the same",
            )
        self.optimiser.create_state()
        tensors = self._tensors()
        self.checkpoints.load(snapshot, tensors)
        torch.set_rng_state(tensors["rng"][f"rank{self.ranks.rank}"])
        if torch.cuda.is_available():
            torch.cuda.set_rng_state(tensors["rng"][f"rank{self.ranks.rank}-cuda"])
        self.progress = stored
        self.checkpoints.point_best(stored.best_step)

    # ---- telling

    def _add_to_window(self, gradients: Gradients) -> None:
        window, counts = self.progress.window, gradients.counts
        sums = {
            **{f"numerator/{name}": [value] for name, value in gradients.numerators.items()},
            **{f"denominator/{name}": [value] for name, value in gradients.denominators.items()},
            "valid": counts.valid_K.tolist(),
            "correct": counts.correct_K.tolist(),
            "accepted": counts.accepted_K.tolist(),
            "ce": counts.ce_K.tolist(),
            "gradient_norm": [gradients.norm],
            "steps": [1.0],
            "positions": [float(gradients.num_positions)],
        }
        if counts.alpha_K is not None:
            sums["alpha"] = counts.alpha_K.tolist()
        if not gradients.is_finite:
            return
        for key, values in sums.items():
            before = window.get(key, [0.0] * len(values))
            window[key] = [a + b for a, b in zip(before, values, strict=True)]
        self.clock.positions += gradients.num_positions
        self.progress.supervised_positions += gradients.num_positions

    def _log_window(self, stage: str, *, epoch: float) -> None:
        window, clock = self.progress.window, self.clock
        self.progress.window, self.clock = {}, _Clock()
        if not window:
            return

        def per_slot(key: str) -> list[float]:
            return [a / max(b, 1.0) for a, b in zip(window.get(key, window["valid"]), window["valid"], strict=True)]

        losses = {
            key.removeprefix("numerator/"): value[0] / max(window["denominator/" + key[10:]][0], 1e-12)
            for key, value in window.items()
            if key.startswith("numerator/")
        }
        seconds = time.perf_counter() - clock.started
        self._write(
            "step",
            {
                "epoch": epoch,
                "loss": sum(losses.values()),
                **{f"loss_{name}": value for name, value in losses.items()},
                "accuracy": per_slot("correct"),
                "accepted": per_slot("accepted"),
                "cross_entropy": per_slot("ce"),
                **({"alpha": per_slot("alpha")} if "alpha" in window else {}),
                "gradient_norm": window["gradient_norm"][0] / window["steps"][0],
                "learning_rate": self.optimiser.learning_rate,
                "positions": window["positions"][0],
                "positions_per_second": clock.positions / max(seconds, 1e-9),
                "seconds": seconds,
                "time_share": {key: round(value / max(seconds, 1e-9), 4) for key, value in clock.seconds.items()},
            },
            stage=stage,
        )

    def _write(self, kind: str, values: dict[str, Any], *, stage: str | None = None, step: int | None = None) -> None:
        if self.log is not None:
            name = stage or self.section.stages[self.progress.stage].name
            self.log.write(kind, step=self.progress.step if step is None else step, stage=name, values=values)

    def _note(self, stage: str) -> str:
        best = self.progress.best_accepted_length
        return stage if best is None else f"{stage}, held-out accepted length {best:.2f}"

    def _result(self, status: Literal["finished", "interrupted"], *, was_finished: bool = False) -> TrainingResult:
        progress = self.progress
        return TrainingResult(
            status=status,
            was_finished=was_finished,
            step=progress.step,
            best_step=progress.best_step,
            best_accepted_length=progress.best_accepted_length,
            skipped_steps=progress.skipped_steps,
            empty_steps=progress.empty_steps,
            refused_rows=progress.refused_rows,
            supervised_positions=progress.supervised_positions,
        )
