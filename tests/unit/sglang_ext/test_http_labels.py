"""The HTTP process labels a request by what its template was really given."""

from __future__ import annotations

from contextvars import copy_context
from types import SimpleNamespace
from typing import Any

import pytest

from angelspec.core.bundle import parse_bundle
from sglang_ext import http_hooks
from sglang_ext.requests import RESOLVED_KEY

HIGH = {"name": "think", "source": "./c", "family": "block", "mode": "high-think", "depth": 7}
PLAIN = {"name": "dfly", "source": "./b", "family": "block", "mode": "no-think", "depth": 7}


@pytest.fixture(params=["hy3", "smollm2"])
def family(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    bundle = parse_bundle(
        {"target": {"source": "./t", "mode_family": request.param}, "drafters": [PLAIN, HIGH]}, where="test"
    )
    monkeypatch.setattr(http_hooks, "current_plan", lambda: SimpleNamespace(bundle=bundle))
    return request.param


def chat(text: str = "Write a function that sorts a list", **changes: Any) -> SimpleNamespace:
    facts = {
        "messages": [{"role": "user", "content": text}], "chat_template_kwargs": None, "reasoning_effort": None,
        "custom_params": None, "stream": True, "return_spec_tokens_details": False,
    }  # fmt: skip
    return SimpleNamespace(**{**facts, **changes})


def native(**changes: Any) -> SimpleNamespace:
    facts = {"sampling_params": {}, "extra_key": None, "text": None, "input_ids": [1, 2]}
    return SimpleNamespace(**{**facts, **changes})


def render(serving: Any, request: Any, *_: Any) -> str:
    """As SGLang does: the effort leaves the template's arguments."""
    effort = (request.chat_template_kwargs or {}).pop("reasoning_effort", None)
    request.reasoning_effort = request.reasoning_effort or effort
    return "processed"


def convert(serving: Any, request: Any, *_: Any) -> tuple[Any, Any]:
    http_hooks._process_messages(render, serving, request)
    return native(), request


def chat_label(request: SimpleNamespace) -> dict[str, Any]:
    adapted, _ = copy_context().run(http_hooks._convert_chat, convert, None, request)
    return adapted.sampling_params["custom_params"][RESOLVED_KEY]


@pytest.mark.parametrize("family", ["hy3"], indirect=True)
@pytest.mark.parametrize(
    ("request_fields", "mode"),
    [
        ({"chat_template_kwargs": {"reasoning_effort": "high"}}, "high-think"),
        ({"reasoning_effort": "high"}, "high-think"),
        ({"chat_template_kwargs": {"reasoning_effort": "no_think"}}, "no-think"),
        ({}, "no-think"),
        ({"reasoning_effort": "low"}, ""),  # a mode that no drafter is trained for
    ],
)
def test_hy3_thinks_as_its_effort_says(family: str, request_fields: dict[str, Any], mode: str) -> None:
    label = chat_label(chat(**request_fields))
    assert (label["mode"], label["workload"]) == (mode, "code")


@pytest.mark.parametrize("family", ["hy3"], indirect=True)
def test_a_drafter_of_the_mode_may_be_asked_for(family: str) -> None:
    label = chat_label(chat(reasoning_effort="high", custom_params={"route": "think"}))
    assert label["route"] == "think"
    with pytest.raises(ValueError, match="think"):
        chat_label(chat(custom_params={"route": "think"}))


@pytest.mark.parametrize("family", ["smollm2"], indirect=True)
def test_a_chat_that_comes_as_a_native_request_keeps_its_mode_and_workload(family: str) -> None:
    """``/v1/responses`` renders a chat and asks for its ids itself."""

    def respond() -> dict[str, Any]:
        request = chat("What is 17 * 23 + 4?", chat_template_kwargs={"enable_thinking": True})
        http_hooks._process_messages(render, None, request)
        obj = native()
        http_hooks._label_native(obj)
        return obj.sampling_params["custom_params"][RESOLVED_KEY]

    label = copy_context().run(respond)
    assert (label["mode"], label["workload"]) == ("high-think", "math")


@pytest.mark.parametrize("family", ["smollm2"], indirect=True)
@pytest.mark.parametrize(
    "wrong", [{"extra_key": ["a"]}, {"sampling_params": [{}, {}, {}]}, {"extra_key": ["a", "b", "c"]}]
)
def test_lists_of_wrong_lengths_are_left_to_sglangs_own_words(family: str, wrong: dict[str, Any]) -> None:
    obj = native(text=["one", "two"], input_ids=None, **wrong)
    before = obj.sampling_params
    http_hooks._label_native(obj)
    assert obj.sampling_params is before and not getattr(obj, "angelspec_labelled", False)


@pytest.mark.parametrize("family", ["smollm2"], indirect=True)
def test_a_native_request_is_read_by_its_text(family: str) -> None:
    obj = native(text="Write a Python function that reverses a string.", input_ids=None)
    http_hooks._label_native(obj)
    label = obj.sampling_params["custom_params"][RESOLVED_KEY]
    assert (label["mode"], label["workload"]) == ("no-think", "code")


@pytest.mark.parametrize("family", ["hy3"], indirect=True)
def test_prefixes_are_cached_apart_by_mode_alone(family: str) -> None:
    def key(extra_key: str | None = None, **label: Any) -> str:
        obj = native(sampling_params={"custom_params": label}, extra_key=extra_key)
        http_hooks._label_native(obj)
        return obj.extra_key

    default, high = key(), key(mode="high-think")
    assert key(mode="no-think", route="dfly", workload="math", dcut=0.5) == key(route="ar") == default
    assert key(mode="high-think", route="think") == high != default
    other, _ = copy_context().run(http_hooks._convert_chat, convert, None, chat(reasoning_effort="low"))
    assert other.extra_key not in (default, high)
    assert key("a client's") != default
    assert key("a client's") != key("a client's", mode="high-think")


@pytest.mark.parametrize("family", ["hy3"], indirect=True)
@pytest.mark.parametrize(("given", "one", "other"), [(None, None, None), ("a", "a", "a"), (["a", "b"], "a", "b")])
def test_every_prompt_of_a_list_is_cached_by_its_own_mode(family: str, given: Any, one: Any, other: Any) -> None:
    labels: list[dict[str, Any]] = [{"mode": "high-think"}, {}]
    batch = native(input_ids=[[1], [2]], sampling_params=[{"custom_params": one} for one in labels], extra_key=given)
    http_hooks._label_native(batch)
    singles = []
    for label, extra_key in zip(labels, (one, other), strict=True):
        single = native(sampling_params={"custom_params": label}, extra_key=extra_key)
        http_hooks._label_native(single)
        singles.append(single.extra_key)
    assert batch.extra_key == singles
    assert singles[0] != singles[1]
