"""A load test of a running server: every choice of route and cut in turns, on the same prompts, beside plain decoding.

For each repeat, prompt set and concurrency, each choice has one window; the order is rotated from repeat to repeat, so
that drift of the machine falls on all alike. One engine serves all choices through the request's label; a server
without the extension may stand in the same rounds as the control.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import zip_longest
from typing import Any

from angelspec.core.addresses import without_login
from angelspec.core.bundle import PLAIN
from angelspec.core.errors import RequestError
from angelspec.core.fingerprint import fingerprint
from angelspec.core.modes import mode_family
from angelspec.core.request_label import RequestLabel, parse_label
from angelspec.serving.answers import ServerInfo
from angelspec.serving.bench_result import (
    CONTROL,
    BenchResult,
    BenchSettings,
    Choice,
    PromptSet,
    Window,
)
from angelspec.serving.client import AsyncClient
from angelspec.serving.failures import ServingError
from angelspec.serving.load import LoadPrompt, run_load
from angelspec.serving.wire import Sampling

MIXED = "mixed"
"""Name of all prompt sets together."""
_SPEED_ARGUMENTS = (
    "dtype", "kv_cache_dtype", "quantization", "attention_backend", "sampling_backend", "tp_size", "dp_size",
    "page_size", "chunked_prefill_size", "max_running_requests", "max_total_tokens", "mem_fraction_static",
    "disable_cuda_graph", "cuda_graph_max_bs", "cuda_graph_bs", "disable_radix_cache", "disable_overlap_schedule",
    "schedule_policy", "schedule_conservativeness", "device", "enable_torch_compile", "stream_interval",
    "speculative_algorithm", "grammar_backend",
)  # fmt: skip


@dataclass(frozen=True)
class Traffic:
    """A prompt set and its prompts."""

    name: str
    source: str
    prompts: tuple[LoadPrompt, ...]

    @property
    def facts(self) -> PromptSet:
        """What the result says of it."""
        content = [[dict(message) for message in prompt.messages] for prompt in self.prompts]
        return PromptSet(
            name=self.name,
            source=self.source,
            prompts=len(self.prompts),
            workloads=dict(sorted(Counter(prompt.workload for prompt in self.prompts).items())),
            digest=fingerprint(content, length=64),
        )


def mixed_traffic(sets: Sequence[Traffic]) -> Traffic:
    """The prompts of all sets, taken in turns.

    Raises:
        RequestError: a set has the name that stands for all of them.
    """
    if any(traffic.name == MIXED for traffic in sets):
        raise RequestError(
            f"a prompt set is called '{MIXED}', which stands for all sets together",
            mend="name it with NAME=SOURCE, or leave the mix out with --no-mixed",
        )
    turns = zip_longest(*(traffic.prompts for traffic in sets))
    prompts = tuple(prompt for turn in turns for prompt in turn if prompt is not None)
    return Traffic(MIXED, " + ".join(traffic.name for traffic in sets), prompts)


def choices_of(routes: Sequence[str], cuts: Sequence[str]) -> list[Choice]:
    """The choices of a command line, plain decoding first.

    Args:
        routes: ``ROUTE`` or ``ROUTE:CUT``; the latter is measured with this cut alone.
        cuts: for routes that name none.

    Raises:
        RequestError: a cut that does not exist, or a drafter with the control's name.
    """
    found: dict[str, Choice] = {PLAIN: Choice(name=PLAIN, route=PLAIN)}
    for text in routes:
        route, _, own = text.partition(":")
        if route == CONTROL:
            raise RequestError(
                f"route '{CONTROL}' can't be measured: the server without the extension has this name",
                mend="give the drafter another name in the bundle, or route by its algorithm",
            )
        for cut in [own] if own else cuts:
            _label(route, cut)
            name = route if cut == "auto" or route == PLAIN else f"{route}, cut {cut}"
            found[name] = Choice(name=name, route=route, dcut="auto" if route == PLAIN else cut)
    return list(found.values())


def order_of(choices: Sequence[Choice], *, repeat: int) -> list[Choice]:
    """The order of one round: rotated by one from repeat to repeat."""
    shift = repeat % len(choices)
    return [*choices[shift:], *choices[:shift]]


def drawn(prompts: Sequence[LoadPrompt], *, count: int, seed: int) -> list[LoadPrompt]:
    """``count`` prompts in an order of its own per seed; all are used before one comes twice."""
    generator = random.Random(seed)
    taken: list[LoadPrompt] = []
    while len(taken) < count:
        turn = list(prompts)
        generator.shuffle(turn)
        taken += turn
    return taken[:count]


def run_bench(
    url: str,
    traffics: Sequence[Traffic],
    *,
    settings: BenchSettings,
    choices: Sequence[Choice],
    control_url: str | None = None,
    api_key: str | None = None,
    hardware: str,
    command: str,
    say: Callable[[str], None],
    keep: Callable[[BenchResult], None] = lambda result: None,
    timeout: float = 600.0,
) -> BenchResult:
    """Measure.

    Args:
        url: server with the extension.
        traffics: prompt sets.
        settings: how to measure; requests per window are at least ``requests_per_user`` times the concurrency.
        choices: what to compare, plain decoding among it.
        control_url: a server without the extension.
        api_key: of both servers.
        hardware: this machine, in words.
        command: that asked for this.
        say: told of every window.
        keep: given what was measured so far, after every window: nothing of it is lost if a later one fails.
        timeout: seconds without a byte after which a request is lost.

    Raises:
        ServingError: a server is out of reach (also later on), serves another target, or lacks the extension (the
            control: has it).
        RequestRefused: a route that the server does not know.
    """
    return asyncio.run(
        _run(
            url, traffics, settings=settings, choices=choices, control_url=control_url, api_key=api_key,
            hardware=hardware, command=command, say=say, keep=keep, timeout=timeout,
        )
    )  # fmt: skip


async def _run(
    url: str,
    traffics: Sequence[Traffic],
    *,
    settings: BenchSettings,
    choices: Sequence[Choice],
    control_url: str | None,
    api_key: str | None,
    hardware: str,
    command: str,
    say: Callable[[str], None],
    keep: Callable[[BenchResult], None],
    timeout: float,
) -> BenchResult:
    connect = {"api_key": api_key, "timeout": timeout}
    async with AsyncClient(url, **connect) as client, AsyncClient(control_url or url, **connect) as control:
        info = await client.server_info()
        other = await control.server_info() if control_url is not None else None
        _check_servers(info, other, url=url, control_url=control_url)
        settings = settings.model_copy(update={"mode": settings.mode or _shared_mode(info)})
        arguments = _template_arguments(info, settings.mode)
        for choice in choices:
            await _try(client, choice, arguments)
        rounds = [*choices, *([Choice(name=CONTROL, route=None)] if other is not None else [])]
        result = BenchResult(
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            url=without_login(url),
            control_url=None if control_url is None else without_login(control_url),
            engine_version=info.version,
            control_version=other.version if other is not None else None,
            engine=None if info.engine is None else info.engine.without_places(),
            engine_arguments=_speed_arguments(info),
            control_arguments=_speed_arguments(other) if other is not None else None,
            hardware=hardware,
            command=command,
            settings=settings,
            baseline=PLAIN,
            choices=tuple(rounds),
            prompt_sets=tuple(traffic.facts for traffic in traffics),
            windows=(),
            cells=(),
        )
        for repeat in range(settings.repeats):
            for traffic in traffics:
                for concurrency in settings.concurrency:
                    for place, choice in enumerate(order_of(rounds, repeat=repeat)):
                        server = client if choice.route is not None else control
                        window = await _window(
                            server, traffic, choice, settings=settings, concurrency=concurrency, repeat=repeat,
                            place=place, arguments=arguments,
                        )  # fmt: skip
                        if not window.requests:
                            await server.server_info()  # a server that is gone ends the measurement
                        result = result.with_window(window)
                        keep(result)
                        say(f"[{len(result.windows)}/{result.planned_windows}] {_shown(window)}")
    return result


async def _window(
    client: AsyncClient,
    traffic: Traffic,
    choice: Choice,
    *,
    settings: BenchSettings,
    concurrency: int,
    repeat: int,
    place: int,
    arguments: Mapping[str, Any],
) -> Window:
    count = settings.window_requests(concurrency) + concurrency
    prompts = drawn(traffic.prompts, count=count, seed=settings.seed + repeat)
    try:
        emptied = await client.flush_cache()
    except ServingError:  # the window's own requests say it
        emptied = False
    before = await _counters(client)
    figures = await run_load(
        client,
        prompts,
        concurrency=concurrency,
        sampling=Sampling(max_tokens=settings.max_tokens, temperature=settings.temperature, seed=settings.seed),
        label=None if choice.route is None else _label(choice.route, choice.dcut),
        template_arguments=arguments,
    )
    after = await _counters(client)
    return Window(
        traffic=traffic.name,
        concurrency=concurrency,
        choice=choice.name,
        repeat=repeat,
        place=place,
        cache_emptied=emptied,
        counters=after - before if before is not None and after is not None else None,
        too_short=figures.seconds < settings.minimum_seconds,
        **vars(figures),
    )


async def _counters(client: AsyncClient) -> Any:
    try:
        engine = (await client.server_info()).engine
    except ServingError:
        return None
    return engine.counters if engine is not None else None


async def _try(client: AsyncClient, choice: Choice, arguments: Mapping[str, Any]) -> None:
    """One request of one token, so that a route that does not exist is refused before anything is measured."""
    await client.chat(
        [{"role": "user", "content": "Hi"}],
        sampling=Sampling(max_tokens=1, temperature=0.0),
        label=_label(choice.route or PLAIN, choice.dcut),
        template_arguments=arguments,
    )


def _label(route: str, cut: str) -> RequestLabel:
    try:
        value: str | float = float(cut)
    except ValueError:
        value = cut
    return parse_label({"route": route, "dcut": value})


def _check_servers(info: ServerInfo, other: ServerInfo | None, *, url: str, control_url: str | None) -> None:
    if info.extension(url).speculation == "off":
        raise ServingError(f"{url}: speculation is switched off", mend="switch it on, then measure")
    if other is None:
        return
    if other.engine is not None:
        raise ServingError(
            f"{control_url} has angelspec's extension, so it is no control", mend="start it with `sglang serve`"
        )
    if other.model.rstrip("/") != info.model.rstrip("/"):
        raise ServingError(f"{control_url} serves {other.model}, {url} serves {info.model}", mend="serve one target")


def _shared_mode(info: ServerInfo) -> str | None:
    """The mode of all drafters; None: they have several."""
    modes = {drafter.mode for drafter in info.engine.drafters} if info.engine is not None else set()
    return next(iter(modes)) if len(modes) == 1 else None


def _template_arguments(info: ServerInfo, mode: str | None) -> dict[str, Any]:
    if mode is None:
        return {}
    assert info.engine is not None, "checked before"
    return mode_family(info.engine.mode_family).arguments(mode)  # type: ignore[arg-type]


def _speed_arguments(info: ServerInfo) -> dict[str, Any]:
    return {name: info.arguments[name] for name in _SPEED_ARGUMENTS if name in info.arguments}


def _shown(window: Window) -> str:
    speed = f"{window.tokens_per_second:.1f} tokens/s" if window.tokens_per_second is not None else "no tokens"
    words = f"{window.traffic}, concurrency {window.concurrency}, {window.choice}: {speed} in {window.seconds:.1f} s"
    if (length := window.acceptance.mean_accepted_length) is not None:
        words += f", accepted length {length:.2f}"
    if window.failures:
        words += f", {len(window.failures)} failed"
    return words + (", too short" if window.too_short else "")
