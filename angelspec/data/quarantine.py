"""What becomes of refused rows: a file that holds them, counts by reason, and the point at which a run stops."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from angelspec.core.errors import DataError
from angelspec.core.files import write_text_atomic
from angelspec.data.reasons import Rejection, count_reasons, table_below

_SHOWN = 5


def write_quarantine(path: Path, rejected: Sequence[Rejection]) -> None:
    """Write one JSON line per refused row: file, line, reason, detail and the row's beginning."""
    lines = (
        json.dumps(
            {"file": row.file, "line": row.line, "reason": str(row.reason), "detail": row.detail, "raw": row.raw},
            ensure_ascii=True,
        )
        for row in rejected
    )
    write_text_atomic(path, "".join(f"{line}\n" for line in lines))


def require_usable(
    *, accepted: int, rejected: Sequence[Rejection], max_bad_fraction: float, what: str, quarantine: Path | None = None
) -> None:
    """Stop where nothing is left, or where too many rows were refused.

    Args:
        accepted: rows that can be used.
        rejected: rows that cannot.
        max_bad_fraction: largest share of refused rows that is put up with.
        what: the source or stage, for the message.
        quarantine: where the refused rows were written, for the message.

    Raises:
        DataError: with the counts by reason and the first refused rows.
    """
    total = accepted + len(rejected)
    if accepted and len(rejected) <= max_bad_fraction * total:
        return
    counts = count_reasons(row.reason for row in rejected)
    if not accepted:
        problem = f"{what}: no usable rows" + ("" if total else " (the source is empty)")
    else:
        problem = (
            f"{what}: {len(rejected):,} of {total:,} rows were refused "
            f"({len(rejected) / total:.1%}; data.max_bad_fraction is {max_bad_fraction:.1%})"
        )
    shown = "".join(f"\n  {row}" for row in rejected[:_SHOWN])
    more = f"\n  … and {len(rejected) - _SHOWN:,} more" if len(rejected) > _SHOWN else ""
    table = table_below(counts)
    place = f"see {quarantine}, then " if quarantine is not None else ""
    mend = f"{place}mend the rows" if total else "check the path and that the file was copied whole"
    raise DataError(f"{problem}{table}{shown}{more}", mend=mend)
