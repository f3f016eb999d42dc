"""Background requests: others that a server is busy with while a comparison runs."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import Any

from angelspec.core.errors import AngelspecError
from angelspec.serving.client import AsyncClient
from angelspec.serving.wire import Sampling

MOST_REQUESTS = 8
"""At a time and server, for one visitor."""
_ANSWER_TOKENS = 256
_HEAD_START_SECONDS = 10.0
_PAUSE_SECONDS = 1.0
_LONGEST_SECONDS = 900.0


@contextlib.asynccontextmanager
async def background(
    servers: Iterable[tuple[AsyncClient, Mapping[str, Any]]],
    count: int,
    *,
    prompts: Sequence[str],
) -> AsyncIterator[None]:
    """Keep ``count`` requests running on each server inside the block; leaving it ends them in the server too.

    The block begins when all of them, of all servers, receive text, or after ten seconds. A server that refuses them is
    asked again after a pause: its own column says what is wrong.

    Args:
        servers: each with the arguments of its chat template.
        count: requests on each.
        prompts: asked over and over.
    """
    jobs = [(asyncio.Event(), client, arguments, seed) for client, arguments in servers for seed in range(count)]
    started = [event for event, *_ in jobs]
    tasks = [
        asyncio.create_task(_keep_asking(client, prompts[seed % len(prompts) :], arguments, event, seed))
        for event, client, arguments, seed in jobs
    ]
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_HEAD_START_SECONDS):
                await asyncio.gather(*(event.wait() for event in started))
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _keep_asking(
    client: AsyncClient, prompts: Sequence[str], arguments: Mapping[str, Any], started: asyncio.Event, seed: int
) -> None:
    async with asyncio.timeout(_LONGEST_SECONDS):
        for prompt in itertools.cycle(prompts):
            sampling = Sampling(max_tokens=_ANSWER_TOKENS, temperature=0.7, seed=seed)
            messages = [{"role": "user", "content": prompt}]
            try:
                async with client.stream_chat(messages, sampling=sampling, template_arguments=arguments) as stream:
                    async for _ in stream:
                        started.set()
            except AngelspecError:
                started.set()
                await asyncio.sleep(_PAUSE_SECONDS)
