"""The client against a fake server: answers, streams, labels, cancelling, and everything that can break."""

import asyncio
import json
import time
from types import SimpleNamespace

import pytest
import torch
from fake_sglang import Behaviour, FakeSGLang, small_bundle
from pydantic import ValidationError

from angelspec.core.calibration import Calibration
from angelspec.core.request_label import RequestLabel
from angelspec.core.step_costs import StepCosts
from angelspec.serving.answers import EngineCounters, EngineState, ServedDrafter
from angelspec.serving.client import AsyncClient, Client
from angelspec.serving.failures import RequestRefused, ServerUnreachable, ServingError, StreamBroken
from angelspec.serving.wire import Events, Sampling, chat_answer, generate_chunk, label_params
from sglang_ext import engine_hooks
from sglang_ext.metrics import Counters

USER = [{"role": "user", "content": "abc"}]
NO_THINK = {"enable_thinking": False}
WORDS = "one two three four five six seven"


@pytest.fixture
def server():
    with FakeSGLang(behaviour=Behaviour(words=WORDS)) as running:
        yield running


@pytest.fixture
def client(server):
    with Client(server.url) as made:
        yield made


def test_a_whole_answer(client, server):
    label = RequestLabel(route="dfly", ratio=1.0, workload="code")
    answer = client.chat(
        USER, sampling=Sampling(max_tokens=40, temperature=0.0, seed=3), label=label, template_arguments=NO_THINK,
        details=True,
    )  # fmt: skip
    assert answer.text == WORDS
    assert answer.finish_reason == "stop"
    assert answer.pieces == ()  # of streams alone
    assert answer.metadata.steps_by_route == {"dfly": 2}
    assert answer.metadata.accepted_length == 3.5
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 7)
    _, body = server.requests[-1]
    assert body["custom_params"] == {"route": "dfly", "dcut": "off", "workload": "code"}
    assert body["chat_template_kwargs"] == NO_THINK
    assert (body["max_tokens"], body["temperature"], body["seed"]) == (40, 0.0, 3)


def test_nothing_is_sent_that_was_not_wished(client, server):
    answer = client.chat(USER)
    assert (answer.pieces, answer.metadata) == ((), None)
    assert set(server.requests[-1][1]) == {"model", "messages", "rid"}


@pytest.mark.parametrize(
    ("label", "params"),
    [
        (None, {}),
        (RequestLabel(), {}),
        (RequestLabel(ratio=0.5, mode="no-think"), {"dcut": 0.5, "mode": "no-think"}),
        ({"route": "mtp"}, {"route": "mtp"}),
    ],
)
def test_labels(label, params):
    assert label_params(label) == params


def test_a_stream_brings_pieces_and_the_state_so_far(client):
    with client.stream_chat(USER, label=RequestLabel(route="mtp"), template_arguments=NO_THINK, details=True) as stream:
        chunks = list(stream)
    said = [chunk for chunk in chunks if chunk.text]
    assert [chunk.text for chunk in said] == ["one two", " three four", " five six", " seven"]
    assert [[piece.position for piece in chunk.pieces] for chunk in said] == [[1, 0], [1, 0], [1, 0], [0]]
    assert [chunk.metadata.verify_steps for chunk in said] == [1, 2, 3, 4]
    assert stream.answer.text == WORDS
    assert stream.answer.finish_reason == "stop"
    assert stream.answer.usage.completion_tokens == 7
    assert 0 < stream.answer.first_token_seconds <= stream.answer.seconds


def test_text_survives_torn_bytes_and_odd_separators():
    words = "é漢🙂 a\u2028b c\u0085d"  # the fake server tears every event in the middle
    with FakeSGLang(behaviour=Behaviour(words=words)) as server, Client(server.url) as client:
        with client.stream_chat(USER) as stream:
            list(stream)
        assert stream.answer.text == words


def test_metadata_is_found_in_either_place_of_a_whole_chat():
    metadata = {"route": "mtp", "why": "", "workload": "chat", "mode": None, "steps_by_route": {"mtp": 2},
                "verify_steps": 2, "generated_tokens": 3, "drafted_tokens": 6, "proposed_tokens": 6,
                "accepted_length": 1.5, "kept_ratio": 1.0, "speculative_share": 1.0}  # fmt: skip
    choice = {"message": {"content": "x"}, "finish_reason": "stop", "meta_info": {"angelspec": metadata}}
    assert chat_answer({"choices": [choice]}, seconds=1.0).metadata.accepted_length == 1.5
    top = {"choices": [{"message": {"content": "x"}}], "angelspec": {"metadata": metadata, "pieces": []}}
    assert chat_answer(top, seconds=1.0).metadata.verify_steps == 2


def test_a_server_of_another_version_is_named():
    body = {"choices": [{"message": {"content": "x"}}], "angelspec": {"metadata": {"route": "mtp"}}}
    with pytest.raises(ServerUnreachable, match="why: is required"):
        chat_answer(body, seconds=1.0)


