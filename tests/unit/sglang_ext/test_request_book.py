"""How requests are taken in: labels, routes, what forbids drafting, and records that outlive nobody."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from angelspec.core.bundle import Bundle, parse_bundle
from sglang_ext import requests as book_module
from sglang_ext.requests import RESOLVED_KEY, RequestBook, plain_reason


@pytest.fixture
def bundle() -> Bundle:
    drafters = [
        {"name": "mtp", "source": "./a", "family": "mtp", "mode": "no-think", "depth": 3},
        {"name": "dfly", "source": "./b", "family": "block", "mode": "no-think", "depth": 7},
        {"name": "think", "source": "./c", "family": "block", "mode": "high-think", "depth": 7},
    ]
    return parse_bundle({"target": {"source": "./t", "mode_family": "smollm2"}, "drafters": drafters}, where="test")


def params(**changes: Any) -> SimpleNamespace:
    facts = {
        "custom_params": None, "frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0,
        "min_new_tokens": 0,
    }  # fmt: skip
    return SimpleNamespace(**{**facts, **changes})


def request(rid: str, *, grammar: Any = None, **changes: Any) -> SimpleNamespace:
    return SimpleNamespace(
        rid=rid, sampling_params=params(**changes), grammar=grammar, custom_logit_processor=None,
        finished=lambda: False,
    )  # fmt: skip


def test_a_label_decides_and_the_mode_chooses_the_drafters(bundle: Bundle) -> None:
    book = RequestBook(bundle)
    rows, new = book.rows(
        [
            request("a", custom_params={"route": "dfly", "workload": "code"}),
            request("b", custom_params={"mode": "high-think"}),
            request("c"),
        ],
        costs=None,
    )
    assert new == rows
    assert (rows[0].route.drafters[0], rows[0].route.forced, rows[0].workload) == ("dfly", True, "code")
    assert rows[0].states_of == rows[2].states_of == ("mtp", "dfly")
    assert (rows[1].mode, rows[1].states_of) == ("high-think", ("think",))
    assert book.rows([request("d")], costs=None)[1] and len(book) == 4


def test_what_the_http_process_found_is_taken(bundle: Bundle) -> None:
    label = {"workload": "math", "mode": "high-think", "route": "auto", "dcut": 0.5}
    ((row,), _) = RequestBook(bundle).rows([request("a", custom_params={RESOLVED_KEY: label})], costs=None)
    assert (row.workload, row.mode, row.route.ratio) == ("math", "high-think", 0.5)


def test_a_label_that_is_wrong_is_served_plainly(bundle: Bundle) -> None:
    ((row,), _) = RequestBook(bundle).rows([request("a", custom_params={"route": "nobody"})], costs=None)
    assert row.route.drafters == () and "nobody" in row.record.why


@pytest.mark.parametrize(
    "changes",
    [{"frequency_penalty": 0.1}, {"presence_penalty": -0.1}, {"repetition_penalty": 1.1}, {"min_new_tokens": 3}],
)
def test_what_depends_on_the_output_forbids_drafting_but_not_the_states(bundle: Bundle, changes: dict) -> None:
    ((row,), _) = RequestBook(bundle).rows([request("a", **changes)], costs=None)
    assert row.plain_because is not None
    assert row.states_of == ("mtp", "dfly"), "others may find its prefix in the cache"


def test_grammars_forbid_drafting() -> None:
    assert plain_reason(params(), has_grammar=True, has_processor=False)
    assert plain_reason(params(), has_grammar=False, has_processor=True)
    assert plain_reason(params(), has_grammar=False, has_processor=False) is None


def test_an_id_that_is_used_again_is_another_request(bundle: Bundle) -> None:
    book = RequestBook(bundle)
    first = request("same")
    (old,), _ = book.rows([first], costs=None)
    (kept,), new = book.rows([first], costs=None)
    assert kept is old and new == []
    (other,), new = book.rows([request("same", grammar=object())], costs=None)
    assert new == [other] and other is not old
    assert other.plain_because is not None


def test_requests_whose_end_nobody_told_are_forgotten(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(book_module, "_KEEP_IDLE", 20)
    monkeypatch.setattr(book_module, "_LOOK_EVERY", 5)
    book, running = RequestBook(bundle), request("running")
    book.rows([running, request("lost")], costs=None)
    forgotten = []
    for _ in range(40):
        book.rows([running], costs=None)
        forgotten += [known.rid for known in book.forget_idle()]
    assert forgotten == ["lost"]
    assert [known.rid for known in book] == ["running"]
    assert book.finish("running") is not None and book.finish("running") is None


def test_requests_that_end_with_their_first_token_are_not_kept(bundle: Bundle) -> None:
    book = RequestBook(bundle)
    running, classified = request("running"), request("classified")
    book.rows([running, classified], costs=None)
    classified.finished = lambda: True
    forgotten = []
    for _ in range(32):
        book.rows([running], costs=None)
        forgotten += [known.rid for known in book.forget_idle()]
    assert forgotten == ["classified"] and [known.rid for known in book] == ["running"]
    first = request("first")
    book.rows([first], costs=None)
    assert book.forget_idle(now=True) == []
    first.finished = lambda: True
    assert [known.rid for known in book.forget_idle(now=True)] == ["first"]
