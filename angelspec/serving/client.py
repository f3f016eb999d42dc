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
import ipaddress
import re
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

import httpx

from angelspec.core.engine import SERVER_KEY_VARIABLE, SPECULATION_SWITCH
from angelspec.serving.answers import ChatAnswer, ChatChunk, GenerateAnswer, GenerateChunk, ServerInfo
from angelspec.serving.failures import RequestRefused, ServerUnreachable, ServingError, StreamBroken
from angelspec.serving.wire import (
    Events,
    Label,
    Messages,
    Sampling,
    chat_answer,
    chat_body,
    chat_chunk,
    error_words,
    event_error,
    event_object,
    generate_answer,
    generate_body,
    generate_chunk,
    joined,
    server_info,
)

_CHAT, _GENERATE = "/v1/chat/completions", "/generate"
_CONNECT_SECONDS = 10.0
_FLUSH = {"timeout": 10}
"""Seconds that running requests have to end first."""
_EVENTS = {"Accept": "text/event-stream"}
_LOGIN = re.compile(r"(?<=://)[^/?#\s]*@")


def is_address(url: str) -> bool:
    """Whether a server can have this address: http:// or https://, and a host and port that there can be."""
    try:
        httpx.URL(url)
        parts = urlsplit(url)
        (parts.hostname or "").encode("idna")
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except (ValueError, httpx.InvalidURL):
        return False


def without_login(text: str) -> str:
    """A text without the user names and passwords of the addresses in it."""
    return _LOGIN.sub("", text)


def _settings(url: str, *, api_key: str | None, timeout: float, connections: int | None) -> dict[str, Any]:
    if not is_address(url):
        raise ServingError(f"{without_login(url)} is no address of a server", mend="write it as http://HOST:PORT")
    host = urlsplit(url).hostname or ""
    try:
        local = ipaddress.ip_address(host).is_loopback
    except ValueError:
        local = host == "localhost"
    return {
        "base_url": url.rstrip("/"),
        "headers": {"Authorization": f"Bearer {api_key}"} if api_key else {},
        "timeout": httpx.Timeout(timeout, connect=_CONNECT_SECONDS),
        "limits": httpx.Limits(max_connections=connections, max_keepalive_connections=connections),
        "trust_env": not local,  # a proxy of the environment must not stand before a local server
    }


def _shown(response: httpx.Response) -> str:
    return without_login(str(response.request.url))


def _check(response: httpx.Response, body: bytes) -> None:
    if response.status_code < 400:
        return
    words = error_words(body)
    if response.status_code < 500:
        keyless = response.status_code in (401, 403)
        mend = f"give the server's API key: --api-key KEY, or {SERVER_KEY_VARIABLE}" if keyless else None
        raise RequestRefused(words, status=response.status_code, mend=mend)
    raise ServerUnreachable(f"{_shown(response)}: the server fails ({response.status_code}): {words}")


def _object(response: httpx.Response) -> dict[str, Any]:
    _check(response, response.content)
    try:
        value = response.json()
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ServerUnreachable(f"{_shown(response)}: the answer is no JSON object", mend="is this an SGLang server?")
    return value


@contextlib.contextmanager
def _reaching(url: str) -> Iterator[None]:
    try:
        yield
    except httpx.RequestError as error:
        what = "no answer in time" if isinstance(error, httpx.TimeoutException) else str(error) or type(error).__name__
        raise ServerUnreachable(f"{url}: {what}", mend="is the server running? start it: angelspec serve") from error


