"""Fetching a drafter: only what belongs to one, resumed where it was cut off, verified before anybody may use it.

In the cache a drafter lies under ``drafters/HUB/ORG/NAME@SNAPSHOT``, whole and checked, or not at all. Beside it,
``NAME.refs.json`` points from each revision that was asked for to the folder that it meant last.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from angelspec.core.errors import CheckpointError, MissingRequirement
from angelspec.core.files import read_json, write_json_atomic
from angelspec.core.fingerprint import file_sha256, fingerprint
from angelspec.core.locations import cache_folder
from angelspec.core.manifest import MANIFEST_FILE
from angelspec.core.repositories import Repository
from angelspec.hub.failures import IntegrityError, NotOnHub
from angelspec.hub.patience import with_patience
from angelspec.hub.quiet import quiet_clients
from angelspec.hub.staging import CONFIG_FILE, git_blob_sha1, is_allowed
from angelspec.hub.transport import Hub, RemoteFile, connect

Say = Callable[[str], None]
Check = Callable[[Path], Sequence[str]]
"""Says why a fetched folder can't be loaded (empty: it can)."""
_COMMIT = re.compile(r"(?!(?:19|20)\d{6}$)[0-9a-f]{7,40}")
"""Whole or shortened; eight digits of a date are rather a tag."""
_LICENSES = re.compile(r"(?i)licen[cs]e[\w.-]*")
_PICKLES = re.compile(r"pytorch_model(-\d{5}-of-\d{5})?\.bin(\.index\.json)?")
_PARTIAL = ".partial"
_REFS = ".refs.json"
_SHOWN = 12
"""Characters of a snapshot in a folder's name."""


def drafter_cache() -> Path:
    """Where pulled drafters lie."""
    return cache_folder() / "drafters"


def names_a_commit(revision: str | None) -> bool:
    """Whether a revision is a commit, which never means anything else later."""
    return revision is not None and _COMMIT.fullmatch(revision) is not None


def cached(repository: Repository) -> Path | None:
    """The cached folder of what that name meant when it was last pulled; None: there is none."""
    parent, name = _place(repository)
    if names_a_commit(repository.revision):
        found = [path for path in parent.glob(f"{name}@{repository.revision[:_SHOWN]}*") if path.is_dir()]
        return found[0] if len(found) == 1 else None
    folder = parent / str(_refs(repository).get(repository.revision or "", ""))
    return folder if folder != parent and folder.is_dir() else None


def fetch_lock(folder: Path) -> Path:
    """The file that is locked while a folder of the cache, finished or unfinished, is fetched."""
    whole = folder.with_name(folder.name.removeprefix(".").removesuffix(_PARTIAL)) if is_partial(folder) else folder
    return drafter_cache() / ".locks" / f"{fingerprint(str(whole.resolve()))}.lock"


def partial_of(folder: Path) -> Path:
    """Where the download of a drafter's folder lies until it is whole."""
    return folder.with_name(f".{folder.name}{_PARTIAL}")


def is_partial(folder: Path) -> bool:
    """Whether a folder of the cache is an unfinished download."""
    return folder.name.endswith(_PARTIAL)


def pointers(organisation: Path) -> dict[Path, list[str]]:
    """Names under which the drafters in the cache of an organisation were pulled, by folder.

    Args:
        organisation: a folder HUB/ORG of the cache.
    """
    found: dict[Path, list[str]] = {}
    for file in organisation.glob(f"*{_REFS}"):
        repository = f"{organisation.parent.name}:{organisation.name}/{file.name.removesuffix(_REFS)}"
        for revision, name in _read_refs(file).items():
            found.setdefault(organisation / name, []).append(repository + (f"@{revision}" if revision else ""))
    return found


def forget(folder: Path) -> None:
    """Remove the pointers to a drafter of the cache."""
    for file in folder.parent.glob(f"*{_REFS}"):
        refs = _read_refs(file)
        kept = {revision: name for revision, name in refs.items() if name != folder.name}
        if not kept:
            file.unlink()
        elif kept != refs:
            write_json_atomic(file, kept)


def pull(
    repository: Repository,
    *,
    output: Path | None = None,
    check: Check | None = None,
    needs_manifest: bool = False,
    say: Say = lambda text: None,
) -> Path:
    """Fetch a drafter into the cache, or into ``output``, and return its folder.

    Args:
        repository: where it lies.
        output: another folder to fetch it into.
        check: run on what was fetched before it is shown to anybody.
        needs_manifest: refuse a drafter without one before anything of it is fetched.
        say: told what is being done.

    Raises:
        HubError: it can't be had, or is not what the hub says it is.
        CheckpointError: it can't be loaded, lacks a manifest that is needed, or ``output`` holds something else.
        MissingRequirement: the disk is too small.
    """
    with quiet_clients():
        return _pull(
            connect(repository.hub), repository, output=output, check=check, needs_manifest=needs_manifest, say=say
        )


