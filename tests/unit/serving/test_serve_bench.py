"""The load test: choices, order, cells by hand, and whole runs against fake servers."""

from collections import Counter

import pytest
from fake_sglang import Behaviour, FakeSGLang, small_bundle
from serving_builders import window_of

from angelspec.core.acceptance import AcceptanceCounts
from angelspec.core.errors import DataError, RequestError
from angelspec.serving.bench import Traffic, choices_of, drawn, mixed_traffic, order_of, run_bench
from angelspec.serving.bench_result import CONTROL, BenchResult, BenchSettings, cells_of
from angelspec.serving.failures import RequestRefused, ServerUnreachable, ServingError
from angelspec.serving.load import LoadPrompt


def _traffic(name, count, workload="chat"):
    prompts = [LoadPrompt(f"{name}/{i}", workload, ({"role": "user", "content": f"{name} {i}"},)) for i in range(count)]
    return Traffic(name, f"file:{name}.jsonl", tuple(prompts))


def _settings(**changes):
    values = {
        "concurrency": (1, 2), "requests": 4, "max_tokens": 32, "temperature": 0.0, "repeats": 2, "seed": 5,
        "mode": "no-think", "minimum_seconds": 0.001,
    }  # fmt: skip
    return BenchSettings(**{**values, **changes})


def _bench(server, *, traffics=None, control=None, choices=None, said=None, keep=lambda result: None, **changes):
    return run_bench(
        server.url,
        traffics or [_traffic("code", 5, "code")],
        settings=_settings(**changes),
        choices=choices or choices_of(["dfly"], ["auto"]),
        control_url=control.url if control else None,
        hardware="a machine",
        command="angelspec bench serve",
        say=(said if said is not None else []).append,
        keep=keep,
    )


def test_a_result_holds_no_login_and_no_folder_of_the_server():
    bundle = small_bundle()
    drafters = (bundle.drafters[0], bundle.drafters[1].model_copy(update={"source": "hf:org/dfly"}))
    with FakeSGLang(bundle.model_copy(update={"drafters": drafters})) as server:
        server.url = server.url.replace("http://", "http://user:p@ss@")
        result = _bench(server, concurrency=(1,), repeats=1)
    assert "p@ss" not in result.model_dump_json() and "user" not in result.url
    assert result.engine.target == "tiny" and [d.source for d in result.engine.drafters] == ["mtp", "hf:org/dfly"]


# ------------------------------------------------------------------------------------------------ schedule


def test_choices():
    found = choices_of(["ar", "mtp", "dfly:off", "dfly", "auto"], ["auto"])
    assert [(c.name, c.route, c.dcut) for c in found] == [
        ("ar", "ar", "auto"), ("mtp", "mtp", "auto"), ("dfly, cut off", "dfly", "off"), ("dfly", "dfly", "auto"),
        ("auto", "auto", "auto"),
    ]  # fmt: skip
    both = choices_of(["dfly"], ["auto", "off", "0.5"])
    assert [c.name for c in both] == ["ar", "dfly", "dfly, cut off", "dfly, cut 0.5"]
    with pytest.raises(RequestError, match="'of' is not allowed"):
        choices_of(["dfly:of"], ["auto"])


def test_reserved_names_are_refused():
    with pytest.raises(RequestError, match="route 'control' can't be measured"):
        choices_of(["mtp", "control:off"], ["auto"])
    with pytest.raises(RequestError, match="a prompt set is called 'mixed'"):
        mixed_traffic([_traffic("a", 1), _traffic("mixed", 1)])


@pytest.mark.parametrize(("requests", "per_user", "expected"), [(8, 2, (8, 8, 32)), (8, 6, (8, 24, 96))])
def test_windows_of_many_users_are_no_shorter(requests, per_user, expected):
    settings = BenchSettings(
        concurrency=(1, 4, 16), requests=requests, requests_per_user=per_user, max_tokens=8, temperature=0, repeats=1,
        seed=0, mode=None, minimum_seconds=1,
    )  # fmt: skip
    assert tuple(settings.window_requests(users) for users in settings.concurrency) == expected


def test_the_order_is_rotated_so_that_each_choice_has_each_place():
    choices = choices_of(["mtp", "dfly"], ["auto"])
    places = Counter(
        (choice.name, place) for repeat in range(3) for place, choice in enumerate(order_of(choices, repeat=repeat))
    )
    assert set(places.values()) == {1}
    assert len(places) == 9


