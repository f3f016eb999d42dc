"""Why a row was refused or changed: a stable vocabulary, each word with its explanation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType


class Reason(StrEnum):
    """Why a row is left out."""

    # the bytes
    INVALID_UTF8 = "invalid-utf8"
    LINE_TOO_LONG = "line-too-long"
    TRUNCATED = "truncated"
    INVALID_JSON = "invalid-json"
    LONE_SURROGATE = "lone-surrogate"
    NUL_CHARACTER = "nul-character"
    WRONG_COLUMNS = "wrong-columns"
    # the row
    NOT_AN_OBJECT = "not-an-object"
    NO_CONVERSATION = "no-conversation"
    TWO_CONVERSATIONS = "two-conversations"
    AMBIGUOUS_PROMPT = "ambiguous-prompt"
    BAD_CONVERSATION = "bad-conversation"
    EMPTY_CONVERSATION = "empty-conversation"
    DUPLICATE_ID = "duplicate-id"
    UNKNOWN_WORKLOAD = "unknown-workload"
    # the messages
    BAD_MESSAGE = "bad-message"
    UNKNOWN_ROLE = "unknown-role"
    BAD_CONTENT = "bad-content"
    IMAGE_CONTENT = "image-content"
    EMPTY_USER_TEXT = "empty-user-text"
    NO_USER = "no-user"
    NO_ASSISTANT = "no-assistant"
    NO_ASSISTANT_TEXT = "no-assistant-text"
    ASSISTANT_FIRST = "assistant-first"
    ASSISTANT_AFTER_ASSISTANT = "assistant-after-assistant"
    SYSTEM_NOT_FIRST = "system-not-first"
    ORPHAN_TOOL_RESULT = "orphan-tool-result"
    BAD_TOOL_CALL = "bad-tool-call"
    BAD_TOOL_ARGUMENTS = "bad-tool-arguments"
    BAD_TOOLS = "bad-tools"
    TOOL_TURNS_IN_ROLLOUT = "tool-turns-in-rollout"
    # reasoning
    REASONING_TWICE = "reasoning-twice"
    THINK_UNCLOSED = "think-unclosed"
    THINK_UNOPENED = "think-unopened"
    THINK_MISPLACED = "think-misplaced"
    NO_REASONING = "no-reasoning"
    # rendering
    SPECIAL_TOKEN_TEXT = "special-token-text"
    TEMPLATE_ERROR = "template-error"
    PROMPT_NOT_PREFIX = "prompt-not-prefix"
    TEXT_NOT_RENDERED = "text-not-rendered"
    NO_END_OF_TURN = "no-end-of-turn"
    STOP_INSIDE_ANSWER = "stop-inside-answer"
    EMPTY_MASK = "empty-mask"
    PROMPT_TOO_LONG = "prompt-too-long"
    # training rows
    NO_SUPERVISED_TOKEN = "no-supervised-token"
    NO_SUPERVISED_TOKEN_AFTER_TRUNCATION = "no-supervised-token-after-truncation"
    NO_ANCHOR = "no-anchor"
    CONTAMINATED = "contaminated"
    ANSWER_UNFINISHED = "answer-unfinished"
    ANSWER_REPEATS = "answer-repeats"
    ANSWER_EMPTY = "answer-empty"


class Remark(StrEnum):
    """What was changed in, or is worth knowing of, a row that was kept."""

    TRAILING_TURNS_DROPPED = "trailing-turns-dropped"
    CONSECUTIVE_USERS = "consecutive-users"
    EMPTY_TURN_UNSUPERVISED = "empty-turn-unsupervised"
    DUPLICATE_CONTENT = "duplicate-content"
    REASONING_DROPPED = "reasoning-dropped"
    TURN_DROPPED = "turn-dropped"
    ANSWER_CUT = "answer-cut"


EXPLANATIONS: Mapping[Reason | Remark, str] = MappingProxyType(
    {
        Reason.INVALID_UTF8: "bytes that are not UTF-8",
        Reason.LINE_TOO_LONG: "more bytes than data.max_line_bytes allows",
        Reason.TRUNCATED: "the file ends in the middle of this row",
        Reason.INVALID_JSON: "no valid JSON",
        Reason.LONE_SURROGATE: "half of a surrogate pair, which no tokenizer can read",
        Reason.NUL_CHARACTER: "a NUL character, which tokenizers and servers treat differently",
        Reason.WRONG_COLUMNS: "a table row whose fields do not match the header",
        Reason.NOT_AN_OBJECT: "JSON, but no object",
        Reason.NO_CONVERSATION: "none of the keys that hold a conversation or a prompt",
        Reason.TWO_CONVERSATIONS: "'conversations' and 'messages' are both given and differ",
        Reason.AMBIGUOUS_PROMPT: "several prompt columns that differ; name one as prompt_key",
        Reason.BAD_CONVERSATION: "the conversation is no list of messages",
        Reason.EMPTY_CONVERSATION: "the conversation has no messages",
        Reason.DUPLICATE_ID: "the id of an earlier row of the same source",
        Reason.UNKNOWN_WORKLOAD: "the workload is missing or is none of chat, code, math",
        Reason.BAD_MESSAGE: "a message without a role, or with two that differ",
        Reason.UNKNOWN_ROLE: "a role that is not in the role map (data.role_map adds to it)",
        Reason.BAD_CONTENT: "content that is neither text nor a list of text parts",
        Reason.IMAGE_CONTENT: "image, audio or video content, which is unsupported",
        Reason.EMPTY_USER_TEXT: "a user turn without text",
        Reason.NO_USER: "no user turn",
        Reason.NO_ASSISTANT: "no assistant turn, and answers are taken from the rows",
        Reason.NO_ASSISTANT_TEXT: "no assistant turn has text or tool calls",
        Reason.ASSISTANT_FIRST: "an assistant turn before any user turn, which no server generates",
        Reason.ASSISTANT_AFTER_ASSISTANT: "two assistant turns in a row, which no server generates",
        Reason.SYSTEM_NOT_FIRST: "a system turn that is not the first message",
        Reason.ORPHAN_TOOL_RESULT: "a tool result that answers no tool call",
        Reason.BAD_TOOL_CALL: "a tool call without a function name",
        Reason.BAD_TOOL_ARGUMENTS: "tool call arguments that are no JSON object",
        Reason.BAD_TOOLS: "'tools' is no list of tool descriptions",
        Reason.TOOL_TURNS_IN_ROLLOUT: "tool calls or results, which a rollout cannot produce again",
        Reason.REASONING_TWICE: "reasoning both inline and as a field, or in two fields that differ",
        Reason.THINK_UNCLOSED: "reasoning is opened and never closed",
        Reason.THINK_UNOPENED: "reasoning is closed and never opened",
        Reason.THINK_MISPLACED: "thinking tags elsewhere than once around the beginning of the answer",
        Reason.NO_REASONING: "the mode thinks and the assistant turn has no reasoning",
        Reason.SPECIAL_TOKEN_TEXT: "the text of a special token, which would end or open a turn",
        Reason.TEMPLATE_ERROR: "the chat template refuses the conversation",
        Reason.PROMPT_NOT_PREFIX: "the rendered prompt is no prefix of the rendered conversation",
        Reason.TEXT_NOT_RENDERED: "the chat template leaves out part of the assistant turn",
        Reason.NO_END_OF_TURN: "the rendered answer has no end-of-turn token",
        Reason.STOP_INSIDE_ANSWER: "the rendered answer has an end-of-turn token before its end",
        Reason.EMPTY_MASK: "no token of the rendered answer is left to supervise",
        Reason.PROMPT_TOO_LONG: "the rendered prompt is longer than data.max_prompt_tokens",
        Reason.NO_SUPERVISED_TOKEN: "the row supervises no token",
        Reason.NO_SUPERVISED_TOKEN_AFTER_TRUNCATION: "no supervised token after truncation",
        Reason.NO_ANCHOR: "no supervised token has room for a whole block behind it",
        Reason.CONTAMINATED: "shares text with an evaluation example",
        Reason.ANSWER_UNFINISHED: "the answer's finish reason is not in rollout.keep_finish_reasons",
        Reason.ANSWER_REPEATS: "the answer's share of repeated 12-grams is above rollout.max_repeated_share",
        Reason.ANSWER_EMPTY: "the answer is nothing but a stop token",
        Remark.TRAILING_TURNS_DROPPED: "turns after the last assistant turn were dropped",
        Remark.CONSECUTIVE_USERS: "user turns in a row; the chat template decides whether that is possible",
        Remark.EMPTY_TURN_UNSUPERVISED: "an assistant turn without text stays in the history, unsupervised",
        Remark.DUPLICATE_CONTENT: "the conversation of an earlier row under another id",
        Remark.REASONING_DROPPED: "the mode does not think: the turn's reasoning was left out",
        Remark.TURN_DROPPED: "one assistant turn was refused, others of the conversation were kept",
        Remark.ANSWER_CUT: "the answer was cut at the longest document length",
    }
)


class RowRefused(Exception):
    """Raised inside this package where one row cannot be used; caught row by row, never shown as such."""

    def __init__(self, reason: Reason, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail or EXPLANATIONS[reason]


@dataclass(frozen=True, slots=True)
class Rejection:
    """One refused row."""

    file: str
    line: int
    """One-based line of the row's beginning (row number for Parquet and hub datasets)."""
    reason: Reason
    detail: str
    raw: str = ""
    """The row's beginning, for the quarantine file."""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.reason}: {self.detail}"


