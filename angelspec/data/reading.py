"""Read sources into conversations, row by row; whatever is refused is named by file, line and reason."""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from angelspec.core.errors import DataError
from angelspec.core.recipe import DataSection, PromptSource
from angelspec.data.conversation import Conversation
from angelspec.data.messages import full_role_map
from angelspec.data.quarantine import require_usable, write_quarantine
from angelspec.data.reasons import Note, Reason, Rejection, Remark, RowRefused, count_reasons
from angelspec.data.row_schema import READ_KEYS, Responses, RowRules, read_row
from angelspec.data.sources import SourceContent, locate

_RAW_KEPT = 10_000
"""Refused rows whose text is kept; of more, only the place and the reason."""


@dataclass
class ReadResult:
    """What was read, and what was not."""

    accepted: list[Conversation] = field(default_factory=list)
    rejected: list[Rejection] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    contents: list[SourceContent] = field(default_factory=list)
    """What the sources held, pinned."""
    not_drawn: int = 0
    """Usable rows left out by a source's limit."""
    ignored_keys: dict[str, int] = field(default_factory=dict)
    """Keys of rows that nothing reads, and how many rows have them."""

    @property
    def counts(self) -> dict[str, int]:
        """Refused rows by reason."""
        return count_reasons(row.reason for row in self.rejected)

    @property
    def remarks(self) -> dict[str, int]:
        """Notes by kind."""
        return count_reasons(note.remark for note in self.notes)

    def extend(self, other: ReadResult) -> None:
        """Add another source's result."""
        self.accepted += other.accepted
        self.rejected += other.rejected
        self.notes += other.notes
        self.contents += other.contents
        self.not_drawn += other.not_drawn
        for key, count in other.ignored_keys.items():
            self.ignored_keys[key] = self.ignored_keys.get(key, 0) + count


def read_source(
    source: PromptSource, section: DataSection, *, responses: Responses | None = None, classify: bool = False
) -> ReadResult:
    """Read one source.

    Args:
        source: what to read; its limit draws rows by content hash, so that the choice depends on the seed and on
            what the rows say, and not on their order.
        section: role map, limits and seed.
        responses: overrides section.responses (evaluation prompts are always a rollout).
        classify: whether a row that does not say its workload is classified as a server would; else it is refused.

    Returns:
        Accepted conversations in the order of the source, and every refused row.

    Raises:
        DataError: the source cannot be read at all.
        MissingRequirement: a hub is needed and does not answer.
    """
    content = locate(source)
    rules = RowRules(
        source=source.name,
        workload=source.workload,
        responses=responses or section.responses,
        role_map=full_role_map(section.role_map),
        prompt_key=source.prompt_key,
        default_workload="classify" if classify else None,
    )
    return read_content_rows(
        content, rules, max_line_bytes=section.max_line_bytes, limit=source.limit, seed=section.seed
    )


def read_content_rows(
    content: SourceContent, rules: RowRules, *, max_line_bytes: int, limit: int | None = None, seed: int = 0
) -> ReadResult:
    """Read the rows of a located source by given rules; see ``read_source``."""
    result = ReadResult(contents=[content])
    draw = _Draw(limit, seed=seed)
    line_of_id: dict[str, str] = {}
    line_of_content: dict[str, str] = {}
    for file, row in content.rows(max_line_bytes=max_line_bytes):
        try:
            if row.refused is not None:
                raise row.refused
            read = read_row(row.value, rules=rules, file=file, line=row.line)
            conversation = read.conversation
            place = f"{file}:{row.line}"
            if (first := line_of_id.setdefault(conversation.id, place)) != place and read.has_id:
                given = conversation.id.removeprefix(f"{rules.source}/")
                raise RowRefused(Reason.DUPLICATE_ID, f"id '{given}' is also that of {first}")
        except RowRefused as refused:
            raw = row.raw if len(result.rejected) < _RAW_KEPT else ""
            result.rejected.append(Rejection(file, row.line, refused.reason, refused.detail, raw))
            continue
        for key in row.value.keys() - READ_KEYS - {rules.prompt_key}:
            result.ignored_keys[str(key)] = result.ignored_keys.get(str(key), 0) + 1
        result.notes += read.notes
        if (first := line_of_content.setdefault(conversation.content_hash, place)) != place:
            once = "" if read.has_id else "; without an id of its own it is read once"
            result.notes.append(Note(file, row.line, Remark.DUPLICATE_CONTENT, f"says the same as {first}{once}"))
            if not read.has_id:
                continue
        draw.offer(conversation)
    result.accepted = draw.chosen()
    result.not_drawn = draw.offered - len(result.accepted)
    return result


class _Draw:
    """All conversations, or the ``limit`` of the smallest keyed content hash, in their given order."""

    def __init__(self, limit: int | None, *, seed: int) -> None:
        self._limit = limit
        self._seed = seed
        self._held: list[tuple[int, int, Conversation]] = []
        self.offered = 0

    def offer(self, conversation: Conversation) -> None:
        self.offered += 1
        if self._limit is None:
            self._held.append((0, self.offered, conversation))
            return
        digest = hashlib.sha256(f"{self._seed}/{conversation.content_hash}".encode()).digest()
        # a heap of the negated keys: its top is the worst of those held; order breaks ties
        entry = (-int.from_bytes(digest[:8], "big"), -self.offered, conversation)
        if len(self._held) < self._limit:
            heapq.heappush(self._held, entry)
        else:
            heapq.heappushpop(self._held, entry)

    def chosen(self) -> list[Conversation]:
        return [entry[2] for entry in sorted(self._held, key=lambda entry: abs(entry[1]))]


def read_sources(
    sources: Sequence[PromptSource],
    section: DataSection,
    *,
    responses: Responses | None = None,
    classify: bool = False,
    quarantine: Path | None = None,
) -> ReadResult:
    """Read every source of a list, write the refused rows aside, and stop if too many of a source fell.

    Args:
        sources: sources with distinct names.
        section: see ``read_source``; max_bad_fraction holds for each source.
        responses: see ``read_source``.
        classify: see ``read_source``.
        quarantine: JSONL file for the refused rows; written even when there are none.

    Raises:
        DataError: a source has nothing usable or too many refused rows, or two sources share a name.
    """
    names = [source.name for source in sources]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise DataError(f"sources share the name {', '.join(repeated)}", mend="give every source a name of its own")
    result = ReadResult()
    results = []
    for source in sources:
        results.append(read_source(source, section, responses=responses, classify=classify))
        result.extend(results[-1])
    if quarantine is not None:
        write_quarantine(quarantine, result.rejected)
    for source, part in zip(sources, results, strict=True):
        require_usable(
            accepted=len(part.accepted) + part.not_drawn,
            rejected=part.rejected,
            max_bad_fraction=section.max_bad_fraction,
            what=f"source '{source.name}' ({source.source})",
            quarantine=quarantine,
        )
    return result
