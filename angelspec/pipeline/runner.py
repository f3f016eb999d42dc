"""Runs the stages of a recipe in order, reusing and resuming what the store holds.

Of several ranks (torchrun) the first runs every stage, and the others wait until the store holds its result; stages
that are made for it, the training ones, are entered by all together.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from angelspec.core.recipe import Recipe
from angelspec.pipeline.progress import Progress
from angelspec.pipeline.session import Session
from angelspec.pipeline.stage import Stage, StageResult, Work
from angelspec.pipeline.store import Store

_LOOK_SECONDS = 0.5


def run_stages(
    stages: Sequence[Stage], recipe: Recipe, *, store: Store, session: Session, progress: Progress
) -> dict[str, StageResult]:
    """Run or reuse every stage.

    Returns:
        Finished stages by name, in order.

    Raises:
        AngelspecError: a stage cannot go on; what it wrote stays and is taken up by the next run.
    """
    if not session.ranks.is_first:
        return _follow(stages, recipe, store=store, session=session, progress=progress)
    results: dict[str, StageResult] = {}
    for number, stage in enumerate(stages, start=1):
        name = store.name_of(stage, recipe, results)
        label = f"[{number}/{len(stages)}] {stage.name}"
        with store.lock(stage, name):
            finished = store.finished(stage, name)
            if stage.by_all_ranks:
                session.ranks.any(finished is None)
            if finished is not None:
                progress.say(f"{label}: reused ({finished.folder.name})")
                results[stage.name] = finished
                continue
            folder = store.folder(stage, name)
            resumed = folder.is_dir() and any(folder.iterdir())
            folder.mkdir(parents=True, exist_ok=True)
            progress.say(f"{label}: {stage.does}" + (" (taken up where it stopped)" if resumed else ""))
            started = time.monotonic()
            output = stage.run(Work(recipe, folder, dict(results), session, progress))
            seconds = time.monotonic() - started
            results[stage.name] = store.finish(stage, name, output, seconds=seconds, inputs=stage.inputs(recipe))
            progress.say(f"{label}: done in {seconds:.1f} s")
    return results


def _follow(
    stages: Sequence[Stage], recipe: Recipe, *, store: Store, session: Session, progress: Progress
) -> dict[str, StageResult]:
    """What every rank but the first does. A first rank that fails is not noticed here: the launcher ends all."""
    results: dict[str, StageResult] = {}
    for stage in stages:
        name = store.name_of(stage, recipe, results)
        if stage.by_all_ranks and session.ranks.any(False):
            stage.run(Work(recipe, store.folder(stage, name), dict(results), session, progress))
        while (finished := store.finished(stage, name)) is None:
            time.sleep(_LOOK_SECONDS)
        results[stage.name] = finished
    return results
