"""A comparison against a server: what is sent, what ends, and that visitors share nothing."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

import pytest
from demo_server import DemoServer

from angelspec.demo.columns import Seen, Server, look, offered_columns
from angelspec.demo.comparing import Visit, Wishes, compare
from angelspec.serving.wire import Sampling

SHORT = "one two three four five six seven eight nine ten"
SAMPLING = Sampling(max_tokens=40, temperature=0.5, seed=7, stop=("END",))


async def visit_to(server: DemoServer) -> Visit:
    seen: Seen = await look(Server("embedded", server.url))
    return Visit(seen=[seen])


async def compared(
    server: DemoServer, prompt: str = "Hello", *, mode="no-think", until: Callable | None = None, **wishes
):
    visit = await visit_to(server)
    columns = [c for c in offered_columns(visit.seen, mode) if wishes.pop("only", None) in (None, c.title)]
    asked = Wishes(prompt, columns, mode, SAMPLING, **wishes)
    async with contextlib.aclosing(compare(visit, asked)) as frames:
        async for _ in frames:
            if until is not None and until(visit):
                break
    return visit


def test_every_request_says_what_was_wished():
    with DemoServer(answer=SHORT, step_seconds=0.001) as server:
        visit = asyncio.run(compared(server, "Hi", mode="high-think"))
    first, *rest = server.bodies
    assert not first.get("stream") and first["max_tokens"] == 1, "the prompt is read once before the columns"
    assert [body["custom_params"] for body in rest] == [state.column.label for state in visit.states]
    for body in rest:
        assert body["messages"] == [{"role": "user", "content": "Hi"}]
        assert (body["max_tokens"], body["temperature"], body["seed"], body["stop"]) == (40, 0.5, 7, ["END"])
        assert body["chat_template_kwargs"] == {"enable_thinking": True} and body["return_spec_tokens_details"]
    assert visit.tags == ("<think>", "</think>")
    assert [state.status for state in visit.states] == ["done"] * 4 and visit.past == visit.states


def test_in_turn_one_runs_at_a_time_and_together_all_do():
    with DemoServer(answer=SHORT, step_seconds=0.005) as server:
        asyncio.run(compared(server))
        assert server.most_running == 1
        asyncio.run(compared(server, together=True))
        assert server.most_running == 5


def test_leaving_ends_the_requests_and_the_background():
    with DemoServer(answer=SHORT * 10, step_seconds=0.02) as server:
        visit = asyncio.run(compared(server, load=2, until=lambda visit: bool(visit.states[0].answer.text)))
        assert server.most_running == 3
        end = time.monotonic() + 5
        while server.running and time.monotonic() < end:
            time.sleep(0.02)
        assert server.running == 0 and server.abandoned == 3
    assert {state.status for state in visit.states} == {"stopped"}


def test_a_server_that_refuses_the_background_does_not_hold_up_the_columns():
    with DemoServer(answer=SHORT, step_seconds=0.001) as server:
        server.refuse = lambda body: None if body.get("return_spec_tokens_details") else "too busy"
        began = time.monotonic()
        visit = asyncio.run(compared(server, load=2))
    assert [state.status for state in visit.states] == ["done"] * 5 and time.monotonic() - began < 8


async def compared_with(servers: list[Server], until: Callable, **wishes) -> Visit:
    visit = Visit(seen=[await look(server) for server in servers])
    asked = Wishes("Hi", offered_columns(visit.seen, "no-think"), "no-think", SAMPLING, **wishes)
    async with contextlib.aclosing(compare(visit, asked)) as frames, asyncio.timeout(8):
        async for _ in frames:
            if until(visit):
                break
    return visit


def finished(visit: Visit, name: str) -> bool:
    return all(state.status == "done" for state in visit.states if state.column.server.name == name)


def test_a_server_that_does_not_answer_holds_up_no_other_machine(monkeypatch):
    monkeypatch.setattr(Server, "machine", property(lambda server: server.name))
    with DemoServer(answer=SHORT, step_seconds=0.001) as hung, DemoServer(answer=SHORT, step_seconds=0.001) as good:
        hung.hold_reading = True
        servers = [Server("hung", hung.url), Server("good", good.url)]
        visit = asyncio.run(compared_with(servers, until=lambda visit: finished(visit, "good")))
        hung.hold_reading = False
    assert finished(visit, "good") and not finished(visit, "hung")


def test_reading_the_prompt_has_an_end(monkeypatch):
    monkeypatch.setattr("angelspec.demo.comparing._READ_SECONDS", 0.2)
    with DemoServer(answer=SHORT, step_seconds=0.001) as hung:
        hung.hold_reading = True
        servers = [Server("hung", hung.url)]
        visit = asyncio.run(compared_with(servers, until=lambda visit: finished(visit, "hung")))
        hung.hold_reading = False
    assert finished(visit, "hung")


def test_the_backgrounds_of_all_servers_begin_at_once(monkeypatch):
    monkeypatch.setattr("angelspec.demo.load._HEAD_START_SECONDS", 0.5)
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(DemoServer(answer=SHORT, step_seconds=2.0)) for _ in range(4)]
        named = [Server(str(number), server.url) for number, server in enumerate(servers)]
        began = time.monotonic()
        asyncio.run(compared_with(named, load=1, until=lambda visit: visit.states[0].status == "running"))
    assert time.monotonic() - began < 1.5


def test_a_servers_key_goes_with_every_request():
    with DemoServer(answer=SHORT, step_seconds=0.001, api_key="s3cret") as server:
        servers = [Server("a", server.url, "s3cret")]
        visit = asyncio.run(compared_with(servers, until=lambda visit: finished(visit, "a"), load=1))
    assert len(visit.states) == 5 and finished(visit, "a")


def test_visitors_share_nothing():
    async def ten(server: DemoServer) -> list[Visit]:
        return await asyncio.gather(*(compared(server, f"visitor {number}") for number in range(10)))

    with DemoServer(answer=SHORT, step_seconds=0.001) as server:
        visits = asyncio.run(ten(server))
    for number, visit in enumerate(visits):
        assert all(f"“visitor {number}”" in state.answer.text for state in visit.states)
        assert len(visit.past) == 5
        assert any(state.shared for state in visit.states), "nobody said that others were served meanwhile"


@pytest.mark.parametrize("together", [False, True])
def test_a_lone_visitor_is_told_of_no_others(together):
    with DemoServer(answer=SHORT, step_seconds=0.001) as server:
        visit = asyncio.run(compared(server, "alone", together=together))
    assert len(visit.states) == 5 and not any(state.shared for state in visit.states)
