"""Rollout by an OpenAI-compatible server instead of the local engine.

The server gets messages and the mode's template arguments, as every client of the finished drafter will send them. It
returns text; its tokens are found by rendering that text as an assistant turn with the target's own template. Answers
are journalled one by one under the hash of their request, so an interrupted rollout asks nothing twice.
"""

from __future__ import annotations

import asyncio
import email.utils
import json
import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from angelspec.core.errors import AngelspecError, DataError, MissingRequirement
from angelspec.core.files import read_json, write_json_atomic
from angelspec.core.fingerprint import fingerprint
from angelspec.core.modes import Mode, ModeFamily
from angelspec.core.recipe import RolloutSection
from angelspec.data.chat import assistant_turn, chat_format
from angelspec.data.conversation import Conversation, Message
from angelspec.data.generation import Answer
from angelspec.data.reasons import RowRefused
from angelspec.data.seeds import row_key
from angelspec.hub.redaction import redact
from angelspec.targets.target import Target

_JOURNAL, _MODEL = "answers.jsonl", "model.json"
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 60.0
_LONGEST_RETRY_AFTER = 600.0
_RETRIED = frozenset({408, 409, 425, 429})


@dataclass(frozen=True)
class Request:
    """One chat completion to ask for."""

    prompt_id: str
    sample: int
    body: Mapping[str, Any]

    @property
    def key(self) -> str:
        """Content hash of what is sent (the server's address is no part of it)."""
        return fingerprint(dict(self.body), length=32)


@dataclass(frozen=True)
class Reply:
    """What the server said."""

    content: str
    reasoning: str | None
    finish_reason: str


def ask_endpoint(
    target: Target,
    asked: Sequence[tuple[str, int]],
    section: RolloutSection,
    *,
    mode: Mode,
    conversations: Mapping[str, Sequence[Mapping[str, Any]]],
    folder: Path,
    on_progress: Callable[[int, int], None],
) -> list[Answer]:
    """Have a server answer prompts, and find the tokens of what it says.

    Args:
        target: gives tokenizer, template and mode family; its weights are not used.
        asked: (prompt id, sample) pairs.
        section: endpoint, sampling and retry settings. The key comes from the environment variable that it names.
        mode: sent as ``chat_template_kwargs``.
        conversations: messages by prompt id.
        folder: the journal lies here.
        on_progress: called with (tokens, answers) so far.

    Returns:
        Answers in the order of ``asked``. One whose text cannot be rendered as an assistant turn has the finish reason
        ``refused: ...`` and no tokens, as has one that thinks in a mode without. The tokens of an unfinished one are
        those of its text alone.

    Raises:
        MissingRequirement: the server refuses the key (401, 403) or cannot be reached.
        DataError: the server refuses a request as wrong, keeps failing after all retries, or thinks although the mode
            is no-think.
    """
    return asyncio.run(
        _ask_all(target, asked, section, mode=mode, conversations=conversations, folder=folder, on_progress=on_progress)
    )


async def _ask_all(
    target: Target,
    asked: Sequence[tuple[str, int]],
    section: RolloutSection,
    *,
    mode: Mode,
    conversations: Mapping[str, Sequence[Mapping[str, Any]]],
    folder: Path,
    on_progress: Callable[[int, int], None],
) -> list[Answer]:
    journal = _Journal(folder / _JOURNAL)
    key = _key(section.endpoint_key_variable)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    limits = httpx.Limits(max_connections=section.concurrency, max_keepalive_connections=section.concurrency)
    base = (section.endpoint_url or "").rstrip("/")
    async with httpx.AsyncClient(
        headers=headers, timeout=section.timeout_seconds, limits=limits, follow_redirects=False
    ) as client:
        server = _Server(client, base, retries=section.retries, key=key, key_variable=section.endpoint_key_variable)
        model = section.endpoint_model or _same_model(folder / _MODEL, await server.first_model(), base=base)
        requests = [
            _request(prompt_id, sample, section, model=model, family=target.mode_family, mode=mode,
                     messages=conversations[prompt_id])
            for prompt_id, sample in asked
        ]  # fmt: skip
        answers: dict[int, Answer] = {}
        tokens = 0
        gate = asyncio.Semaphore(section.concurrency)

        async def one(index: int, request: Request) -> None:
            nonlocal tokens
            reply = journal.get(request.key)
            if reply is None:
                async with gate:
                    reply = await server.complete(request)
                _require_mode(reply, family=target.mode_family, mode=mode)  # before it is kept for the next run
                journal.add(request.key, reply)
            answers[index] = _answer(target, mode=mode, messages=conversations[request.prompt_id], reply=reply)
            tokens += len(answers[index].tokens)
            on_progress(tokens, len(answers))

        try:
            async with asyncio.TaskGroup() as group:
                for index, request in enumerate(requests):
                    group.create_task(one(index, request))
        except ExceptionGroup as failed:  # several may fail before all have stopped; ours say most
            ours = [error for error in failed.exceptions if isinstance(error, AngelspecError)]
            raise (ours or failed.exceptions)[0] from None
        finally:
            journal.close()
    return [answers[index] for index in range(len(requests))]


