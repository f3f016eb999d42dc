"""JSON lines and JSON arrays as rows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from angelspec.core.errors import DataError
from angelspec.data.byte_rows import BYTE_ORDER_MARK, ByteRow, read_array, read_lines
from angelspec.data.reasons import Reason, RowRefused
from angelspec.data.source_row import SourceRow, bad_byte, parse_json, raw_text, too_long


def json_line_rows(stream: BinaryIO, *, limit: int) -> Iterator[SourceRow]:
    """One JSON value a line."""
    for row in read_lines(stream, limit=limit):
        yield _decode(row, limit=limit)


def json_document_rows(path: Path, stream: BinaryIO, *, limit: int) -> Iterator[SourceRow]:
    """A .json file: one array of rows; JSON lines, as many such files are; or one object, a single row.

    Inside an object no line begins with a brace as its second one, so a file whose two first lines do holds lines, and
    a broken first one is one bad row.

    Raises:
        DataError: one object over several lines that is larger than the limit.
    """
    first, second = _beginnings(stream, limit=limit)
    stream.seek(0)
    if first.startswith(b"["):
        rows = read_array(stream, limit=limit)
    elif first.startswith(b"{") and not first.endswith(b"}") and not second.startswith(b"{"):
        rows = iter([_one_object(path, stream, limit=limit)])
    else:
        rows = read_lines(stream, limit=limit)
    for row in rows:
        yield _decode(row, limit=limit)


def _beginnings(stream: BinaryIO, *, limit: int) -> tuple[bytes, bytes]:
    """The first two lines that are not blank, without space around them; of one above the limit only that much."""
    found: list[bytes] = []
    while len(found) < 2 and (line := stream.readline(limit)):
        rest = line
        while not rest.endswith(b"\n") and (rest := stream.readline(limit)):
            pass
        if text := line.removeprefix(BYTE_ORDER_MARK).strip():
            found.append(text)
    first, second = (*found, b"", b"")[:2]
    return first, second


def _one_object(path: Path, stream: BinaryIO, *, limit: int) -> ByteRow:
    content = stream.read(limit + 1)
    if len(content) > limit:
        raise DataError(
            f"{path} is one JSON object of more than {limit:,} bytes",
            mend="write its rows as a JSON array or as JSON lines",
        )
    body = content.removeprefix(BYTE_ORDER_MARK)
    return ByteRow(1, len(content) - len(body), body, len(body), False, terminated=False)


def _decode(row: ByteRow, *, limit: int) -> SourceRow:
    try:
        return SourceRow(row.line, _value(row, limit=limit), None, raw_text(row.data))
    except RowRefused as refused:
        return SourceRow(row.line, None, refused, raw_text(row.data))


def _value(row: ByteRow, *, limit: int) -> Any:
    if row.too_long:
        raise too_long(row.size, limit=limit)
    if not row.data and not row.terminated:
        raise RowRefused(Reason.TRUNCATED, "the file ends before its array does")
    try:
        text = row.data.decode("utf-8")
    except UnicodeDecodeError as error:
        if not row.terminated and error.reason == "unexpected end of data":
            raise RowRefused(Reason.TRUNCATED, "the file ends inside a character") from error
        raise bad_byte(row.data, error, row_offset=row.offset) from error
    try:
        return parse_json(text)
    except ValueError as error:
        if not row.terminated and _ends_early(text, error):
            raise RowRefused(Reason.TRUNCATED, f"the file ends in the middle of this row ({error})") from error
        lone = "; carriage returns alone end no rows" if "\r" in text.strip() else ""
        raise RowRefused(Reason.INVALID_JSON, f"{error}{lone}") from error


def _ends_early(text: str, error: ValueError) -> bool:
    """Whether a last row is no JSON because its end is missing, rather than wrong in itself."""
    if not isinstance(error, json.JSONDecodeError) or error.msg == "Extra data":
        return False
    rest = text.rstrip()[error.pos :]
    return error.msg.startswith("Unterminated string") or not rest or rest.isalpha()
