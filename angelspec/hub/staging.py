"""A publication is a copy by allow-list: what is named here goes, everything else stays, and both are shown.

Deny-lists let ``.env``, optimizer states and upload caches through; a copy also means that what was checked is what is
uploaded, whatever happens to the run folder meanwhile.
"""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from angelspec.core.errors import CheckpointError
from angelspec.core.files import LFS_START, read_json
from angelspec.core.fingerprint import file_sha256
from angelspec.core.manifest import MANIFEST_FILE
from angelspec.core.recipe_files import RECIPE_FILE
from angelspec.core.trained_template import TEMPLATE_FILE
from angelspec.hub.redaction import holds_a_token

CARD_FILE = "README.md"
LICENSE_FILE = "LICENSE"
CONFIG_FILE = "config.json"
LOAD_TEST_FILE = "serve-bench.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
_PICKLES = (".bin", ".pt", ".pth", ".pkl")
ALLOWED = (
    CARD_FILE, LICENSE_FILE, CONFIG_FILE, MANIFEST_FILE, WEIGHTS_FILE, INDEX_FILE, "report.json", "report.md",
    LOAD_TEST_FILE, RECIPE_FILE, TEMPLATE_FILE, "training/metrics.jsonl",
)  # fmt: skip
"""Paths that go, besides shards of the weights and the report's plots (*.png beside it)."""
_TEXTS = (".md", ".json", ".jsonl", ".yaml", ".txt", ".jinja")


@dataclass(frozen=True)
class StagedFile:
    """One file of a publication."""

    path: str
    """In the repository."""
    source: Path
    """The staged copy."""
    size: int
    sha256: str
    git_sha1: str
    """Of its content as a git blob, by which a hub may list it."""


@dataclass(frozen=True)
class LeftOut:
    """Something in the checkpoint's folder that does not go."""

    path: str
    why: str


@dataclass(frozen=True)
class Stage:
    """The staged copy, and what stayed behind."""

    folder: Path
    files: tuple[StagedFile, ...]
    left_out: tuple[LeftOut, ...]

    @property
    def total_bytes(self) -> int:
        """Of all files."""
        return sum(file.size for file in self.files)


def git_blob_sha1(path: Path) -> str:
    """The name git gives a file of this content."""
    digest = hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False)
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def is_allowed(path: str) -> bool:
    """Whether a path, relative to the checkpoint's folder, belongs to a publication."""
    return path in ALLOWED or bool(_SHARD.fullmatch(path)) or ("/" not in path and path.endswith(".png"))


def copy_allowed(source: Path, into: Path) -> list[LeftOut]:
    """Copy what is allowed and report what is not.

    Args:
        source: the checkpoint's folder.
        into: an empty folder.

    Raises:
        CheckpointError: a link points at nothing or stands where a file should, or a file that must be there is missing
            or empty; every problem is named.
    """
    if not source.is_dir():
        raise CheckpointError(f"{source} is no folder", mend="give the folder of an exported drafter")
    left_out: list[LeftOut] = []
    problems: list[str] = []
    for path, name in _entries(source):
        if path.is_symlink() and not path.exists():
            problems.append(f"{name} is a link to {path.readlink()}, which does not exist")
        elif path.is_symlink() and is_allowed(name):
            # the name would be published with the content of whatever it points at
            problems.append(f"{name} is a link to {path.readlink()}; only real files are published")
        elif path.is_symlink():
            left_out.append(LeftOut(name, "a link"))
        elif path.is_dir():
            left_out.append(LeftOut(f"{name}/", "a folder that is no part of a publication"))
        elif not is_allowed(name):
            left_out.append(LeftOut(name, _why_not(name)))
        else:
            destination = into / name
            destination.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, destination)
    problems += _missing(into)
    if problems:
        lines = "\n".join(f"  {problem}" for problem in problems)
        raise CheckpointError(
            f"{source} can't be published: {len(problems)} problem(s)\n{lines}",
            mend="export the drafter again, or remove what does not belong there",
        )
    return left_out


def _entries(source: Path) -> Iterator[tuple[Path, str]]:
    """Everything in the folder, and in ``training/``, the one folder of which something may go."""
    folders = {name.split("/")[0] for name in ALLOWED if "/" in name}
    for path in sorted(source.iterdir()):
        if path.name in folders and path.is_dir() and not path.is_symlink():
            yield from ((inner, f"{path.name}/{inner.name}") for inner in sorted(path.iterdir()))
        else:
            yield path, path.name


def _why_not(name: str) -> str:
    if name.endswith(_PICKLES):
        return "pickled; weights are published as safetensors"
    if name.startswith("."):
        return "hidden"
    return "not on the list of what is published"


def _missing(folder: Path) -> list[str]:
    """What a publication must hold and does not."""
    problems = [f"{name} is missing" for name in (CONFIG_FILE, MANIFEST_FILE) if not (folder / name).is_file()]
    shards = sorted(path.name for path in folder.iterdir() if _SHARD.fullmatch(path.name))
    if (folder / INDEX_FILE).is_file():
        try:
            named = set(read_json(folder / INDEX_FILE)["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError):
            problems.append(f"{INDEX_FILE} can't be read")
        else:
            problems += [f"{name}, which {INDEX_FILE} names, is missing" for name in sorted(named - set(shards))]
            problems += [f"{name} is not named by {INDEX_FILE}" for name in shards if name not in named]
    elif shards:
        problems.append(f"{INDEX_FILE} is missing beside {', '.join(shards)}")
    elif not (folder / WEIGHTS_FILE).is_file():
        problems.append(f"{WEIGHTS_FILE} is missing")
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.stat().st_size == 0:
            problems.append(f"{path.relative_to(folder)} is empty")
        elif path.is_file() and path.suffix == ".safetensors":
            with path.open("rb") as stream:
                if stream.read(len(LFS_START)) == LFS_START:
                    problems.append(f"{path.name} is a Git LFS pointer, not the weights")
    return problems


def staged_files(folder: Path) -> tuple[StagedFile, ...]:
    """The finished copy, hashed.

    Raises:
        CheckpointError: a text in it holds a token.
    """
    files = []
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = path.relative_to(folder).as_posix()
        if path.suffix in _TEXTS and holds_a_token(path.read_text(encoding="utf-8", errors="replace")):
            raise CheckpointError(
                f"{name} holds an access token", mend="remove it from the recipe or card, and revoke the token"
            )
        files.append(StagedFile(name, path, path.stat().st_size, file_sha256(path), git_blob_sha1(path)))
    return tuple(files)
