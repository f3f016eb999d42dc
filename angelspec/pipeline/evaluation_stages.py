"""Stages that measure the trained drafter by decoding with it, and export it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from angelspec import __version__
from angelspec.core.files import write_text_atomic
from angelspec.core.fingerprint import file_sha256, fingerprint
from angelspec.core.manifest import DrafterManifest, MeasuredAcceptance, TargetIdentity, TrainedStage, TrainingRecord
from angelspec.core.recipe import Recipe
from angelspec.data.chat import chat_format, prompt_rows
from angelspec.data.conversation import Conversation
from angelspec.data.conversation_files import read_conversations
from angelspec.data.quarantine import require_usable
from angelspec.data.rounds import first_round
from angelspec.decoding.proposer import Proposer
from angelspec.decoding.proposers import BlockProposer, LookupProposer
from angelspec.drafters.block import BlockDrafter
from angelspec.evaluation.acceptance import check_exactness, measure, measure_speed, num_answers
from angelspec.evaluation.plots import plot_report
from angelspec.evaluation.report import DrafterFacts, Machine, Report, SuiteFacts, TargetFacts, to_markdown
from angelspec.evaluation.results import MeasureSettings, SuiteResult
from angelspec.evaluation.suites import Suite
from angelspec.evaluation.training_plots import plot_training
from angelspec.pipeline.estimates import amounts
from angelspec.pipeline.progress import Progress
from angelspec.pipeline.stage import Estimate, Stage, StageOutput, Work
from angelspec.pipeline.training_stages import WEIGHTS, stage_name
from angelspec.targets.target import Target
from angelspec.training.export import export_drafter
from angelspec.training.metrics import FILE_NAME as METRICS

LOOKUP = "prompt lookup"
"""Name of the drafter without weights in every table."""
TRAINING_LOG = f"training/{METRICS}"
"""Where an export keeps its training log."""
_SPEED_PROMPTS, _SPEED_TOKENS = 8, 64
"""The race against plain decoding: prompts of all suites in turns, and the longest answer."""
_EXACT_TOKENS = 96
"""Longest answer of the comparison with plain decoding, which decodes one request at a time."""


def suites_of(
    conversations: Sequence[Conversation], target: Target, recipe: Recipe, *, names: Sequence[str], limit: int | None
) -> list[Suite]:
    """Evaluation prompts (first user turns) as a server renders them, by source."""
    chat = chat_format(target, mode=recipe.mode)
    by_source: dict[str, list[Conversation]] = {name: [] for name in names}
    for item in first_round(conversations):
        by_source[item.conversation.source].append(item.conversation)
    suites = []
    for name, members in by_source.items():
        rendered = prompt_rows(members, chat, max_prompt_tokens=recipe.data.max_prompt_tokens)
        require_usable(
            accepted=len(rendered.prompts),
            rejected=rendered.rejected,
            max_bad_fraction=recipe.data.max_bad_fraction,
            what=f"evaluation suite '{name}'",
        )
        suites.append(Suite(name, tuple(rendered.prompts)).first(limit))
    return suites


def mixed_suite(suites: Sequence[Suite], count: int) -> Suite:
    """``count`` prompts, taken from the suites in turns."""
    turns = zip_longest(*(suite.prompts for suite in suites))
    prompts = [prompt for turn in turns for prompt in turn if prompt is not None]
    return Suite("mixed", tuple(prompts[:count]))


def measured_report(
    target: Target,
    proposers: Sequence[Proposer],
    suites: Sequence[Suite],
    *,
    recipe: Recipe,
    settings: MeasureSettings,
    exact_target: Target | None,
    folder: Path,
    progress: Progress,
    title: str,
    commands: Sequence[str],
    descriptions: Mapping[str, str],
) -> Report:
    """Measure everything and put it into one report; finished parts in ``folder`` are not measured again."""
    total = num_answers(suites, proposers, settings=settings)
    with progress.meter("evaluate", total=total, unit="answers") as meter:
        results = measure(target, proposers, suites, settings=settings, folder=folder / "units", advance=meter)
    progress.say("  speed beside plain decoding")
    speed = measure_speed(
        target,
        proposers,
        [mixed_suite(suites, _SPEED_PROMPTS)],
        settings=settings.model_copy(update={"max_new_tokens": min(_SPEED_TOKENS, settings.max_new_tokens)}),
        rounds=2,
        folder=folder / "units",
    )
    exactness = []
    if exact_target is not None and recipe.evaluation.exactness_prompts:
        progress.say("  output against plain decoding, token for token, in float32")
        exactness = check_exactness(
            exact_target,
            proposers,
            mixed_suite(suites, recipe.evaluation.exactness_prompts),
            settings=settings.model_copy(update={"max_new_tokens": min(_EXACT_TOKENS, settings.max_new_tokens)}),
            folder=folder / "units",
        )
    return Report(
        title=title,
        target=TargetFacts(name=target.name, digest=target.digest, dtype=str(target.dtype).removeprefix("torch.")),
        mode=recipe.mode,
        machine=Machine.here(target.device),
        settings=settings,
        commands=tuple(commands),
        drafters=tuple(
            DrafterFacts(
                name=proposer.name,
                description=descriptions[proposer.name],
                depth=proposer.depth,
                identity=dict(proposer.identity),
            )
            for proposer in proposers
        ),
        suites=tuple(SuiteFacts(name=s.name, prompts=len(s.prompts), digest=s.digest) for s in suites),
        results=tuple(results),
        speed=tuple(speed),
        exactness=tuple(exactness),
    )


def save_report(report: Report, folder: Path, *, metrics: Mapping[str, Path], consecutive: bool) -> None:
    """Write report.json, report.md and the plots into ``folder``.

    Args:
        report: what was measured.
        folder: where to.
        metrics: training logs by stage or drafter; none: no training curves.
        consecutive: the logs are stages of one run.
    """
    pictures = dict(plot_report(report, folder))
    if metrics:
        pictures["Training"] = plot_training(metrics, folder / "training.png", consecutive=consecutive)
    report.save(folder)
    captions = {caption: path.name for caption, path in pictures.items()}
    write_text_atomic(folder / "report.md", to_markdown(report, plots=captions))


def lookup_proposer(recipe: Recipe) -> LookupProposer:
    """Prompt lookup as the recipe sets it."""
    lookup = recipe.evaluation.lookup
    return LookupProposer(max_match=lookup.max_match, num_proposals=lookup.num_proposals, name=LOOKUP)


def lookup_description(recipe: Recipe) -> str:
    """Its row in the report."""
    lookup = recipe.evaluation.lookup
    return f"longest suffix match up to {lookup.max_match} tokens, {lookup.num_proposals} proposals, no weights"


def measure_settings(recipe: Recipe) -> MeasureSettings:
    """The recipe's evaluation as settings of a measurement."""
    evaluation = recipe.evaluation
    return MeasureSettings(
        temperatures=evaluation.temperatures,
        max_new_tokens=evaluation.max_new_tokens,
        batch_size=evaluation.batch_size,
        seed=evaluation.seed,
    )


