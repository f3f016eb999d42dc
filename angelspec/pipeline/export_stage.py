"""The stage that writes the drafter which a server loads, with its manifest and reports."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from angelspec import __version__
from angelspec.core.files import expanded, write_text_atomic
from angelspec.core.fingerprint import file_sha256, fingerprint
from angelspec.core.manifest import DrafterManifest, MeasuredAcceptance, TargetIdentity, TrainedStage, TrainingRecord
from angelspec.core.recipe import Recipe
from angelspec.core.recipe_files import RECIPE_FILE, recipe_text
from angelspec.core.trained_template import TEMPLATE_FILE
from angelspec.evaluation.report import REPORT_FILE, Report
from angelspec.evaluation.results import SuiteResult
from angelspec.pipeline.estimates import amounts
from angelspec.pipeline.evaluation_stages import trained_drafter, training_logs
from angelspec.pipeline.measuring import LOOKUP
from angelspec.pipeline.requirements import BYTES_OF
from angelspec.pipeline.stage import Estimate, Stage, StageOutput, StageResult, Work
from angelspec.pipeline.training_stages import stage_name
from angelspec.training.export import export_drafter
from angelspec.training.metrics import FILE_NAME as METRICS

TRAINING_LOG = f"training/{METRICS}"
"""Where an export keeps its training log."""


def _manifest(work: Work, report: Report) -> DrafterManifest:
    recipe, before = work.recipe, work.before
    target = before["target"].output
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
        training=training_record(recipe, before),
        acceptance=_acceptance(report.results, drafter=recipe.name),
        report_files=(REPORT_FILE, "report.md"),
    )


def training_record(recipe: Recipe, before: Mapping[str, StageResult]) -> TrainingRecord:
    """What the manifest says of the training, from the finished stages by name."""
    summaries = {
        stage.name: before[stage_name(recipe, index)].output.summary
        for index, stage in enumerate(recipe.training.stages)
    }
    last, packed = summaries[recipe.training.stages[-1].name], before["pack"].output.summary["train"]
    return TrainingRecord(
        steps=_steps_seen(summaries),
        supervised_positions=sum(summary["supervised_positions"] for summary in summaries.values()),
        # a training that was finished before it counted its rows says neither
        target_tokens=last.get("target_tokens", packed["supervised_tokens"]),
        stages=tuple(TrainedStage(name=name, steps=summary["steps"]) for name, summary in summaries.items()),
        data_fingerprints={
            name: before[name].output.digest
            for name in ("prompts", "decontaminate", "rollout", "pack")
            if name in before
        },
        workloads=last.get("workloads", packed["documents_by_workload"]),
        held_out_accepted_length=last["held_out_accepted_length"],
        initial_checkpoint=recipe.drafter.initial_checkpoint,
    )


def _steps_seen(summaries: Mapping[str, Mapping[str, Any]]) -> int:
    """Updates that the weights of the last of consecutive stages have seen: each began with the weights of the stage
    before, which may be those of one before that."""
    names, steps = list(summaries), 0
    while names:
        chosen = summaries[names[-1]]["chosen_from"]
        steps += summaries[chosen]["best_step"]
        names = names[: names.index(chosen)]
    return steps


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
    report = Report.load(report_folder / REPORT_FILE)
    folder = work.folder / "drafter"
    dtype = getattr(torch, recipe.export.dtype)
    # in its own precision: a copy of rounded numbers would be no copy of the target's
    embedding = work.target(recipe.export.dtype).embedding_VD if recipe.export.include_embedding else None
    export_drafter(
        drafter,
        folder,
        dtype=dtype,
        manifest=_manifest(work, report),
        embedding_VD=embedding,
        geometry=recipe.target.geometry,
    )
    if recipe.target.chat_template is not None:
        shutil.copyfile(expanded(recipe.target.chat_template), folder / TEMPLATE_FILE)
    hashes = {path.name: file_sha256(path) for path in sorted(folder.iterdir())}
    write_text_atomic(folder / RECIPE_FILE, recipe_text(recipe))
    for path in sorted(report_folder.glob("*")):
        if path.is_file() and path.suffix in (".json", ".md", ".png") and path.name != "stage.json":
            shutil.copyfile(path, folder / path.name)
    join_metrics(training_logs(work).values(), folder / TRAINING_LOG)
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
            disk_bytes=amounts(recipe).drafter_parameters * BYTES_OF[recipe.export.dtype],
        ),
        version=3,
    )


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