@dataclass(frozen=True, slots=True)
class Note:
    """Something changed in a row that was kept."""

    file: str
    line: int
    remark: Remark
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.remark}: {self.detail or EXPLANATIONS[self.remark]}"


def count_reasons(reasons: Iterable[Reason | Remark]) -> dict[str, int]:
    """Counts by word, the most frequent first (ties by name)."""
    counts: dict[str, int] = {}
    for reason in reasons:
        counts[str(reason)] = counts.get(str(reason), 0) + 1
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def listed(counts: Mapping[str, int]) -> str:
    """``12 word, 3 other``."""
    return ", ".join(f"{count} {word}" for word, count in counts.items())


def table_below(counts: Mapping[str, int]) -> str:
    """``reasons_table`` to follow a message's first line, indented; empty for no counts."""
    return "".join(f"\n  {line}" for line in reasons_table(counts).splitlines())


def reasons_table(counts: Mapping[str, int]) -> str:
    """Lines of ``count  word  explanation``; empty for no counts."""
    if not counts:
        return ""
    known = {str(key): text for key, text in EXPLANATIONS.items()}
    width = max(len(word) for word in counts)
    digits = max(len(f"{count:,}") for count in counts.values())
    return "\n".join(f"{count:>{digits},}  {word:<{width}}  {known[word]}" for word, count in counts.items())
