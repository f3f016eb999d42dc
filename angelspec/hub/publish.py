"""Publishing a drafter: staged by allow-list, checked before any request, uploaded, read back before success is said.

What needs a drafter to run (building it, drafting with it) is passed in, so that this stays on its floor.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from angelspec.core.errors import AngelspecError, CheckpointError
from angelspec.core.files import write_text_atomic
from angelspec.core.locations import license_file
from angelspec.core.manifest import DrafterManifest
from angelspec.core.repositories import Repository
from angelspec.hub.card_metadata import card_problems
from angelspec.hub.failures import ContentRefused, IntegrityError, VisibilityConflict
from angelspec.hub.patience import with_patience
from angelspec.hub.quiet import quiet_clients
from angelspec.hub.staging import (
    CARD_FILE,
    LICENSE_FILE,
    LOAD_TEST_FILE,
    Stage,
    StagedFile,
    copy_allowed,
    is_allowed,
    staged_files,
)
from angelspec.hub.stated_facts import contradictions
from angelspec.hub.transport import Hub, RemoteFile, connect

OUR_LICENSE = "apache-2.0"
_APACHE = re.compile(r"Apache License,?\s+Version 2\.0")
_TITLE_CHARACTERS = 1000
"""In which a licence's text says which one it is; further on it may speak of others."""
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
"""Files a loader might take for the drafter's weights."""

_PLACE = re.compile(r"""https?://[^\s"'<>,;]+|(?<![\w./~-])(?:file:|folder:)?[/~][\w.-]+/[^\s"'<>,;]+""")
_LOOPBACK = re.compile(r"https?://(?:localhost|127\.[\d.]+|\[::1\])(?::\d+)?(?:/|$)")

Check = Callable[[Path, DrafterManifest], Sequence[str]]
"""Looks at the staged folder; returns what is wrong, one sentence each."""
Say = Callable[[str], None]


@dataclass(frozen=True)
class Destination:
    """Where a publication goes, and who may see it."""

    repository: Repository
    private: bool = True

    def __str__(self) -> str:
        return f"{self.repository} ({'private' if self.private else 'public'})"


@dataclass(frozen=True)
class Outcome:
    """What became of one destination."""

    destination: Destination
    state: Literal["published", "unchanged", "failed"]
    detail: str
    error: AngelspecError | None = None


@dataclass(frozen=True)
class Publication:
    """A checked, staged copy, ready to go."""

    manifest: DrafterManifest
    stage: Stage
    license: str
    warnings: tuple[str, ...] = ()
    """What is allowed but may not be meant."""


@contextmanager
def prepare(
    folder: Path,
    *,
    license: str,
    base_model: str | None,
    write_card: Callable[[Path, DrafterManifest], str],
    checks: Mapping[str, Check],
    say: Say = lambda text: None,
) -> Iterator[Publication]:
    """Stage a checkpoint and check it; the staged copy exists until the block ends. No request is made.

    Args:
        folder: the checkpoint's.
        license: identifier, in small letters. Its text is the checkpoint's ``LICENSE``, or ours for apache-2.0.
        base_model: the target's ORG/NAME, which the card must name; None: it is on no hub.
        write_card: makes README.md from the staged folder where the checkpoint has none of its own.
        checks: by what they look at; run on the staged copy.
        say: told what is being done.

    Raises:
        CheckpointError: with everything that is wrong.
    """
    temporary = Path(tempfile.mkdtemp(prefix="angelspec-publish-"))
    try:
        say("staging")
        left_out = copy_allowed(folder, temporary)
        manifest = DrafterManifest.read(temporary)
        assert manifest is not None, "staging refuses a folder without one"
        add_license(temporary, license)
        if not (temporary / CARD_FILE).is_file():
            write_text_atomic(temporary / CARD_FILE, write_card(temporary, manifest))
        problems = card_problems(_text(temporary / CARD_FILE), base_model=base_model, license=license)
        problems += contradictions(temporary, manifest)
        for what, check in checks.items():
            say(f"checking {what}")
            problems += check(temporary, manifest)
        if problems:
            lines = "\n".join(f"  {problem}" for problem in problems)
            raise CheckpointError(
                f"{folder} is not published: {len(problems)} problem(s)\n{lines}", mend="mend them, or export it again"
            )
        stage = Stage(temporary, staged_files(temporary), tuple(left_out))
        yield Publication(manifest, stage, license, _warnings(temporary, manifest))
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def add_license(folder: Path, license: str) -> None:
    """Put the licence's text beside the weights, unless one is there.

    Raises:
        CheckpointError: there is none, and the licence is not the one whose text we carry; or the one that is there is
            of Apache's licence where another is stated, or the reverse.
    """
    path = folder / LICENSE_FILE
    if path.is_file():
        if (_APACHE.search(_text(path)[:_TITLE_CHARACTERS]) is not None) != (license == OUR_LICENSE):
            raise CheckpointError(
                f"{LICENSE_FILE} is not the text of licence '{license}'",
                mend=f"put that text there, or state the licence that {LICENSE_FILE} holds with --license",
            )
        return
    if license != OUR_LICENSE:
        raise CheckpointError(
            f"the text of licence '{license}' is missing", mend=f"put it as {LICENSE_FILE} beside config.json"
        )
    shutil.copyfile(license_file(), path)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path.name} is not UTF-8: {error}", mend="save it as UTF-8") from error