def _pull(
    hub: Hub, repository: Repository, *, output: Path | None, check: Check | None, needs_manifest: bool, say: Say
) -> Path:
    name, place = repository.name, str(repository)

    def patiently(doing, call):
        return with_patience(call, doing=doing, place=place, tokens=hub.tokens, say=say)

    snapshot = patiently("find the revision", lambda: hub.snapshot(name, repository.revision))
    files = _wanted(patiently("list the files", lambda: hub.files(name, snapshot)), place=place)
    if needs_manifest and MANIFEST_FILE not in files:
        raise CheckpointError(
            f"{place} has no {MANIFEST_FILE}, so its target and mode are unknown; nothing was fetched",
            mend="give a drafter that angelspec exported",
        )
    parent, stem = _place(repository)
    content = fingerprint({path: [file.size, file.sha256, file.git_sha1] for path, file in files.items()}, length=40)
    shown = (snapshot if names_a_commit(snapshot) else content)[:_SHOWN]
    folder = output.resolve() if output is not None else parent / f"{stem}@{shown}"
    if folder == Path.cwd():
        raise CheckpointError("--output is the folder where you are", mend="name a folder in it")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder, say=say):
        if folder.is_dir() and any(folder.iterdir()):
            if output is not None and (wrong := _wrong(folder, files)):
                raise CheckpointError(
                    f"{folder} exists and is not {place}: {wrong[0]}", mend="choose another folder, or remove it"
                )
            say(f"{place}: already in {folder}")
        else:
            _fetch(hub, repository, files, snapshot, folder=folder, check=check, patiently=patiently, say=say)
    if output is None:
        refs = _refs(repository)
        write_json_atomic(_refs_file(repository), {**refs, repository.revision or "": folder.name})
    return folder


def _fetch(
    hub: Hub,
    repository: Repository,
    files: Mapping[str, RemoteFile],
    snapshot: str,
    *,
    folder: Path,
    check: Check | None,
    patiently: Callable,
    say: Say,
) -> None:
    partial = partial_of(folder)
    partial.mkdir(parents=True, exist_ok=True)
    _need_room(partial, sum(file.size for file in files.values()))
    for path, file in files.items():
        if not _wrong(partial, {path: file}):
            continue  # an earlier attempt fetched it
        say(f"{repository}: {path}, {file.size / 1e6:.1f} MB")
        patiently(
            f"fetch {path}",
            lambda path=path, file=file: hub.download(
                repository.name, path, revision=snapshot, into=partial, expected=file
            ),
        )
    wrong = _wrong(partial, files)
    if wrong:
        shutil.rmtree(partial, ignore_errors=True)
        raise IntegrityError(
            f"{repository}: what came is not what the hub lists: {'; '.join(wrong)}",
            mend="pull again; behind a mirror, try the hub itself",
        )
    for path in sorted(partial.rglob("*"), reverse=True):  # the clients' own notes beside the files
        if path.is_dir() and not any(path.iterdir()):
            path.rmdir()
        elif path.is_file() and path.relative_to(partial).as_posix() not in files:
            path.unlink()
    problems = list(check(partial)) if check is not None else []
    if problems:
        lines = "\n".join(f"  {problem}" for problem in problems)
        raise CheckpointError(
            f"{repository} came whole but can't be used:\n{lines}",
            mend="another revision may be right; `angelspec checkpoint show` lists those that are known",
        )
    if folder.is_dir():
        folder.rmdir()  # empty, see above
    partial.rename(folder)


def _wanted(listed: Mapping[str, RemoteFile], *, place: str) -> dict[str, RemoteFile]:
    """The files of a drafter: never code, and pickles only where there is nothing better."""
    files = {
        path: file
        for path, file in listed.items()
        if is_allowed(path) or ("/" not in path and _LICENSES.fullmatch(path))
    }
    if not any(path.endswith(".safetensors") for path in files):
        files |= {path: file for path, file in listed.items() if _PICKLES.fullmatch(path)}
    weights = [path for path in files if path.endswith((".safetensors", ".bin"))]
    if CONFIG_FILE not in files or not weights:
        lacking = CONFIG_FILE if weights else "weights"
        raise NotOnHub(f"{place} holds no drafter: it has no {lacking}", mend="check the name and the revision")
    return dict(sorted(files.items()))


def _wrong(folder: Path, files: Mapping[str, RemoteFile]) -> list[str]:
    """Files of a folder that are not as listed."""
    wrong = []
    for path, file in files.items():
        here = folder / path
        if not here.is_file():
            wrong.append(f"{path} is missing")
        elif (what := file.differs_from(here.stat().st_size, file_sha256(here), git_blob_sha1(here))) is not None:
            wrong.append(f"{path} has another {what}")
    return wrong


def _need_room(folder: Path, size: int) -> None:
    held = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    free = shutil.disk_usage(folder).free
    if size - held > free:
        raise MissingRequirement(
            f"{(size - held) / 1e9:.1f} GB are to be fetched, {free / 1e9:.1f} GB are free on the disk of {folder}",
            mend="make room (`angelspec clean`), or set ANGELSPEC_CACHE to a larger disk",
        )


@contextmanager
def _locked(folder: Path, *, say: Say) -> Iterator[None]:
    """Held while a folder is fetched, so that two commands never fill one."""
    path = fetch_lock(folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        say(f"another command fetches {folder.name}: waiting for it")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _place(repository: Repository) -> tuple[Path, str]:
    organisation, name = repository.name.split("/")
    return drafter_cache() / repository.hub / organisation, name


def _refs_file(repository: Repository) -> Path:
    parent, name = _place(repository)
    return parent / f"{name}{_REFS}"


def _refs(repository: Repository) -> dict[str, str]:
    return _read_refs(_refs_file(repository))


def _read_refs(file: Path) -> dict[str, str]:
    try:
        refs = read_json(file)
    except (OSError, ValueError):
        return {}
    return refs if isinstance(refs, dict) else {}
