"""Closed-loop load: a fixed number of users, each of whom sends the next prompt when the last answer has ended.

A window begins when every user has had one answer (the warm-up) and ends when the first of them finds no prompt left:
from then on fewer run together. Only what arrives in between counts. Tokens are counted as they arrive.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from angelspec.core.acceptance import AcceptanceCounts, pool
from angelspec.core.request_label import RequestLabel
from angelspec.serving.answers import ChatAnswer, ChatChunk
from angelspec.serving.client import AsyncClient
from angelspec.serving.failures import ServingError
from angelspec.serving.wire import Sampling

_COUNTED = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
_GIVEN_UP = 5
"""Failures in a row after which a window is ended."""
_PAUSE = 0.2


@dataclass(frozen=True)
class LoadPrompt:
    """One prompt of a load test."""

    id: str
    workload: str
    messages: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True)
class Arrival:
    """Tokens that came with one event of one stream."""

    at: float
    """Seconds of the clock that all arrivals share."""
    tokens: int


@dataclass
class RequestTrace:
    """One request, as its user saw it."""

    prompt: str
    sent: float
    warm_up: bool
    arrivals: list[Arrival] = field(default_factory=list)
    answer: ChatAnswer | None = None
    failure: str | None = None

    @property
    def tokens(self) -> int:
        return sum(arrival.tokens for arrival in self.arrivals)

    @property
    def first_token_seconds(self) -> float | None:
        return self.arrivals[0].at - self.sent if self.arrivals else None

    @property
    def decode_seconds(self) -> float | None:
        """From the first arrival to the last."""
        return self.arrivals[-1].at - self.arrivals[0].at if self.arrivals else None


@dataclass(frozen=True)
class LoadFigures:
    """What a window gave."""

    seconds: float
    """Between the end of the warm-up and the first user without a prompt."""
    tokens: int
    """That arrived in these seconds."""
    requests: int
    """Answers that ended, the warm-up's not counted."""
    stopped: int
    """Of these, those that ended by themselves."""
    user_tokens_per_second: float | None
    """Tokens after a request's first event over the time they took, over all requests."""
    first_token_median: float | None
    acceptance: AcceptanceCounts
    """Pooled over these requests; empty without the extension."""
    speculative_steps: int
    """Verify steps of these requests that were drafted for."""
    failures: tuple[str, ...]


async def run_load(
    client: AsyncClient,
    prompts: Sequence[LoadPrompt],
    *,
    concurrency: int,
    sampling: Sampling,
    label: RequestLabel | None,
    template_arguments: Mapping[str, Any],
) -> LoadFigures:
    """Send prompts from ``concurrency`` users and measure.

    Args:
        client: of the server, with as many connections as users.
        prompts: in the order in which they are sent; the first ``concurrency`` of them are the warm-up.
        concurrency: users.
        sampling: of every request.
        label: of every request; None: none is sent (a server without the extension).
        template_arguments: of the chat template.
    """
    waiting = list(prompts)[::-1]
    traces: list[RequestTrace] = []
    warmed_up = asyncio.Barrier(concurrency)
    clock: dict[str, float] = {}
    failed_in_a_row = 0

    async def one(*, warm_up: bool) -> None:
        nonlocal failed_in_a_row
        prompt = waiting.pop()
        trace = RequestTrace(prompt.id, time.perf_counter(), warm_up)
        traces.append(trace)
        await _ask(client, prompt, trace, sampling=sampling, label=label, template_arguments=template_arguments)
        failed_in_a_row = failed_in_a_row + 1 if trace.failure else 0
        if trace.failure:
            await asyncio.sleep(_PAUSE)

    async def user() -> None:
        await one(warm_up=True)
        await warmed_up.wait()  # so that the measured prompts are the same for every choice
        clock.setdefault("start", time.perf_counter())
        while waiting and failed_in_a_row < _GIVEN_UP:
            await one(warm_up=False)
        clock.setdefault("end", time.perf_counter())

    await asyncio.gather(*(user() for _ in range(concurrency)))
    return figures(traces, start=clock.get("start"), end=clock["end"])


async def _ask(
    client: AsyncClient,
    prompt: LoadPrompt,
    trace: RequestTrace,
    *,
    sampling: Sampling,
    label: RequestLabel | None,
    template_arguments: Mapping[str, Any],
) -> None:
    asked = Sampling(**{**vars(sampling), "extra": {**sampling.extra, **_COUNTED}})
    counted = 0
    try:
        async with client.stream_chat(
            prompt.messages, sampling=asked, label=label, template_arguments=template_arguments, details=True
        ) as stream:
            async for chunk in stream:
                assert isinstance(chunk, ChatChunk), "a chat stream gives chat chunks"
                total = chunk.usage.completion_tokens if chunk.usage is not None else counted + len(chunk.pieces)
                if total > counted:
                    trace.arrivals.append(Arrival(time.perf_counter(), total - counted))
                    counted = total
        assert isinstance(stream.answer, ChatAnswer), "a chat stream gives a chat answer"
        trace.answer = stream.answer
        if not counted:
            trace.failure = f"{prompt.id}: the answer holds no token"
        elif stream.answer.finish_reason not in ("stop", "length"):
            trace.failure = f"{prompt.id}: the answer ended with '{stream.answer.finish_reason}'"
    except ServingError as error:
        trace.failure = f"{prompt.id}: {error.message}"


def figures(traces: Sequence[RequestTrace], *, start: float | None, end: float) -> LoadFigures:
    """Figures of a window.

    Args:
        traces: of all requests, the warm-up's too.
        start: end of the warm-up; None: it never ended.
        end: when the first user found no prompt left.
    """
    start = end if start is None else start
    tokens = sum(a.tokens for trace in traces for a in trace.arrivals if start < a.at <= end)
    ended = [trace for trace in traces if trace.failure is None and trace.answer is not None and not trace.warm_up]
    decoded = [(sum(a.tokens for a in t.arrivals[1:]), t.decode_seconds) for t in ended]
    decode_seconds = sum(seconds or 0.0 for _, seconds in decoded)
    first = [t.first_token_seconds for t in ended if t.first_token_seconds is not None]
    known = [trace.answer.metadata for trace in ended if trace.answer and trace.answer.metadata]
    return LoadFigures(
        seconds=max(end - start, 0.0),
        tokens=tokens,
        requests=len(ended),
        stopped=sum(1 for trace in ended if trace.answer and trace.answer.finish_reason == "stop"),
        user_tokens_per_second=sum(count for count, _ in decoded) / decode_seconds if decode_seconds > 0 else None,
        first_token_median=statistics.median(first) if first else None,
        acceptance=pool(item.counts for item in known),
        speculative_steps=sum(item.speculative_steps for item in known),
        failures=tuple(trace.failure for trace in traces if trace.failure is not None),
    )