def _request(
    prompt_id: str,
    sample: int,
    section: RolloutSection,
    *,
    model: str,
    family: ModeFamily,
    mode: Mode,
    messages: Sequence[Mapping[str, Any]],
) -> Request:
    body: dict[str, Any] = {
        "model": model,
        "messages": [dict(message) for message in messages],
        "max_tokens": section.max_new_tokens,
        "temperature": section.temperature,
        "top_p": section.top_p,
        "stream": False,
    }
    if section.temperature > 0:
        body["seed"] = (row_key(prompt_id, sample) ^ section.seed) & 0x7FFFFFFF
    if arguments := family.arguments(mode):
        body["chat_template_kwargs"] = arguments
    return Request(prompt_id, sample, body)


def _same_model(path: Path, model: str, *, base: str) -> str:
    """The model of the server, which must be the one that answered before a rollout was broken off.

    Raises:
        DataError: it is another.
    """
    if not path.exists():
        write_json_atomic(path, {"model": model})
        return model
    before = read_json(path)["model"]
    if before != model:
        raise DataError(
            f"{base} serves '{model}', but the answers so far are from '{before}'",
            mend=f"serve '{before}' again, or set rollout.endpoint_model to have all answers from another",
        )
    return model


def _key(variable: str) -> str:
    """The key in an environment variable, without the line end that a file leaves; empty: none.

    Raises:
        MissingRequirement: it can't stand in a header.
    """
    key = os.environ.get(variable, "").strip()
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise MissingRequirement(
            f"the key in ${variable} holds characters that no key has", mend=f"export {variable}=... again"
        )
    return key


class _Server:
    """Requests with retries; nothing it raises or logs holds the key."""

    def __init__(self, client: httpx.AsyncClient, base: str, *, retries: int, key: str, key_variable: str) -> None:
        self._client = client
        self._base = base
        self._retries = retries
        self._key = key
        self._key_variable = key_variable

    async def first_model(self) -> str:
        """The model that the server lists first."""
        answer = await self._send("GET", "/models", None, what="the list of models")
        try:
            return str(answer["data"][0]["id"])
        except (KeyError, IndexError, TypeError) as error:
            raise DataError(f"{self._base} lists no model", mend="set rollout.endpoint_model") from error

    async def complete(self, request: Request) -> Reply:
        """One chat completion."""
        what = f"prompt {request.prompt_id}"
        answer = await self._send("POST", "/chat/completions", request.body, what=what)
        try:
            choice = answer["choices"][0]
            message = choice["message"]
            reasoning = message.get("reasoning_content") or message.get("reasoning")
            content = message.get("content")
            if not all(isinstance(part, str | None) for part in (content, reasoning)):
                raise TypeError("an answer is a text")
            return Reply(content or "", reasoning, str(choice["finish_reason"]))
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise DataError(
                f"{self._base} answers {what} with something that is no chat completion",
                mend="check that rollout.endpoint_url ends where /chat/completions begins (often /v1)",
            ) from error

    async def _send(self, method: str, path: str, body: Mapping[str, Any] | None, *, what: str) -> Any:
        problem = ""
        for attempt in range(self._retries + 1):
            pause = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2**attempt) * (1 + 0.1 * random.random())
            try:
                response = await self._client.request(method, self._base + path, json=body)
            except httpx.TransportError as error:
                problem = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            except httpx.InvalidURL as error:
                raise DataError(f"rollout.endpoint_url '{self._base}' is no URL: {error}") from error
            else:
                if response.status_code in (401, 403):
                    state = "is refused" if self._key else "is needed but not set"
                    raise MissingRequirement(
                        f"{self._base} answers {response.status_code}: the key in ${self._key_variable} {state}",
                        mend=f"export {self._key_variable}=..., or set rollout.endpoint_key_variable",
                    )
                if response.is_success:
                    try:
                        return response.json()
                    except ValueError:
                        problem = "a body that is not JSON"
                elif response.status_code in _RETRIED or response.status_code >= 500:
                    problem = f"status {response.status_code}"
                    pause = max(pause, _retry_after(response.headers.get("Retry-After")))
                else:
                    raise DataError(
                        f"{self._base} refuses {what} ({response.status_code}): {self._excerpt(response.text)}"
                    )
            if attempt < self._retries:
                await asyncio.sleep(pause)
        text = f"{self._base} keeps failing on {what} after {self._retries + 1} tries: {self._clean(problem)}"
        raise DataError(text, mend="finished answers are kept; run again when the server is well")

    def _excerpt(self, text: str) -> str:
        return self._clean(" ".join(text.split())[:300])

    def _clean(self, text: str) -> str:
        return redact(text, (self._key,) if self._key else ())


