"""``angelspec evaluate``: several drafters, prompt lookup and plain decoding on the same prompts."""

from __future__ import annotations

import itertools
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from pydantic import ValidationError

from angelspec.core.errors import CheckpointError, DataError, RecipeError, RequestError
from angelspec.core.manifest import DrafterManifest
from angelspec.core.recipe import Recipe
from angelspec.core.recipe_resolution import resolve, validate
from angelspec.core.trained_template import trained_template
from angelspec.data.prompt_items import prompt_source
from angelspec.data.sources import absent_files
from angelspec.decoding.proposers import drafter_proposer
from angelspec.decoding.speculative import CutPolicy
from angelspec.drafters.checkpoint import load_drafter
from angelspec.evaluation.rendering import print_report
from angelspec.evaluation.report import REPORT_FILE
from angelspec.pipeline.export_stage import TRAINING_LOG
from angelspec.pipeline.measuring import (
    drafter_description,
    evaluation_prompts,
    lookup_description,
    lookup_proposer,
    measure_settings,
    measured_report,
    save_report,
    suites_of,
)
from angelspec.pipeline.progress import Progress, table_console
from angelspec.pipeline.session import Session


def evaluate_checkpoints(
    checkpoints: Sequence[Path],
    *,
    prompts: Sequence[str] = (),
    temperatures: Sequence[float] | None = None,
    limit: int | None = None,
    max_new_tokens: int | None = None,
    batch_size: int | None = None,
    target_source: str | None = None,
    shortlist: int | None = None,
    cut: float | None = None,
    breakeven: Sequence[int] = (),
    shortlists: bool = False,
    output: Path | None = None,
    overwrite: bool = False,
    quiet: bool = False,
) -> None:
    """Measure exported drafters of one target and mode side by side, print the tables and write the report.

    Args:
        checkpoints: folders with a manifest; the first one's recipe gives what is not said here.
        prompts: ``[NAME=]SOURCE`` items; none: the evaluation sets of the first drafter's recipe.
        temperatures: none: the recipe's.
        limit: prompts per suite.
        max_new_tokens: longest answer.
        batch_size: rows decoded together.
        target_source: where the target lies, if not where the manifest says.
        shortlist: candidates per slot that a sequential head rescores; 0: the whole vocabulary; None: the recipe's.
        cut: keep ratio of D-cut.
        breakeven: batch sizes at which the break-even with the first MTP drafter is measured; none: it is not.
        shortlists: measure the first drafter with a sequential head with shortlists of every size.
        output: see ``report_folder``.
        overwrite: see ``report_folder``.
        quiet: show no progress.

    Raises:
        CheckpointError: a folder has no manifest, the drafters are for different targets or modes, the break-even is
            asked for without an MTP drafter, or shortlists without a drafter that has a sequential head.
        RecipeError: an option has a value that a recipe can't have.
        RequestError: another report lies there.
    """
    folder = report_folder(output, overwrite=overwrite)
    names = _names(checkpoints)
    manifests = [_manifest(path) for path in checkpoints]
    for name, manifest in zip(names[1:], manifests[1:], strict=True):
        for fact in ("mode", "target.digest"):
            values = [_get(item, fact) for item in (manifests[0], manifest)]
            if values[0] != values[1]:
                raise CheckpointError(
                    f"'{names[0]}' and '{name}' differ in {fact}: {values[0]} and {values[1]}",
                    mend="evaluate them apart; drafters are compared on one target and one mode",
                )
    if breakeven and not any(manifest.drafter.family == "mtp" for manifest in manifests):
        raise CheckpointError(
            f"the break-even compares with MTP, but {' and '.join(names)} {'is' if len(names) == 1 else 'are'} of "
            "another family",
            mend="add an MTP drafter of the same target and mode",
        )
    shortlists_of = _first_sequential(names, manifests) if shortlists else None
    recipe = _recipe(
        checkpoints[0], manifests[0], prompts=prompts, temperatures=temperatures, limit=limit,
        max_new_tokens=max_new_tokens, batch_size=batch_size, target_source=target_source, shortlist=shortlist,
    )  # fmt: skip
    policy = _cut_policy(cut)
    progress = Progress(quiet=quiet)
    session = Session(recipe)
    target = session.target(recipe.evaluation.dtype)
    if target.digest != manifests[0].target.digest:
        raise CheckpointError(
            f"target {target.name} ({target.digest}) is not the one the drafters were trained for "
            f"({manifests[0].target.digest})",
            mend="give the right target with --target",
        )
    suites = suites_of(
        evaluation_prompts(recipe, classify=True, quarantine=folder / "sources-quarantine.jsonl", say=progress.say),
        target,
        recipe,
        names=[source.name for source in recipe.data.evaluation],
        limit=recipe.evaluation.prompts_per_suite,
        quarantine=folder / "quarantine.jsonl",
        say=progress.say,
    )
    lookup = lookup_proposer(recipe)
    proposers, descriptions = [], {lookup.name: lookup_description(recipe)}
    for name, path in zip(names, checkpoints, strict=True):
        loaded = load_drafter(path, geometry=target.geometry, embedding_VD=target.embedding_VD)
        drafter = loaded.drafter.eval().requires_grad_(False)
        proposers.append(drafter_proposer(drafter, target=target, name=name, shortlist=recipe.evaluation.shortlist))
        descriptions[name] = drafter_description(loaded.config)
    settings = measure_settings(recipe)
    if policy is not None:
        settings = settings.model_copy(update={"cut": policy})
    with progress.running(), torch.no_grad():
        report = measured_report(
            target,
            [*proposers, lookup],
            suites,
            recipe=recipe,
            settings=settings,
            exact_target=lambda: session.target("float32"),
            folder=folder,
            progress=progress,
            title="comparison of " + ", ".join(names),
            commands=(shlex.join(["angelspec", *sys.argv[1:]]),),
            descriptions=descriptions,
            breakeven=breakeven,
            shortlists_of=shortlists_of,
        )
    logs = {name: path / TRAINING_LOG for name, path in zip(names, checkpoints, strict=True)}
    logs = {name: path for name, path in logs.items() if path.is_file()}
    save_report(report, folder, metrics=logs, consecutive=False)
    if not quiet:
        console = table_console()
        print_report(report, console=console)
        console.print(f"report: {folder / 'report.md'}", highlight=False)


