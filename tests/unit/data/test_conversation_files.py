"""Conversations survive the way between stages."""

from __future__ import annotations

import pytest

from angelspec.core.errors import DataError
from angelspec.data.conversation import Conversation, Message, ToolCall
from angelspec.data.conversation_files import read_conversations, write_conversations


def test_round_trip_is_exact_and_keeps_where_it_was_read_aside(tmp_path):
    conversation = Conversation(
        id="a/1",
        workload="chat",
        messages=(
            Message("user", "a\u2028b\r\nc"),
            Message("assistant", "", reasoning="why", tool_calls=(ToolCall("f", {"x": [1, None]}, id="c1"),)),
            Message("tool", "3", tool_call_id="c1"),
        ),
        source="a",
        tools=({"type": "function"},),
        language="de",
        file="/somewhere.jsonl",
        line=7,
    )
    write_conversations(tmp_path / "c.jsonl", [conversation, conversation])
    first, second = read_conversations(tmp_path / "c.jsonl")
    assert first == second
    assert first.messages == conversation.messages
    assert first.content_hash == conversation.content_hash
    assert (first.file, first.line) == ("/somewhere.jsonl", 7)
    assert "somewhere" not in (tmp_path / "c.jsonl").read_text()  # equal content is equal bytes wherever it lay


def test_a_damaged_file_is_named(tmp_path):
    (tmp_path / "c.jsonl").write_text('{"id": 1}\n')
    with pytest.raises(DataError, match="c.jsonl"):
        read_conversations(tmp_path / "c.jsonl")