def _retry_after(value: str | None) -> float:
    """Seconds that a Retry-After header asks for: a number or a date; 0 without one."""
    if not value:
        return 0.0
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(value).timestamp() - time.time()
        except ValueError:
            return 0.0
    return min(_LONGEST_RETRY_AFTER, max(0.0, seconds))


class _Journal:
    """Replies by request hash, one JSON line each; a line that a crash cut short or damaged is asked for again."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._replies: dict[str, Reply] = {}
        good = 0
        if path.exists():
            for line in path.read_bytes().splitlines(keepends=True):
                if not line.endswith(b"\n"):
                    break
                good += len(line)
                with suppress(ValueError, KeyError, TypeError, AttributeError):
                    value = json.loads(line)
                    key = value.pop("request")
                    self._replies[key] = Reply(**value)
        self._stream = path.open("r+b" if path.exists() else "wb")
        self._stream.truncate(good)
        self._stream.seek(good)

    def get(self, key: str) -> Reply | None:
        return self._replies.get(key)

    def add(self, key: str, reply: Reply) -> None:
        self._replies[key] = reply
        line = json.dumps({"request": key, **vars(reply)}, ensure_ascii=False) + "\n"
        self._stream.write(line.encode("utf-8", "backslashreplace"))
        self._stream.flush()

    def close(self) -> None:
        self._stream.close()


def _require_mode(reply: Reply, *, family: ModeFamily, mode: Mode) -> None:
    if mode == "no-think" and family.think_close is not None and (reply.reasoning or "").strip():
        raise DataError(
            "the server thinks although it was asked not to: its template does not read "
            f"{', '.join(family.arguments(mode)) or 'chat_template_kwargs'}",
            mend="serve the target with the chat template of the recipe's target, or train for high-think",
        )


def _answer(target: Target, *, mode: Mode, messages: Sequence[Mapping[str, Any]], reply: Reply) -> Answer:
    """Tokens of a reply: what the target's template shows of it behind the prompt, with the token that ends it."""
    family = target.mode_family
    if mode == "no-think" and family.think_close is not None and family.think_close in reply.content:
        return Answer((), "refused: thinks")
    content, reasoning = _split_reasoning(reply, family=family, mode=mode)
    if reply.finish_reason != "stop":
        text = content
        if reasoning is not None:  # one that was cut while it thought has not closed its thinking
            text = f"{reasoning}\n{family.think_close}\n\n{content}" if content else reasoning
        return Answer(tuple(target.tokenizer.encode(text, add_special_tokens=False)), reply.finish_reason)
    turns = [
        Message(message["role"], message.get("content") or "", reasoning=message.get("reasoning_content"))
        for message in messages
    ]
    turns.append(Message("assistant", content, reasoning=reasoning))
    conversation = Conversation(id="", workload="chat", messages=tuple(turns), source="")
    try:
        _, tokens = assistant_turn(conversation, len(turns) - 1, chat_format(target, mode=mode))
    except RowRefused as error:
        return Answer((), f"refused: {error.reason}")
    return Answer(tuple(tokens), "stop")


def _split_reasoning(reply: Reply, *, family: ModeFamily, mode: Mode) -> tuple[str, str | None]:
    """Content and reasoning, also from servers that leave the reasoning inside the text."""
    if mode == "no-think" or family.think_close is None:
        return reply.content, None
    if reply.reasoning is not None or family.think_close not in reply.content:
        return reply.content, reply.reasoning
    reasoning, _, content = reply.content.partition(family.think_close)
    if family.think_open is not None:
        reasoning = reasoning.removeprefix(family.think_open)
    return content.lstrip("\n"), reasoning.strip("\n")