class _Reading:
    """What both kinds of streams do with the bytes that come."""

    def __init__(self, *, native: bool, request_id: str) -> None:
        self.request_id = request_id
        self.answer: ChatAnswer | GenerateAnswer = GenerateAnswer() if native else ChatAnswer()
        """All that came so far."""
        self.cancelled = False
        self._events = Events()
        self._started = time.perf_counter()
        self._done = False

    def _chunks(self, data: bytes) -> Iterator[ChatChunk | GenerateChunk]:
        for event in self._events.feed(data):
            if event == Events.DONE:
                self._done = True
                return
            seconds = time.perf_counter() - self._started
            value = event_object(event)
            if (error := event_error(value)) is not None:
                words, status = error
                if status < 500:
                    raise RequestRefused(words, status=status)
                raise StreamBroken(f"the server failed in the middle of the answer: {words}", partial=self.answer)
            if isinstance(self.answer, GenerateAnswer):
                chunk = generate_chunk(self.answer, value, seconds=seconds)
                self.answer = chunk.answer
            else:
                chunk = chat_chunk(value, seconds=seconds)
                self.answer = joined(self.answer, chunk)
            yield chunk

    def _check_end(self) -> None:
        if not self._done and not self.cancelled:
            raise StreamBroken("the connection ended in the middle of the answer", partial=self.answer)

    def _broken(self, error: Exception) -> StreamBroken:
        return StreamBroken(f"the connection broke in the middle of the answer: {error}", partial=self.answer)


class Stream(_Reading):
    """An answer while it comes; made by ``Client.stream_chat`` and ``Client.stream_generate``."""

    def __init__(self, client: Client, path: str, body: Mapping[str, Any]) -> None:
        super().__init__(native=path == _GENERATE, request_id=body["rid"])
        self._client = client
        self._context = client.http.stream("POST", path, json=body, headers=_EVENTS)
        self._response: httpx.Response | None = None

    def __enter__(self) -> Self:
        self._started = time.perf_counter()
        with _reaching(self._client.url):
            self._response = self._context.__enter__()
            if self._response.status_code >= 400:
                try:
                    _check(self._response, self._response.read())
                finally:
                    self._context.__exit__(None, None, None)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._context.__exit__(kind, error, trace)  # closes the connection of an unfinished answer

    def __iter__(self) -> Iterator[ChatChunk | GenerateChunk]:
        assert self._response is not None, "a stream is read inside its with block"
        try:
            for data in self._response.iter_bytes():
                for chunk in self._chunks(data):
                    yield chunk
                    if self.cancelled:
                        return
                if self._done or self.cancelled:
                    return
        except httpx.TransportError as error:
            if self.cancelled:
                return
            raise self._broken(error) from error
        self._check_end()

    def cancel(self) -> None:
        """End the answer, here and in the server. May be called from any thread, more than once."""
        if not self.cancelled and not self._done:
            self.cancelled = True
            self._client.abort(self.request_id)


class AsyncStream(_Reading):
    """An answer while it comes; made by ``AsyncClient.stream_chat`` and ``AsyncClient.stream_generate``."""

    def __init__(self, client: AsyncClient, path: str, body: Mapping[str, Any]) -> None:
        super().__init__(native=path == _GENERATE, request_id=body["rid"])
        self._client = client
        self._context = client.http.stream("POST", path, json=body, headers=_EVENTS)
        self._response: httpx.Response | None = None

    async def __aenter__(self) -> Self:
        self._started = time.perf_counter()
        with _reaching(self._client.url):
            self._response = await self._context.__aenter__()
            if self._response.status_code >= 400:
                try:
                    _check(self._response, await self._response.aread())
                finally:
                    await self._context.__aexit__(None, None, None)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._context.__aexit__(kind, error, trace)

    async def __aiter__(self) -> AsyncIterator[ChatChunk | GenerateChunk]:
        assert self._response is not None, "a stream is read inside its async with block"
        try:
            async for data in self._response.aiter_bytes():
                for chunk in self._chunks(data):
                    yield chunk
                    if self.cancelled:
                        return
                if self._done or self.cancelled:
                    return
        except httpx.TransportError as error:
            if self.cancelled:
                return
            raise self._broken(error) from error
        self._check_end()

    async def cancel(self) -> None:
        """End the answer, here and in the server. May be called from another task, more than once."""
        if not self.cancelled and not self._done:
            self.cancelled = True
            await self._client.abort(self.request_id)


def _chat(messages: Messages, *, stream: bool, **options: Any) -> dict[str, Any]:
    return chat_body(messages, stream=stream, request_id=uuid.uuid4().hex, **options)


