"""A client of a running server: chat and native requests with our labels, their streams, the server's state.

``Client`` and ``AsyncClient`` have the same methods. Nothing is retried. The demo, the launcher's probe and the load
test go through here.

    with Client("http://127.0.0.1:30000") as client:
        answer = client.chat([{"role": "user", "content": "Hi"}], label=RequestLabel(route="mtp"), details=True)
        answer.text, answer.metadata.accepted_length, [piece.position for piece in answer.pieces]

        with client.stream_chat([...], details=True) as stream:
            for chunk in stream:            # ChatChunk: new text, new pieces, metadata so far
                ...
                if enough:
                    break                   # leaving the block closes the connection, and the server aborts
        stream.answer                       # ChatAnswer: all that came

    async with AsyncClient(url) as client:
        async with client.stream_chat([...]) as stream:
            async for chunk in stream: ...

``stream.cancel()`` may be called from another thread (or task): it asks the server to abort, and the reading loop ends.
A server without the extension answers as well; ``pieces`` are then empty and ``metadata`` is None.

Errors: ``RequestRefused`` (4xx, with the server's words), ``ServerUnreachable`` (no connection, 5xx), ``StreamBroken``
(the connection ended in mid-answer; its ``partial`` holds what had come).
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Mapping
from typing import Any, Self, Unpack

import httpx

from angelspec.core.addresses import without_login
from angelspec.core.engine import SPECULATION_SWITCH
from angelspec.serving.answers import ChatAnswer, GenerateAnswer, ServerInfo
from angelspec.serving.connection import CONNECT_SECONDS, check, http_settings, json_object, reaching
from angelspec.serving.failures import RequestRefused
from angelspec.serving.streams import AsyncStream, Stream
from angelspec.serving.wire import (
    CHAT,
    GENERATE,
    ChatOptions,
    Label,
    Messages,
    Sampling,
    chat_answer,
    chat_body,
    generate_answer,
    generate_body,
    server_info,
)

_FLUSH = {"timeout": 10}
"""Seconds that running requests have to end first."""


def _new_id() -> str:
    return uuid.uuid4().hex


class Client:
    """A connection to one server.

    Args:
        url: such as ``http://127.0.0.1:30000``.
        api_key: of the server, if it has one.
        timeout: seconds without a byte after which a request counts as lost.
        verify: whether an https server's certificate must be for this address.

    Raises:
        ServingError: ``url`` is no address.
    """

    def __init__(self, url: str, *, api_key: str | None = None, timeout: float = 600.0, verify: bool = True) -> None:
        self.url = without_login(url.rstrip("/"))
        self.http = httpx.Client(**http_settings(url, api_key=api_key, timeout=timeout, verify=verify))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections."""
        self.http.close()

    # ---------------------------------------------------------------------------------------- requests

    def chat(self, messages: Messages, **options: Unpack[ChatOptions]) -> ChatAnswer:
        """Ask for a whole answer; messages are OpenAI's."""
        body = chat_body(messages, stream=False, request_id=_new_id(), **options)
        value, seconds = self._timed(CHAT, body)
        return chat_answer(value, seconds=seconds)

    def stream_chat(self, messages: Messages, **options: Unpack[ChatOptions]) -> Stream:
        """The same as a stream of ``ChatChunk``, read inside a ``with`` block."""
        body = chat_body(messages, stream=True, request_id=_new_id(), **options)
        return Stream(self.http, CHAT, body, url=self.url, abort=self.abort)

    def generate(
        self, prompt: str | list[int], *, sampling: Sampling = Sampling(), label: Label = None
    ) -> GenerateAnswer:
        """Continue a text or token ids, without a chat template."""
        body = generate_body(prompt, stream=False, request_id=_new_id(), sampling=sampling, label=label)
        value, seconds = self._timed(GENERATE, body)
        return generate_answer(value, seconds=seconds)

    def stream_generate(
        self, prompt: str | list[int], *, sampling: Sampling = Sampling(), label: Label = None
    ) -> Stream:
        """The same as a stream of ``GenerateChunk``, read inside a ``with`` block."""
        body = generate_body(prompt, stream=True, request_id=_new_id(), sampling=sampling, label=label)
        return Stream(self.http, GENERATE, body, url=self.url, abort=self.abort)

    # ------------------------------------------------------------------------------------------- server

    def healthy(self, *, timeout: float = 5.0) -> bool:
        """Whether the server is ready; False where nothing answers."""
        try:
            return self.http.get("/health", timeout=timeout).status_code == 200
        except httpx.TransportError:
            return False

    def server_info(self) -> ServerInfo:
        """Version, arguments and the extension's state."""
        with reaching(self.url):
            return server_info(json_object(self.http.get("/server_info")))

    def set_speculation(self, on: bool) -> None:
        """Switch speculation on or off for all requests, also those that name a drafter; running ones go on.

        Raises:
            RequestRefused: the server has no such switch.
        """
        with reaching(self.url):
            response = self.http.post("/set_internal_state", json=_switch(on))
            _check_switched(response)

    def flush_cache(self) -> bool:
        """Empty the prefix cache; False: the server did not (requests are running, or it can't)."""
        with reaching(self.url):
            return self.http.post("/flush_cache", params=_FLUSH).status_code == 200

    def abort(self, request_id: str) -> None:
        """Ask the server to end a request; a server that can't be asked is left alone."""
        with contextlib.suppress(httpx.HTTPError):
            self.http.post("/abort_request", json={"rid": request_id}, timeout=CONNECT_SECONDS)

    def _timed(self, path: str, body: Mapping[str, Any]) -> tuple[dict[str, Any], float]:
        started = time.perf_counter()
        with reaching(self.url):
            response = self.http.post(path, json=body)
        return json_object(response), time.perf_counter() - started


