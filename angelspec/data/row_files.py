"""A file of any supported kind as a stream of rows."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path

from angelspec.core.errors import DataError
from angelspec.core.files import LFS_START
from angelspec.data.json_rows import json_document_rows, json_line_rows
from angelspec.data.source_row import SourceRow
from angelspec.data.text_tables import table_rows
from angelspec.data.typed_tables import parquet_rows

SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet")
"""Kinds of files that can be read; the text ones also with .gz behind."""


def file_rows(path: Path, *, max_line_bytes: int) -> Iterator[SourceRow]:
    """Read a file row by row, by its suffix, in bounded memory.

    Raises:
        DataError: the file is missing, of no supported kind, or unreadable as a whole.
    """
    suffix = file_kind(path)
    if suffix == ".parquet":
        yield from parquet_rows(path)
        return
    with path.open("rb") as raw:
        _refuse_other_encodings(path, raw.read(64))
        raw.seek(0)
        try:
            with gzip.open(raw, "rb") if path.suffix.lower() == ".gz" else raw as stream:
                if suffix in (".csv", ".tsv"):
                    delimiter = "," if suffix == ".csv" else "\t"
                    yield from table_rows(path, stream, delimiter=delimiter, limit=max_line_bytes)
                elif suffix == ".json":
                    yield from json_document_rows(path, stream, limit=max_line_bytes)
                else:
                    yield from json_line_rows(stream, limit=max_line_bytes)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise DataError(f"{path} is no complete gzip file: {error}", mend="copy it again") from error


def file_kind(path: Path) -> str:
    """The suffix that says how a file is read.

    Raises:
        DataError: no such file, or another kind.
    """
    if not path.is_file():
        raise DataError(f"{path} does not exist or is no file", mend="check the path (file:PATH in a recipe)")
    kind = path.suffix.lower()
    if kind == ".gz" and path.with_suffix("").suffix.lower() != ".parquet":
        kind = path.with_suffix("").suffix.lower()
    if kind not in SUFFIXES:
        raise DataError(
            f"{path} is of an unknown kind '{path.suffix}'",
            mend=f"use one of: {', '.join(SUFFIXES)} (text also with .gz behind)",
        )
    return kind


def _refuse_other_encodings(path: Path, head: bytes) -> None:
    if head.startswith(LFS_START):
        raise DataError(f"{path} is a Git LFS pointer, not the file itself", mend="run `git lfs pull`")
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise DataError(f"{path} is UTF-16, not UTF-8", mend="save it as UTF-8")
