"""From a row's keys to a conversation: which keys hold it, and which order of turns a server can produce.

Schemas, in the order in which they are looked for:

- ``conversations`` or ``messages``: a list of messages or a JSON string of one; both only if they say the same;
- ``turns``: a list of user texts, to be answered one after another;
- ``prompt_key`` of the source, else ``prompt``, ``question``, ``instruction`` (with ``input``), ``problem``: one user
  text, or a list of messages; its answer from ``response``, ``answer``, ``output`` or ``completion``.

Turns, where answers are taken from the rows: at most one system turn, at the beginning; then user turns (several in a
row are left to the chat template), assistant turns that follow a user turn or a tool result, and tool results that
follow a tool call. Turns behind the last assistant turn are dropped. For a rollout every assistant turn is dropped:
the user turns are asked again, one after another (``rounds.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from angelspec.core.classifier import classify
from angelspec.core.errors import suggest
from angelspec.core.roles import Role
from angelspec.core.workloads import WORKLOADS, Workload
from angelspec.data.conversation import Conversation, Message
from angelspec.data.messages import clean_text, read_content, read_messages, read_tools
from angelspec.data.reasons import Note, Reason, Remark, RowRefused
from angelspec.data.source_row import parse_json

Responses = Literal["rollout", "given", "either"]
"""Where answers come from; either: from the row where it has a conversation, else the row is a prompt."""

CONVERSATION_KEYS = ("conversations", "messages")
PROMPT_KEYS = ("prompt", "question", "instruction", "problem")
ANSWER_KEYS = ("response", "answer", "output", "completion")
ID_KEYS = ("id", "uuid", "conversation_id", "prompt_id")
WORKLOAD_KEYS = ("workload", "domain")
READ_KEYS = frozenset(
    (
        *CONVERSATION_KEYS,
        "turns",
        *PROMPT_KEYS,
        "input",
        *ANSWER_KEYS,
        *ID_KEYS,
        *WORKLOAD_KEYS,
        "system",
        "tools",
        "language",
        "source",
        "category",
    )  # fmt: skip
)
"""Keys that are read or that only describe a row."""

_ABSENT = (None, "")
"""A table spells an absent value as an empty text."""


@dataclass(frozen=True)
class RowRules:
    """How the rows of one source are read."""

    source: str
    workload: Workload | None
    responses: Responses
    role_map: Mapping[str, Role]
    prompt_key: str | None = None
    default_workload: Workload | Literal["classify"] | None = None
    """For rows that do not say theirs: one, or what a server's classifier calls them; None: they are refused."""


@dataclass(frozen=True)
class ReadRow:
    """A row that can be used."""

    conversation: Conversation
    notes: tuple[Note, ...]
    has_id: bool
    """Whether its id is the row's own, and not made from its content."""


def read_row(value: Any, *, rules: RowRules, file: str, line: int) -> ReadRow:
    """Read one row.

    Raises:
        RowRefused: it cannot be used.
    """
    if not isinstance(value, Mapping):
        raise RowRefused(Reason.NOT_AN_OBJECT, f"{_spelled(value)} instead of an object")
    messages, is_prompt = _messages(value, rules=rules)
    messages = _with_system(messages, value.get("system"))
    answered = rules.responses == "given" or (rules.responses == "either" and not is_prompt)
    remarks: list[tuple[Remark, str]] = []
    if answered:
        messages, remarks = _answered(messages)
    else:
        messages = _questions(messages)
    notes = tuple(Note(file, line, remark, detail) for remark, detail in remarks)
    language = value.get("language")
    conversation = Conversation(
        id="",
        workload=_workload(value, messages, rules=rules),
        messages=messages,
        source=rules.source,
        tools=read_tools(value.get("tools")),
        language=language if isinstance(language, str) else None,
        file=file,
        line=line,
    )
    given = _id(value)
    row_id = given or f"row-{conversation.content_hash}"
    return ReadRow(replace(conversation, id=f"{rules.source}/{row_id}"), notes, has_id=given is not None)


def _spelled(value: Any) -> str:
    return "null" if value is None else f"{type(value).__name__}"


def _id(value: Mapping[str, Any]) -> str | None:
    for key in ID_KEYS:
        given = value.get(key)
        if isinstance(given, str | int) and not isinstance(given, bool) and str(given).strip():
            return clean_text(str(given), where=key)
    return None