def _warnings(folder: Path, manifest: DrafterManifest) -> tuple[str, ...]:
    recipe = manifest.recipe
    places = [recipe.target.source, recipe.target.chat_template, recipe.drafter.initial_checkpoint]
    places += [source.source for source in (*recipe.data.train, *recipe.data.evaluation)]
    paths = {place for place in places if place and (place.startswith(("folder:", "file:", "/", "~", ".")))}
    paths |= set(_places_in(recipe.rollout.endpoint_url or ""))
    warnings = (
        [f"the manifest names local paths or addresses that everyone will read: {', '.join(sorted(paths))}"]
        if paths
        else []
    )
    if (folder / LOAD_TEST_FILE).is_file() and (places := _places_in(_text(folder / LOAD_TEST_FILE))):
        warnings.append(f"{LOAD_TEST_FILE} names local paths or addresses that everyone will read: {', '.join(places)}")
    if not manifest.acceptance:
        warnings.append("nothing was measured: the card has no figures")
    return tuple(warnings)


def _places_in(text: str) -> list[str]:
    """Local paths and addresses of other machines in a text, each once."""
    return sorted({place for place in _PLACE.findall(text) if not _LOOPBACK.match(place)})


def publish(
    publication: Publication, destinations: Sequence[Destination], *, message: str, say: Say = lambda text: None
) -> list[Outcome]:
    """Bring a publication to every destination, one after the other; one's failure does not stop the next.

    Args:
        publication: from ``prepare``.
        destinations: whose revision is a branch (None: the default one).
        message: of the commit.
        say: told what is being done, and about every wait.
    """
    outcomes = []
    for destination in destinations:
        try:
            with quiet_clients():
                outcomes.append(_publish_to(publication, destination, message=message, say=say))
        except AngelspecError as error:
            outcomes.append(Outcome(destination, "failed", str(error), error))
    return outcomes


def _publish_to(publication: Publication, destination: Destination, *, message: str, say: Say) -> Outcome:
    hub, name = connect(destination.repository.hub), destination.repository.name
    place = str(destination.repository)

    def patiently(doing, call):
        return with_patience(call, doing=doing, place=place, tokens=hub.tokens, say=say)

    account = patiently("log in", hub.account)
    private = patiently("look at the repository", lambda: hub.is_private(name))
    if private is None:
        say(f"{destination}: creating it as {account}")
        patiently(
            "create the repository",
            lambda: _create(hub, name, private=destination.private, license=publication.license),
        )
        private = patiently("look at the repository", lambda: hub.is_private(name))
    _same_visibility(destination, private)
    branch = destination.repository.revision or hub.default_branch
    if branch != hub.default_branch:
        patiently(f"create the branch '{branch}'", lambda: hub.need_branch(name, branch))

    attempts = 0

    def upload() -> str:
        """The revision that holds the files. Looks first, so that a commit whose answer was lost is not made twice."""
        nonlocal attempts
        present = hub.files(name, branch)
        _refuse_other_weights(publication, present, place=place)
        outdated = _outdated(publication, present)
        if not outdated and not _differences(publication.stage.files, present):
            return branch
        attempts += 1
        say(f"{place}: uploading {len(publication.stage.files)} files, {publication.stage.total_bytes / 1e6:.1f} MB")
        if outdated:
            say(f"{place}: removing what an earlier publication left: {', '.join(outdated)}")
        return hub.commit(name, publication.stage.files, remove=outdated, branch=branch, message=message)

    revision = patiently("upload the files", upload)
    say(f"{place}: reading back")
    read = patiently("read back", lambda: hub.files(name, revision))
    differences = _differences(publication.stage.files, read)
    differences += [f"{path} is still there" for path in _outdated(publication, read)]
    differences += _unhashed_differences(
        hub, name, publication.stage.files, read, revision=revision, patiently=patiently
    )
    if differences:
        raise IntegrityError(
            f"{place}: what the hub holds is not what was sent: {'; '.join(differences)}",
            mend="publish again; if it stays so, delete the repository and report it to the hub",
        )
    besides = _besides(publication, read)
    if not attempts:
        return Outcome(destination, "unchanged", f"{hub.url(name)} holds this already{besides}")
    where = "" if revision == branch else f" at {revision[:12]}"
    return Outcome(destination, "published", f"{hub.url(name)}{where}, read back and equal{besides}")