def test_events_are_cut_at_newlines_only():
    events = Events()
    data = 'data: {"a": "x\u2028y"}\r\n\r\n: comment\n\ndata: é\n\n'.encode()
    assert [event for byte in data for event in events.feed(bytes([byte]))] == ['{"a": "x\u2028y"}', "é"]


def test_native_answers(client, server):
    answer = client.generate([1, 2, 3], sampling=Sampling(max_tokens=5, seed=9), label={"route": "dfly"})
    assert answer.text == "one two three four five"
    assert answer.output_ids == (0, 1, 2, 3, 4)
    assert answer.positions == (1, 2, 3, 0, 0)
    assert answer.finish_reason == "length"
    assert answer.metadata.route == "dfly"
    body = server.requests[-1][1]
    assert body["input_ids"] == [1, 2, 3]
    assert body["sampling_params"] == {"max_new_tokens": 5, "sampling_seed": 9, "custom_params": {"route": "dfly"}}


def test_a_native_stream(client):
    with client.stream_generate("abc", label={"route": "mtp", "mode": "no-think"}) as stream:
        texts = [chunk.text for chunk in stream]
    assert [text for text in texts if text] == ["one two", " three four", " five six", " seven"]
    assert stream.answer.text == WORDS
    assert stream.answer.positions == (1, 0, 1, 0, 1, 0, 0)
    assert stream.answer.first_token_seconds is not None


def test_a_native_stream_of_increments():
    def event(text, ids, total):
        return {"text": text, "output_ids": ids, "meta_info": {"completion_tokens": total, "prompt_tokens": 1}}

    from angelspec.serving.answers import GenerateAnswer

    first = generate_chunk(GenerateAnswer(), event("a", [1], 1), seconds=0.1)
    second = generate_chunk(first.answer, event("a", [2], 2), seconds=0.2)
    assert (second.text, second.answer.text, second.answer.output_ids) == ("a", "aa", (1, 2))
    assert second.answer.first_token_seconds == 0.1


def test_a_bad_label_is_refused_with_the_servers_words(client):
    with pytest.raises(RequestRefused, match=r"custom_params\.rout: unknown label \(did you mean 'route'") as refused:
        client.chat(USER, label={"rout": "mtp"})
    assert refused.value.status == 400
    with (
        pytest.raises(RequestRefused, match="route 'dflyy' does not exist"),
        client.stream_chat(USER, label={"route": "dflyy"}),
    ):
        pass


def test_a_connection_that_breaks_keeps_what_came():
    behaviour = Behaviour(words=WORDS, break_after=2)
    with FakeSGLang(behaviour=behaviour) as server, Client(server.url) as client:
        with pytest.raises(StreamBroken) as broken, client.stream_chat(USER, details=True) as stream:
            list(stream)
        assert broken.value.partial.text == "one two three four"  # two steps of the first drafter, mtp
        assert broken.value.partial.finish_reason is None


def test_a_stream_that_ends_too_soon_is_broken_even_if_it_ends_in_order():
    with FakeSGLang(behaviour=Behaviour(words=WORDS, end_after=2)) as server, Client(server.url) as client:
        with pytest.raises(StreamBroken, match="ended in the middle") as broken, client.stream_chat(USER) as stream:
            list(stream)
        assert broken.value.partial.text == "one two three four"


def test_an_error_in_mid_stream_keeps_what_came():
    with FakeSGLang(behaviour=Behaviour(words=WORDS, error_after=1)) as server, Client(server.url) as client:
        with pytest.raises(StreamBroken, match="ran out of memory") as broken, client.stream_chat(USER) as stream:
            list(stream)
        assert broken.value.partial.text == "one two"


