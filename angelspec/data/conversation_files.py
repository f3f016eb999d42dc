"""Conversations between stages: what was read once is written in one form and read back exactly.

Where each one was read lies in a file beside them: equal content is equal bytes, wherever it came from.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path

from angelspec.core.errors import DataError
from angelspec.core.files import write_text_atomic
from angelspec.data.conversation import Conversation, Message, ToolCall


def write_conversations(path: Path, conversations: Iterable[Conversation]) -> None:
    """Write one JSON line per conversation, atomically, and a file beside it that says where each was read."""
    lines, places = [], []
    for conversation in conversations:
        value = asdict(conversation)
        places.append(json.dumps([value.pop("file"), value.pop("line")]) + "\n")
        lines.append(json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False) + "\n")
    write_text_atomic(_places_file(path), "".join(places))
    write_text_atomic(path, "".join(lines))


def read_conversations(path: Path) -> list[Conversation]:
    """Read what ``write_conversations`` wrote.

    Raises:
        DataError: the file is missing or damaged.
    """
    conversations = []
    try:
        with path.open(encoding="utf-8", newline="\n") as stream:
            for line in stream:
                value = json.loads(line)
                messages = tuple(
                    Message(**{**message, "tool_calls": tuple(ToolCall(**call) for call in message["tool_calls"])})
                    for message in value.pop("messages")
                )
                conversations.append(Conversation(messages=messages, tools=tuple(value.pop("tools")), **value))
        places = _read_places(path)
        if len(places) == len(conversations):
            conversations = [
                replace(conversation, file=file, line=line)
                for conversation, (file, line) in zip(conversations, places, strict=True)
            ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path}: not a list of conversations ({error})", mend="delete its stage folder and run again"
        ) from error
    return conversations


def _places_file(path: Path) -> Path:
    return path.with_suffix(".places.jsonl")


def _read_places(path: Path) -> list[tuple[str, int]]:
    """File and line of each conversation; none where they were never written."""
    places = _places_file(path)
    if not places.is_file():
        return []
    return [(str(file), int(line)) for file, line in map(json.loads, places.read_text(encoding="utf-8").splitlines())]