def _create(hub: Hub, name: str, *, private: bool, license: str) -> None:
    """Create it, unless an earlier attempt did and only its answer was lost."""
    if hub.is_private(name) is None:
        hub.create(name, private=private, license=license)


def _same_visibility(destination: Destination, private: bool | None) -> None:
    if private is None:
        raise IntegrityError(
            f"{destination.repository} was created but can't be seen", mend="look at it on the site, then publish again"
        )
    if private != destination.private:
        raise VisibilityConflict(
            f"{destination.repository} is {'private' if private else 'not private'}, but this is to be published as "
            f"{'private' if destination.private else 'public'}; nothing was uploaded",
            mend="say --public or --private as the repository is, or change it on the site yourself",
        )


def _refuse_other_weights(publication: Publication, present: Mapping[str, RemoteFile], *, place: str) -> None:
    ours = {file.path for file in publication.stage.files}
    others = sorted(path for path in present if path.endswith(_WEIGHTS) and path not in ours)
    if others:
        raise ContentRefused(
            f"{place} holds other weights too, which loaders might take: {', '.join(others)}",
            mend="delete them on the site, or publish to another repository",
        )


def _outdated(publication: Publication, present: Mapping[str, RemoteFile]) -> list[str]:
    """Files that a publication may hold and this one does not: an earlier one's, which would stand beside the new
    weights as if they were theirs."""
    ours = {file.path for file in publication.stage.files}
    return sorted(path for path in present if is_allowed(path) and path not in ours)


def _besides(publication: Publication, present: Mapping[str, RemoteFile]) -> str:
    """What else a repository holds, in words; empty: nothing but the hub's own settings."""
    ours = {*(file.path for file in publication.stage.files), ".gitattributes"}
    others = sorted(path for path in present if path not in ours)
    return f"; it also holds, and keeps, {', '.join(others)}" if others else ""


def _differences(files: Sequence[StagedFile], present: Mapping[str, RemoteFile]) -> list[str]:
    found = []
    for file in files:
        there = present.get(file.path)
        if there is None:
            found.append(f"{file.path} is missing")
        elif (what := there.differs_from(file.size, file.sha256, file.git_sha1)) is not None:
            found.append(f"{file.path} has another {what}")
    return found


def _unhashed_differences(
    hub: Hub, name: str, files: Sequence[StagedFile], present: Mapping[str, RemoteFile], *, revision: str, patiently
) -> list[str]:
    """Files of which the hub tells no hash are fetched and compared."""
    found = []
    for file in files:
        there = present.get(file.path)
        if there is None or there.has_hash:
            continue
        with tempfile.TemporaryDirectory(prefix="angelspec-readback-") as folder:
            path = patiently(
                f"read {file.path} back",
                lambda file=file, there=there, folder=folder: hub.download(
                    name, file.path, revision=revision, into=Path(folder), expected=there
                ),
            )
            if path.read_bytes() != file.source.read_bytes():
                found.append(f"{file.path} has another content")
    return found


def exit_code(outcomes: Sequence[Outcome]) -> int:
    """0: all went well; the failure's own code where all failures are of one kind; 1 where they differ."""
    codes = {outcome.error.exit_code for outcome in outcomes if outcome.error is not None}
    return codes.pop() if len(codes) == 1 else int(bool(codes))