def report_folder(output: Path | None, *, overwrite: bool) -> Path:
    """Where a report goes without replacing another.

    Args:
        output: there; None: ``runs/evaluation``, or the first of ``runs/evaluation-2``, ... that holds no report.
        overwrite: replace the report that lies in ``output``.

    Raises:
        RequestError: ``output`` holds a report.
    """
    if output is None:
        names = itertools.chain(["evaluation"], (f"evaluation-{number}" for number in itertools.count(2)))
        return next(folder for name in names if not ((folder := Path("runs") / name) / REPORT_FILE).exists())
    if (output / REPORT_FILE).exists() and not overwrite:
        raise RequestError(
            f"{output / REPORT_FILE} exists", mend="choose another --output, or replace it with --overwrite"
        )
    return output


def _first_sequential(names: Sequence[str], manifests: Sequence[DrafterManifest]) -> str:
    """The first drafter whose head rescores candidates one slot after another."""
    for name, manifest in zip(names, manifests, strict=True):
        if manifest.drafter.family == "block" and manifest.drafter.head != "none":
            return name
    raise CheckpointError(
        f"a shortlist is of a sequential head, and none of {', '.join(names)} has one",
        mend="give a DSpark or DFly drafter, or leave out --shortlists",
    )


def _names(checkpoints: Sequence[Path]) -> list[str]:
    names = [_name(path.resolve()) for path in checkpoints]
    if len(set(names)) < len(names):
        names = [str(path) for path in checkpoints]
    if len(set(names)) < len(names):
        raise CheckpointError("a checkpoint is given twice")
    return names


def _name(folder: Path) -> str:
    """What a table calls a drafter: its folder's name, or that of the run whose drafter it is."""
    return folder.parent.name if folder.name == "drafter" else folder.name


def _manifest(path: Path) -> DrafterManifest:
    if not path.exists():
        raise CheckpointError(f"{path} does not exist", mend="give the folder of an exported drafter")
    manifest = DrafterManifest.read(path)
    if manifest is None:
        raise CheckpointError(
            f"{path} has no angelspec_manifest.json, so its target and mode are unknown",
            mend="give the folder of an exported drafter (the `drafter` folder of a run)",
        )
    return manifest


def _get(item: object, path: str) -> object:
    for name in path.split("."):
        item = getattr(item, name)
    return item


def _recipe(
    checkpoint: Path,
    manifest: DrafterManifest,
    *,
    prompts: Sequence[str],
    temperatures: Sequence[float] | None,
    limit: int | None,
    max_new_tokens: int | None,
    batch_size: int | None,
    target_source: str | None,
    shortlist: int | None,
) -> Recipe:
    """The drafter's recipe with the command's changes."""
    document = manifest.recipe.model_dump(mode="json")
    changes = {
        "temperatures": None if temperatures is None else list(temperatures),
        "prompts_per_suite": limit,
        "max_new_tokens": max_new_tokens,
        "batch_size": batch_size,
    }
    document["evaluation"].update({key: value for key, value in changes.items() if value is not None})
    if shortlist is not None:
        document["evaluation"]["shortlist"] = shortlist or None
    if not prompts and (absent := absent_files(manifest.recipe.data.evaluation)):
        raise DataError(
            f"the drafter was measured on files that are not here: {', '.join(absent)}",
            mend="give prompts, such as --prompts math=builtin:eval/math",
        )
    if prompts:
        document["data"]["evaluation"] = [prompt_source(item).model_dump(mode="json") for item in prompts]
    template = trained_template(checkpoint, manifest)
    document["target"]["chat_template"] = None if template is None else str(template)
    if target_source is not None:
        document["target"]["source"] = target_source if ":" in target_source else f"folder:{target_source}"
    return resolve(validate(document, where="the command's options on the drafter's recipe"))


def _cut_policy(ratio: float | None) -> CutPolicy | None:
    try:
        return None if ratio is None else CutPolicy(ratio=ratio)
    except ValidationError:
        raise RecipeError(f"--dcut {ratio:g}: no share of proposals", mend="give one above 0, and at most 1") from None
