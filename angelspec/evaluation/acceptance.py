"""Measures drafters by decoding with them: acceptance, speed beside plain decoding, exactness.

Work is cut into units, one per (suites that fill a batch together, temperature, proposer); a finished unit lies as JSON
in a folder under the fingerprint of everything it depends on, so that an interrupted measurement goes on and a changed
one starts anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from angelspec.core.errors import DataError
from angelspec.decoding.answers import Decoded, DecodeRun
from angelspec.decoding.plain import decode_plain
from angelspec.decoding.proposer import NoProposer, Proposer
from angelspec.evaluation.results import (
    AnswerGroup,
    Divergence,
    ExactnessResult,
    MeasureSettings,
    SpeedResult,
    SuiteResult,
    WorkloadGroups,
)
from angelspec.evaluation.suite_decoding import RecordedSuites, decode_suites, in_turns, unit_facts
from angelspec.evaluation.suites import Suite, check_names
from angelspec.evaluation.units import cached

if TYPE_CHECKING:
    from angelspec.targets.target import Target

Advance = Callable[[int], None]
"""Called with how many answers are done, of ``num_answers`` in all."""


def num_answers(suites: Sequence[Suite], proposers: Sequence[Proposer], *, settings: MeasureSettings) -> int:
    """Answers that ``measure`` decodes."""
    return sum(len(suite.prompts) for suite in suites) * len(settings.temperatures) * len(proposers)


def measure(
    target: Target,
    proposers: Sequence[Proposer],
    suites: Sequence[Suite],
    *,
    settings: MeasureSettings,
    recorded: bool = False,
    folder: Path | None = None,
    advance: Advance | None = None,
) -> list[SuiteResult]:
    """Decode every suite at every temperature with every proposer.

    All proposers of one (suite, temperature) answer the same prompts from the same random streams, so in float32
    they give the same answers, and their accepted lengths are compared on equal text. Suites too small for a batch
    are decoded together.

    Args:
        target: the frozen model.
        proposers: of distinct names.
        suites: of distinct names.
        settings: how to decode.
        recorded: let the target answer once and measure every proposer on that answer (``decoding.recording``): the
            same counts without a verify forward per step, and no verification in the seconds.
        folder: where finished units are kept; None keeps none.
        advance: progress in answers; see ``num_answers``.

    Returns:
        one result per (suite, temperature, proposer), in this order of loops.
    """
    check_names(suites)
    _check_proposers(proposers)
    results: dict[tuple[str, float, str], SuiteResult] = {}
    done = 0
    for group in batch_groups(suites, batch_size=settings.batch_size):
        for temperature in settings.temperatures:
            source = (
                RecordedSuites(
                    target, group, settings=settings, temperature=temperature, folder=folder,
                    depth=max((proposer.depth for proposer in proposers), default=0),
                )
                if recorded
                else None
            )  # fmt: skip
            for proposer in proposers:
                unit = {
                    "unit": "acceptance",
                    **unit_facts(target, group, settings, temperature=temperature),
                    "proposer": dict(proposer.identity),
                    **({"recorded": True} if recorded else {}),
                }

                def run(
                    group=group, temperature=temperature, proposer=proposer, done=done, source=source
                ) -> list[SuiteResult]:
                    progress = None if advance is None else lambda finished: advance(done + finished)
                    if source is not None:
                        decoded = source.decode(proposer, progress=progress)
                    else:
                        decoded = decode_suites(
                            target, proposer, group, settings=settings, temperature=temperature, progress=progress
                        )
                    return _suite_results(decoded, suites=group, temperature=temperature, proposer=proposer)

                for suite, result in zip(group, cached(folder, unit, list[SuiteResult], run), strict=True):
                    # A unit knows a proposer by what it is, not by what it is called in this table.
                    named = result.model_copy(update={"proposer": proposer.name, "suite": suite.name})
                    results[suite.name, temperature, proposer.name] = named
                    done += len(suite.prompts)
                if advance is not None:
                    advance(done)
    return [
        results[suite.name, temperature, proposer.name]
        for suite in suites
        for temperature in settings.temperatures
        for proposer in proposers
    ]


def batch_groups(suites: Sequence[Suite], *, batch_size: int) -> list[list[Suite]]:
    """Neighbouring suites, joined until they fill a batch."""
    groups: list[list[Suite]] = []
    for suite in suites:
        if groups and sum(len(member.prompts) for member in groups[-1]) < batch_size:
            groups[-1].append(suite)
        else:
            groups.append([suite])
    return groups


def measure_speed(
    target: Target,
    proposers: Sequence[Proposer],
    suites: Sequence[Suite],
    *,
    settings: MeasureSettings,
    rounds: int = 2,
    prompts_per_suite: int | None = None,
    folder: Path | None = None,
) -> list[SpeedResult]:
    """Tokens per second of the reference loop with each proposer and without any, in turns on the same prompts.

    One unmeasured round of a few tokens comes first. A stored unit holds all proposers of one (suite, temperature):
    speeds are comparable only side by side.

    Args:
        rounds: how often each proposer answers the prompts; the order is reversed every other round.
        prompts_per_suite: None: one batch.
    """
    check_names(suites)
    _check_proposers(proposers)
    drafters = [proposer for proposer in proposers if proposer.depth > 0]
    runners: list[Proposer] = [NoProposer(), *drafters]
    results = []
    for full_suite in suites:
        suite = full_suite.first(prompts_per_suite or settings.batch_size)
        for temperature in settings.temperatures:
            unit = {
                "unit": "speed",
                **unit_facts(target, [suite], settings, temperature=temperature),
                "proposers": [dict(proposer.identity) for proposer in drafters],
                "rounds": rounds,
            }

            def run(suite=suite, temperature=temperature) -> list[SpeedResult]:
                return _race(target, runners, suite, settings=settings, temperature=temperature, rounds=rounds)

            stored = cached(folder, unit, list[SpeedResult], run)
            results += [
                result.model_copy(update={"proposer": proposer.name, "suite": suite.name})
                for result, proposer in zip(stored, drafters, strict=True)
            ]
    return results


def check_exactness(
    target: Target,
    proposers: Sequence[Proposer],
    suite: Suite,
    *,
    settings: MeasureSettings,
    folder: Path | None = None,
) -> list[ExactnessResult]:
    """Compare each proposer's answers, token for token, with plain decoding of one request at a time.

    In float32 all are expected to be identical; in lower precision the shapes of a batch change rounding, and the
    first divergence is reported with the logit gap that decided it.
    """
    _check_proposers(proposers)
    results = []
    for temperature in settings.temperatures:
        plain = None
        for proposer in proposers:
            unit = {
                "unit": "exactness",
                **unit_facts(target, [suite], settings, temperature=temperature),
                "proposer": dict(proposer.identity),
            }

            def run(temperature=temperature, proposer=proposer) -> ExactnessResult:
                nonlocal plain
                if plain is None:
                    plain = decode_plain(
                        target,
                        [prompt.tokens for prompt in suite.prompts],
                        max_new_tokens=settings.max_new_tokens,
                        temperature=temperature,
                        seed=settings.seed,
                    )
                decoded = decode_suites(target, proposer, [suite], settings=settings, temperature=temperature)
                return compare_answers(
                    target,
                    suite,
                    plain=[answer.tokens for answer in plain],
                    speculative=[answer.tokens for answer in decoded.answers],
                    proposer=proposer.name,
                    temperature=temperature,
                )

            result = cached(folder, unit, ExactnessResult, run)
            results.append(result.model_copy(update={"proposer": proposer.name}))
    return results


def compare_answers(
    target: Target,
    suite: Suite,
    *,
    plain: Sequence[Sequence[int]],
    speculative: Sequence[Sequence[int]],
    proposer: str,
    temperature: float,
) -> ExactnessResult:
    """Count equal answers and describe the first difference, by prompt, then by position."""
    first = None
    identical = 0
    for prompt, truth, answer in zip(suite.prompts, plain, speculative, strict=True):
        if list(truth) == list(answer):
            identical += 1
            continue
        if first is None:
            position = next(
                (i for i, (a, b) in enumerate(zip(truth, answer, strict=False)) if a != b),
                min(len(truth), len(answer)),
            )
            first = Divergence(
                prompt_id=prompt.id,
                position=position,
                plain_token=truth[position] if position < len(truth) else None,
                speculative_token=answer[position] if position < len(answer) else None,
                top2_gap=_top2_gap(target, [*prompt.tokens, *truth[:position]]),
            )
    return ExactnessResult(
        proposer=proposer,
        temperature=temperature,
        dtype=str(target.dtype).removeprefix("torch."),
        prompts=len(suite.prompts),
        tokens=sum(map(len, plain)),
        identical=identical,
        first_divergence=first,
    )


def _suite_results(
    run: DecodeRun, *, suites: Sequence[Suite], temperature: float, proposer: Proposer
) -> list[SuiteResult]:
    """Each suite's answers; of the time that suites spent together, each has the share of its steps."""
    answers = iter(run.answers)
    decoded = [[next(answers) for _ in suite.prompts] for suite in suites]
    steps = [sum(len(answer.accepted) for answer in part) + len(part) for part in decoded]  # a prefill is a step
    return [
        _suite_result(part, suite=suite, temperature=temperature, proposer=proposer, run=run, share=own / sum(steps))
        for suite, part, own in zip(suites, decoded, steps, strict=True)
    ]