def test_prompts_are_drawn_alike_for_every_choice_and_none_comes_twice_too_soon():
    prompts = _traffic("a", 5).prompts
    assert drawn(prompts, count=12, seed=1) == drawn(prompts, count=12, seed=1)
    assert drawn(prompts, count=12, seed=1) != drawn(prompts, count=12, seed=2)
    taken = drawn(prompts, count=12, seed=1)
    assert {p.id for p in taken[:5]} == {p.id for p in taken[5:10]} == {p.id for p in prompts}


def test_mixed_traffic_takes_turns():
    mixed = mixed_traffic([_traffic("a", 3, "code"), _traffic("b", 1, "math")])
    assert [prompt.id for prompt in mixed.prompts] == ["a/0", "b/0", "a/1", "a/2"]
    assert mixed.facts.workloads == {"code": 3, "math": 1}
    assert mixed.facts.digest != _traffic("a", 3).facts.digest


# --------------------------------------------------------------------------------------------------- cells


def test_cells_by_hand():
    steps = AcceptanceCounts(generated_tokens=90, verify_steps=30, proposed_tokens=105, drafted_tokens=105)
    windows = [
        window_of("ar", 0, tokens=100, seconds=10.0),  # 10 tokens/s
        window_of("dfly", 0, tokens=200, seconds=10.0, acceptance=steps, speculative_steps=15, first_token_median=0.4),
        window_of("ar", 1, tokens=100, seconds=20.0),  # 5 tokens/s: the machine was slow in this round
        window_of("dfly", 1, tokens=160, seconds=8.0, too_short=True, failures=("x: gone",), requests=12,
                user_tokens_per_second=30.0),
    ]  # fmt: skip
    plain, dfly = cells_of(windows, baseline="ar")
    assert (plain.choice, plain.tokens_per_second, plain.speedup) == ("ar", pytest.approx(200 / 30), pytest.approx(1))
    assert dfly.tokens_per_second == pytest.approx(360 / 18)
    assert dfly.speedup == pytest.approx((2.0 * 4.0) ** 0.5)  # 20 / 10 and 20 / 5
    assert dfly.speedup_low < 1 < dfly.speedup_high  # two repeats say little
    assert dfly.accepted_length == pytest.approx((30 * 3.0 + 10 * 2.0) / 40)
    assert dfly.kept_ratio == pytest.approx((105 + 30 + 30 + 10) / (105 + 30 + 70 + 10))  # slots, not windows, weigh
    assert dfly.speculative_share == pytest.approx((15 + 10) / (30 + 10))
    assert dfly.first_token_seconds == pytest.approx(0.3)
    assert dfly.user_tokens_per_second == pytest.approx((4 * 10.0 + 12 * 30.0) / 16)
    assert dfly.user_speedup.value == pytest.approx((1.0 * 3.0) ** 0.5)
    assert dfly.first_token_ratio.value == pytest.approx((2.0 * 1.0) ** 0.5)
    assert dfly.first_token_ratio.low < 1 < dfly.first_token_ratio.high
    assert (dfly.windows, dfly.too_short, dfly.failures) == (2, 1, 1)


def test_a_round_without_plain_decoding_is_no_pair():
    windows = [
        window_of("ar", 0, tokens=100, seconds=10.0),
        window_of("ar", 1, tokens=0, seconds=0.0),
        window_of("dfly", 0, tokens=200, seconds=10.0),
        window_of("dfly", 1, tokens=900, seconds=10.0),
    ]
    dfly = cells_of(windows, baseline="ar")[1]
    assert (dfly.speedup, dfly.speedup_low) == (pytest.approx(2.0), None)


# -------------------------------------------------------------------------------------------------- whole