class AsyncClient:
    """The same for asyncio; see ``Client``.

    Args:
        connections: most connections at a time; None: as many as requests.
    """

    def __init__(
        self, url: str, *, api_key: str | None = None, timeout: float = 600.0, connections: int | None = None
    ) -> None:
        self.url = without_login(url.rstrip("/"))
        self.http = httpx.AsyncClient(**http_settings(url, api_key=api_key, timeout=timeout, connections=connections))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close all connections."""
        await self.http.aclose()

    # ---------------------------------------------------------------------------------------- requests

    async def chat(self, messages: Messages, **options: Unpack[ChatOptions]) -> ChatAnswer:
        """See ``Client.chat``."""
        body = chat_body(messages, stream=False, request_id=_new_id(), **options)
        value, seconds = await self._timed(CHAT, body)
        return chat_answer(value, seconds=seconds)

    def stream_chat(self, messages: Messages, **options: Unpack[ChatOptions]) -> AsyncStream:
        """See ``Client.stream_chat``."""
        body = chat_body(messages, stream=True, request_id=_new_id(), **options)
        return AsyncStream(self.http, CHAT, body, url=self.url, abort=self.abort)

    async def generate(
        self, prompt: str | list[int], *, sampling: Sampling = Sampling(), label: Label = None
    ) -> GenerateAnswer:
        """See ``Client.generate``."""
        body = generate_body(prompt, stream=False, request_id=_new_id(), sampling=sampling, label=label)
        value, seconds = await self._timed(GENERATE, body)
        return generate_answer(value, seconds=seconds)

    def stream_generate(
        self, prompt: str | list[int], *, sampling: Sampling = Sampling(), label: Label = None
    ) -> AsyncStream:
        """See ``Client.stream_generate``."""
        body = generate_body(prompt, stream=True, request_id=_new_id(), sampling=sampling, label=label)
        return AsyncStream(self.http, GENERATE, body, url=self.url, abort=self.abort)

    # ------------------------------------------------------------------------------------------- server

    async def healthy(self, *, timeout: float = 5.0) -> bool:
        """See ``Client.healthy``."""
        try:
            return (await self.http.get("/health", timeout=timeout)).status_code == 200
        except httpx.TransportError:
            return False

    async def server_info(self) -> ServerInfo:
        """See ``Client.server_info``."""
        with reaching(self.url):
            return server_info(json_object(await self.http.get("/server_info")))

    async def set_speculation(self, on: bool) -> None:
        """See ``Client.set_speculation``."""
        with reaching(self.url):
            response = await self.http.post("/set_internal_state", json=_switch(on))
            _check_switched(response)

    async def flush_cache(self) -> bool:
        """See ``Client.flush_cache``."""
        with reaching(self.url):
            return (await self.http.post("/flush_cache", params=_FLUSH)).status_code == 200

    async def abort(self, request_id: str) -> None:
        """See ``Client.abort``."""
        with contextlib.suppress(httpx.HTTPError):
            await self.http.post("/abort_request", json={"rid": request_id}, timeout=CONNECT_SECONDS)

    async def _timed(self, path: str, body: Mapping[str, Any]) -> tuple[dict[str, Any], float]:
        started = time.perf_counter()
        with reaching(self.url):
            response = await self.http.post(path, json=body)
        return json_object(response), time.perf_counter() - started


def _check_switched(response: httpx.Response) -> None:
    check(response, response.content)
    said = response.json()
    if not said or said != [True] * len(said):  # SGLang answers 200 also where it refuses, once per scheduler
        raise RequestRefused(
            "the server did not take the switch of speculation",
            status=response.status_code,
            mend="its log says why; a server without angelspec's extension has none",
        )


def _switch(on: bool) -> dict[str, Any]:
    return {"server_args": {SPECULATION_SWITCH: int(on)}}