# ---------------------------------------------------------------------------------------------- evaluate


def _last_training(recipe: Recipe) -> str:
    return stage_name(recipe, len(recipe.training.stages) - 1)


def trained_drafter(work: Work) -> BlockDrafter:
    """The run's drafter as it is exported."""
    return export_weights(work.recipe, work.before[_last_training(work.recipe)].folder / WEIGHTS)


def export_weights(recipe: Recipe, path: Path) -> BlockDrafter:
    """The recipe's drafter with these weights, rounded as they are exported."""
    drafter = BlockDrafter(recipe.drafter_config())
    dtype = getattr(torch, recipe.export.dtype)
    drafter.load_state_dict({name: tensor.to(dtype).float() for name, tensor in load_file(path).items()})
    return drafter.eval().requires_grad_(False)


def _run_evaluate(work: Work) -> StageOutput:
    recipe = work.recipe
    work.session.release_features()
    target = work.session.target(recipe.evaluation.dtype)
    suites = suites_of(
        read_conversations(work.before["prompts"].folder / "evaluation.jsonl"),
        target,
        recipe,
        names=[source.name for source in recipe.data.evaluation],
        limit=recipe.evaluation.prompts_per_suite,
    )
    config = recipe.drafter_config()
    lookup = lookup_proposer(recipe)
    drafter = BlockProposer(
        trained_drafter(work), target=target, name=recipe.name, shortlist=recipe.evaluation.shortlist
    )
    report = measured_report(
        target,
        [drafter, lookup],
        suites,
        recipe=recipe,
        settings=measure_settings(recipe),
        exact_target=work.session.target("float32"),
        folder=work.folder,
        progress=work.progress,
        title=recipe.name,
        commands=(f"angelspec recipe run {recipe.name}",),
        descriptions={
            drafter.name: f"{config.algorithm}, {config.num_layers} layers, taps {list(config.target_layer_ids)}, "
            f"block {config.block_size}, {amounts(recipe).drafter_parameters / 1e6:.1f}M parameters, "
            f"{recipe.export.dtype}",
            lookup.name: lookup_description(recipe),
        },
    )
    save_report(report, work.folder, metrics=_metrics(work), consecutive=True)
    counts = [result.model_dump(mode="json", exclude={"seconds", "total_seconds"}) for result in report.results]
    exact = [result.model_dump(mode="json") for result in report.exactness]
    return StageOutput(
        fingerprint([counts, exact]), {"report": "report.json", "exact": all(r.exact for r in report.exactness)}
    )


