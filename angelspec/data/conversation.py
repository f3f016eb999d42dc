"""A conversation, in the one form used inside angelspec, whatever schema it was read from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from angelspec.core.fingerprint import fingerprint
from angelspec.core.roles import Role
from angelspec.core.workloads import Workload


@dataclass(frozen=True)
class ToolCall:
    """One function that an assistant turn calls."""

    name: str
    arguments: Mapping[str, Any]
    """Always an object, so that a JSON string and an object render to the same tokens."""
    id: str | None = None

    def to_template(self) -> dict[str, Any]:
        """The form that chat templates read."""
        call: dict[str, Any] = {"type": "function"}
        if self.id is not None:
            call["id"] = self.id
        return {**call, "function": {"name": self.name, "arguments": dict(self.arguments)}}


@dataclass(frozen=True)
class Message:
    """One turn."""

    role: Role
    content: str
    reasoning: str | None = None
    """An assistant's reasoning, without its tags; None where there is none."""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    """On a tool result: the call it answers."""
    name: str | None = None

    @property
    def says_something(self) -> bool:
        """Whether there is text beyond white space, or a tool call."""
        return bool(self.content.strip()) or bool(self.tool_calls)

    def to_template(self, *, with_reasoning: bool = True) -> dict[str, Any]:
        """The form that chat templates read; reasoning goes to ``reasoning_content``."""
        message: dict[str, Any] = {"role": self.role, "content": self.content}
        if with_reasoning and self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [call.to_template() for call in self.tool_calls]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        if self.name is not None:
            message["name"] = self.name
        return message


@dataclass(frozen=True)
class Conversation:
    """One row of a source.

    For a rollout: an optional system turn and then user turns only, to be answered one after another
    (``data/rounds.py``). For given answers: as read, ending with an assistant turn.
    """

    id: str
    """Unique among the sources of one list: ``source name/row id``."""
    workload: Workload
    messages: tuple[Message, ...]
    source: str
    """Name of the source it comes from."""
    tools: tuple[Mapping[str, Any], ...] = ()
    language: str | None = None
    file: str = ""
    line: int = 0

    @cached_property
    def content_hash(self) -> str:
        """Hash of everything that is said and of the tools on offer."""
        return fingerprint(
            {"messages": [message.to_template() for message in self.messages], "tools": list(self.tools)}
        )

    @cached_property
    def group(self) -> str:
        """Hash of how it begins (up to the first user turn): equal for all that grows from one prompt."""
        first_user = next(index for index, message in enumerate(self.messages) if message.role == "user")
        return fingerprint([message.to_template() for message in self.messages[: first_user + 1]])
