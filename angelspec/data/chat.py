"""Conversations to token ids and masks, by rendering prefixes with the target's own chat template.

A server renders the messages before an assistant turn with a generation prompt; what it generates is whatever the
template then shows of that turn, up to and with the first end-of-turn token. So an assistant turn's prompt is
``render(messages[:i], add_generation_prompt=True)``, the whole is ``render(messages[:i + 1])``, and the supervised
span is what the whole has behind the prompt. Where the prompt is no prefix, the turn is refused: no markers are
searched for, the template need not cooperate, and there is no mask of all ones to fall back to.

Every assistant turn is a row of its own, because templates show history otherwise (without its reasoning) than they
showed it when it was generated.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

import jinja2

from angelspec.core.errors import TargetError
from angelspec.core.modes import Mode, ModeFamily
from angelspec.data.answers import Prompt
from angelspec.data.conversation import Conversation, Message
from angelspec.data.reasons import Note, Reason, Rejection, Remark, RowRefused
from angelspec.data.tokenised import TokenisedRow, answered_row

_ROW_ERRORS = (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError)
"""What chat templates raise about the messages they are given."""
_NO_TEMPLATE = "Cannot use chat template functions"


class Render(Protocol):
    """``Target.render``: token ids exactly as a server's ``apply_chat_template`` gives them."""

    def __call__(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        mode: Mode,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int]: ...


@dataclass(frozen=True)
class ChatFormat:
    """How one target, in one mode, is spoken to."""

    render: Render
    mode: Mode
    family: ModeFamily
    stop_token_ids: frozenset[int]
    """Ids that end an answer."""
    special_texts: tuple[str, ...] = ()
    """Texts that the tokenizer turns into special tokens wherever they stand."""
    name: str = "the target"
    """For messages."""

    @cached_property
    def special_pattern(self) -> re.Pattern[str] | None:
        """Finds the longest special text at a place; None without any."""
        if not self.special_texts:
            return None
        return re.compile("|".join(re.escape(text) for text in sorted(self.special_texts, key=len, reverse=True)))

    @property
    def thinks(self) -> bool:
        """Whether answers begin with reasoning."""
        return self.mode != "no-think"

    def tokens(
        self, messages: Sequence[Mapping[str, Any]], *, answer_follows: bool, tools: Sequence[Mapping[str, Any]]
    ) -> list[int]:
        """Render messages.

        Raises:
            RowRefused: the template refuses these messages.
            TargetError: the tokenizer has no chat template, or not for this mode.
        """
        try:
            return self.render(messages, mode=self.mode, add_generation_prompt=answer_follows, tools=tools or None)
        except TargetError as error:
            if error.__cause__ is None:
                raise
            self._refuse(error.__cause__)
        except _ROW_ERRORS as error:
            self._refuse(error)
        raise AssertionError("unreachable")

    def _refuse(self, error: BaseException) -> None:
        if _NO_TEMPLATE in str(error):
            raise TargetError(
                f"the tokenizer of {self.name} has no chat template ({error})",
                mend="set target.chat_template to a Jinja file",
            ) from error
        raise RowRefused(Reason.TEMPLATE_ERROR, f"{type(error).__name__}: {error}") from error


def chat_format(target: Any, *, mode: Mode) -> ChatFormat:
    """The format of a loaded target (``angelspec.targets.target.Target``)."""
    return ChatFormat(
        render=target.render,
        mode=mode,
        family=target.mode_family,
        stop_token_ids=frozenset(target.stop_token_ids),
        special_texts=special_texts(target.tokenizer),
        name=target.name,
    )


def special_texts(tokenizer: Any) -> tuple[str, ...]:
    """Texts that a transformers tokenizer always turns into one special token."""
    added = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    return tuple(sorted(added | set(tokenizer.all_special_tokens)))


@dataclass
class RenderedRows:
    """Training rows of given conversations."""

    rows: list[TokenisedRow] = field(default_factory=list)
    rejected: list[Rejection] = field(default_factory=list)
    """Conversations of which no turn is left, by the reason of the first turn."""
    notes: list[Note] = field(default_factory=list)

    @property
    def num_supervised(self) -> int:
        """Supervised tokens."""
        return sum(row.num_supervised for row in self.rows)

    @property
    def num_tokens(self) -> int:
        """All tokens."""
        return sum(len(row) for row in self.rows)


