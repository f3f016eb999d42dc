"""SmolLM2 and its shipped drafters, served as the README says: probed, and with the target's own words."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from angelspec.core.bundle import Bundle, load_bundle
from angelspec.core.locations import resource_folder
from angelspec.core.modes import Mode, mode_family
from angelspec.core.request_label import RequestLabel
from angelspec.serving.answers import ChatAnswer, EngineCounters, EngineState
from angelspec.serving.client import Client
from angelspec.serving.failures import RequestRefused
from angelspec.serving.wire import ChatOptions, Label, Sampling
from tests.engine_builders import served

pytest.importorskip("sglang")
LEAST = 1.3
"""Accepted length; a drafter with a wrong alignment or taps has 1.0."""
QUESTION = [{"role": "user", "content": "Write a Python function that returns the largest of three numbers."}]


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What ``angelspec serve`` says."""
    return tmp_path_factory.mktemp("shipped") / "serve.log"


@pytest.fixture(scope="module")
def bundle_file() -> Path:
    return resource_folder("checkpoints") / "bundle.yaml"


@pytest.fixture(scope="module")
def bundle(bundle_file: Path) -> Bundle:
    return load_bundle(bundle_file)


@pytest.fixture(scope="module")
def client(bundle_file: Path, log: Path) -> Iterator[Client]:
    with served("--bundle", str(bundle_file), "--enable-metrics", log=log) as client:
        yield client


def options(route: str, mode: Mode = "no-think") -> ChatOptions:
    """Of a greedy chat."""
    return {
        "sampling": Sampling(max_tokens=96, temperature=0.0),
        "template_arguments": mode_family("smollm2").arguments(mode),
        "label": RequestLabel(route=route),
        "details": True,
    }


def ask(client: Client, route: str, mode: Mode = "no-think") -> ChatAnswer:
    return client.chat(QUESTION, **options(route, mode))


def state(client: Client) -> EngineState:
    return client.server_info().extension("the server")


def engine_log(log: Path) -> str:
    """What SGLang says."""
    said = re.search(r"log: (\S+)", log.read_text())
    assert said is not None
    return Path(said[1]).read_text()


@pytest.fixture(scope="module")
def plain(client: Client) -> dict[Mode, str]:
    """The target's own words."""
    return {mode: ask(client, "ar", mode).text for mode in ("no-think", "high-think")}


def test_the_shipped_drafters_speed_up_the_embedded_target(
    client: Client, bundle: Bundle, plain: dict[Mode, str], log: Path
) -> None:
    assert ask(client, "auto").text == plain["no-think"]
    for drafter in bundle.drafters:
        answer = ask(client, drafter.name, drafter.mode)
        assert answer.text == plain[drafter.mode]
        metadata = answer.metadata
        assert metadata is not None and (metadata.route, metadata.workload, metadata.mode) == (
            drafter.name, "code", drafter.mode,
        )  # fmt: skip
        assert metadata.speculative_share == 1.0
        assert metadata.accepted_length is not None and metadata.accepted_length > LEAST
    engine = state(client)
    assert engine.costs is not None and engine.counters.speculative_steps > 0
    for drafter in bundle.drafters:
        assert f"{drafter.name} ({drafter.algorithm or drafter.family}, {drafter.mode}," in engine_log(log)


def test_speculation_is_switched_off_and_on_while_it_runs(client: Client, plain: dict[Mode, str]) -> None:
    with client.stream_chat(QUESTION, **options("dfly")) as stream:
        for number, _ in enumerate(stream):
            if number == 4:
                client.set_speculation(False)
    assert stream.answer.text == plain["no-think"]
    assert stream.answer.metadata is not None
    assert stream.answer.metadata.steps_by_route.keys() == {"dfly", "ar"}, "a running request did not go on plainly"

    off = state(client)
    answer, now = ask(client, "dfly"), state(client)
    assert off.speculation == now.speculation == "off"
    seen: EngineCounters = now.counters - off.counters
    assert seen.steps > 0 and seen.speculative_steps == 0
    assert answer.text == plain["no-think"]
    assert answer.metadata is not None and answer.metadata.speculative_share == 0.0

    client.set_speculation(True)
    answer, now = ask(client, "dfly"), state(client)
    assert now.speculation == "on"
    assert (now.counters - off.counters).speculative_steps > 0
    assert answer.text == plain["no-think"]
    assert answer.metadata is not None and answer.metadata.speculative_share == 1.0


def test_the_switch_takes_on_and_off_alone(client: Client, log: Path) -> None:
    refused: Any = client.http.post("/set_internal_state", json={"server_args": {"angelspec_speculation": 2}}).json()
    assert refused == [False]
    assert "angelspec_speculation must be 1 (on) or 0 (off), got 2" in engine_log(log)
    assert state(client).speculation == "on"


Samples = dict[str, dict[str, float]]
"""By name of a metric, its values by label."""


