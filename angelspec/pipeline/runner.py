"""Runs the stages of a recipe in order, reusing and resuming what the store holds."""

from __future__ import annotations

import time
from collections.abc import Sequence

from angelspec.core.recipe import Recipe
from angelspec.pipeline.progress import Progress
from angelspec.pipeline.session import Session
from angelspec.pipeline.stage import Stage, StageResult, Work
from angelspec.pipeline.store import Store


def run_stages(
    stages: Sequence[Stage], recipe: Recipe, *, store: Store, session: Session, progress: Progress
) -> dict[str, StageResult]:
    """Run or reuse every stage.

    Returns:
        Finished stages by name, in order.

    Raises:
        AngelspecError: a stage cannot go on; what it wrote stays and is taken up by the next run.
    """
    results: dict[str, StageResult] = {}
    for number, stage in enumerate(stages, start=1):
        name = store.name_of(stage, recipe, results)
        label = f"[{number}/{len(stages)}] {stage.name}"
        with store.lock(stage, name):
            finished = store.finished(stage, name)
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