def _workload(value: Mapping[str, Any], messages: Sequence[Message], *, rules: RowRules) -> Workload:
    if rules.workload is not None:
        return rules.workload
    given = next((value[key] for key in WORKLOAD_KEYS if value.get(key) not in _ABSENT), None)
    if given is None and rules.default_workload == "classify":
        return classify([message.to_template() for message in messages]).workload
    if given is None and rules.default_workload is not None:
        return rules.default_workload
    if given in WORKLOADS:
        return given
    detail = "no 'workload' or 'domain'" if given is None else f"workload '{given}'{suggest(str(given), WORKLOADS)}"
    raise RowRefused(
        Reason.UNKNOWN_WORKLOAD, f"{detail}; use one of {', '.join(WORKLOADS)}, or state the source's workload"
    )


def _messages(value: Mapping[str, Any], *, rules: RowRules) -> tuple[tuple[Message, ...], bool]:
    """The messages as given, and whether the row's schema is that of a bare prompt."""
    if rules.prompt_key is not None:
        if value.get(rules.prompt_key) in _ABSENT:
            raise RowRefused(
                Reason.NO_CONVERSATION, f"no '{rules.prompt_key}' (prompt_key); keys: {', '.join(map(str, value))}"
            )
        return _prompt(value, rules.prompt_key, rules=rules)
    given = [key for key in CONVERSATION_KEYS if value.get(key) not in _ABSENT]
    if given:
        read = [_list(value[key], rules=rules, where=key) for key in given]
        if any(messages != read[0] for messages in read[1:]):
            raise RowRefused(Reason.TWO_CONVERSATIONS, f"{' and '.join(given)} are both given and differ")
        return read[0], False
    if value.get("turns") not in _ABSENT:
        return _turns(value["turns"], rules=rules)
    prompts = [key for key in PROMPT_KEYS if value.get(key) not in _ABSENT]
    if not prompts:
        raise RowRefused(
            Reason.NO_CONVERSATION,
            f"none of {', '.join((*CONVERSATION_KEYS, 'turns', *PROMPT_KEYS))}; keys: {', '.join(map(str, value))}",
        )
    if any(value[key] != value[prompts[0]] for key in prompts[1:]):
        raise RowRefused(Reason.AMBIGUOUS_PROMPT, f"{' and '.join(prompts)} are given and differ; state prompt_key")
    return _prompt(value, prompts[0], rules=rules)


def _list(value: Any, *, rules: RowRules, where: str) -> tuple[Message, ...]:
    with_answers = rules.responses != "rollout"
    return read_messages(value, role_map=rules.role_map, where=where, with_answers=with_answers)


def _turns(turns: Any, *, rules: RowRules) -> tuple[tuple[Message, ...], bool]:
    if isinstance(turns, str):
        try:
            turns = parse_json(turns)
        except ValueError as error:
            raise RowRefused(Reason.BAD_CONVERSATION, f"'turns' is text but no JSON: {error}") from error
    if not isinstance(turns, list):
        raise RowRefused(Reason.BAD_CONVERSATION, "'turns' is no list")
    if not turns:
        raise RowRefused(Reason.EMPTY_CONVERSATION, "'turns' is an empty list")
    if all(isinstance(turn, Mapping) for turn in turns):
        return _list(turns, rules=rules, where="turns"), False
    if not all(isinstance(turn, str) for turn in turns):
        raise RowRefused(Reason.BAD_CONVERSATION, "'turns' holds something else than user texts")
    return tuple(_user(turn, where=f"turn {number}") for number, turn in enumerate(turns, start=1)), True


def _user(text: str, *, where: str) -> Message:
    if not text.strip():
        raise RowRefused(Reason.EMPTY_USER_TEXT, f"{where} has no text")
    return Message("user", clean_text(text, where=where))


