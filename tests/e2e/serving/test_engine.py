"""The extension in a real engine on a CPU: every output equals stock SGLang's, whatever is mixed, cut or interrupted.

The target is tiny and random. Its own answers, recorded by the stock engine, feed a replay drafter, so that drafts are
really accepted; the other drafters are random. Engines run one after the other, each with everything at once: overlap,
radix cache, chunked prefill and, every 25 steps, a retraction; then no overlap and large pages; then windows of one
width, whose cuts cap what is accepted.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine_builders import engine, run, write_tiny_bundle

pytest.importorskip("sglang")
STOP = 65


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engine")


@pytest.fixture(scope="module")
def target() -> Path:
    from angelspec.targets.sources import materialise

    return materialise("random:llama")


LABELS: tuple[dict[str, Any] | None, ...] = (
    None,
    {"route": "dfly"},
    {"route": "mtp"},
    {"route": "dspark", "dcut": "off"},
    {"route": "ar"},
    {"route": "dfly", "dcut": 0.5},
    {"workload": "code"},
    {"route": "mtp", "dcut": 0.75},
)


def requests() -> list[dict[str, Any]]:
    """Prompts short and long (several chunks), some that share a prefix, with every kind of sampling parameters."""
    dice = random.Random(1)
    found: list[dict[str, Any]] = []

    def add(length: int, prefix: list[int] | None = None, **params: Any) -> dict[str, Any]:
        ids = [*(prefix or []), *(dice.randrange(32, 120) for _ in range(length))]
        params = {"temperature": 0.0, "max_new_tokens": 40 + dice.randrange(24), "ignore_eos": True, **params}
        label = LABELS[len(found) % len(LABELS)]
        found.append({"rid": f"r{len(found)}", "ids": ids, "params": params, "label": label})
        return found[-1]

    for length in (5, 150, 33, 70, 12, 200, 17, 90, 41, 130, 3, 64):
        add(length)
    shared = found[5]["ids"]
    for length in (1, 9, 40):
        add(length, shared[:160])
    add(30, stop_token_ids=[STOP], ignore_eos=False)
    add(31, stop="e")
    add(20, logit_bias={"70": 4.0, "71": -5.0})
    add(21, frequency_penalty=0.7)
    add(22, presence_penalty=0.4, repetition_penalty=1.2)
    add(23, min_new_tokens=20, stop_token_ids=[STOP], ignore_eos=False)
    add(24, json_schema=json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}),
        max_new_tokens=60, ignore_eos=False)  # fmt: skip
    add(25, temperature=1.0, top_k=1)
    add(27, logit_bias={"70": 3.0, "71": 2.5, "72": -5.0}, repetition_penalty=1.6)
    for route, params in LOGPROB_ROWS:
        add(26, **params).update(label={"route": route}, top_logprobs=3, token_logprobs=[STOP, 70, 200])
    return found


LOGPROB_ROWS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("auto", {}),
    ("dfly", {}),
    ("mtp", {}),
    ("dfly", {"temperature": 0.7, "top_p": 1e-6}),  # sampled, of the one token that is left
    ("mtp", {"temperature": 1.0, "top_k": 1}),  # 1: SGLang forgets a temperature where nobody in the batch is sampled
)


def as_wave(requests: list[dict[str, Any]], *, labelled: bool) -> list[dict[str, Any]]:
    wave = []
    for request in requests:
        params = dict(request["params"])
        if labelled and request["label"] is not None:
            params["custom_params"] = request["label"]
        kept = {key: request[key] for key in ("ids", "top_logprobs", "token_logprobs", "abort_after") if key in request}
        wave.append({"rid": request["rid"] + ("" if labelled else "#stock"), "params": params, **kept})
    return wave


@pytest.fixture(scope="module")
def stock(folder: Path, target: Path) -> dict[str, Any]:
    """What stock SGLang answers, on the same platform."""
    arguments = engine(target, disable_overlap_schedule=True)  # with overlap, penalties come one token late
    told = run(folder, "stock", {"engine": arguments, "waves": [as_wave(requests(), labelled=False)]})
    return {rid.split("#")[0]: answer for rid, answer in told["answers"].items()}


@pytest.fixture(scope="module")
def replay(folder: Path, stock: dict[str, Any]) -> Path:
    """The script of the replay drafter, right nine times in ten: in DFly's place, in ``LOGPROB_ROWS`` in MTP's, too."""
    path = folder / "replay.json"
    script = {
        request["rid"]: {
            "prompt": len(request["ids"]),
            "output": stock[request["rid"]]["ids"],
            "probability": 0.9,
            "confidence": 0.9,
        }
        for request in requests()
    }
    for request in requests()[-len(LOGPROB_ROWS) :]:
        if request["label"] == {"route": "mtp"}:
            script[request["rid"]] |= {"drafter": "mtp", "depth": 3}
    path.write_text(json.dumps(script))
    return path


UNIFORM = "uniform windows"
"""The control: every row verified at full width, and what is accepted capped by its cut."""
SETTINGS: dict[str, dict[str, Any]] = {
    "overlap, retraction": {"max_total_tokens": 900},
    "no overlap, pages of 16": {"disable_overlap_schedule": True, "page_size": 16},
    UNIFORM: {},
}


@pytest.fixture(scope="module", params=list(SETTINGS))
def served(
    request: pytest.FixtureRequest, folder: Path, target: Path, replay: Path
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The same requests under the extension, with aborts among them, twice: the second time from the prefix cache."""
    bundle = write_tiny_bundle(folder, target=target)
    aborted = [
        {**one, "rid": f"{one['rid']}#aborted", "params": {**one["params"], "max_new_tokens": 400},
         "abort_after": 0.05 * i}
        for i, one in enumerate(requests()[1:4])
    ]  # fmt: skip
    again = [{**one, "rid": f"{one['rid']}#again"} for one in requests()[:8]]
    waves = [as_wave([*requests(), *aborted], labelled=True), as_wave(again, labelled=True)]
    told = run(
        folder,
        f"served-{len(request.param)}",
        {"engine": engine(target, speculative_algorithm="ANGELSPEC", **SETTINGS[request.param]), "waves": waves},
        ANGELSPEC_BUNDLE=str(bundle),
        ANGELSPEC_REPLAY=str(replay),
        SGLANG_TEST_RETRACT="1" if request.param == "overlap, retraction" else "0",
        SGLANG_TEST_RETRACT_INTERVAL="25",
        **({"ANGELSPEC_UNIFORM": "1"} if request.param == UNIFORM else {}),
    )
    yield request.param, told


