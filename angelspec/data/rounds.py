"""Prompts with several user turns, asked one after another: each answer becomes history of the next question."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from angelspec.core.modes import Mode, ModeFamily
from angelspec.data.conversation import Conversation, Message


@dataclass(frozen=True)
class Round:
    """A conversation up to a user turn, and the user turns that wait behind it."""

    conversation: Conversation
    """Ends with a user turn. Its id is the conversation's, with ``#2`` and so on in later rounds."""
    waiting: tuple[Message, ...]
    number: int = 1


def first_round(conversations: Iterable[Conversation]) -> list[Round]:
    """Ask the first user turn of each conversation (made of an optional system turn and user turns)."""
    rounds = []
    for conversation in conversations:
        first = next(index for index, message in enumerate(conversation.messages) if message.role == "user")
        asked, waiting = conversation.messages[: first + 1], conversation.messages[first + 1 :]
        assert all(message.role == "user" for message in waiting), conversation.id
        rounds.append(Round(replace(conversation, messages=asked), waiting))
    return rounds


def next_round(rounds: Sequence[Round], answers: Mapping[str, str | None]) -> list[Round]:
    """Ask the next user turn where there is one and the last was answered.

    Args:
        rounds: the round before.
        answers: by the id of each round's conversation, the answer as a client shows and sends it back (see
            ``visible_answer``); absent or None: no usable answer, the conversation ends here.
    """
    following = []
    for item in rounds:
        answer = answers.get(item.conversation.id)
        if not item.waiting or answer is None or not answer.strip():
            continue
        number = item.number + 1
        messages = (*item.conversation.messages, Message("assistant", answer), item.waiting[0])
        base = item.conversation.id.removesuffix(f"#{item.number}") if item.number > 1 else item.conversation.id
        conversation = replace(item.conversation, id=f"{base}#{number}", messages=messages)
        following.append(Round(conversation, item.waiting[1:], number))
    return following


def visible_answer(text: str, *, family: ModeFamily, mode: Mode) -> str | None:
    """An answer without its reasoning; None if the reasoning never ended.

    Args:
        text: what was generated, decoded, without the stop token.
        family: the target's mode family.
        mode: the mode it was generated in.
    """
    if family.think_close is None or (mode == "no-think" and family.think_close not in text):
        return text
    _, closed, answer = text.rpartition(family.think_close)
    return answer.lstrip("\n") if closed else None
