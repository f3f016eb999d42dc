"""Numbers of bytes for a person."""

from __future__ import annotations


def byte_size(count: int | None, *, unknown: str = "?") -> str:
    """Bytes in binary units, such as ``3.0 MiB``; ``unknown`` for None."""
    if count is None:
        return unknown
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