class Client:
    """A connection to one server.

    Args:
        url: such as ``http://127.0.0.1:30000``.
        api_key: of the server, if it has one.
        timeout: seconds without a byte after which a request counts as lost.

    Raises:
        ServingError: ``url`` is no address.
    """

    def __init__(self, url: str, *, api_key: str | None = None, timeout: float = 600.0) -> None:
        self.url = without_login(url.rstrip("/"))
        self.http = httpx.Client(**_settings(url, api_key=api_key, timeout=timeout, connections=None))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections."""
        self.http.close()

    # ---------------------------------------------------------------------------------------- requests

    def chat(
        self,
        messages: Messages,
        *,
        sampling: Sampling = Sampling(),
        label: Label = None,
        template_arguments: Mapping[str, Any] = {},
        model: str = "default",
        details: bool = False,
    ) -> ChatAnswer:
        """Ask for a whole answer.

        Args:
            messages: as OpenAI's.
            sampling: how it is drawn.
            label: workload, mode, route and cut that are wished.
            template_arguments: of the chat template; ``core.modes.mode_family(name).arguments(mode)`` gives a mode's.
            model: name of the served model.
            details: whether pieces and metadata are wanted.
        """
        body = _chat(
            messages, stream=False, sampling=sampling, label=label, template_arguments=template_arguments, model=model,
            details=details,
        )  # fmt: skip
        value, seconds = self._timed(_CHAT, body)
        return chat_answer(value, seconds=seconds)

    def stream_chat(
        self,
        messages: Messages,
        *,
        sampling: Sampling = Sampling(),
        label: Label = None,
        template_arguments: Mapping[str, Any] = {},
        model: str = "default",
        details: bool = False,
    ) -> Stream:
        """The same as a stream of ``ChatChunk``, read inside a ``with`` block."""
        body = _chat(
            messages, stream=True, sampling=sampling, label=label, template_arguments=template_arguments, model=model,
            details=details,
        )  # fmt: skip
        return Stream(self, _CHAT, body)

    def generate(
        self, prompt: str | list[int], *, sampling: Sampling = Sampling(), label: Label = None
    ) -> GenerateAnswer:
        """Continue a text or token ids, without a chat template."""
        body = generate_body(prompt, sampling=sampling, label=label, stream=False, request_id=uuid.uuid4().hex)
        value, seconds = self._timed(_GENERATE, body)
        return generate_answer(value, seconds=seconds)

    def stream_generate(
        self, prompt: str | list[int], *, sampling: Sampling = Sampling(), label: Label = None
    ) -> Stream:
        """The same as a stream of ``GenerateChunk``, read inside a ``with`` block."""
        body = generate_body(prompt, sampling=sampling, label=label, stream=True, request_id=uuid.uuid4().hex)
        return Stream(self, _GENERATE, body)

    # ------------------------------------------------------------------------------------------- server

    def healthy(self, *, timeout: float = 5.0) -> bool:
        """Whether the server is ready; False where nothing answers."""
        try:
            return self.http.get("/health", timeout=timeout).status_code == 200
        except httpx.TransportError:
            return False

    def server_info(self) -> ServerInfo:
        """Version, arguments and the extension's state."""
        with _reaching(self.url):
            return server_info(_object(self.http.get("/server_info")))

    def set_speculation(self, on: bool) -> None:
        """Switch speculation on or off for requests that ask for nothing else."""
        with _reaching(self.url):
            response = self.http.post("/set_internal_state", json=_switch(on))
            _check(response, response.content)

    def flush_cache(self) -> bool:
        """Empty the prefix cache; False: the server did not (requests are running, or it can't)."""
        with _reaching(self.url):
            return self.http.post("/flush_cache", params=_FLUSH).status_code == 200

    def abort(self, request_id: str) -> None:
        """Ask the server to end a request; a server that can't be asked is left alone."""
        with contextlib.suppress(httpx.HTTPError):
            self.http.post("/abort_request", json={"rid": request_id}, timeout=_CONNECT_SECONDS)

    def _timed(self, path: str, body: Mapping[str, Any]) -> tuple[dict[str, Any], float]:
        started = time.perf_counter()
        with _reaching(self.url):
            response = self.http.post(path, json=body)
        return _object(response), time.perf_counter() - started


