"""From what a user calls a drafter to a folder: a path, a name in the registry, or a repository on a hub."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from angelspec.core.errors import CheckpointError, HubError
from angelspec.core.files import expanded, is_free
from angelspec.core.locations import resource_folder
from angelspec.core.registry import RegisteredDrafter, Registry, load_registry
from angelspec.core.repositories import Repository, names_a_hub
from angelspec.hub.failures import HubUnavailable, NotOnHub
from angelspec.hub.pull import cached, names_a_commit, pull

Say = Callable[[str], None]
Check = Callable[[Path, RegisteredDrafter | None], Sequence[str]]
"""Says why a fetched folder can't be loaded, given what the registry knows of it (empty: it can)."""


@dataclass(frozen=True)
class FoundDrafter:
    """A drafter on this machine."""

    folder: Path
    """Its folder, or its file where a user named one."""
    name: str
    """What to call it."""
    entry: RegisteredDrafter | None = None
    """What the registry knows of it; its ``config_overrides`` are for the loader."""


def find_drafter(
    text: str,
    *,
    output: Path | None = None,
    check: Check | None = None,
    needs_manifest: bool = False,
    bare_paths: bool = True,
    say: Say = lambda text: None,
    registry: Registry | None = None,
) -> FoundDrafter:
    """The drafter that a user names, fetched if it has to be.

    A path that exists comes first. A repository that the registry knows is taken at the revision pinned there unless
    another is named. What is cached under a commit is used without asking the hub; otherwise the hub is asked, and what
    is cached serves when it can't be reached.

    Args:
        text: a path, hf:ORG/NAME[@REVISION], modelscope:ORG/NAME[@REVISION], or a registered name.
        output: folder to fetch it into, or to copy a drafter into that ships with angelspec; None: the cache.
        check: run on what is fetched.
        needs_manifest: fetch no drafter without one; what is on this machine is not looked at.
        bare_paths: whether a path counts that begins with neither ``.`` nor ``/`` nor ``~``.
        say: told what is being done.
        registry: None: the one that ships with angelspec.

    Raises:
        CheckpointError: no such path or registered drafter, it can't be loaded, or lacks a manifest that is needed.
        HubError: it can't be fetched.
    """
    path = expanded(text)
    if path.exists() and (bare_paths or text.startswith((".", "/", "~"))):
        if output is not None:
            raise CheckpointError(f"{path} is on this machine: nothing is fetched", mend="copy it yourself")
        return FoundDrafter(path, path.resolve().name)
    registry = registry or load_registry()
    if names_a_hub(text):
        repository = Repository.parse(text)
        entry = registry.find(repository.name)
        places: Sequence[Repository] = [_pinned(repository, entry, say)]
        return _fetch(
            places, entry, name=str(repository), output=output, check=check, needs_manifest=needs_manifest, say=say
        )
    entry = registry.need(text)
    if entry.folder is not None:
        folder = resource_folder("checkpoints") / entry.folder
        if folder.is_dir():
            return FoundDrafter(folder if output is None else _copied(folder, output), entry.name, entry)
        if not entry.places:
            raise CheckpointError(f"'{entry.name}' should lie in {folder}", mend="reinstall angelspec")
    places = [_pinned(replace(place, revision=None), entry, say) for place in entry.places]
    return _fetch(places, entry, name=entry.name, output=output, check=check, needs_manifest=needs_manifest, say=say)


def on_this_machine(text: str, *, registry: Registry | None = None) -> Path | None:
    """Where a drafter lies already, by the same names as ``find_drafter`` takes; None: it would have to be fetched.

    Raises:
        HubError: a repository's name that is none.
    """
    path = expanded(text)
    if path.exists():
        return path
    registry = registry or load_registry()
    if names_a_hub(text):
        repository = Repository.parse(text)
        return cached(_pinned(repository, registry.find(repository.name), lambda text: None))
    entry = registry.find(text)
    if entry is None:
        return None
    shipped = resource_folder("checkpoints") / entry.folder if entry.folder is not None else None
    if shipped is not None and shipped.is_dir():
        return shipped
    return next((folder for folder in map(cached, entry.places) if folder is not None), None)


def _copied(folder: Path, output: Path) -> Path:
    if not is_free(output):
        raise CheckpointError(f"{output} exists", mend="choose another folder, or remove it")
    return Path(shutil.copytree(folder, output, dirs_exist_ok=True))


def _pinned(repository: Repository, entry: RegisteredDrafter | None, say: Say) -> Repository:
    if entry is None or repository.revision is not None:
        return repository
    for place in entry.places:
        if (place.hub, place.name) == (repository.hub, repository.name) and place.revision is not None:
            say(f"{repository}: taken at revision {place.revision}, because {entry.pinned_because}")
            return place
    return repository


def _fetch(
    places: Sequence[Repository],
    entry: RegisteredDrafter | None,
    *,
    name: str,
    output: Path | None,
    check: Check | None,
    needs_manifest: bool,
    say: Say,
) -> FoundDrafter:
    failure: HubError | None = None
    for place in places:
        here = cached(place) if output is None else None
        if here is not None and names_a_commit(place.revision):
            return FoundDrafter(here, name, entry)
        try:
            checked = None if check is None else lambda folder: check(folder, entry)
            folder = pull(place, output=output, check=checked, needs_manifest=needs_manifest, say=say)
        except HubUnavailable as error:
            if here is not None:
                say(f"{place}: the hub can't be reached; taking {here.name} from the cache")
                return FoundDrafter(here, name, entry)
            failure = failure or error
        except NotOnHub as error:
            failure = failure or error
        else:
            return FoundDrafter(folder, name, entry)
    assert failure is not None, "no place to fetch from"
    raise failure
