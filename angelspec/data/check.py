"""The function behind ``angelspec data check``: what would become of each row, without a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from angelspec.core.recipe import DataSection, PromptSource
from angelspec.core.workloads import Workload
from angelspec.data.messages import full_role_map
from angelspec.data.quarantine import write_quarantine
from angelspec.data.reading import ReadResult, read_content_rows
from angelspec.data.reasons import EXPLANATIONS
from angelspec.data.row_schema import Responses, RowRules
from angelspec.data.sources import locate

_DEFAULTS = DataSection.model_fields


def check_files(
    paths: Sequence[Path | str],
    *,
    quarantine: Path | None = None,
    responses: Responses = "either",
    role_map: Mapping[str, str] | None = None,
    workload: Workload = "chat",
    prompt_key: str | None = None,
    max_line_bytes: int = _DEFAULTS["max_line_bytes"].default,
) -> dict[str, Any]:
    """Validate files row by row.

    Args:
        paths: files of any supported kind.
        quarantine: JSONL file for the refused rows.
        responses: given: every row must have an answer; rollout: answers are ignored; either: rows that hold a
            conversation must have one, rows that hold a prompt need none.
        role_map: extra role names.
        workload: for rows that do not say theirs.
        prompt_key: see ``PromptSource.prompt_key``.
        max_line_bytes: longer rows are refused.

    Returns:
        Plain data: ``accepted`` (rows), ``rejected`` (list of line, reason, detail, and file where several were
        given), ``counts`` (by reason), ``notes`` and ``note_counts`` (what was changed in accepted rows),
        ``reasons`` (what each word means), ``ignored_keys``, ``rows``, and ``error`` if nothing is usable.

    Raises:
        DataError: a file cannot be read at all.
    """
    result = ReadResult()
    for path in paths:
        source = PromptSource(name=Path(path).name, source=f"file:{path}", prompt_key=prompt_key)
        content = locate(source)
        rules = RowRules(
            source=source.name,
            workload=None,
            responses=responses,
            role_map=full_role_map(role_map or {}),
            prompt_key=prompt_key,
            default_workload=workload,
        )
        result.extend(read_content_rows(content, rules, max_line_bytes=max_line_bytes))
    if quarantine is not None:
        write_quarantine(quarantine, result.rejected)
    return report(result, several=len(paths) > 1)


def report(result: ReadResult, *, several: bool) -> dict[str, Any]:
    """Spell a result as the plain data that ``check_files`` describes."""

    def place(row: Any) -> dict[str, Any]:
        return {"file": row.file, "line": row.line} if several else {"line": row.line}

    counts, remarks = result.counts, result.remarks
    value: dict[str, Any] = {
        "rows": len(result.accepted) + result.not_drawn + len(result.rejected),
        "accepted": len(result.accepted),
        "rejected": [{**place(row), "reason": str(row.reason), "detail": row.detail} for row in result.rejected],
        "counts": counts,
        "notes": [{**place(note), "note": str(note.remark), "detail": note.detail} for note in result.notes],
        "note_counts": remarks,
        "reasons": {str(word): text for word, text in EXPLANATIONS.items() if str(word) in {**counts, **remarks}},
        "ignored_keys": dict(sorted(result.ignored_keys.items())),
        "files": [str(path) for content in result.contents for path in content.files],
    }
    if not result.accepted:
        value["error"] = "no usable rows"
    return value
