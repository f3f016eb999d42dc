"""CSV and TSV files as rows: one object each, keyed by the header."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from angelspec.core.errors import DataError
from angelspec.data.byte_rows import BYTE_ORDER_MARK
from angelspec.data.reasons import Reason, RowRefused
from angelspec.data.source_row import RAW_CHARACTERS, SourceRow, bad_byte, raw_text, too_long

_LOST_LINES = 20
"""A row that is cut inside quotes may hold so many lines; more are rows that an open quote swallowed."""


class _PhysicalLines:
    """Lines for csv.reader, which joins those inside quotes; bytes that are not UTF-8 stay recoverable."""

    def __init__(self, stream: BinaryIO, *, limit: int) -> None:
        self._stream = stream
        self._limit = limit
        self._line = 0
        self._offset = 0
        self.start_row()

    def start_row(self) -> None:
        """Begin to describe another row."""
        self.first_line, self.first_offset = self._line + 1, self._offset
        self.size = self.count = 0
        self.too_long = False
        self.bad_byte: RowRefused | None = None
        self.raw = b""

    def __iter__(self) -> _PhysicalLines:
        return self

    def __next__(self) -> str:
        data = self._stream.readline(self._limit + 2)
        if not data:
            raise StopIteration
        size, end = len(data), data
        while not end.endswith(b"\n") and (end := self._stream.readline(self._limit + 2)):
            size += len(end)
        self.too_long |= size > self._limit + 2
        self._line += 1
        self.count += 1
        if self._line == 1:
            data = data.removeprefix(BYTE_ORDER_MARK)
        if len(self.raw) < 4 * RAW_CHARACTERS:
            self.raw += data[: 4 * RAW_CHARACTERS]
        line_offset = self._offset
        self._offset += size
        self.size += size
        if self.too_long:
            return "\n"
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            self.bad_byte = self.bad_byte or bad_byte(data, error, row_offset=line_offset)
            return data.decode("utf-8", "surrogateescape")


def table_rows(path: Path, stream: BinaryIO, *, delimiter: str, limit: int) -> Iterator[SourceRow]:
    """Read a table with a header; a quoted field may hold line ends, which are kept as they are.

    Raises:
        DataError: no readable header, one that names a column twice, or a quote that takes many lines to the end.
    """
    lines = _PhysicalLines(stream, limit=limit)
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    header: list[str] | None = None
    while True:
        lines.start_row()
        fields: list[str] = []
        refused: RowRefused | None = None
        try:
            with _field_limit(limit):
                fields = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            refused = _refused(str(error), limit=limit)
            if refused.reason is Reason.TRUNCATED and lines.count > _LOST_LINES:
                raise DataError(
                    f"{path}: a quote that line {lines.first_line} opens is never closed; {lines.count - 1:,} lines "
                    "behind it can't be told apart",
                    mend="close it, or double the quotes inside the field",
                ) from None
        if lines.too_long or lines.size > limit + 2:
            refused = too_long(lines.size, limit=limit)
        refused = refused or lines.bad_byte
        if refused is None and not fields:
            continue
        if header is None:
            header = _header(path, fields, refused)
            continue
        if refused is None and len(fields) != len(header):
            refused = RowRefused(Reason.WRONG_COLUMNS, f"{len(fields)} fields; the header names {len(header)}")
        value = None if refused else dict(zip(header, fields, strict=True))
        yield SourceRow(lines.first_line, value, refused, raw_text(lines.raw))


def _header(path: Path, fields: list[str], refused: RowRefused | None) -> list[str]:
    if refused is not None:
        raise DataError(f"{path} has no readable header: {refused.detail}", mend="name the columns on line 1")
    header = [name.strip() for name in fields]
    if len(set(header)) != len(header):
        raise DataError(f"{path} names a column twice: {', '.join(header)}", mend="rename one of them")
    return header


def _refused(message: str, *, limit: int) -> RowRefused:
    if "field limit" in message:
        return RowRefused(
            Reason.LINE_TOO_LONG,
            f"a field of more than {limit:,} characters (data.max_line_bytes), or a quote left open",
        )
    if "unexpected end of data" in message:
        return RowRefused(Reason.TRUNCATED, "the file ends inside quotes")
    return RowRefused(Reason.WRONG_COLUMNS, message)


@contextmanager
def _field_limit(limit: int) -> Iterator[None]:
    """The csv module's limit is one for the whole process: set it only while it reads."""
    before = csv.field_size_limit(limit)
    try:
        yield
    finally:
        csv.field_size_limit(before)