def _prompt(value: Mapping[str, Any], key: str, *, rules: RowRules) -> tuple[tuple[Message, ...], bool]:
    prompt = value[key]
    if isinstance(prompt, list) and prompt and all(isinstance(item, Mapping) and "type" not in item for item in prompt):
        return _list(prompt, rules=rules, where=key), True
    if isinstance(prompt, list) and prompt and all(isinstance(item, str) for item in prompt):
        return tuple(_user(turn, where=f"'{key}', turn {number}") for number, turn in enumerate(prompt, start=1)), True
    text = read_content(prompt, where=f"'{key}'")
    if key == "instruction" and isinstance(extra := value.get("input"), str) and extra.strip():
        text = f"{text}\n\n{extra}"
    messages = (_user(text, where=f"'{key}'"),)
    if rules.responses == "rollout":
        return messages, True
    answers = [name for name in ANSWER_KEYS if name != key and value.get(name) not in _ABSENT]
    if not answers:
        return messages, True
    if any(value[name] != value[answers[0]] for name in answers[1:]):
        raise RowRefused(Reason.TWO_CONVERSATIONS, f"{' and '.join(answers)} are given and differ")
    answer = [{"role": "assistant", "content": value[answers[0]]}]
    return messages + read_messages(answer, role_map={"assistant": "assistant"}, where=answers[0]), False


def _with_system(messages: tuple[Message, ...], system: Any) -> tuple[Message, ...]:
    """Put a row's own ``system`` text in front, as some ShareGPT exports keep it."""
    if system in _ABSENT:
        return messages
    message = Message("system", read_content(system, where="'system'"))
    if messages[0].role == "system":
        if messages[0] != message:
            raise RowRefused(Reason.TWO_CONVERSATIONS, "'system' and the first message differ")
        return messages
    return (message, *messages)


def _questions(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """System and user turns, to be answered by the target; the row's own answers are dropped unread."""
    if any(message.role == "tool" or message.tool_calls for message in messages):
        raise RowRefused(Reason.TOOL_TURNS_IN_ROLLOUT)
    questions = tuple(message for message in messages if message.role != "assistant")
    _check_order(questions)
    return questions


def _answered(messages: tuple[Message, ...]) -> tuple[tuple[Message, ...], list[tuple[Remark, str]]]:
    """The turns up to the last assistant turn that says something."""
    _check_order(messages)
    if not any(message.role == "assistant" for message in messages):
        raise RowRefused(Reason.NO_ASSISTANT)
    last = max((index for index, message in enumerate(messages)
                if message.role == "assistant" and message.says_something), default=None)  # fmt: skip
    if last is None:
        raise RowRefused(Reason.NO_ASSISTANT_TEXT, "no assistant text")
    remarks: list[tuple[Remark, str]] = []
    for number, message in enumerate(messages[:last], start=1):
        if message.role == "assistant" and not message.says_something:
            remarks.append((Remark.EMPTY_TURN_UNSUPERVISED, f"message {number}"))
        if message.role == "user" and messages[number].role == "user":
            remarks.append((Remark.CONSECUTIVE_USERS, f"messages {number} and {number + 1}"))
    if last + 1 < len(messages):
        dropped = ", ".join(message.role for message in messages[last + 1 :])
        remarks.append((Remark.TRAILING_TURNS_DROPPED, f"dropped behind the last assistant turn: {dropped}"))
    return messages[: last + 1], remarks


def _check_order(messages: tuple[Message, ...]) -> None:
    """Refuse an order of turns that a server cannot produce."""
    open_calls: list[str | None] = []
    before: Message | None = None
    seen_user = False
    for number, message in enumerate(messages, start=1):
        if message.role == "system" and number > 1:
            raise RowRefused(Reason.SYSTEM_NOT_FIRST, f"message {number} is a system turn; only the first may be")
        if message.role == "assistant":
            if not seen_user:
                raise RowRefused(Reason.ASSISTANT_FIRST, f"message {number}")
            if before is not None and before.role == "assistant":
                raise RowRefused(Reason.ASSISTANT_AFTER_ASSISTANT, f"messages {number - 1} and {number}")
            open_calls = [call.id for call in message.tool_calls]
        elif message.role == "tool":
            if not open_calls:
                raise RowRefused(Reason.ORPHAN_TOOL_RESULT, f"message {number}")
            if message.tool_call_id in open_calls:
                open_calls.remove(message.tool_call_id)
            elif message.tool_call_id is None or None in open_calls:
                open_calls.pop(0)
            else:
                raise RowRefused(
                    Reason.ORPHAN_TOOL_RESULT,
                    f"message {number} answers '{message.tool_call_id}', not a call before it",
                )
        else:
            open_calls = []
        seen_user |= message.role == "user"
        before = message
    if not seen_user:
        raise RowRefused(Reason.NO_USER)