def _until(condition, seconds=5.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


def test_leaving_a_stream_stops_the_server():
    words = " ".join(["word"] * 400)
    with FakeSGLang(behaviour=Behaviour(words=words, step_seconds=0.01)) as server, Client(server.url) as client:
        with client.stream_chat(USER) as stream:
            chunks = iter(stream)  # kept: that it is collected must not be what closes the connection
            while not next(chunks).text:
                pass
        _until(lambda: server.disconnected)
        assert server.counters.steps < 100
        assert stream.answer.text


def test_cancelling_aborts_in_the_server_and_ends_the_loop():
    words = " ".join(["word"] * 400)
    with FakeSGLang(behaviour=Behaviour(words=words, step_seconds=0.01)) as server, Client(server.url) as client:
        with client.stream_chat(USER) as stream:
            for number, _ in enumerate(stream):
                if number == 3:
                    stream.cancel()
            stream.cancel()
        assert server.aborted == [stream.request_id]
        assert stream.cancelled
        _until(lambda: server.running == 0)
        assert server.counters.steps < 100


def test_a_server_without_the_extension():
    with FakeSGLang(behaviour=Behaviour(words=WORDS, extension=False)) as server, Client(server.url) as client:
        assert client.server_info().engine is None
        answer = client.chat(USER, details=True)
        assert (answer.text, answer.pieces, answer.metadata) == (WORDS, (), None)


def test_state_and_switch(client, server):
    assert client.healthy()
    info = client.server_info()
    assert (info.version, info.engine.speculation) == ("0.5.23", "on")
    assert [drafter.name for drafter in info.engine.drafters] == ["mtp", "dfly"]
    client.set_speculation(False)
    assert server.requests[-1][1] == {"server_args": {"angelspec_speculation": 0}}
    assert client.server_info().engine.speculation == "off"
    assert client.flush_cache()
    server.behaviour.extension = False
    with pytest.raises(RequestRefused, match="did not take the switch"):
        client.set_speculation(True)


def test_counters_of_a_window():
    later, earlier = (
        EngineCounters.model_validate(Counters(**sums).as_dict())
        for sums in ({"steps": 9, "draft_seconds": 3.0}, {"steps": 4, "draft_seconds": 1.0})
    )
    window = later - earlier
    assert (window.steps, window.draft_seconds, window.nan_rows) == (5, 2.0, 0)


def test_the_engines_page_holds_what_is_read(monkeypatch):
    bundle = small_bundle()
    places = [SimpleNamespace(drafter=drafter) for drafter in bundle.drafters]
    plan = SimpleNamespace(bundle=bundle, places=places, draft_numbers_per_token=4)
    monkeypatch.setattr(engine_hooks, "current_plan", lambda: plan)
    runner = SimpleNamespace(kv_cache_dtype=torch.float32)
    page = engine_hooks.describe(
        SimpleNamespace(
            speculation=True,
            costs=SimpleNamespace(measured=StepCosts()),
            calibrations={"dfly": Calibration(slope=0.5)},
            ledger=SimpleNamespace(counters=Counters()),
            draft_model_runner=runner,
        )
    )
    assert set(page) == set(EngineState.model_fields)
    assert set(page["counters"]) >= set(EngineCounters.model_fields)
    assert all(set(drafter) == set(ServedDrafter.model_fields) for drafter in page["drafters"])
    state = EngineState.model_validate(json.loads(json.dumps(page)))
    assert (state.costs, state.calibrations) == (StepCosts(), {"dfly": Calibration(slope=0.5)})


def test_a_counter_of_another_name_is_no_zero():
    renamed = Counters().as_dict()
    renamed["cuts"] = renamed.pop("cut_steps")
    with pytest.raises(ValidationError, match="cut_steps"):
        EngineCounters.model_validate(renamed)


def test_no_error_shows_a_login():
    with Client("http://user:p@ss@127.0.0.1:9") as client, pytest.raises(ServerUnreachable) as caught:
        client.server_info()
    assert "p@ss" not in str(caught.value) and "http://127.0.0.1:9" in str(caught.value)
    with pytest.raises(ServingError) as refused:
        Client("http://user:p@ss@127.0.0.1:abc")
    assert "p@ss" not in str(refused.value)


def test_nothing_answers():
    with FakeSGLang() as server:
        url = server.url
    with Client(url) as client:
        assert not client.healthy()
        with pytest.raises(ServerUnreachable, match="refused"):
            client.chat(USER)


def test_a_server_that_is_none_of_ours(client):
    with pytest.raises(RequestRefused, match="Not Found"):
        client._timed("/elsewhere", {})


def test_proxies_of_the_environment_do_not_stand_before_a_local_server(server, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    with Client(server.url) as client:
        assert client.healthy()


def test_asynchronous():
    async def talk(url):
        async with AsyncClient(url) as client:
            assert await client.healthy()
            whole = await client.chat(USER, details=True, label={"route": "dfly"}, template_arguments=NO_THINK)
            async with client.stream_chat(USER, details=True) as stream:
                texts = [chunk.text async for chunk in stream]
            async with client.stream_generate("abc") as native:
                async for _ in native:
                    pass
            generated = await client.generate("abc")
            await client.set_speculation(False)
            state = (await client.server_info()).engine.speculation
            return whole, texts, stream.answer, native.answer, generated, state

    with FakeSGLang(behaviour=Behaviour(words=WORDS)) as server:
        whole, texts, streamed, native, generated, state = asyncio.run(talk(server.url))
    assert whole.metadata.route == "dfly"
    assert "".join(texts) == streamed.text == native.text == generated.text == WORDS
    assert state == "off"


def test_asynchronous_breaks_and_cancels():
    async def broken(url):
        async with AsyncClient(url) as client, client.stream_chat(USER) as stream:
            async for _ in stream:
                pass

    async def cancelled(url):
        async with AsyncClient(url) as client:
            async with client.stream_chat(USER) as stream:
                async for _ in stream:
                    await stream.cancel()
            return stream

    async def refused(url):
        async with AsyncClient(url) as client, client.stream_chat(USER, label={"route": "no"}):
            pass

    with FakeSGLang(behaviour=Behaviour(words=WORDS, break_after=1)) as server:
        with pytest.raises(StreamBroken) as error:
            asyncio.run(broken(server.url))
        assert error.value.partial.text == "one two"
        with pytest.raises(RequestRefused, match="does not exist"):
            asyncio.run(refused(server.url))
    with FakeSGLang(behaviour=Behaviour(words=" ".join(["x"] * 300), step_seconds=0.01)) as server:
        stream = asyncio.run(cancelled(server.url))
        assert server.aborted == [stream.request_id]
