"""Messages of both common schemas (role/content, from/value) in the one form used inside angelspec.

What is refused and why is the vocabulary of ``reasons.py``; nothing is guessed, and nothing is dropped silently.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from angelspec.core.errors import DataError
from angelspec.core.modes import MODE_FAMILIES
from angelspec.core.roles import ROLES, Role
from angelspec.data.conversation import Message, ToolCall
from angelspec.data.reasons import Reason, RowRefused
from angelspec.data.source_row import parse_json

ROLE_MAP: Mapping[str, Role] = MappingProxyType(
    {**{role: role for role in ROLES}, "human": "user", "gpt": "assistant", "observation": "tool"}
)
"""Role names that are known without asking; data.role_map adds to them."""

_THINK_TAGS = tuple(
    dict.fromkeys(
        (family.think_open, family.think_close)
        for family in MODE_FAMILIES.values()
        if family.think_open and family.think_close
    )
)
_ANY_THINK_TAG = re.compile("|".join(re.escape(tag) for pair in _THINK_TAGS for tag in pair))
_MEDIA = ("image", "audio", "video", "file")


def full_role_map(extra: Mapping[str, str]) -> dict[str, Role]:
    """``ROLE_MAP`` and a recipe's own names.

    Raises:
        DataError: a name is mapped to something that is no role.
    """
    for name, role in extra.items():
        if role not in ROLES:
            raise DataError(f"data.role_map maps '{name}' to '{role}'", mend=f"map it to one of: {', '.join(ROLES)}")
    return {**ROLE_MAP, **extra}  # type: ignore[dict-item]


def read_messages(
    value: Any, *, role_map: Mapping[str, Role], where: str, with_answers: bool = True
) -> tuple[Message, ...]:
    """Read a list of messages, or a JSON string that holds one.

    Args:
        value: as found in the row.
        role_map: every accepted role name.
        where: the key it was found under, for messages.
        with_answers: whether assistant turns are used; otherwise their texts are neither read nor checked.

    Raises:
        RowRefused: some message cannot be used.
    """
    if isinstance(value, str):
        try:
            value = parse_json(value)
        except ValueError as error:
            raise RowRefused(Reason.BAD_CONVERSATION, f"'{where}' is text but no JSON: {error}") from error
    if not isinstance(value, list):
        raise RowRefused(Reason.BAD_CONVERSATION, f"'{where}' is {_kind(value)}, not a list of messages")
    if not value:
        raise RowRefused(Reason.EMPTY_CONVERSATION, f"'{where}' is an empty list")
    return tuple(
        _message(item, number, role_map=role_map, with_answers=with_answers)
        for number, item in enumerate(value, start=1)
    )


def _message(item: Any, number: int, *, role_map: Mapping[str, Role], with_answers: bool) -> Message:
    if not isinstance(item, Mapping):
        raise RowRefused(Reason.BAD_MESSAGE, f"message {number} is {_kind(item)}, not an object")
    name = _one_of(item, ("role", "from"), reason=Reason.BAD_MESSAGE, number=number)
    if name is None:
        raise RowRefused(Reason.BAD_MESSAGE, f"message {number} has neither 'role' nor 'from'")
    if not isinstance(name, str):
        raise RowRefused(Reason.UNKNOWN_ROLE, f"message {number}: the role is {_kind(name)}, not text")
    if name not in role_map:
        raise RowRefused(
            Reason.UNKNOWN_ROLE,
            f"message {number}: role '{name}' is not one of {', '.join(role_map)}; "
            f"map it with data.role_map, for instance {{{name}: assistant}}",
        )
    role = role_map[name]
    if role == "assistant" and not with_answers:
        return Message(role, "", tool_calls=_tool_calls(item.get("tool_calls"), number=number))
    content = _one_of(item, ("content", "value"), reason=Reason.BAD_CONTENT, number=number)
    if content is None and role != "assistant":
        raise RowRefused(Reason.BAD_CONTENT, f"message {number} ({role}) has no content")
    text = "" if content is None else read_content(content, where=f"message {number}")
    if role == "user" and not text.strip():
        raise RowRefused(Reason.EMPTY_USER_TEXT, f"message {number} has no text")
    if role != "assistant":
        call_id = item.get("tool_call_id") if role == "tool" else None
        tool_name = item.get("name") if role == "tool" else None
        return Message(
            role,
            text,
            tool_call_id=None if call_id is None else str(call_id),
            name=None if tool_name is None else clean_text(str(tool_name), where=f"message {number} name"),
        )
    field = _one_of(item, ("reasoning_content", "reasoning"), reason=Reason.REASONING_TWICE, number=number, empty=("",))
    text, reasoning = _split_reasoning(text, field, number=number)
    return Message(role, text, reasoning=reasoning, tool_calls=_tool_calls(item.get("tool_calls"), number=number))


def _one_of(
    item: Mapping[str, Any], keys: Sequence[str], *, reason: Reason, number: int, empty: tuple[Any, ...] = ()
) -> Any:
    given = {key: item[key] for key in keys if item.get(key) is not None and item[key] not in empty}
    values = list(given.values())
    if len(values) > 1 and any(value != values[0] for value in values[1:]):
        raise RowRefused(reason, f"message {number}: {' and '.join(given)} are both given and differ")
    return values[0] if values else None


def read_content(content: Any, *, where: str) -> str:
    """Text of a content: a string, or a list of text parts joined without a separator.

    Raises:
        RowRefused: images and the like, or anything else.
    """
    if isinstance(content, str):
        return clean_text(content, where=where)
    if not isinstance(content, list):
        raise RowRefused(Reason.BAD_CONTENT, f"{where}: content is {_kind(content)}, not text")
    texts: list[str] = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if isinstance(kind, str) and any(medium in kind for medium in _MEDIA):
            raise RowRefused(Reason.IMAGE_CONTENT, f"{where}: image content unsupported (part of type '{kind}')")
        if kind != "text" or not isinstance(part.get("text"), str):
            spelled = f"a part of type '{kind}'" if kind is not None else f"{_kind(part)} among the parts"
            raise RowRefused(Reason.BAD_CONTENT, f"{where}: {spelled}; only text parts are read")
        texts.append(clean_text(part["text"], where=where))
    return "".join(texts)


def clean_text(text: str, *, where: str) -> str:
    """Return ``text`` if a tokenizer and a server can read it.

    Raises:
        RowRefused: a lone surrogate, or a NUL character.
    """
    if "\0" in text:
        raise RowRefused(Reason.NUL_CHARACTER, f"{where}: NUL at character {text.index(chr(0))}")
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RowRefused(
                Reason.LONE_SURROGATE, f"{where}: U+{ord(text[error.start]):04X} at character {error.start}"
            ) from error
    return text


def _split_reasoning(text: str, field: Any, *, number: int) -> tuple[str, str | None]:
    """Take ``<think>…</think>`` off the beginning of an answer, so that it and a field mean the same."""
    if field is not None and not isinstance(field, str):
        raise RowRefused(Reason.BAD_CONTENT, f"message {number}: the reasoning is {_kind(field)}, not text")
    if field is not None:
        clean_text(field, where=f"message {number} reasoning")
    tags = _ANY_THINK_TAG.findall(text)
    if not tags:
        return text, _reasoning(field)
    if field is not None:
        raise RowRefused(Reason.REASONING_TWICE, f"message {number}: reasoning is inline and a field at once")
    for opening, closing in _THINK_TAGS:
        if tags == [opening]:
            raise RowRefused(Reason.THINK_UNCLOSED, f"message {number}: {opening} without {closing}")
        if tags == [closing]:
            raise RowRefused(Reason.THINK_UNOPENED, f"message {number}: {closing} without {opening}")
        if tags == [opening, closing] and text.lstrip().startswith(opening):
            reasoning, answer = text.lstrip().removeprefix(opening).split(closing)
            return answer.lstrip("\r\n"), _reasoning(reasoning)
    raise RowRefused(
        Reason.THINK_MISPLACED, f"message {number}: tags {' '.join(tags[:6])} do not enclose the beginning once"
    )


def _reasoning(text: str | None) -> str | None:
    """Without the line ends that templates add themselves; empty reasoning is none."""
    stripped = (text or "").strip("\r\n")
    return stripped if stripped.strip() else None


def _tool_calls(value: Any, *, number: int) -> tuple[ToolCall, ...]:
    if isinstance(value, str):
        try:
            value = parse_json(value) if value.strip() else None
        except ValueError as error:
            raise RowRefused(Reason.BAD_TOOL_CALL, f"message {number}: tool_calls is no JSON: {error}") from error
    if value is None:
        return ()
    if not isinstance(value, list):
        raise RowRefused(Reason.BAD_TOOL_CALL, f"message {number}: tool_calls is {_kind(value)}, not a list")
    return tuple(_tool_call(call, number=number) for call in value)


def _tool_call(call: Any, *, number: int) -> ToolCall:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not name:
        raise RowRefused(Reason.BAD_TOOL_CALL, f"message {number}: a tool call has no function name")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = parse_json(arguments) if arguments.strip() else {}
        except ValueError as error:
            raise RowRefused(
                Reason.BAD_TOOL_ARGUMENTS, f"message {number}: arguments of '{name}' are no JSON: {error}"
            ) from error
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, Mapping):
        raise RowRefused(
            Reason.BAD_TOOL_ARGUMENTS,
            f"message {number}: arguments of '{name}' are {_kind(arguments)}, not an object",
        )
    clean_value(arguments, where=f"message {number} arguments")
    call_id = call.get("id")
    return ToolCall(clean_text(name, where=f"message {number}"), arguments, None if call_id is None else str(call_id))


def read_tools(value: Any) -> tuple[Mapping[str, Any], ...]:
    """Tool descriptions: a list of objects, or a JSON string that holds one.

    Raises:
        RowRefused: anything else.
    """
    if isinstance(value, str):
        try:
            value = parse_json(value) if value.strip() else None
        except ValueError as error:
            raise RowRefused(Reason.BAD_TOOLS, f"'tools' is text but no JSON: {error}") from error
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(tool, Mapping) for tool in value):
        raise RowRefused(Reason.BAD_TOOLS, "'tools' is no list of objects")
    clean_value(value, where="tools")
    return tuple(value)


def clean_value(value: Any, *, where: str) -> None:
    """``clean_text`` of every text inside plain data, which must be JSON."""
    if isinstance(value, str):
        clean_text(value, where=where)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            clean_value(key, where=where)
            clean_value(item, where=where)
    elif isinstance(value, list):
        for item in value:
            clean_value(item, where=where)
    elif not (value is None or isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))):
        raise RowRefused(Reason.BAD_CONTENT, f"{where}: {value!r} cannot be written as JSON")


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    names = {bool: "a truth value", int: "a number", float: "a number", str: "text", list: "a list", dict: "an object"}
    return names.get(type(value), type(value).__name__)
