"""``angelspec recipe run``: all stages, then the table, the report and how to serve the drafter."""

from __future__ import annotations

import shutil
from pathlib import Path

from angelspec.core.files import replace_folder, restore_folder, write_text_atomic
from angelspec.core.recipe import Recipe
from angelspec.core.recipe_files import RECIPE_FILE, recipe_text
from angelspec.drafters.checkpoint import require_replaceable
from angelspec.evaluation.rendering import print_report
from angelspec.evaluation.report import Report
from angelspec.evaluation.tables import Table
from angelspec.pipeline.hub_commits import HubCommits
from angelspec.pipeline.progress import Progress, table_console
from angelspec.pipeline.record import RunRecord, only_run_in
from angelspec.pipeline.requirements import check_requirements
from angelspec.pipeline.runner import follow_stages, run_stages
from angelspec.pipeline.session import Session
from angelspec.pipeline.stages import stages_of
from angelspec.pipeline.store import Store
from angelspec.serving.instructions import serve_instructions

DRAFTER_FOLDER = "drafter"


def run_recipe(
    recipe: Recipe, *, output: Path, store: Path, quiet: bool = False, progress: Progress | None = None
) -> Path:
    """Run a resolved recipe and return the folder of the exported drafter.

    Of several ranks (torchrun) all train; the first runs the other stages, shows what is done and writes ``output``.

    Args:
        recipe: resolved.
        output: gets ``recipe.yaml``, ``stages.json``, ``drafter/`` with its report.
        store: folder of the stages; runs that share it share finished stages.
        quiet: show no progress and print no table.
        progress: where to show progress; None: the console.

    Raises:
        MissingRequirement: this machine cannot run it (before anything is downloaded), or another run writes into
            ``output``.
        CheckpointError: ``drafter/`` there holds something that is no drafter.
        AngelspecError: a stage cannot go on; finished and half-finished stages stay.
    """
    check_requirements(recipe, output=output, store=store)
    drafter = output / DRAFTER_FOLDER
    require_replaceable(drafter)
    session = Session(recipe)
    if not session.ranks.is_first:
        session.ranks.barrier()  # until the record is this run's
        follow_stages(
            stages_of(recipe), recipe, store=Store(store), session=session, progress=Progress(quiet=True), output=output
        )
        return drafter
    progress = progress or Progress(quiet=quiet)
    with only_run_in(output), progress.running():
        write_text_atomic(output / RECIPE_FILE, recipe_text(recipe))
        record = RunRecord(output)
        session.ranks.barrier()
        stages = stages_of(recipe, data=HubCommits(store, progress.say).pin(recipe.data))
        results = run_stages(stages, recipe, store=Store(store), session=session, progress=progress, record=record)
        _copy_drafter(results["export"].folder / "drafter", drafter.resolve())
    if not quiet:
        _print_end(recipe, drafter, target_folder=Path(results["target"].output.summary["folder"]))
    return drafter


def _copy_drafter(source: Path, destination: Path) -> None:
    fresh = destination.with_name(f".{destination.name}.new")
    shutil.rmtree(fresh, ignore_errors=True)
    shutil.copytree(source, fresh)
    restore_folder(destination)
    replace_folder(fresh, destination)


def main_table(table: Table) -> bool:
    """Whether a table is shown at the end of a run; the others are in the report."""
    return "unfinished" not in table.title and not table.title.startswith("Time per")


def _print_end(recipe: Recipe, drafter: Path, *, target_folder: Path) -> None:
    console = table_console()
    print_report(Report.load(drafter / "report.json"), console=console, only=main_table)
    console.print(f"\ndrafter: [bold]{drafter}[/bold]\nreport:  {drafter / 'report.md'}", highlight=False)
    instructions = serve_instructions(
        recipe.drafter_config(),
        checkpoint=drafter,
        target=str(target_folder),
        mode=recipe.mode,
        family=recipe.target.mode_family,
    )
    for instruction in instructions:
        console.print(f"\n[bold]serve with {instruction.engine}[/bold] ({instruction.note})", highlight=False)
        console.print(f"  {instruction.command}", soft_wrap=True, highlight=False)
    console.print(f"\ncompare drafters: angelspec evaluate {drafter} [OTHER ...]", highlight=False)
