"""The function behind ``angelspec data check``: what would become of each row, without a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from angelspec.core.errors import DataError
from angelspec.core.recipe import DataSection, PromptSource
from angelspec.core.workloads import Workload
from angelspec.data.chat import ChatFormat, prompt_rows, rows_of_given
from angelspec.data.conversation import Conversation
from angelspec.data.fitting import fit_row
from angelspec.data.messages import full_role_map
from angelspec.data.quarantine import write_quarantine
from angelspec.data.reading import ReadResult, read_content_rows
from angelspec.data.reasons import EXPLANATIONS, Note, Rejection, Remark, RowRefused
from angelspec.data.rounds import first_round
from angelspec.data.row_schema import Responses, RowRules
from angelspec.data.sources import locate

_DEFAULTS = DataSection.model_fields


@dataclass(frozen=True)
class RenderingCheck:
    """A target and a geometry against which rows are also rendered, masked and cut."""

    chat: ChatFormat
    max_prompt_tokens: int
    max_document_tokens: int
    block_size: int


@dataclass
class TokenCounts:
    """What rendering gave."""

    rows: int = 0
    total: int = 0
    supervised: int = 0


def check_files(
    paths: Sequence[Path | str],
    *,
    quarantine: Path | None = None,
    responses: Responses = "either",
    role_map: Mapping[str, str] | None = None,
    workload: Workload = "chat",
    prompt_key: str | None = None,
    max_line_bytes: int = _DEFAULTS["max_line_bytes"].default,
    rendering: RenderingCheck | None = None,
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
        rendering: a target to render accepted rows for; None: they are not rendered.

    Returns:
        Plain data: ``accepted`` (rows), ``rejected`` (list of line, reason, detail, and file where several were
        given), ``counts`` (by reason), ``notes`` and ``note_counts`` (what was changed in accepted rows),
        ``reasons`` (what each word means), ``ignored_keys``, ``rows``, with ``rendering`` also ``tokens`` (rows,
        total, supervised, supervised_share), and ``error`` if nothing is usable.

    Raises:
        DataError: a file cannot be read at all, or is the quarantine as well.
        TargetError: the target's tokenizer has no chat template.
    """
    if quarantine is not None and any(quarantine.resolve() == Path(path).resolve() for path in paths):
        raise DataError(f"{quarantine} is checked and can't be the quarantine", mend="name another --quarantine file")
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
    tokens = None if rendering is None else _render(result, rendering)
    if quarantine is not None:
        write_quarantine(quarantine, result.rejected)
    value = report(result, several=len(paths) > 1)
    if tokens is not None:
        share = tokens.supervised / max(1, tokens.total)
        counted = {"rows": tokens.rows, "total": tokens.total, "supervised": tokens.supervised}
        value["tokens"] = {**counted, "supervised_share": share}
    return value


def _render(result: ReadResult, rendering: RenderingCheck) -> TokenCounts:
    """Move conversations that cannot be rendered or hold no block from the accepted to the rejected."""
    counts = TokenCounts()
    kept: list[Conversation] = []
    for conversation in result.accepted:
        if conversation.messages[-1].role == "assistant":
            refused = _render_answers(conversation, rendering, counts, result.notes)
        else:
            first = first_round([conversation])[0].conversation
            prompts = prompt_rows([first], rendering.chat, max_prompt_tokens=rendering.max_prompt_tokens)
            refused = prompts.rejected
            counts.rows += len(prompts.prompts)
            counts.total += sum(len(prompt.tokens) for prompt in prompts.prompts)
        result.rejected += refused
        if not refused:
            kept.append(conversation)
    result.accepted = kept
    result.rejected.sort(key=lambda row: (row.file, row.line))
    return counts


def _render_answers(
    conversation: Conversation, rendering: RenderingCheck, counts: TokenCounts, notes: list[Note]
) -> list[Rejection]:
    rendered = rows_of_given([conversation], rendering.chat, max_prompt_tokens=rendering.max_prompt_tokens)
    notes += rendered.notes
    place = (conversation.file, conversation.line)
    refused: list[RowRefused] = []
    for row in rendered.rows:
        try:
            fitted = fit_row(row, max_document_tokens=rendering.max_document_tokens, block_size=rendering.block_size)
        except RowRefused as error:
            refused.append(error)
            continue
        if len(fitted) < len(row):
            notes.append(Note(*place, Remark.ANSWER_CUT, f"{len(row)} tokens, cut to {len(fitted)}"))
        counts.rows += 1
        counts.total += len(fitted)
        counts.supervised += fitted.num_supervised
    if rendered.rejected or len(refused) < len(rendered.rows):
        notes += [Note(*place, Remark.TURN_DROPPED, f"{error.reason}: {error.detail}") for error in refused]
        return rendered.rejected
    return [Rejection(*place, refused[0].reason, refused[0].detail, conversation.id)]


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