class AsyncClient:
    """The same for asyncio; see ``Client``.

    Args:
        connections: most connections at a time; None: as many as requests.
    """

    def __init__(
        self, url: str, *, api_key: str | None = None, timeout: float = 600.0, connections: int | None = None
    ) -> None:
        self.url = without_login(url.rstrip("/"))
        self.http = httpx.AsyncClient(**_settings(url, api_key=api_key, timeout=timeout, connections=connections))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close all connections."""
        await self.http.aclose()

    # ---------------------------------------------------------------------------------------- requests

    async def chat(
        self,
        messages: Messages,
        *,
        sampling: Sampling = Sampling(),
        label: Label = None,
        template_arguments: Mapping[str, Any] = {},
        model: str = "default",
        details: bool = False,
    ) -> ChatAnswer:
        """See ``Client.chat``."""
        body = _chat(
            messages, stream=False, sampling=sampling, label=label, template_arguments=template_arguments, model=model,
            details=details,
        )  # fmt: skip
        value, seconds = await self._timed(_CHAT, body)
        return chat_answer(value, seconds=seconds)

    def stream_chat(
        self,
        messages: Messages,
        *,
        sampling: Sampling = Sampling(),
        label: Label = None,
        template_arguments: Mapping[str, Any] = {},
        model: str = "default",
        details: bool = False,
    ) -> AsyncStream:
        """See ``Client.stream_chat``."""
        body = _chat(
            messages, stream=True, sampling=sampling, label=label, template_arguments=template_arguments, model=model,
            details=details,
        )  # fmt: skip
        return AsyncStream(self, _CHAT, body)

    async def generate(
        self, prompt: str | list[int], *, sampling: Sampling = Sampling(), label: Label = None
    ) -> GenerateAnswer:
        """See ``Client.generate``."""
        body = generate_body(prompt, sampling=sampling, label=label, stream=False, request_id=uuid.uuid4().hex)
        value, seconds = await self._timed(_GENERATE, body)
        return generate_answer(value, seconds=seconds)

    def stream_generate(
        self, prompt: str | list[int], *, sampling: Sampling = Sampling(), label: Label = None
    ) -> AsyncStream:
        """See ``Client.stream_generate``."""
        body = generate_body(prompt, sampling=sampling, label=label, stream=True, request_id=uuid.uuid4().hex)
        return AsyncStream(self, _GENERATE, body)

    # ------------------------------------------------------------------------------------------- server

    async def healthy(self, *, timeout: float = 5.0) -> bool:
        """See ``Client.healthy``."""
        try:
            return (await self.http.get("/health", timeout=timeout)).status_code == 200
        except httpx.TransportError:
            return False

    async def server_info(self) -> ServerInfo:
        """See ``Client.server_info``."""
        with _reaching(self.url):
            return server_info(_object(await self.http.get("/server_info")))

    async def set_speculation(self, on: bool) -> None:
        """See ``Client.set_speculation``."""
        with _reaching(self.url):
            response = await self.http.post("/set_internal_state", json=_switch(on))
            _check(response, response.content)

    async def flush_cache(self) -> bool:
        """See ``Client.flush_cache``."""
        with _reaching(self.url):
            return (await self.http.post("/flush_cache", params=_FLUSH)).status_code == 200

    async def abort(self, request_id: str) -> None:
        """See ``Client.abort``."""
        with contextlib.suppress(httpx.HTTPError):
            await self.http.post("/abort_request", json={"rid": request_id}, timeout=_CONNECT_SECONDS)

    async def _timed(self, path: str, body: Mapping[str, Any]) -> tuple[dict[str, Any], float]:
        started = time.perf_counter()
        with _reaching(self.url):
            response = await self.http.post(path, json=body)
        return _object(response), time.perf_counter() - started


def _switch(on: bool) -> dict[str, Any]:
    return {"server_args": {SPECULATION_SWITCH: int(on)}}
