"""``angelspec recipe compare``: train every variant with every seed, then decode the same prompts with all of them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from angelspec.core.comparison import Comparison
from angelspec.core.errors import MissingRequirement
from angelspec.core.files import write_text_atomic
from angelspec.core.recipe import Recipe
from angelspec.decoding.proposer import Proposer
from angelspec.decoding.proposers import drafter_proposer
from angelspec.evaluation.acceptance import measure, num_answers
from angelspec.evaluation.comparison import ComparisonReport, Outcome, Training, comparison_tables
from angelspec.evaluation.comparison_plot import plot_comparison
from angelspec.pipeline.evaluation_stages import exported_drafter
from angelspec.pipeline.hub_commits import HubCommits
from angelspec.pipeline.measuring import LOOKUP, evaluation_prompts, lookup_proposer, measure_settings, suites_of
from angelspec.pipeline.progress import Progress, table_console
from angelspec.pipeline.record import RunRecord, only_run_in
from angelspec.pipeline.requirements import check_requirements
from angelspec.pipeline.runner import run_stages
from angelspec.pipeline.session import Session
from angelspec.pipeline.stage import StageResult
from angelspec.pipeline.stages import stages_of
from angelspec.pipeline.store import Store
from angelspec.pipeline.training_stages import WEIGHTS, stage_name

_NOT_COMPARED = ("evaluate", "export")
"""Stages of a recipe that a comparison replaces by one measurement of all variants together."""


def run_comparison(
    comparison: Comparison, *, output: Path, store: Path, quiet: bool = False, progress: Progress | None = None
) -> ComparisonReport:
    """Train and measure everything; finished stages and measurements are reused.

    Args:
        comparison: what to compare.
        output: gets ``stages.json``, ``comparison.json``, ``.md``, ``.png`` and the measurement's units.
        store: folder of the stages; variants share rollouts, packed rows and features there.
        quiet: show no progress and print no table.
        progress: where to show progress; None: the console.

    Raises:
        RecipeError: a variant is wrong; before anything runs.
        MissingRequirement: this machine cannot run it, or another run writes into ``output``.
    """
    started = time.monotonic()
    runs = list(comparison.runs())
    for _, _, recipe in runs:
        check_requirements(recipe, output=output)
    base = runs[0][2]
    progress = progress or Progress(quiet=quiet)
    session = Session(base)
    if session.ranks.world_size > 1:
        raise MissingRequirement(
            f"a comparison is run by one process, and {session.ranks.world_size} were started",
            mend="start it without torchrun",
        )
    trainings, proposers = [], {}
    with only_run_in(output), progress.running():
        record, commits = RunRecord(output), HubCommits(store, progress.say)
        for number, (variant, seed, recipe) in enumerate(runs, start=1):
            progress.say(f"({number}/{len(runs)}) variant '{variant}', seed {seed}")
            stages = [
                stage for stage in stages_of(recipe, data=commits.pin(recipe.data)) if stage.name not in _NOT_COMPARED
            ]
            results = run_stages(
                stages, recipe, store=Store(store), session=session, progress=progress, record=record,
                prefix=f"{variant}, seed {seed}: ",
            )  # fmt: skip
            trainings.append(_training(variant, seed, recipe, results))
            proposers[variant, seed] = _proposer(f"{variant}/{seed}", recipe, results, session=session)
        session.release_features()
        base = base.model_copy(update={"data": commits.pin(base.data)})
        outcomes = _measure_all(comparison, base, proposers, session=session, folder=output, progress=progress)
    report = ComparisonReport(
        comparison=comparison,
        mode=base.mode,
        target=base.target.name or str(base.target.source),
        temperature=base.evaluation.temperatures[0],
        trainings=tuple(trainings),
        outcomes=tuple(outcomes),
        seconds=time.monotonic() - started,
    )
    _save(report, output)
    if not quiet:
        console = table_console()
        for table in comparison_tables(report):
            console.print(table.to_rich())
        console.print(f"report: {output / 'comparison.md'}", highlight=False)
    return report


def _training(variant: str, seed: int, recipe: Recipe, results: Mapping[str, StageResult]) -> Training:
    stages = [results[stage_name(recipe, index)] for index in range(len(recipe.training.stages))]
    return Training(
        variant=variant,
        seed=seed,
        steps=sum(stage.output.summary["steps"] for stage in stages),
        supervised_positions=sum(stage.output.summary["supervised_positions"] for stage in stages),
        held_out_accepted_length=stages[-1].output.summary["held_out_accepted_length"],
        seconds=sum(stage.seconds for stage in stages),
    )


def _proposer(name: str, recipe: Recipe, results: Mapping[str, StageResult], *, session: Session) -> Proposer:
    last = results[stage_name(recipe, len(recipe.training.stages) - 1)]
    return drafter_proposer(
        exported_drafter(recipe, last.folder / WEIGHTS),
        target=session.target(recipe.evaluation.dtype),
        name=name,
        shortlist=recipe.evaluation.shortlist,
    )


def _measure_all(
    comparison: Comparison,
    base: Recipe,
    proposers: Mapping[tuple[str, int], Proposer],
    *,
    session: Session,
    folder: Path,
    progress: Progress,
) -> list[Outcome]:
    """Answer the base recipe's evaluation prompts, rendered in each mode, once; measure every drafter asked for on
    these answers, and lookup."""
    target = session.target(base.evaluation.dtype)
    conversations = evaluation_prompts(base, quarantine=folder / "sources-quarantine.jsonl", say=progress.say)
    settings = measure_settings(base)
    settings = settings.model_copy(update={"temperatures": settings.temperatures[:1]})
    identity = {proposer.name: key for key, proposer in proposers.items()} | {LOOKUP: (LOOKUP, None)}
    outcomes = []
    for mode in comparison.modes or (base.mode,):
        asked = comparison.variants if mode == base.mode else comparison.variants_in(mode)
        everyone = [lookup_proposer(base), *(p for (variant, _), p in proposers.items() if variant in asked)]
        recipe = base.model_copy(update={"mode": mode})
        suites = suites_of(
            conversations,
            target,
            recipe,
            names=[source.name for source in base.data.evaluation],
            limit=base.evaluation.prompts_per_suite,
            quarantine=folder / f"{mode}-quarantine.jsonl",
            say=progress.say,
        )
        total = num_answers(suites, everyone, settings=settings)
        with progress.meter(f"measure on {mode} prompts", total=total, unit="answers") as meter:
            results = measure(
                target, everyone, suites, settings=settings, recorded=True, folder=folder / "units", advance=meter
            )
        for result in results:
            variant, seed = identity[result.proposer]
            outcomes += [
                Outcome(
                    variant=variant,
                    seed=seed,
                    mode=mode,
                    workload=group.workload,
                    finished=group.finished.counts,
                    unfinished=group.unfinished.counts,
                )
                for group in result.groups
            ]
    return outcomes


def _save(report: ComparisonReport, folder: Path) -> None:
    picture = plot_comparison(report, folder / "comparison.png")
    report.save(folder)
    comparison = report.comparison
    lines = [
        f"# {comparison.name}",
        "",
        comparison.description,
        "",
        f"Recipe {comparison.base}, target {report.target}, {len(comparison.variants)} variants, seeds "
        f"{', '.join(map(str, comparison.seeds))}; {report.seconds / 60:.0f} minutes.",
        "",
        "Accepted lengths are those of decoding along the target's own answers, which no drafter changes; they are "
        "recorded once.",
        "",
        f"![accepted length by variant]({picture.name})",
        "",
        *(table.to_markdown() for table in comparison_tables(report)),
    ]
    write_text_atomic(folder / "comparison.md", "\n".join(lines))
