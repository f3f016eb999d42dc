"""Several answers at once, merged into one row of states that is drawn a few times a second.

Each lane is a row of columns that wait for each other; lanes run side by side. A column that fails, fails alone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterable, AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Literal

from angelspec.core.errors import AngelspecError
from angelspec.core.request_label import RequestMetadata
from angelspec.demo.columns import Column
from angelspec.serving.answers import ChatAnswer, ChatChunk, Piece
from angelspec.serving.wire import joined

Status = Literal["waiting", "running", "done", "stopped", "failed"]
Opener = Callable[[], AbstractAsyncContextManager[AsyncIterable[ChatChunk]]]
"""Sends a column's request; leaving the context closes the connection, and the server ends the request."""
FRAME_SECONDS = 0.1
"""Least time between two drawings: each sends what changed to the browser."""
_log = logging.getLogger(__name__)


@dataclass
class ColumnState:
    """One column while it runs, and afterwards."""

    column: Column
    status: Status = "waiting"
    answer: ChatAnswer = field(default_factory=ChatAnswer)
    events: int = 0
    """Events that brought text: an estimate of the tokens where the server does not name them."""
    first_tokens: int = 0
    """Tokens that the first event brought."""
    last_seconds: float = 0.0
    """From sending to the newest text."""
    kept: list[tuple[float, float]] = field(default_factory=list)
    """(seconds, kept ratio so far), one for each event with a verify step."""
    error: str = ""
    mend: str = ""
    shared: bool = False
    """Whether another visitor's column ran on the same machine meanwhile."""

    def add(self, chunk: ChatChunk) -> None:
        """Take in what an event brings."""
        self.answer = joined(self.answer, chunk)
        if chunk.text or chunk.reasoning or chunk.pieces:
            self.events += 1
            self.first_tokens = self.first_tokens or len(chunk.pieces) or 1
            self.last_seconds = chunk.seconds
        if chunk.metadata is not None and chunk.metadata.kept_ratio is not None:
            self.kept.append((chunk.seconds, chunk.metadata.kept_ratio))

    def fail(self, error: str, mend: str = "") -> None:
        self.status, self.error, self.mend = "failed", error, mend

    @property
    def metadata(self) -> RequestMetadata | None:
        return self.answer.metadata

    @property
    def tokens(self) -> int:
        """Tokens of the answer so far: counted by the server, else its pieces, else events with text."""
        if self.answer.usage is not None:
            return self.answer.usage.completion_tokens
        return len(self.answer.pieces) or self.events

    @property
    def first_token_seconds(self) -> float | None:
        return self.answer.first_token_seconds

    @property
    def tokens_per_second(self) -> float | None:
        """Speed of decoding: tokens behind the first event over the time since it; None: there is no such token."""
        first, behind = self.answer.first_token_seconds, self.tokens - self.first_tokens
        if first is None or behind <= 0 or self.last_seconds <= first:
            return None
        return behind / (self.last_seconds - first)

    @property
    def pieces(self) -> Sequence[Piece]:
        """The answer as tokens, without those that the server does not show (an end token, a stop text).

        A server without the extension gives one piece, all its own.
        """
        answer = self.answer
        if not answer.pieces:
            return (Piece(answer.text, 0),) if answer.text else ()
        if answer.finish_reason is None or answer.reasoning:
            return answer.pieces
        return _clipped(answer.pieces, answer.text)


def stop(states: Sequence[ColumnState]) -> None:
    """Mark what had not ended as stopped."""
    for state in states:
        if state.status in ("waiting", "running"):
            state.status = "stopped"


async def merge(
    lanes: Sequence[Sequence[tuple[ColumnState, Opener]]], *, frame_seconds: float = FRAME_SECONDS
) -> AsyncIterator[None]:
    """Run all lanes; yields whenever some state has changed, and once more at the end.

    Closing the generator closes every connection and marks what had not ended as stopped.
    """
    changed = asyncio.Event()
    tasks = [asyncio.create_task(_run_lane(lane, changed)) for lane in lanes]
    try:
        while not all(task.done() for task in tasks):
            await changed.wait()
            changed.clear()
            yield
            await asyncio.sleep(frame_seconds)
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        stop([state for lane in lanes for state, _ in lane])


async def _run_lane(lane: Sequence[tuple[ColumnState, Opener]], changed: asyncio.Event) -> None:
    try:
        for state, opener in lane:
            await _run(state, opener, changed)
    finally:
        changed.set()


async def _run(state: ColumnState, opener: Opener, changed: asyncio.Event) -> None:
    state.status = "running"
    changed.set()
    try:
        async with opener() as stream:
            async for chunk in stream:
                state.add(chunk)
                changed.set()
        state.status = "done"
    except AngelspecError as error:
        state.fail(error.message, error.mend or "")
    except Exception as error:  # whatever one column meets must not stop another
        _log.exception("column %s failed", state.column.key)
        state.fail(f"{type(error).__name__}: {error}", "the page's log says more")
    changed.set()


def _clipped(pieces: Sequence[Piece], text: str) -> Sequence[Piece]:
    """Pieces up to the length of ``text``; all of them where they spell another one."""
    if not "".join(piece.text for piece in pieces).startswith(text):
        return pieces
    kept, room = [], len(text)
    for piece in pieces:
        if room <= 0:
            break
        kept.append(Piece(piece.text[:room], piece.position))
        room -= len(piece.text)
    return kept