def rows_of_given(
    conversations: Iterable[Conversation],
    chat: ChatFormat,
    *,
    max_prompt_tokens: int | None = None,
) -> RenderedRows:
    """Make a training row of every assistant turn of every conversation.

    Args:
        conversations: ending with an assistant turn.
        chat: the target's format.
        max_prompt_tokens: turns with longer prompts are refused.

    Raises:
        TargetError: the tokenizer has no chat template, or none for this mode.
    """
    result = RenderedRows()
    for conversation in conversations:
        rows, refused, remarks = _rows_of(conversation, chat, max_prompt_tokens=max_prompt_tokens)
        result.rows += rows
        place = (conversation.file, conversation.line)
        result.notes += [Note(*place, remark, detail) for remark, detail in remarks]
        if not rows:
            result.rejected.append(Rejection(*place, refused[0].reason, refused[0].detail, conversation.id))
        else:
            result.notes += [Note(*place, Remark.TURN_DROPPED, f"{item.reason}: {item.detail}") for item in refused]
    return result


def _rows_of(
    conversation: Conversation, chat: ChatFormat, *, max_prompt_tokens: int | None
) -> tuple[list[TokenisedRow], list[RowRefused], list[tuple[Remark, str]]]:
    rows: list[TokenisedRow] = []
    refused: list[RowRefused] = []
    remarks: list[tuple[Remark, str]] = []
    turn = 0
    for index, message in enumerate(conversation.messages):
        if message.role != "assistant":
            continue
        turn += 1
        if not message.says_something:
            continue
        try:
            prompt, answer = assistant_turn(conversation, index, chat, max_prompt_tokens=max_prompt_tokens)
        except RowRefused as error:
            refused.append(RowRefused(error.reason, f"assistant turn {turn}: {error.detail}"))
            continue
        if message.reasoning is not None and not chat.thinks:
            remarks.append((Remark.REASONING_DROPPED, f"assistant turn {turn}"))
        rows.append(
            answered_row(
                prompt,
                answer,
                id=conversation.id if turn == 1 else f"{conversation.id}#{turn}",
                workload=conversation.workload,
                group=conversation.group,
            )
        )
    if not rows and not refused:
        refused.append(RowRefused(Reason.NO_ASSISTANT_TEXT, "no assistant text"))
    return rows, refused, remarks


def assistant_turn(
    conversation: Conversation, index: int, chat: ChatFormat, *, max_prompt_tokens: int | None = None
) -> tuple[list[int], list[int]]:
    """Prompt and answer of one assistant turn.

    Args:
        conversation: all of it; what follows the turn is not looked at.
        index: of the assistant turn.
        chat: the target's format.
        max_prompt_tokens: see ``rows_of_given``.

    Returns:
        The prompt's tokens, and what the server generates behind them: reasoning where the mode thinks, the answer,
        the end-of-turn token, and nothing that the template puts behind it.

    Raises:
        RowRefused: the turn cannot be rendered as a server would.
    """
    message = conversation.messages[index]
    if chat.thinks and message.reasoning is None:
        raise RowRefused(Reason.NO_REASONING, f"mode {chat.mode} and no reasoning")
    prompt = prompt_tokens(conversation, index, chat, max_prompt_tokens=max_prompt_tokens)
    _refuse_special(message, chat)
    history = _history(conversation.messages[:index], chat)
    whole = _rendered_answer(history, message, chat, tools=conversation.tools)
    if whole[: len(prompt)] != prompt:
        same = next((i for i, (a, b) in enumerate(zip(prompt, whole, strict=False)) if a != b), len(whole))
        raise RowRefused(Reason.PROMPT_NOT_PREFIX, f"they part at token {same} of {len(prompt)}")
    answer = whole[len(prompt) :]
    ends = [place for place, token in enumerate(answer) if token in chat.stop_token_ids]
    if not ends:
        raise RowRefused(Reason.NO_END_OF_TURN)
    if len(ends) > 1:
        raise RowRefused(Reason.STOP_INSIDE_ANSWER, f"at tokens {', '.join(map(str, ends))} of the answer")
    if ends[0] == 0:
        raise RowRefused(Reason.EMPTY_MASK, "the answer is rendered to nothing but an end-of-turn token")
    return prompt, answer[: ends[0] + 1]


