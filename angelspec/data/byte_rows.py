"""Rows of a text file as bytes: JSON lines and JSON arrays, split without decoding and in bounded memory.

Line numbers count line feeds only (U+2028, U+0085, vertical tabs and lone carriage returns end no line). A row
longer than the limit is never held: its beginning is kept for the quarantine and the rest is skipped.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

_CHUNK_BYTES = 1 << 20
_HEAD_BYTES = 1024
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class ByteRow:
    """One row, still encoded."""

    line: int
    """One-based number of the line on which it begins."""
    offset: int
    """Bytes of the file before it."""
    data: bytes
    """Its bytes without the line end; only the beginning when ``too_long``."""
    size: int
    """All of its bytes."""
    too_long: bool
    terminated: bool
    """False when the file ended before the row did (or before its line feed)."""


class _Collector:
    """Gathers the pieces of one row up to a limit, and counts all of them."""

    def __init__(self, limit: int) -> None:
        self._limit = limit + 2  # a carriage return is no part of the row, one byte more tells that it is too long
        self._kept = bytearray()
        self.size = 0

    def add(self, piece: bytes) -> None:
        self.size += len(piece)
        room = self._limit - len(self._kept)
        if room > 0:
            self._kept += piece[:room]

    def take(self) -> tuple[bytes, int]:
        """The kept bytes and the number of all; starts anew."""
        kept, size = bytes(self._kept), self.size
        self._kept.clear()
        self.size = 0
        return kept, size


def read_lines(stream: BinaryIO, *, limit: int) -> Iterator[ByteRow]:
    """Split at line feeds; a carriage return before one is dropped, blank lines count but are not yielded.

    Args:
        stream: the file, from its beginning; a UTF-8 byte-order mark is skipped.
        limit: most bytes of a row.
    """
    line, offset = 1, 0
    collector = _Collector(limit)
    while chunk := stream.read(_CHUNK_BYTES):
        begin = 0
        while (end := chunk.find(b"\n", begin)) >= 0:
            if collector.size:
                collector.add(chunk[begin:end])
                kept, size = collector.take()
            else:
                kept, size = chunk[begin:end], end - begin
            if row := _line(kept, size, line=line, offset=offset, limit=limit, terminated=True):
                yield row
            line += 1
            offset += size + 1
            begin = end + 1
        if begin < len(chunk):
            collector.add(chunk[begin:])
    kept, size = collector.take()
    if row := _line(kept, size, line=line, offset=offset, limit=limit, terminated=False):
        yield row


def _line(kept: bytes, size: int, *, line: int, offset: int, limit: int, terminated: bool) -> ByteRow | None:
    if offset == 0 and kept.startswith(BYTE_ORDER_MARK):
        kept, size, offset = kept[3:], size - 3, 3
    if len(kept) == size and kept.endswith(b"\r"):
        kept, size = kept[:-1], size - 1
    if size > limit:
        return ByteRow(line, offset, kept[:_HEAD_BYTES], size, True, terminated)
    if not kept.strip():
        return None
    return ByteRow(line, offset, kept, size, False, terminated)


_OUTSIDE = re.compile(rb'["{}\[\],]')
_INSIDE = re.compile(rb'["\\]')


def read_array(stream: BinaryIO, *, limit: int) -> Iterator[ByteRow]:
    """Split the elements of one top-level JSON array, without parsing them.

    Only strings and brackets are looked at, so that a bad element does not hide its neighbours. An array that is
    not closed ends with an unterminated row, empty if the last element is whole; bytes behind it are a row too.
    """
    depth, in_string, escaped = 0, False, False
    collector = _Collector(limit)
    line, offset, row_line, row_offset = 1, 0, 1, 0
    first_chunk, closed, comma = True, False, False

    def row(*, terminated: bool) -> ByteRow:
        kept, size = collector.take()
        stripped = kept.lstrip()
        lead = len(kept) - len(stripped)
        too_long = size - lead > limit or size > len(kept)
        data = stripped[:_HEAD_BYTES] if too_long else stripped.rstrip()
        return ByteRow(row_line + kept[:lead].count(b"\n"), row_offset + lead, data, size - lead, too_long, terminated)

    while chunk := stream.read(_CHUNK_BYTES):
        position = 0
        if first_chunk and chunk.startswith(BYTE_ORDER_MARK):
            position = 3
        first_chunk = False
        kept_from = position
        while position < len(chunk):
            if escaped:
                escaped = False
                position += 1
                continue
            found = (_INSIDE if in_string else _OUTSIDE).search(chunk, position)
            if found is None:
                break
            position = found.end()
            byte = found.group()
            if in_string:
                if byte == b"\\":
                    escaped = True
                else:
                    in_string = False
                continue
            if closed:
                continue
            if byte == b'"':
                in_string = True
            elif byte in b"{[":
                depth += 1
                if depth == 1:
                    kept_from = position
                    row_line, row_offset = line + chunk.count(b"\n", 0, position), offset + position
            elif (byte == b"," and depth == 1) or (byte in b"}]" and depth == 1):
                collector.add(chunk[kept_from : position - 1])
                closed = byte != b","
                made = row(terminated=True)
                if made.data or byte == b"," or comma:
                    yield made
                comma = byte == b","
                kept_from = position
                row_line, row_offset = line + chunk.count(b"\n", 0, position), offset + position
                depth -= closed
            elif byte in b"}]":
                depth -= 1
        if depth or closed:
            collector.add(chunk[kept_from:])
        line += chunk.count(b"\n")
        offset += len(chunk)
    rest = row(terminated=closed)
    if rest.data:
        yield rest
    if not closed and (not rest.data or (depth <= 1 and not in_string)):
        yield ByteRow(line, offset, b"", 0, False, terminated=False)
