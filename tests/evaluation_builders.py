"""A report with figures that a test can work out by hand."""

from __future__ import annotations

from angelspec.core.acceptance import count_steps
from angelspec.decoding.answers import COMPONENTS
from angelspec.evaluation.machine import Machine
from angelspec.evaluation.report import DrafterFacts, Report, SuiteFacts, TargetFacts
from angelspec.evaluation.results import (
    AnswerGroup,
    ExactnessResult,
    MeasureSettings,
    ShortlistResult,
    SpeedResult,
    SuiteResult,
    WorkloadGroups,
)


def _group(accepted, depth, *, answers):
    counts = count_steps(accepted, [depth] * len(accepted), [depth] * len(accepted), depth=depth)
    one = AnswerGroup(
        answers=1, tokens=counts.generated_tokens + 1, ngrams=8, repeated_ngrams=2, counts=counts
    )  # fmt: skip
    total = AnswerGroup()
    for _ in range(answers):
        total += one
    return total


def _kind(drafter):
    return "lookup" if drafter == "prompt lookup" else "mtp" if drafter.startswith("mtp") else "block"


def small_report(*, steps=None, lookup_steps=None, mtp_steps=None, drafters=("dfly", "prompt lookup")) -> Report:
    """Two finished answers and an unfinished one per suite and drafter, at temperature 0.

    Steps are, per suite, (accepted proposals by step, depth): ``steps`` of the drafters that are not named otherwise.
    Drafters whose name begins with mtp are of that family.
    """
    steps = steps or {"a": ([2, 1, 0, 3], 3), "b": ([1, 1, 2, 0], 3)}
    lookup_steps = lookup_steps or {name: ([1, 0, 0, 0], depth) for name, (_, depth) in steps.items()}
    by_kind = {"block": steps, "lookup": lookup_steps, "mtp": mtp_steps or steps}
    results, speed = [], []
    for suite in steps:
        for drafter in drafters:
            accepted, depth = by_kind[_kind(drafter)][suite]
            groups = WorkloadGroups(
                workload="code",
                finished=_group(accepted, depth, answers=2),
                unfinished=_group(accepted, depth, answers=1),
            )
            results.append(
                SuiteResult(
                    suite=suite,
                    temperature=0.0,
                    proposer=drafter,
                    depth=depth,
                    groups=(groups,),
                    seconds=dict.fromkeys(COMPONENTS, 0.1),
                    total_seconds=0.6,
                )  # fmt: skip
            )
            seconds = 2.0 if suite == "a" else 4.0
            speed.append(
                SpeedResult(
                    suite=suite,
                    temperature=0.0,
                    proposer=drafter,
                    prompts=3,
                    rounds=2,
                    tokens=100,
                    seconds=seconds,
                    plain_tokens=100,
                    plain_seconds=4.0,
                )  # fmt: skip
            )
    return Report(
        title="small",
        created="2026-01-01T00:00:00+00:00",
        target=TargetFacts(name="tiny", digest="0123abcd", dtype="float32"),
        mode="no-think",
        machine=Machine(description="two cores of a test", threads=2),
        settings=MeasureSettings(temperatures=(0.0,), max_new_tokens=24, batch_size=4, seed=3),
        commands=("angelspec evaluate small",),
        drafters=tuple(
            DrafterFacts(
                name=name,
                description=f"the {name} of a test",
                depth=max(depth for _, depth in by_kind[_kind(name)].values()),
                identity={"kind": _kind(name), "digest": name},
            )  # fmt: skip
            for name in drafters
        ),
        suites=tuple(SuiteFacts(name=name, prompts=3, digest=name) for name in steps),
        results=tuple(results),
        speed=tuple(speed),
        exactness=tuple(
            ExactnessResult(proposer=name, temperature=0.0, dtype="float32", prompts=8, tokens=100, identical=8)
            for name in drafters
        ),
        shortlist=tuple(
            ShortlistResult(
                size=size, counts=_group([1, 2, 0], 3, answers=1).counts, draft_seconds=0.3, total_seconds=1.0, tokens=7
            )
            for size in (8, None)
        ),
        notes=("measured on a test",),
    )