def test_a_whole_run_with_a_control():
    said = []
    with (
        FakeSGLang(behaviour=Behaviour(step_seconds=0.005)) as server,
        FakeSGLang(behaviour=Behaviour(step_seconds=0.005, extension=False)) as control,
    ):
        result = _bench(server, control=control, said=said)
        requests = [body for path, body in server.requests if path.endswith("completions")][2:]  # two tries before
        controlled = [body for path, body in control.requests if path.endswith("completions")]
    assert [choice.name for choice in result.choices] == ["ar", "dfly", CONTROL]
    assert len(result.windows) == len(said) == 2 * 2 * 3
    assert [w.choice for w in result.windows[:3]] == ["ar", "dfly", CONTROL]
    assert [w.choice for w in result.windows[6:9]] == ["dfly", CONTROL, "ar"]
    assert result.faults == []
    dfly = result.cell(traffic="code", concurrency=2, choice="dfly")
    assert 1.5 < dfly.speedup < 4.5
    assert dfly.speedup_low < dfly.speedup < dfly.speedup_high
    assert 2.0 < dfly.accepted_length <= 4.0
    assert result.cell(traffic="code", concurrency=1, choice="ar").speculative_share == 0.0
    stock = result.cell(traffic="code", concurrency=1, choice=CONTROL)
    assert 0.3 < stock.speedup < 3.0
    assert stock.accepted_length is None
    window = next(w for w in result.windows if w.choice == "dfly")
    assert window.counters.steps == window.counters.speculative_steps > 0
    assert window.cache_emptied
    # the same prompts, seeds and limits for every choice
    by_choice = {
        route: [body["messages"][0]["content"] for body in requests if body["custom_params"]["route"] == route]
        for route in ("ar", "dfly")
    }
    assert Counter(by_choice["ar"]) == Counter(by_choice["dfly"])
    assert Counter(by_choice["ar"]) == Counter(body["messages"][0]["content"] for body in controlled)
    assert {(body["seed"], body["max_tokens"], body["temperature"]) for body in requests} == {(5, 32, 0.0)}
    assert all(body["chat_template_kwargs"] == {"enable_thinking": False} for body in [*requests, *controlled])
    assert (result.engine_version, result.control_version) == ("0.5.23", "0.5.23")
    assert result.engine_arguments == {"dtype": "float32"}


def test_a_result_is_read_back(tmp_path):
    with FakeSGLang(behaviour=Behaviour(step_seconds=0.005)) as server:
        result = _bench(server, concurrency=(1,), repeats=1)
    assert BenchResult.load(result.save(tmp_path)) == result
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(DataError, match="is no result"):
        BenchResult.load(tmp_path / "other.json")


def test_short_windows_and_failures_are_reported():
    with FakeSGLang(behaviour=Behaviour(step_seconds=0.005, break_after=1)) as server:
        result = _bench(server, concurrency=(1,), repeats=1, minimum_seconds=60.0)
    assert all(window.too_short and window.failures for window in result.windows)
    assert any("the minimum is 60 s" in fault for fault in result.faults)
    assert any("request(s) failed, first: code/" in fault for fault in result.faults)
    cell = result.cell(traffic="code", concurrency=1, choice="dfly")
    assert cell.failures > 0
    assert cell.too_short == 1


def test_a_server_that_goes_away_does_not_lose_what_was_measured():
    with FakeSGLang(behaviour=Behaviour(step_seconds=0.002)) as server:
        windows = []

        class Said(list):
            def append(self, text):
                windows.append(text)
                if len(windows) == 2:
                    server.http.shutdown()
                    server.http.server_close()
                    server.behaviour.dies = None

        kept = []
        with pytest.raises(ServerUnreachable):
            _bench(server, concurrency=(1,), repeats=2, said=Said(), keep=kept.append)
    assert [len(result.windows) for result in kept] == [1, 2]  # the third found nobody, and no fourth was tried
    assert kept[-1].cell(traffic="code", concurrency=1, choice="dfly").tokens_per_second > 0
    assert "broken off after 2 of 4 windows" in kept[-1].faults


def test_routes_and_servers_are_checked_before_anything_is_measured():
    with FakeSGLang() as server, FakeSGLang() as twin, FakeSGLang(behaviour=Behaviour(extension=False)) as stock:
        with pytest.raises(RequestRefused, match="route 'dflyy' does not exist"):
            _bench(server, choices=choices_of(["dflyy"], ["auto"]))
        with pytest.raises(ServingError, match="has angelspec's extension, so it is no control"):
            _bench(server, control=twin)
        with pytest.raises(ServingError, match="runs without angelspec's extension"):
            _bench(stock)
        server.speculation = "off"
        with pytest.raises(ServingError, match="switched off"):
            _bench(server)
