"""Conversations between stages: what was read once is written in one form and read back exactly."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from angelspec.core.errors import DataError
from angelspec.core.files import write_text_atomic
from angelspec.data.conversation import Conversation, Message, ToolCall


def write_conversations(path: Path, conversations: Iterable[Conversation]) -> None:
    """Write one JSON line per conversation, atomically, without where it was read: equal content is equal bytes."""
    lines = []
    for conversation in conversations:
        value = asdict(conversation)
        del value["file"], value["line"]
        lines.append(json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False) + "\n")
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
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path}: not a list of conversations ({error})", mend="delete its stage folder and run again"
        ) from error
    return conversations
