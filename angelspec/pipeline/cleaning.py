"""``angelspec clean``: what old runs and caches take on the disk, and their removal, never by surprise.

Only what angelspec can have made is listed: runs, stages of runs, converted targets, pulled drafters, and copies of
drafters whose configuration was completed. What is still named (stages by a run, a drafter by a pointer or the
registry, a target by a recipe) says by whom; what a command works in is known by the lock that it holds.
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from filelock import FileLock, Timeout

from angelspec.core.errors import AngelspecError
from angelspec.core.files import file_states, read_json
from angelspec.core.known_targets import KNOWN_TARGETS
from angelspec.core.locations import cache_folder
from angelspec.core.recipe_files import RECIPE_FILE
from angelspec.core.registry import load_registry
from angelspec.hub.pull import cached, drafter_cache, fetch_lock, forget, is_partial, partial_of, pointers
from angelspec.pipeline.record import RECORD_FILE, RUN_LOCK, read_record
from angelspec.pipeline.store import STAGE_FILE, read_users, users_file
from angelspec.targets.sources import BUILD_LOCK, SOURCE_RECORD

_DAY = 86400.0
_UNFINISHED_FOR = 1 / 24
"""Days without a change after which a half-written copy is taken for abandoned."""
_STAGE = re.compile(r"[a-z][a-z0-9-]*-[0-9a-f]{16}")
_RUN_FILES = (RECIPE_FILE, RECORD_FILE, "comparison.json")
_NUMBER = r"\d+(?:\.\d*)?|\.\d+"
_SIZES = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_AGES = {"h": 1 / 24, "d": 1.0, "w": 7.0, "m": 30.0}


_COMPLETED = "completed"
"""Folder of the cache for drafters whose configuration was completed."""


@dataclass(frozen=True)
class Item:
    """One thing that could go."""

    path: Path
    what: str
    size: int
    """Bytes."""
    age_days: float
    """Since anything in it last changed."""
    named_by: tuple[str, ...] = ()
    """Who still needs it."""
    locks: tuple[Path, ...] = ()
    """Files of which a command holds one while it works in it."""

    @property
    def in_use(self) -> bool:
        """Whether a command works in it now; looked up each time."""
        return any(map(_held, self.locks))


def parse_size(text: str) -> int:
    """Bytes of "500MB", "2 GB" or "1000".

    Raises:
        AngelspecError: no size.
    """
    found = re.fullmatch(rf"({_NUMBER})\s*([KMGT]?B?)", text.strip().upper())
    unit = found[2] if found and found[2].endswith("B") else f"{found[2]}B" if found and found[2] else ""
    try:
        return int(float(found[1]) * _SIZES[unit]) if found else int(text)
    except (ValueError, KeyError) as error:
        raise AngelspecError(f"'{text}' is no size", mend="write a number with KB, MB or GB") from error


def parse_age(text: str) -> float:
    """Days of "12h", "30d", "2w" or "3m" (months of 30 days).

    Raises:
        AngelspecError: no age.
    """
    found = re.fullmatch(rf"({_NUMBER})\s*([hdwm])", text.strip().lower())
    if not found:
        raise AngelspecError(f"'{text}' is no age", mend="write a number with h, d, w or m, like 30d")
    return float(found[1]) * _AGES[found[2]]


def find_items(runs: Path, *, older_than: float = 0.0, larger_than: int = 0) -> list[Item]:
    """Everything that could go and is as old and as large as asked, the largest first.

    Args:
        runs: the folder of runs.
        older_than: days since the last change.
        larger_than: bytes.
    """
    items = [*_runs(runs), *_stages(runs), *_targets(), *_drafters(), *_completed()]
    kept = [item for item in items if item.age_days >= older_than and item.size >= larger_than]
    return sorted(kept, key=lambda item: (-item.size, str(item.path)))


def remove(item: Item) -> bool:
    """Remove it, and the pointers that led to it, while no command can begin to work in it.

    Returns:
        False: a command works in it, and it stays.
    """
    with ExitStack() as held:
        try:
            for path in item.locks:
                if path.is_file():
                    held.enter_context(FileLock(path, timeout=0))
        except Timeout:
            return False
        if drafter_cache() in item.path.parents:
            forget(item.path)
        (item.path / STAGE_FILE).unlink(missing_ok=True)  # what is left of an interrupted removal is no finished stage
        if item.path.is_dir() and not item.path.is_symlink():
            shutil.rmtree(_put_aside(item.path))
        else:
            item.path.unlink()
    users_file(item.path).unlink(missing_ok=True)
    return True


def _put_aside(path: Path) -> Path:
    """Where a folder lies that is about to be removed: a drafter is whole as long as it has its name."""
    if drafter_cache() in path.parents and not is_partial(path):
        aside = partial_of(path)
    elif path.parent == cache_folder() / _COMPLETED and not path.name.startswith("."):
        aside = path.with_name(f".{path.name}.removed")
    else:
        return path
    shutil.rmtree(aside, ignore_errors=True)
    return path.rename(aside)


def _item(path: Path, what: str, *, named_by: tuple[str, ...] = (), locks: tuple[Path, ...] = ()) -> Item:
    states = list(file_states(path))
    size = sum(state.st_size for state in states)
    newest = max(path.lstat().st_mtime, *(state.st_mtime for state in states), 0.0)
    return Item(path, what, size, max(0.0, (time.time() - newest) / _DAY), named_by, locks)


def _run_folders(runs: Path) -> Iterator[Path]:
    if runs.is_dir():
        for path in sorted(runs.iterdir()):
            if (path / "config.json").is_file():  # a drafter that somebody put here, with its recipe
                continue
            if path.is_dir() and any((path / name).is_file() for name in _RUN_FILES):
                yield path


def _runs(runs: Path) -> Iterator[Item]:
    for path in _run_folders(runs):
        drafter = path / "drafter" / "config.json"
        named = (f"its drafter, {drafter.parent}",) if drafter.is_file() else ()
        yield _item(path, "run", named_by=named, locks=(path / RUN_LOCK, *(path / "store").glob(".*.lock")))


def _stages(runs: Path) -> Iterator[Item]:
    store = runs / "store"
    if not store.is_dir():
        return
    inside = list(_run_folders(runs))
    for path in sorted(store.iterdir()):
        if path.is_dir() and _STAGE.fullmatch(path.name):
            outputs = dict.fromkeys((*inside, *map(Path, read_users(path))))
            users = [output for output in outputs if _uses(output, path.name)]
            named = [f"run {output.name if output in inside else output}" for output in users]
            if not (path / "stage.json").is_file() and any(path.rglob("latest")):
                named = [*named, "its pointer 'latest': a rerun goes on from there"]
            locks = (store / f".{path.name}.lock", *(output / RUN_LOCK for output in users))
            yield _item(path, "stage", named_by=tuple(named), locks=locks)


def _uses(output: Path, stage: str) -> bool:
    return any(Path(str(entry.get("folder"))).name == stage for entry in read_record(output).values())


def _targets() -> Iterator[Item]:
    folder = cache_folder() / "targets"
    if not folder.is_dir():
        return
    for path in sorted(folder.iterdir()):
        if not path.is_dir():
            continue
        record = path / SOURCE_RECORD
        source = read_json(record).get("source") if record.is_file() else None
        named = [f"target {name}" for name, target in KNOWN_TARGETS.items() if source and target.source == source]
        what = "target" if record.is_file() else "unfinished target"
        yield _item(path, what, named_by=tuple(named), locks=(path / BUILD_LOCK,))


def _drafters() -> Iterator[Item]:
    root = drafter_cache()
    registered: dict[Path, str] = {}
    for entry in load_registry().drafters:
        for place in entry.places:
            folder = cached(place)
            if folder is not None:
                registered[folder] = entry.name
    for organisation in sorted(path for path in root.glob("*/*") if path.is_dir()):
        pointed = pointers(organisation)
        for path in sorted(path for path in organisation.iterdir() if path.is_dir()):
            named = [f"registered as {registered[path]}"] if path in registered else []
            named += [f"pulled as {name}" for name in pointed.get(path, ())]
            what = "unfinished download" if is_partial(path) else "drafter"
            yield _item(path, what, named_by=tuple(named), locks=(fetch_lock(path),))


def _completed() -> Iterator[Item]:
    """Whole copies of drafters whose config.json lacks fields; serving makes them again."""
    folder = cache_folder() / _COMPLETED
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.is_dir():
            item = _item(path, "completed drafter")
            young = path.name.startswith(".") and item.age_days < _UNFINISHED_FOR  # it may be written now
            yield replace(item, named_by=("whoever writes it: it changed within the hour",)) if young else item


def _held(lock: Path) -> bool:
    """Whether somebody holds a lock file; none is made."""
    if not lock.is_file():
        return False
    try:
        with FileLock(lock, timeout=0):
            return False
    except Timeout:
        return True
