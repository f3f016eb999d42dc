"""Closed-loop load: window arithmetic by hand, and real runs against a fake server."""

import asyncio

import pytest
from fake_sglang import Behaviour, FakeSGLang

from angelspec.core.acceptance import AcceptanceCounts
from angelspec.core.request_label import RequestLabel, RequestRecord
from angelspec.serving.answers import ChatAnswer
from angelspec.serving.client import AsyncClient
from angelspec.serving.load import Arrival, LoadPrompt, RequestTrace, figures, run_load
from angelspec.serving.wire import Sampling


def _metadata(*steps):
    """Of steps (committed, drafted, verified); one that drafted nothing is plain."""
    record = RequestRecord("", "chat", "no-think")
    for committed, drafted, verified in steps:
        record.add("mtp" if drafted else "ar", committed=committed, drafted=drafted, verified=verified)
    return record.metadata


def _trace(sent, arrivals, *, warm_up=False, metadata=None, reason="stop"):
    answer = ChatAnswer(text="x", metadata=metadata, finish_reason=reason)
    return RequestTrace("p", sent, warm_up, [Arrival(at, tokens) for at, tokens in arrivals], answer)


def test_figures_by_hand():
    traces = [
        _trace(0.0, [(0.5, 1), (9.0, 4), (11.0, 6)], warm_up=True),  # 6 of its tokens come inside the window
        _trace(10.0, [(10.4, 1), (12.0, 8)], metadata=_metadata((3, 7, 3), (3, 7, 2), (1, 0, 0), (1, 0, 0))),
        _trace(11.0, [(12.0, 2), (16.0, 4)], metadata=_metadata((5, 7, 7)), reason="length"),
        _trace(13.0, [(13.2, 1), (21.0, 10)]),  # its last tokens come after the window's end
    ]
    found = figures(traces, start=10.0, end=20.0)
    assert found.seconds == 10.0
    assert found.tokens == 6 + 9 + 6 + 1
    assert (found.requests, found.stopped) == (3, 2)
    # tokens after the first event over the time from the first event to the last
    assert found.user_tokens_per_second == pytest.approx((8 + 4 + 10) / (1.6 + 4.0 + 7.8))
    assert found.first_token_median == pytest.approx(0.4)
    assert found.acceptance.mean_accepted_length == pytest.approx((4 * 2.0 + 1 * 5.0) / 5)  # 13 tokens in 5 steps
    assert found.acceptance.kept_ratio == pytest.approx((3 + 2 + 7 + 5) / (3 * 7 + 5))  # slots pooled, anchors counted
    assert (found.speculative_steps, found.acceptance.verify_steps) == (3, 5)
    assert found.failures == ()


def test_a_failed_request_counts_in_nothing_but_the_failures():
    broken = RequestTrace("q", 1.0, False, [Arrival(2.0, 3)], None, "q: broke")
    found = figures([broken], start=0.0, end=5.0)
    assert (found.requests, found.failures, found.first_token_median, found.user_tokens_per_second) == (
        0, ("q: broke",), None, None,
    )  # fmt: skip


def test_a_warm_up_that_never_ended_gives_no_speed():
    found = figures([_trace(0.0, [(1.0, 4)], warm_up=True)], start=None, end=2.0)
    assert (found.seconds, found.tokens) == (0.0, 0)


def _prompts(count):
    return [LoadPrompt(f"p{i}", "chat", ({"role": "user", "content": f"question {i}"},)) for i in range(count)]


def _run(server, *, concurrency, count, label=RequestLabel(route="dfly"), sampling=Sampling(max_tokens=64)):
    async def go():
        async with AsyncClient(server.url) as client:
            return await run_load(
                client, _prompts(count), concurrency=concurrency, sampling=sampling, label=label,
                template_arguments={"enable_thinking": False},
            )  # fmt: skip

    return asyncio.run(go())


def test_users_are_as_many_as_asked_for_and_all_prompts_are_sent_once():
    with FakeSGLang(behaviour=Behaviour(step_seconds=0.01)) as server:
        found = _run(server, concurrency=3, count=12)
        sent = [body["messages"][0]["content"] for _, body in server.requests]
    assert server.most_running == 3
    assert sorted(sent) == sorted(f"question {i}" for i in range(12))
    assert found.requests == 9  # three were the warm-up
    assert found.stopped == 9
    assert found.failures == ()
    assert found.tokens > 0
    assert 2.5 < found.acceptance.mean_accepted_length <= 4.0
    assert found.speculative_steps == found.acceptance.verify_steps
    assert found.first_token_median < 1.0
    assert all(body["custom_params"] == {"route": "dfly"} for _, body in server.requests)


def test_faster_steps_give_more_tokens_per_second():
    with FakeSGLang(behaviour=Behaviour(step_seconds=0.02)) as server:
        plain = _run(server, concurrency=2, count=8, label=RequestLabel(route="ar"))
        drafted = _run(server, concurrency=2, count=8)
    assert 2.0 < (drafted.tokens / drafted.seconds) / (plain.tokens / plain.seconds) < 5.0
    assert drafted.user_tokens_per_second / plain.user_tokens_per_second > 2.0
    assert (plain.acceptance.mean_accepted_length, plain.speculative_steps) == (1.0, 0)


def test_tokens_of_a_server_without_the_extension_are_counted_too():
    with FakeSGLang(behaviour=Behaviour(step_seconds=0.01, extension=False)) as server:
        found = _run(server, concurrency=2, count=6, label=None)
        assert all("custom_params" not in body for _, body in server.requests)
    assert found.tokens > 0 and found.seconds > 0
    assert (found.acceptance, found.speculative_steps) == (AcceptanceCounts(), 0)


def test_broken_streams_are_failures():
    with FakeSGLang(behaviour=Behaviour(break_after=1, step_seconds=0.01)) as server:
        found = _run(server, concurrency=2, count=6)
    assert len(found.failures) >= 5  # a window is given up after so many in a row
    assert "ended in the middle" in found.failures[0] or "broke" in found.failures[0]
    assert found.requests == 0


def test_a_server_that_is_gone_ends_the_window_soon():
    with FakeSGLang() as server:
        pass
    found = _run(server, concurrency=2, count=400)
    assert 5 <= len(found.failures) <= 7
    assert found.tokens == 0