def test_every_answer_is_the_stock_engine_s(served: tuple[str, dict[str, Any]], stock: dict[str, Any]) -> None:
    wrong = []
    for rid, answer in served[1]["answers"].items():
        ours, theirs = answer["ids"], stock[rid.split("#")[0]]["ids"]
        if "aborted" in answer:
            common = min(len(ours), len(theirs))
            ours, theirs = ours[:common], theirs[:common]
        if ours != theirs:
            wrong.append(rid)
    assert wrong == []


def test_aborted_answers_were_cut_while_they_were_decoded(served: tuple[str, dict[str, Any]]) -> None:
    aborted = [answer for answer in served[1]["answers"].values() if "aborted" in answer]
    assert len(aborted) == 3 and all(answer["aborted"] for answer in aborted)
    assert any(1 < len(answer["ids"]) < 400 for answer in aborted)


def test_texts_and_reasons_too(served: tuple[str, dict[str, Any]], stock: dict[str, Any]) -> None:
    for request in requests():
        ours, theirs = served[1]["answers"][request["rid"]], stock[request["rid"]]
        assert ours["text"] == theirs["text"]
        assert ours["meta"]["finish_reason"] == theirs["meta"]["finish_reason"]


@pytest.mark.parametrize("number", range(len(LOGPROB_ROWS)), ids=[f"{route} {row}" for route, row in LOGPROB_ROWS])
def test_log_probabilities_are_the_same(number: int, served: tuple[str, dict[str, Any]], stock: dict[str, Any]) -> None:
    rid = requests()[number - len(LOGPROB_ROWS)]["rid"]
    ours, theirs = served[1]["answers"][rid], stock[rid]
    for name, entries in (("token", 1), ("top", 3), ("token_ids", 3)):
        mine, wanted = (entries_of(one["meta"][f"output_{name}_logprobs"]) for one in (ours, theirs))
        assert len(wanted) == entries * len(theirs["ids"])
        assert [token for _, token in mine] == [token for _, token in wanted], name
        expected = pytest.approx([value for value, _ in wanted], rel=1e-4, abs=1e-4)  # they reach -60
        assert [value for value, _ in mine] == expected, name
    said = ours["meta"]["angelspec"]
    if LOGPROB_ROWS[number][0] != "auto":
        assert said["speculative_share"] == 1.0 and said["accepted_length"] > 2, "too little was drafted and accepted"


