"""One comparison, from a visitor's wishes to the states that the page draws."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from angelspec.core.errors import AngelspecError
from angelspec.core.modes import Mode
from angelspec.demo.columns import Column, Seen, Server, lanes
from angelspec.demo.load import background
from angelspec.demo.presence import Presence
from angelspec.demo.render import Tags
from angelspec.demo.stream import ColumnState, Opener, merge
from angelspec.demo.texts import EXAMPLES
from angelspec.serving.client import AsyncClient
from angelspec.serving.streams import AsyncStream
from angelspec.serving.wire import Sampling

_PRESENCE = Presence()
_LOAD_PROMPTS = [prompt for prompts in EXAMPLES.values() for prompt in prompts.values()]
_REMEMBERED = 100
_ANSWER_SILENCE_SECONDS = 300.0
_READ_SECONDS = 30.0
"""That a server has to read the prompt before its first column begins."""


@dataclass(frozen=True)
class Wishes:
    """What a visitor asked for."""

    prompt: str
    columns: Sequence[Column]
    mode: Mode
    sampling: Sampling
    together: bool = False
    load: int = 0
    """Background requests on each server."""


@dataclass
class Visit:
    """All that is remembered of one visitor, until the page is closed."""

    seen: Sequence[Seen] = ()
    """The servers as they were last looked at."""
    states: list[ColumnState] = field(default_factory=list)
    """The columns on the page."""
    tags: Tags = None
    past: list[ColumnState] = field(default_factory=list)
    """Columns of this visit's comparisons, the newest last."""


async def compare(visit: Visit, wishes: Wishes) -> AsyncIterator[None]:
    """Answer one prompt in every column; yields whenever ``visit.states`` has changed.

    Closing the generator ends all requests, the background's too.
    """
    visit.states = [ColumnState(column) for column in wishes.columns]
    visit.past = [*visit.past, *visit.states][-_REMEMBERED:]
    visit.tags = _tags(visit.seen, wishes.columns)
    servers = list(dict.fromkeys(column.server for column in wishes.columns))
    async with contextlib.AsyncExitStack() as stack:
        clients = {
            server: await stack.enter_async_context(server.connect(timeout=_ANSWER_SILENCE_SECONDS))
            for server in servers
        }
        arguments = {server: _arguments(visit.seen, server, wishes.mode) for server in servers}
        yield
        if wishes.load:
            busy = [(clients[server], arguments[server]) for server in servers]
            await stack.enter_async_context(background(busy, wishes.load, prompts=_LOAD_PROMPTS))
        of = {state.column.key: state for state in visit.states}
        first = set() if wishes.together else {_first_of(server, wishes.columns) for server in servers}
        openers = {
            c.key: _opener(visit, of[c.key], clients[c.server], wishes, arguments[c.server], reads=c.key in first)
            for c in wishes.columns
        }
        rows = [[(of[c.key], openers[c.key]) for c in lane] for lane in lanes(wishes.columns, together=wishes.together)]
        async with contextlib.aclosing(merge(rows)) as frames:
            async for _ in frames:
                yield


def _first_of(server: Server, columns: Sequence[Column]) -> str:
    """The key of the column that comes first on a server."""
    return next(column.key for column in columns if column.server == server)


def _opener(
    visit: Visit, state: ColumnState, client: AsyncClient, wishes: Wishes, arguments: Mapping[str, Any], *, reads: bool
) -> Opener:
    """Opens a column's stream; with ``reads`` its server is given the prompt before, outside the column's time."""
    column = state.column

    @contextlib.asynccontextmanager
    async def opened() -> AsyncIterator[AsyncStream]:
        if reads:
            await _read_prompt(client, wishes, arguments)
        with _PRESENCE.running(visit, state):
            async with client.stream_chat(
                [{"role": "user", "content": wishes.prompt}],
                sampling=wishes.sampling,
                label=column.label,
                template_arguments=arguments,
                details=column.label is not None,
            ) as stream:
                yield stream

    return opened


async def _read_prompt(client: AsyncClient, wishes: Wishes, arguments: Mapping[str, Any]) -> None:
    """Let the server read the prompt once, so that no column pays for that alone; errors are its columns' to tell."""
    with contextlib.suppress(AngelspecError, TimeoutError):
        async with asyncio.timeout(_READ_SECONDS):
            await client.chat(
                [{"role": "user", "content": wishes.prompt}],
                sampling=Sampling(max_tokens=1, temperature=0.0),
                template_arguments=arguments,
            )


def _arguments(seen: Sequence[Seen], server: Server, mode: Mode) -> dict[str, Any]:
    for one in seen:
        if one.server == server and mode in one.family.modes:
            return one.family.arguments(mode)
    return {}


def _tags(seen: Sequence[Seen], columns: Sequence[Column]) -> Tags:
    """What opens and closes thinking; of several servers, the first one's that knows."""
    used = {column.server for column in columns}
    for one in seen:
        if one.server in used and one.family.think_open and one.family.think_close:
            return one.family.think_open, one.family.think_close
    return "<think>", "</think>"
