"""Which drafters may serve a request: what it asks for, then the bundle's rules, then load."""

import pytest

from angelspec.core.bundle import Bundle
from angelspec.core.errors import RequestError
from angelspec.core.request_label import RequestLabel
from angelspec.core.routing import choose_route, expectations
from angelspec.core.step_costs import DraftPoint, StepCosts, VerifyPoint


def _costs(*, slot=0.002, block=(0.02, 0.003), mtp=(0.012, 0.003)):
    """Plain: 0.05 + 0.01 a row; a slot more: ``slot``; drafting: fixed and per row."""
    return StepCosts(
        verification=tuple(
            VerifyPoint(batch_size=b, slots=b * w, seconds=0.05 + 0.01 * b + slot * b * (w - 1))
            for b in (1, 8, 32)
            for w in range(1, 9)
        ),
        drafting={
            name: tuple(DraftPoint(rows=b, seconds=fixed + row * b) for b in (1, 8, 32))
            for name, (fixed, row) in {"dfly": block, "mtp": mtp, "think": block}.items()
        },
    )


def _bundle(**changes):
    document = {
        "target": {"source": "x", "mode_family": "smollm2"},
        "drafters": [
            {"name": "mtp", "source": "x", "family": "mtp", "mode": "no-think", "depth": 3},
            {"name": "dfly", "source": "x", "family": "block", "algorithm": "dfly", "mode": "no-think", "depth": 7},
            {"name": "think", "source": "x", "family": "block", "algorithm": "dfly", "mode": "high-think", "depth": 7},
        ],
        "acceptance": [
            {"drafter": "mtp", "workload": "chat", "cumulative": [0.8, 0.6, 0.4], "steps": 100},
            {"drafter": "dfly", "workload": "chat", "cumulative": [0.8, 0.65, 0.5, 0.4, 0.3, 0.2, 0.15], "steps": 100},
            {"drafter": "dfly", "workload": "code", "cumulative": [0.95] * 7, "steps": 100},
        ],
    }
    return Bundle.model_validate({**document, **changes})


def _route(bundle=None, label=None, *, costs="default", workload="chat", mode="no-think", batch_size=1):
    return choose_route(
        bundle or _bundle(),
        label or RequestLabel(),
        workload=workload,
        mode=mode,
        batch_size=batch_size,
        costs=_costs() if costs == "default" else costs,
    )


def test_a_request_is_given_what_it_asks_for():
    route = _route(label=RequestLabel(route="dfly", ratio=0.5))
    assert (route.drafters, route.forced, route.ratio) == (("dfly",), True, 0.5)
    assert route.why == "asked for by the request"
    plain = _route(label=RequestLabel(route="ar"))
    assert (plain.drafters, plain.forced) == ((), False)


def test_a_route_may_be_an_algorithm_or_a_family_of_the_requests_mode():
    assert _route(label=RequestLabel(route="block")).drafters == ("dfly",)
    assert _route(label=RequestLabel(route="block"), mode="high-think").drafters == ("think",)
    assert _route(label=RequestLabel(route="mtp")).drafters == ("mtp",)


def test_routes_that_cannot_be_given_are_refused():
    with pytest.raises(RequestError, match=r"'dfyl' does not exist \(did you mean .dfly.\?\)\n  mend: use one of"):
        _route(label=RequestLabel(route="dfyl"))
    with pytest.raises(RequestError, match="'dfly' is trained for no-think, but the request runs in high-think"):
        _route(label=RequestLabel(route="dfly"), mode="high-think")
    with pytest.raises(RequestError, match="in another mode"):
        _route(label=RequestLabel(route="mtp"), mode=None)


def test_the_bundles_rules_come_before_load_and_do_not_force():
    bundle = _bundle(routes=[{"workload": "chat", "route": "mtp"}, {"workload": "math", "route": "ar"}])
    route = _route(bundle)
    assert (route.drafters, route.forced) == (("mtp",), False)
    assert route.why == "the bundle routes chat to mtp"
    assert _route(bundle, workload="math").drafters == ()
    assert set(_route(bundle, workload="code").drafters) == {"mtp", "dfly"}
    assert _route(bundle, mode="high-think").drafters == (
        "think",
    )  # a rule's drafter of another mode is no rule for it
    auto = _bundle(routes=[{"workload": "chat", "route": "auto"}, {"route": "mtp"}])
    assert set(_route(auto).drafters) == {"mtp", "dfly"}


def test_load_decides_among_the_drafters_of_the_mode():
    alone = _route(costs=_costs(slot=0.0005, block=(0.012, 0.02)))
    assert alone.drafters == ("dfly", "mtp") and "chat at 1 row: dfly " in alone.why
    crowded = _route(costs=_costs(slot=0.0005, block=(0.012, 0.02)), batch_size=32)
    assert crowded.drafters == ("mtp", "dfly")
    assert "chosen step by step; expected for chat at 32 rows: mtp " in crowded.why


def test_plain_decoding_is_a_choice_like_the_others():
    dear = _route(costs=_costs(slot=0.05))
    assert set(dear.drafters) == {"mtp", "dfly"}
    assert "row: ar " in dear.why


def test_the_workload_counts():
    costs = _costs(slot=0.004, block=(0.03, 0.003), mtp=(0.005, 0.001))
    assert _route(costs=costs, workload="chat").drafters[0] == "mtp"
    assert _route(costs=costs, workload="code").drafters[0] == "dfly"
    assert "expected for math" in _route(costs=costs, workload="math").why  # not measured: the mean of what was


def test_what_is_not_known_is_said():
    assert _route(mode=None).why == "no drafter is trained for this mode"
    assert _route(costs=None).why == "step costs are not measured"
    assert _route(batch_size=500).why == "step costs are not measured for 500 rows"
    unmeasured = _route(_bundle(acceptance=[]))
    assert unmeasured.drafters == ("mtp", "dfly") and "acceptance is not measured" in unmeasured.why


def test_expectations_are_the_best_depth_of_each():
    best, *_ = expectations([("mtp", [0.9, 0.0, 0.0])], costs=_costs(), batch_size=1)
    assert best.drafter == "mtp" and best.depth == 1
    assert best.tokens_per_second == pytest.approx(1.9 / (0.05 + 0.01 + 0.002 + 0.015))


def test_the_cut_of_the_bundle_holds_unless_the_request_says_otherwise():
    bundle = _bundle(dcut={"ratio": 1.0})
    assert _route(bundle).ratio == 1.0
    assert _route(bundle, RequestLabel(ratio=0.25)).ratio == 0.25
    assert _route().ratio is None