def metrics(client: Client) -> Samples:
    """What Prometheus would read of the extension's metrics; labels are joined as the information page joins them."""
    from prometheus_client.parser import text_string_to_metric_families

    found: Samples = {}
    for family in text_string_to_metric_families(client.http.get("/metrics").text):
        for sample in family.samples:
            if sample.name.startswith("angelspec_") and "le" not in sample.labels:
                label = "/".join(sample.labels[key] for key in ("route", "workload", "part") if key in sample.labels)
                found.setdefault(sample.name, {})[label] = sample.value
    return found


def test_prometheus_reads_the_counters_of_the_information_page(client: Client) -> None:
    for route in ("dfly", "mtp", "ar"):
        ask(client, route)
    counted = client.http.get("/server_info").json()["internal_states"][0]["angelspec"]["counters"]
    found = metrics(client)
    assert found["angelspec_requests_total"] == counted["requests"]
    for name in ("committed_tokens", "drafted_slots", "verified_slots"):
        assert sum(found[f"angelspec_{name}_total"].values()) == counted[name]
    tokens, steps = (found[f"angelspec_{name}_total"] for name in ("committed_tokens", "verify_steps"))
    for name, depth in (("dfly", 7), ("mtp", 3)):
        assert LEAST < tokens[f"{name}/code"] / steps[f"{name}/code"] <= depth + 1
    assert tokens["ar/code"] == steps["ar/code"] == found["angelspec_verified_slots_total"]["ar/code"]
    for part in ("draft", "plan", "verify", "other"):
        assert found["angelspec_step_seconds_sum"][part] == pytest.approx(counted[f"{part}_seconds"])
        assert found["angelspec_step_seconds_count"][part] >= counted["steps"]
    assert found["angelspec_keep_ratio_count"][""] == counted["speculative_steps"] > 0
    assert 0 < found["angelspec_keep_ratio_sum"][""] <= counted["speculative_steps"]


@pytest.mark.parametrize(
    ("label", "words"),
    [
        ({"rout": "dfly"}, "custom_params.rout: unknown label (did you mean 'route'?)"),
        ({"workload": "cod"}, "custom_params.workload: 'cod' is not allowed (did you mean 'code'?)"),
        ({"route": "dflly"}, "route 'dflly' does not exist (did you mean 'dfly'?)"),
    ],
)
def test_a_bad_label_is_refused_with_the_nearest_good_one(client: Client, label: Label, words: str) -> None:
    bad: ChatOptions = {**options("auto"), "label": label}
    with pytest.raises(RequestRefused) as chat:
        client.chat(QUESTION, **bad)
    with pytest.raises(RequestRefused) as streamed, client.stream_chat(QUESTION, **bad) as stream:
        list(stream)
    with pytest.raises(RequestRefused) as native:
        client.generate("Hello", label=label)
    for error in (chat.value, streamed.value, native.value):
        assert error.status == 400
        assert words in str(error)


def test_every_chunk_of_a_streamed_chat_says_how_it_was_made(client: Client, plain: dict[Mode, str]) -> None:
    with client.stream_chat(QUESTION, **options("dfly")) as stream:
        chunks = list(stream)
    answer, told = stream.answer, [chunk for chunk in chunks if chunk.text]
    assert len(told) > 5
    assert all(chunk.metadata is not None and chunk.pieces for chunk in told)
    assert "".join(piece.text for piece in answer.pieces) == answer.text == plain["no-think"]
    assert answer.usage is not None and len(answer.pieces) == answer.usage.completion_tokens
    steps = [chunk.metadata.verify_steps for chunk in told if chunk.metadata is not None]
    assert steps == sorted(steps) and steps[0] < steps[-1]
    whole, accepted = answer.metadata, sum(piece.position > 0 for piece in answer.pieces)
    assert whole is not None and whole.generated_tokens == len(answer.pieces) - 1  # the first is prefill's
    ends_within_a_step = answer.pieces[-1].position > 0
    assert accepted == whole.generated_tokens - whole.verify_steps + ends_within_a_step > 0


def test_the_prefix_cache_is_kept_apart_by_mode_alone(client: Client) -> None:
    prompt = list(range(1000, 1100))

    def cached(route: str, mode: Mode) -> int:
        """Tokens of the prompt that were found in the cache."""
        label = RequestLabel(route=route, mode=mode)
        answer = client.generate(prompt, sampling=Sampling(max_tokens=8, temperature=0.0), label=label)
        assert answer.usage is not None and answer.usage.cached_tokens is not None
        return answer.usage.cached_tokens

    assert cached("dfly", "no-think") == 0
    assert cached("dfly-high-think", "high-think") == 0, "drafters of another mode have no entries there"
    # the last token is computed in any case, and MTP's entry of the one before it reads it
    assert cached("mtp", "no-think") == cached("ar", "no-think") == cached("ar", "high-think") == len(prompt) - 2
