"""Result files of ``angelspec bench serve``, as rows for the plot of throughput against concurrency."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from angelspec.core.errors import DataError


@dataclass(frozen=True)
class Result:
    """One file."""

    path: Path
    rows: tuple[dict[str, Any], ...]
    """concurrency, tokens_per_second and series, one for each point."""


def read_result(path: Path) -> Result:
    """Read a result file.

    Raises:
        DataError: it cannot be read, or holds no points.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(
            f"{path}: not readable as JSON: {error}", mend="give a file of `angelspec bench serve`"
        ) from error
    rows = tuple(_points(content))
    if not rows:
        raise DataError(f"{path}: no points of a load test", mend="give a file of `angelspec bench serve`")
    return Result(path, rows)


def _points(content: Any) -> list[dict[str, Any]]:
    return []
