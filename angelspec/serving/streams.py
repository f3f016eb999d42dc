"""Answers while they come, for a thread and for asyncio."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from types import TracebackType
from typing import Any, Self

import httpx

from angelspec.serving.answers import ChatAnswer, ChatChunk, GenerateAnswer, GenerateChunk
from angelspec.serving.connection import check, reaching
from angelspec.serving.failures import RequestRefused, StreamBroken
from angelspec.serving.wire import GENERATE, Events, chat_chunk, event_error, event_object, generate_chunk, joined

_EVENTS = {"Accept": "text/event-stream"}


class _Reading:
    """What both kinds of streams do with the bytes that come."""

    def __init__(self, path: str, body: Mapping[str, Any]) -> None:
        self.request_id: str = body["rid"]
        self.answer: ChatAnswer | GenerateAnswer = GenerateAnswer() if path == GENERATE else ChatAnswer()
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

    def __init__(
        self, http: httpx.Client, path: str, body: Mapping[str, Any], *, url: str, abort: Callable[[str], None]
    ) -> None:
        super().__init__(path, body)
        self._url, self._abort = url, abort
        self._context = http.stream("POST", path, json=body, headers=_EVENTS)
        self._response: httpx.Response | None = None

    def __enter__(self) -> Self:
        self._started = time.perf_counter()
        with reaching(self._url):
            self._response = self._context.__enter__()
            if self._response.status_code >= 400:
                try:
                    check(self._response, self._response.read())
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
            self._abort(self.request_id)


class AsyncStream(_Reading):
    """An answer while it comes; made by ``AsyncClient.stream_chat`` and ``AsyncClient.stream_generate``."""

    def __init__(
        self,
        http: httpx.AsyncClient,
        path: str,
        body: Mapping[str, Any],
        *,
        url: str,
        abort: Callable[[str], Awaitable[None]],
    ) -> None:
        super().__init__(path, body)
        self._url, self._abort = url, abort
        self._context = http.stream("POST", path, json=body, headers=_EVENTS)
        self._response: httpx.Response | None = None

    async def __aenter__(self) -> Self:
        self._started = time.perf_counter()
        with reaching(self._url):
            self._response = await self._context.__aenter__()
            if self._response.status_code >= 400:
                try:
                    check(self._response, await self._response.aread())
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
            await self._abort(self.request_id)