def _metrics(work: Work) -> dict[str, Path]:
    return {
        stage.name: work.before[stage_name(work.recipe, index)].folder / METRICS
        for index, stage in enumerate(work.recipe.training.stages)
    }


def join_metrics(logs: Iterable[Path], path: Path) -> None:
    """One log of consecutive stages: steps count on from stage to stage."""
    lines, offset = [], 0
    for log in logs:
        last = 0
        for line in log.read_text(encoding="utf-8").splitlines():
            event = json.loads(line)
            last = max(last, event["step"])
            lines.append(json.dumps({**event, "step": event["step"] + offset}) + "\n")
        offset += last
    write_text_atomic(path, "".join(lines))


def _evaluate_inputs(recipe: Recipe) -> Mapping[str, Any]:
    return {
        "evaluation": recipe.evaluation.model_dump(mode="json"),
        "mode": recipe.mode,
        "max_prompt_tokens": recipe.data.max_prompt_tokens,
        "max_bad_fraction": recipe.data.max_bad_fraction,
        "export_dtype": recipe.export.dtype,
        "name": recipe.name,
    }


def evaluate_stage(recipe: Recipe) -> Stage:
    """Measure by speculative decoding."""
    return Stage(
        name="evaluate",
        does="measure acceptance by speculative decoding, beside prompt lookup and plain decoding",
        needs=("target", "prompts", *(stage_name(recipe, i) for i in range(len(recipe.training.stages)))),
        inputs=_evaluate_inputs,
        run=_run_evaluate,
        estimate=lambda recipe: Estimate(
            does=f"decode {', '.join(source.name for source in recipe.data.evaluation)} at temperatures "
            f"{', '.join(f'{t:g}' for t in recipe.evaluation.temperatures)}, up to {recipe.evaluation.max_new_tokens} "
            f"tokens, in {recipe.evaluation.dtype}",
            memory_bytes=amounts(recipe).target_bytes * (2 if recipe.evaluation.dtype == "float32" else 1),
        ),
    )


# ------------------------------------------------------------------------------------------------ export


