"""Runs the stages of a recipe in order, reusing and resuming what the store holds.

Of several ranks (torchrun) the first runs every stage, and the others wait until its result lies in the store; stages
that are made for it, the training ones, are entered by all together.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from angelspec.core.recipe import Recipe
from angelspec.pipeline.progress import Progress
from angelspec.pipeline.record import LOOK_SECONDS, RunRecord, await_stage
from angelspec.pipeline.session import Session
from angelspec.pipeline.stage import Stage, StageResult, Work
from angelspec.pipeline.store import Store


def run_stages(
    stages: Sequence[Stage],
    recipe: Recipe,
    *,
    store: Store,
    session: Session,
    progress: Progress,
    record: RunRecord,
    prefix: str = "",
) -> dict[str, StageResult]:
    """Run or reuse every stage, as the first rank or the only one.

    Args:
        record: told what is entered and finished, under ``prefix`` and the stage's name.

    Returns:
        Finished stages by name, in order.

    Raises:
        AngelspecError: a stage cannot go on; what it wrote stays and is taken up by the next run.
    """
    results: dict[str, StageResult] = {}
    for number, stage in enumerate(stages, start=1):
        inputs = stage.inputs(recipe)  # once: what they are read from may change while the stage runs
        name = store.name_of(stage, inputs, results)
        label = f"[{number}/{len(stages)}] {stage.name}"
        folder = store.folder(stage, name)
        with _held(store.lock(stage, name), label, progress):
            finished = store.finished(folder)
            folder.mkdir(parents=True, exist_ok=True)
            record.enter(f"{prefix}{stage.name}", folder)
            store.note_user(folder, record.path.parent)
            if stage.by_all_ranks:
                session.ranks.any(finished is None)
            if finished is None:
                resumed = any(folder.iterdir())
                progress.say(f"{label}: {stage.does}" + (" (taken up where it stopped)" if resumed else ""))
                started = time.monotonic()
                output = stage.run(Work(recipe, folder, dict(results), session, progress))
                seconds = time.monotonic() - started
                finished = store.finish(stage, name, output, seconds=seconds, inputs=inputs)
                progress.say(f"{label}: done in {seconds:.1f} s")
            else:
                progress.say(f"{label}: reused ({folder.name})")
            results[stage.name] = finished
            record.finish(f"{prefix}{stage.name}", finished)
    return results


def follow_stages(
    stages: Sequence[Stage], recipe: Recipe, *, store: Store, session: Session, progress: Progress, output: Path
) -> dict[str, StageResult]:
    """What every rank but the first does: read from the run's record where each stage is, and join those of all ranks.

    A first rank that fails is not noticed here: the launcher ends all.
    """
    results: dict[str, StageResult] = {}
    for stage in stages:
        folder = await_stage(output, stage.name)
        if stage.by_all_ranks and session.ranks.any(False):
            stage.run(Work(recipe, folder, dict(results), session, progress))
        while (finished := store.finished(folder)) is None:
            time.sleep(LOOK_SECONDS)
        results[stage.name] = finished
    return results


@contextmanager
def _held(lock: FileLock, label: str, progress: Progress) -> Iterator[None]:
    """Hold a stage's lock, and say so before waiting for another run that works on it."""
    try:
        lock.acquire(timeout=0)
    except Timeout:
        progress.say(f"{label}: another run works on it; waiting for that")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()
