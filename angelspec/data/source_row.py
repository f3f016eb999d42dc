"""One row of a source before anything is known of its meaning: a decoded value, or why there is none."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from angelspec.data.reasons import Reason, RowRefused

RAW_CHARACTERS = 1000
"""How much of a refused row is kept for the quarantine file."""


@dataclass(frozen=True, slots=True)
class SourceRow:
    """One row of a file or of a hub dataset."""

    line: int
    """One-based line on which it begins; the row's number where there are no lines."""
    value: Any
    refused: RowRefused | None
    raw: str
    """Its beginning, as text."""


def raw_text(data: bytes) -> str:
    """The beginning of encoded data; bytes that are not UTF-8 are written as escapes."""
    return data[: 4 * RAW_CHARACTERS].decode("utf-8", "backslashreplace")[:RAW_CHARACTERS]


def bad_byte(data: bytes, error: UnicodeDecodeError, *, row_offset: int) -> RowRefused:
    """The refusal that names the first byte that is not UTF-8."""
    place = error.start
    return RowRefused(
        Reason.INVALID_UTF8,
        f"byte 0x{data[place]:02X} at offset {place} of the row (offset {row_offset + place} of the file) is not UTF-8",
    )


def too_long(size: int, *, limit: int) -> RowRefused:
    """The refusal of a row over the byte limit."""
    return RowRefused(Reason.LINE_TOO_LONG, f"{size:,} bytes; at most {limit:,} are read (data.max_line_bytes)")


def parse_json(text: str) -> Any:
    """Parse JSON; raw control characters inside strings pass, NaN and Infinity do not.

    Raises:
        ValueError: not JSON, or nested too deeply.
    """
    try:
        return json.loads(text, strict=False, parse_constant=_refuse_constant, object_pairs_hook=_without_doubles)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        keys = [key for key, _ in pairs]
        double = next(key for key in value if keys.count(key) > 1)
        raise ValueError(f"the key {double!r} stands twice in one object")
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