def entries_of(logprobs: list[Any]) -> list[tuple[float, int]]:
    """(value, token) of every token of an answer, or of every one that is told in its place."""
    rows = [entry if isinstance(entry[0], list) else [entry] for entry in logprobs]
    return [(value, token) for row in rows for value, token, _ in row]


def test_what_should_have_happened_happened(served: tuple[str, dict[str, Any]]) -> None:
    setting, told = served
    counted = told["state"]["counters"]
    assert counted["mixed_steps"] > 20
    assert counted["cut_steps"] > 20
    assert counted["prefix_hits"] > 3
    assert counted["continued_chunks"] > 3
    if setting == "overlap, retraction":
        assert counted["prefilled_again"] > 0, "nothing was retracted"
    assert counted["fallbacks"].get("lost states", 0) == 0


def test_the_metadata_adds_up(served: tuple[str, dict[str, Any]]) -> None:
    for rid, answer in served[1]["answers"].items():
        if "aborted" in answer:
            continue
        said, positions = answer["meta"]["angelspec"], answer["meta"]["angelspec_positions"]
        assert len(positions) == len(answer["ids"]), rid
        assert positions[0] == 0
        assert all(b == a + 1 or b in (0, 1) for a, b in zip(positions, positions[1:], strict=False)), rid
        assert sum(said["steps_by_route"].values()) == said["verify_steps"]


def test_routes_are_followed(served: tuple[str, dict[str, Any]]) -> None:
    answers = served[1]["answers"]
    for request in requests()[:8]:
        label, said = request["label"] or {}, answers[request["rid"]]["meta"]["angelspec"]
        if "route" in label:
            assert set(said["steps_by_route"]) == {label["route"]}
        if label.get("dcut") == "off":
            assert said["kept_ratio"] == 1.0


def test_replayed_drafts_are_accepted(served: tuple[str, dict[str, Any]]) -> None:
    """Right nine times in ten at each of seven positions: 1 + 0.9 + .. + 0.9^7 = 5.7 tokens a step, less the cut."""
    forced = [served[1]["answers"][one["rid"]]["meta"]["angelspec"] for one in requests() if is_plain_dfly(one)]
    steps = sum(said["verify_steps"] for said in forced)
    assert len(forced) > 1
    assert sum(said["accepted_length"] * said["verify_steps"] for said in forced) / steps > 3


def is_plain_dfly(request: dict[str, Any]) -> bool:
    """Whether nothing but the cut keeps the replay drafter from its length."""
    return request["label"] == {"route": "dfly"} and len(request["params"]) == 3


def test_history_dependent_parameters_run_at_width_1(served: tuple[str, dict[str, Any]]) -> None:
    for request in requests():
        params = request["params"]
        if {"frequency_penalty", "presence_penalty", "min_new_tokens", "json_schema"} & set(params):
            said = served[1]["answers"][request["rid"]]["meta"]["angelspec"]
            assert said["steps_by_route"].keys() <= {"ar"}
            assert "one token a step" in said["why"]
