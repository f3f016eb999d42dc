"""Files: atomic writes, of which a reader sees the old content or the new and never a part; reading; sizes."""

from __future__ import annotations

import json
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

LFS_START = b"version https://git-lfs"
"""How the pointer begins that Git leaves in place of a large file that it did not fetch."""


def expanded(text: str | Path) -> Path:
    """A path with ``~`` and ``~name`` at its beginning replaced; as in a shell, what names no user stays as it is."""
    try:
        return Path(text).expanduser()
    except RuntimeError:
        return Path(text)


def write_text_atomic(path: Path, text: str) -> None:
    """Write ``text`` as UTF-8 to ``path`` through a temporary sibling, creating parent folders.

    A file that is there keeps its permissions, and a link its target's place.
    """
    path = path.resolve() if path.is_symlink() else path
    mode = path.stat().st_mode & 0o777 if path.exists() else 0o644
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(temporary, mode)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def write_json_atomic(path: Path, value: Any) -> None:
    """Write ``value`` as indented JSON, keys in their given order, refusing NaN."""
    write_text_atomic(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def write_sorted_json(path: Path, value: Any) -> None:
    """Write ``value`` as indented JSON with sorted keys, as files whose bytes are part of a content hash."""
    path.write_text(json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")


def is_free(folder: Path) -> bool:
    """Whether a folder can be written here without losing anything: nothing is there, or an empty folder."""
    return not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))


def restore_folder(folder: Path) -> None:
    """Bring back a folder whose ``replace_folder`` was killed between its two renames."""
    old = _set_aside(folder)
    if old.exists() and not folder.exists():
        old.rename(folder)


def replace_folder(fresh: Path, folder: Path) -> None:
    """Put the folder ``fresh``, of the same parent, in the place of ``folder``, which may be there or not.

    Failing or killed at any moment, the old folder or the new one is left: in its place, or where ``restore_folder``
    finds it.
    """
    old = _set_aside(folder)
    shutil.rmtree(old, ignore_errors=True)  # of a replacement that was killed behind its renames
    if folder.exists():
        folder.rename(old)
    try:
        fresh.rename(folder)
    except BaseException:
        restore_folder(folder)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _set_aside(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.old.tmp")


def file_states(folder: Path) -> Iterator[os.stat_result]:
    """Of every regular file below a folder, links not followed; what vanishes meanwhile is left out."""
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                state = (Path(place) / name).lstat()
                if stat.S_ISREG(state.st_mode):
                    yield state


def read_json(path: Path) -> Any:
    """Read a JSON file (UTF-8, a byte-order mark is accepted)."""
    return json.loads(path.read_text(encoding="utf-8-sig"))