def prompt_tokens(
    conversation: Conversation, end: int, chat: ChatFormat, *, max_prompt_tokens: int | None = None
) -> list[int]:
    """What a server sends to the model to have message ``end`` generated.

    Raises:
        RowRefused: special tokens in the texts, a template that refuses them, or too long a prompt.
    """
    for message in conversation.messages[:end]:
        _refuse_special(message, chat)
    _refuse_special_text(json.dumps(list(conversation.tools), ensure_ascii=False), chat, where="tools")
    history = _history(conversation.messages[:end], chat)
    tokens = chat.tokens(history, answer_follows=True, tools=conversation.tools)
    if max_prompt_tokens is not None and len(tokens) > max_prompt_tokens:
        raise RowRefused(Reason.PROMPT_TOO_LONG, f"{len(tokens):,} tokens; at most {max_prompt_tokens:,}")
    return tokens


def _history(messages: Sequence[Message], chat: ChatFormat) -> list[dict[str, Any]]:
    """Messages as a client sends them back: reasoning only of turns behind the last user turn (a chain of tool
    calls), and only in a mode that thinks. The template decides what it shows of that."""
    last_user = max((index for index, message in enumerate(messages) if message.role == "user"), default=-1)
    return [
        message.to_template(with_reasoning=chat.thinks and index > last_user) for index, message in enumerate(messages)
    ]


def _rendered_answer(
    history: list[dict[str, Any]], message: Message, chat: ChatFormat, *, tools: Sequence[Mapping[str, Any]]
) -> list[int]:
    """The conversation up to an answer; whatever the template would silently leave out of it is refused."""

    def whole(answer: Message) -> list[int]:
        return chat.tokens([*history, answer.to_template()], answer_follows=False, tools=tools)

    plain = replace(message, reasoning=None)
    bare = whole(plain)
    if message.tool_calls and bare == whole(replace(plain, tool_calls=())):
        raise RowRefused(Reason.TEXT_NOT_RENDERED, "the template shows no tool calls")
    if message.tool_calls and message.content.strip() and bare == whole(replace(plain, content="")):
        raise RowRefused(Reason.TEXT_NOT_RENDERED, "the template shows no text beside tool calls")
    if not chat.thinks:
        return bare
    tokens = whole(message)
    if tokens != bare:
        return tokens
    # the template knows no reasoning_content: the reasoning can only stand in the content
    opening, closing = chat.family.think_open, chat.family.think_close
    tokens = whole(replace(plain, content=f"{opening}\n{message.reasoning}\n{closing}\n\n{message.content}"))
    if tokens == bare:
        raise RowRefused(Reason.TEXT_NOT_RENDERED, "the template shows no reasoning")
    return tokens


def _refuse_special(message: Message, chat: ChatFormat) -> None:
    _refuse_special_text(message.content, chat, where=f"the {message.role} turn")
    if message.reasoning is not None:
        _refuse_special_text(message.reasoning, chat, where="reasoning")
    if message.tool_calls:
        calls = json.dumps([call.to_template() for call in message.tool_calls], ensure_ascii=False)
        _refuse_special_text(calls, chat, where="a tool call")


def _refuse_special_text(text: str, chat: ChatFormat, *, where: str) -> None:
    if chat.special_pattern is not None and (found := chat.special_pattern.search(text)):
        raise RowRefused(Reason.SPECIAL_TOKEN_TEXT, f"{where} has '{found.group()}' at character {found.start()}")


@dataclass
class PromptRows:
    """Prompts to be answered."""

    prompts: list[Prompt] = field(default_factory=list)
    rejected: list[Rejection] = field(default_factory=list)


def prompt_row(conversation: Conversation, chat: ChatFormat, *, max_prompt_tokens: int | None = None) -> Prompt:
    """Render a conversation that ends with a user turn.

    Raises:
        RowRefused: see ``prompt_tokens``.
    """
    tokens = prompt_tokens(conversation, len(conversation.messages), chat, max_prompt_tokens=max_prompt_tokens)
    return Prompt(conversation.id, conversation.workload, tuple(tokens), conversation.group)


def prompt_rows(
    conversations: Iterable[Conversation], chat: ChatFormat, *, max_prompt_tokens: int | None = None
) -> PromptRows:
    """Render conversations that end with a user turn; see ``rounds.py`` for those with several.

    Raises:
        TargetError: the tokenizer has no chat template, or none for this mode.
    """
    result = PromptRows()
    for conversation in conversations:
        try:
            result.prompts.append(prompt_row(conversation, chat, max_prompt_tokens=max_prompt_tokens))
        except RowRefused as refused:
            result.rejected.append(
                Rejection(conversation.file, conversation.line, refused.reason, refused.detail, conversation.id)
            )
    return result
