"""Where conversations come from, and the content hash by which a stage knows that they changed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from angelspec.core.errors import DataError
from angelspec.core.files import expanded
from angelspec.core.fingerprint import file_sha256
from angelspec.core.locations import prompt_folder
from angelspec.core.recipe import PromptSource
from angelspec.data.row_files import SUFFIXES, file_rows
from angelspec.data.source_row import SourceRow
from angelspec.data.typed_tables import hub_revision, hub_rows


@dataclass(frozen=True)
class SourceContent:
    """What a source holds now, pinned: the bytes of its files, or the commit of its hub dataset."""

    source: PromptSource
    files: tuple[Path, ...] = ()
    digests: tuple[str, ...] = ()
    """SHA-256 of each file."""
    commit: str | None = None
    """Commit of the hub dataset."""

    def inputs(self) -> dict[str, object]:
        """Plain data that a stage's fingerprint is made of: equal for equal content, wherever the files lie."""
        return {"files": list(self.digests), "commit": self.commit}

    def rows(self, *, max_line_bytes: int) -> Iterator[tuple[str, SourceRow]]:
        """Every row with the name of its file."""
        if self.commit is not None:
            name, _ = _hub_name(self.source)
            for row in hub_rows(name, self.source, commit=self.commit):
                yield f"hf:{name}@{self.commit[:8]}", row
        for path in self.files:
            for row in file_rows(path, max_line_bytes=max_line_bytes):
                yield str(path), row


def locate(source: PromptSource) -> SourceContent:
    """Find a source and pin its content.

    ``builtin:SET/NAME`` is a file of the shipped prompts (``builtin:SET`` all of a set), ``file:PATH`` a file, a
    folder or a pattern with ``*``, ``hf:ORG/NAME[@REVISION]`` a dataset on the Hugging Face hub, whose newest commit
    is looked up where no revision is named.

    Raises:
        DataError: no such kind, file or dataset.
        MissingRequirement: the hub is needed and does not answer.
    """
    files = files_here(source)
    if files is None:
        name, revision = _hub_name(source)
        return SourceContent(source, commit=hub_revision(name, revision=revision))
    return SourceContent(source, files=files, digests=tuple(file_sha256(path) for path in files))


def absent_files(sources: Iterable[PromptSource]) -> list[str]:
    """The ``file:`` sources among these that are not on this machine."""
    return [
        source.source
        for source in sources
        if source.source.startswith("file:") and not expanded(source.source.removeprefix("file:")).exists()
    ]


def at_commit(source: PromptSource, commit: str) -> PromptSource:
    """The same dataset of the hub at one commit, which is then not asked for again."""
    name, _ = _hub_name(source)
    return source.model_copy(update={"source": f"hf:{name}", "revision": commit})


def files_here(source: PromptSource) -> tuple[Path, ...] | None:
    """The files of a source that lies on this machine; None: it is on the hub.

    Raises:
        DataError: no such kind or file.
    """
    kind, _, place = source.source.partition(":")
    if kind == "hf" and place:
        return None
    if kind == "builtin" and place:
        return _shipped(place)
    if kind == "file" and place:
        return _files(place)
    raise DataError(
        f"source '{source.source}' of '{source.name}' is of no known kind",
        mend="write builtin:SET/NAME, file:PATH or hf:ORG/NAME",
    )


def _hub_name(source: PromptSource) -> tuple[str, str | None]:
    name, _, revision = source.source.removeprefix("hf:").partition("@")
    if revision and source.revision and revision != source.revision:
        raise DataError(
            f"source '{source.source}' also has revision '{source.revision}'", mend="state the revision once"
        )
    return name, revision or source.revision


def _shipped(place: str) -> tuple[Path, ...]:
    folder = prompt_folder()
    names = sorted(path.relative_to(folder).with_suffix("").as_posix() for path in folder.glob("*/*.jsonl"))
    sets = sorted({name.split("/")[0] for name in names})
    chosen = [name for name in names if place in (name, name.split("/")[0])]
    if not chosen:
        raise DataError(f"'builtin:{place}' is not shipped", mend=f"use one of: {', '.join((*sets, *names))}")
    return tuple(folder / f"{name}.jsonl" for name in chosen)


def _files(place: str) -> tuple[Path, ...]:
    path = expanded(place)
    if path.is_dir():
        files = sorted(item for item in path.iterdir() if item.is_file() and _kind(item) in SUFFIXES)
    elif not path.is_file() and any(character in place for character in "*?["):
        root = Path(path.anchor)  # empty for a relative pattern: where the user is
        files = sorted(item for item in root.glob(str(path.relative_to(path.anchor))) if item.is_file())
    elif path.is_file():
        files = [path]
    else:
        raise DataError(f"file:{place} does not exist", mend="check the path; it is relative to where you are")
    if not files:
        raise DataError(f"file:{place} holds no file that can be read", mend=f"use one of: {', '.join(SUFFIXES)}")
    return tuple(files)


def _kind(path: Path) -> str:
    return (path.with_suffix("") if path.suffix.lower() == ".gz" else path).suffix.lower()