def _suite_result(
    answers: Sequence[Decoded],
    *,
    suite: Suite,
    temperature: float,
    proposer: Proposer,
    run: DecodeRun,
    share: float,
) -> SuiteResult:
    by_workload: dict[str, dict[bool, list[Decoded]]] = {}
    for prompt, answer in zip(suite.prompts, answers, strict=True):
        ended = by_workload.setdefault(prompt.workload, {True: [], False: []})
        ended[answer.finish_reason == "stop"].append(answer)
    groups = tuple(
        WorkloadGroups(
            workload=workload,
            finished=AnswerGroup.of(ended[True], depth=proposer.depth),
            unfinished=AnswerGroup.of(ended[False], depth=proposer.depth),
        )
        for workload, ended in sorted(by_workload.items())
    )
    return SuiteResult(
        suite=suite.name,
        temperature=temperature,
        proposer=proposer.name,
        depth=proposer.depth,
        groups=groups,
        seconds={name: seconds * share for name, seconds in run.seconds.items()},
        total_seconds=run.total_seconds * share,
    )


def _race(
    target: Target,
    runners: Sequence[Proposer],
    suite: Suite,
    *,
    settings: MeasureSettings,
    temperature: float,
    rounds: int,
) -> list[SpeedResult]:
    """All runners in turns; the first runner is plain decoding."""
    short = settings.model_copy(update={"max_new_tokens": min(4, settings.max_new_tokens)})
    for runner in runners:
        decode_suites(target, runner, [suite], settings=short, temperature=temperature)
    tokens, seconds = [0] * len(runners), [0.0] * len(runners)
    for index in in_turns(range(len(runners)), rounds=rounds):
        run = decode_suites(target, runners[index], [suite], settings=settings, temperature=temperature)
        tokens[index] += sum(len(answer.tokens) for answer in run.answers)
        seconds[index] += run.total_seconds
    return [
        SpeedResult(
            suite=suite.name,
            temperature=temperature,
            proposer=runner.name,
            prompts=len(suite.prompts),
            rounds=rounds,
            tokens=tokens[index],
            seconds=seconds[index],
            plain_tokens=tokens[0],
            plain_seconds=seconds[0],
        )
        for index, runner in enumerate(runners)
        if index > 0
    ]


@torch.inference_mode()
def _top2_gap(target: Target, tokens: Sequence[int]) -> float:
    states = target.forward(torch.tensor([list(tokens)], device=target.device))
    largest, second = target.logits(states.hidden_BTD[0, -1]).topk(2).values.tolist()
    return largest - second


def _check_proposers(proposers: Sequence[Proposer]) -> None:
    names = [proposer.name for proposer in proposers]
    if len(set(names)) != len(names):
        raise DataError(f"two drafters share a name: {', '.join(sorted(names))}", mend="give each its own name")
