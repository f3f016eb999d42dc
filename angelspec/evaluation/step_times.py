"""Measures the parts of each drafter's verify step by batch size, all drafters in turns on the same prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from angelspec.decoding.proposer import NoProposer, Proposer
from angelspec.decoding.timing import time_steps
from angelspec.evaluation.breakeven import PLAIN
from angelspec.evaluation.results import MeasureSettings, StepTimes
from angelspec.evaluation.suite_decoding import in_turns, unit_facts
from angelspec.evaluation.suites import Suite
from angelspec.evaluation.units import cached

if TYPE_CHECKING:
    from angelspec.targets.target import Target

BATCH_SIZES: tuple[int, ...] = (1, 4, 16)
"""Where the break-even is measured unless said otherwise."""
STEPS, UNMEASURED_STEPS, ROUNDS = 8, 2, 3


def measure_step_times(
    target: Target,
    proposers: Sequence[Proposer],
    suite: Suite,
    *,
    settings: MeasureSettings,
    batch_sizes: Sequence[int] = BATCH_SIZES,
    steps: int = STEPS,
    rounds: int = ROUNDS,
    folder: Path | None = None,
    advance: Callable[[int], None] | None = None,
) -> list[StepTimes]:
    """Time the steps of every proposer and of plain decoding, at every temperature and batch size.

    A stored unit holds all proposers of one (temperature, batch size): times are comparable only side by side.

    Args:
        target: the frozen model.
        proposers: of distinct names.
        suite: its first prompts fill a batch, again from the first where it is smaller.
        settings: temperatures, seed and cut.
        batch_sizes: rows that run together.
        steps: measured steps per round.
        rounds: the order of the proposers is reversed every other round.
        folder: where finished units are kept; None keeps none.
        advance: called with how many steps are measured, of ``num_steps`` in all.
    """
    runners: list[Proposer] = [*(proposer for proposer in proposers if proposer.depth > 0), NoProposer()]
    results, done = [], 0
    for temperature in settings.temperatures:
        for batch_size in sorted(set(batch_sizes)):
            batch = [suite.prompts[index % len(suite.prompts)].tokens for index in range(batch_size)]
            unit = {
                "unit": "step-times",
                **unit_facts(target, [suite], settings, temperature=temperature),
                "proposers": [dict(proposer.identity) for proposer in runners],
                "batch_size": batch_size,
                "steps": steps,
                "unmeasured_steps": UNMEASURED_STEPS,
                "rounds": rounds,
            }

            def run(temperature=temperature, batch=batch, done=done) -> list[StepTimes]:
                return _race(
                    target, runners, batch, settings=settings, temperature=temperature, steps=steps, rounds=rounds,
                    advance=None if advance is None else lambda measured: advance(done + measured),
                )  # fmt: skip

            stored = cached(folder, unit, list[StepTimes], run)
            results += [
                result.model_copy(update={"proposer": _shown(proposer)})
                for result, proposer in zip(stored, runners, strict=True)
            ]
            done += rounds * steps * len(runners)
            if advance is not None:
                advance(done)
    return results


def num_steps(
    proposers: Sequence[Proposer],
    *,
    settings: MeasureSettings,
    batch_sizes: Sequence[int] = BATCH_SIZES,
    steps: int = STEPS,
    rounds: int = ROUNDS,
) -> int:
    """Steps that ``measure_step_times`` measures."""
    runners = 1 + sum(proposer.depth > 0 for proposer in proposers)
    return len(settings.temperatures) * len(set(batch_sizes)) * rounds * steps * runners


def _race(
    target: Target,
    runners: Sequence[Proposer],
    batch: Sequence[Sequence[int]],
    *,
    settings: MeasureSettings,
    temperature: float,
    steps: int,
    rounds: int,
    advance: Callable[[int], None] | None,
) -> list[StepTimes]:
    seconds = [{"draft": 0.0, "verify": 0.0, "sample": 0.0} for _ in runners]
    measured = 0
    for index in in_turns(range(len(runners)), rounds=rounds):
        spent = time_steps(
            target,
            runners[index],
            batch,
            steps=steps,
            unmeasured_steps=UNMEASURED_STEPS,
            temperature=temperature,
            seed=settings.seed,
            cut=settings.cut if runners[index].depth else None,
        )
        seconds[index]["draft"] += spent["draft"] + spent["features"]
        seconds[index]["verify"] += spent["verify"]
        seconds[index]["sample"] += spent["sample"]
        measured += steps
        if advance is not None:
            advance(measured)
    return [
        StepTimes(
            proposer=_shown(runner),
            temperature=temperature,
            batch_size=len(batch),
            steps=steps * rounds,
            **{f"{part}_seconds": spent for part, spent in parts.items()},
        )
        for runner, parts in zip(runners, seconds, strict=True)
    ]


def _shown(proposer: Proposer) -> str:
    return proposer.name if proposer.depth else PLAIN