def _manifest(work: Work, report: Report) -> DrafterManifest:
    recipe, before = work.recipe, work.before
    target = before["target"].output
    stages = [before[stage_name(recipe, index)] for index in range(len(recipe.training.stages))]
    packed = before["pack"].output.summary["train"]
    return DrafterManifest(
        angelspec_version=__version__,
        algorithm=recipe.drafter_config().algorithm,
        mode=recipe.mode,
        drafter=recipe.drafter_config(),
        target=TargetIdentity(
            name=target.summary["name"],
            source=recipe.target.source,
            digest=target.digest,
            mode_family=recipe.target.mode_family,
            geometry=recipe.target.geometry,
        ),
        recipe=recipe,
        training=TrainingRecord(
            steps=sum(stage.output.summary["steps"] for stage in stages),
            supervised_positions=sum(stage.output.summary["supervised_positions"] for stage in stages),
            target_tokens=packed["supervised_tokens"],
            stages=tuple(
                TrainedStage(name=item.name, steps=stage.output.summary["steps"])
                for item, stage in zip(recipe.training.stages, stages, strict=True)
            ),
            data_fingerprints={
                name: before[name].output.digest
                for name in ("prompts", "decontaminate", "rollout", "pack")
                if name in before
            },
            workloads=packed["documents_by_workload"],
            held_out_accepted_length=stages[-1].output.summary["held_out_accepted_length"],
            initial_checkpoint=recipe.drafter.initial_checkpoint,
        ),
        acceptance=_acceptance(report.results, drafter=recipe.name),
        report_files=("report.json", "report.md"),
    )


def _acceptance(results: Sequence[SuiteResult], *, drafter: str) -> tuple[MeasuredAcceptance, ...]:
    lookups = {(r.suite, r.temperature): r for r in results if r.proposer == LOOKUP}
    measured = []
    for result in results:
        if result.proposer != drafter:
            continue
        lookup = lookups.get((result.suite, result.temperature))
        for group in result.groups:
            measured.append(
                MeasuredAcceptance(
                    suite=result.suite,
                    workload=group.workload,
                    temperature=result.temperature,
                    finished=group.finished.counts,
                    unfinished=group.unfinished.counts,
                    lookup_finished=None
                    if lookup is None
                    else lookup.pooled(finished=True, workload=group.workload).counts,
                )
            )
    return tuple(measured)


def _run_export(work: Work) -> StageOutput:
    recipe = work.recipe
    drafter = trained_drafter(work)
    report_folder = work.before["evaluate"].folder
    report = Report.load(report_folder / "report.json")
    folder = work.folder / "drafter"
    dtype = getattr(torch, recipe.export.dtype)
    embedding = work.session.target(recipe.target.dtype).embedding_VD if recipe.export.include_embedding else None
    export_drafter(
        drafter,
        folder,
        dtype=dtype,
        manifest=_manifest(work, report),
        embedding_VD=embedding,
        geometry=recipe.target.geometry,
    )
    hashes = {path.name: file_sha256(path) for path in sorted(folder.iterdir())}
    for path in sorted(report_folder.glob("*")):
        if path.is_file() and path.suffix in (".json", ".md", ".png") and path.name != "stage.json":
            shutil.copyfile(path, folder / path.name)
    join_metrics(_metrics(work).values(), folder / TRAINING_LOG)
    size = (folder / "model.safetensors").stat().st_size
    return StageOutput(fingerprint(hashes), {"files": hashes, "weight_bytes": size})


def export_stage(recipe: Recipe) -> Stage:
    """Write the drafter that a server loads."""
    training = tuple(stage_name(recipe, index) for index in range(len(recipe.training.stages)))
    data = ("decontaminate", "rollout", "pack") if recipe.data.responses == "rollout" else ("decontaminate", "pack")
    return Stage(
        name="export",
        does="write the drafter with its manifest and reports, and load it back",
        needs=("target", "prompts", *data, *training, "evaluate"),
        inputs=lambda recipe: {"recipe": recipe.model_dump(mode="json"), "version": __version__},
        run=_run_export,
        estimate=lambda recipe: Estimate(
            does=f"write the drafter in {recipe.export.dtype} as a Hugging Face folder with its manifest and report",
            disk_bytes=amounts(recipe).drafter_parameters * (2 if recipe.export.dtype == "bfloat16" else 4),
        ),
    )
