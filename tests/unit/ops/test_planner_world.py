"""Estimates, costs, routing's expectation and D-cut together, in a seeded world (``tests/serving_world.py``).

Two promises: the planner is as fast as the best fixed depth from 0 to 7 (within 2 %), and never slower than plain
decoding (within 1 %), whatever drafts, verification and luck cost. Rates are expected tokens over seconds, so that the
tolerances are not eaten by chance. ``pytest -m slow`` runs the whole matrix.
"""

import functools
import random

import pytest
from serving_world import TABLES, FixedDepth, Planned, Request, requests_of, simulate

from angelspec.core.bundle import Bundle
from angelspec.core.estimates import Estimates
from angelspec.core.routing import expectations
from angelspec.ops.step_planner import StepPlanner

MIXTURES = {
    "few good": lambda rng: [rng.choice([0.1, 0.1, 0.1, 0.9])] * 7,
    "thirds": lambda rng: [rng.choice([0.1, 0.5, 0.9])] * 7,
    "falling": lambda rng: [rng.choice([0.5, 0.95]) * 0.9**k for k in range(7)],
}
DEPTHS = {"dfly": 7, "mtp": 3}


@functools.cache
def _table(name):
    return TABLES[name]()


def _planner(table, prior=None, depths=("dfly",)):
    """A planner that believes every proposal to be right with chance ``prior``; None: it knows nothing."""
    depths = {name: DEPTHS[name] for name in depths}
    measured = (
        {} if prior is None else {(name, "chat"): [prior**k for k in range(1, d + 1)] for name, d in depths.items()}
    )
    return Planned(StepPlanner(_table(table), Estimates(depths, measured=measured), depths=depths))


def _check(table, batch, chance, confidence, *, prior, tokens, warm_up, of_best=0.98, of_plain=0.99):
    make, costs = requests_of(MIXTURES.get(chance, chance), confidence=confidence), _table(table)
    outcome = simulate(_planner(table, prior), make=make, batch=batch, table=costs, tokens=tokens, warm_up=warm_up)
    plain, *fixed = (outcome.fixed_rate(depth, batch=batch, table=costs) for depth in range(8))
    best = max(plain, *fixed)
    assert outcome.rate >= of_best * best, f"{outcome.rate / best:.3f} of the best fixed depth"
    assert outcome.rate >= of_plain * plain, f"{outcome.rate / plain:.3f} of plain decoding"
    return outcome


QUICK = [
    ("cpu", 1, 0.1), ("cpu", 1, 0.5), ("cpu", 1, 0.9), ("cpu", 8, 0.1), ("cpu", 8, 0.5), ("cpu", 8, 0.7),
    ("cpu", 8, "thirds"), ("cpu", 64, 0.1), ("cpu", 64, 0.8), ("cheap", 8, 0.3), ("dear", 1, 0.8), ("dear", 8, 0.5),
]  # fmt: skip


@pytest.mark.parametrize(("table", "batch", "chance"), QUICK)
def test_as_fast_as_the_best_fixed_depth_and_never_slower_than_plain(table, batch, chance):
    """The bundle's measurement is right, and the confidences are overconfident and say nothing."""
    prior = chance if isinstance(chance, float) else None
    _check(table, batch, chance, "sure", prior=prior, tokens=2500 + 400 * batch, warm_up=100 * batch)


@pytest.mark.parametrize(
    ("prior", "chance"), [(0.05, 0.9), (0.95, 0.1), (0.95, 0.4), (0.3, 0.8)], ids=lambda value: str(value)
)
@pytest.mark.parametrize("batch", [1, 8])
def test_a_wrong_measurement_is_recovered_from(batch, prior, chance):
    """Confidences are noise, too, so that nothing helps but what is verified."""
    _check("cpu", batch, chance, "noise", prior=prior, tokens=2000 * batch, warm_up=800 * batch)


@pytest.mark.parametrize(("before", "after"), [(0.05, 0.9), (0.9, 0.05)])
def test_traffic_that_changes_is_found_out(before, after):
    """After many requests of one kind, all are of the other."""

    def make(rng, number):
        chance = before if number < 60 else after
        draft = [0.97] * 7, [chance] * 7
        return Request(number, max(16, round(rng.expovariate(1 / 150))), {"dfly": lambda step: draft}, (chance,) * 7)

    table = _table("cpu")
    outcome = simulate(_planner("cpu", before), make=make, batch=4, table=table, tokens=6000, warm_up=13_000)
    assert len(outcome.tokens_by_chances) == 1, "the change lies in the warm-up"
    best = max(outcome.fixed_rate(depth, batch=4, table=table) for depth in range(8))
    assert outcome.rate >= 0.98 * best, f"{outcome.rate / best:.3f} of the best fixed depth"


def test_depth_does_not_collapse():
    """All seven proposals pay; confidences of noise make the first steps cut most of them."""
    outcome = _check("dear", 4, 0.95, "noise", prior=0.95, tokens=4000, warm_up=3000)
    assert outcome.kept > 6 * outcome.drafted_rows


def test_noise_for_confidences_costs_little():
    _check("cpu", 8, 0.7, "noise", prior=0.7, tokens=6000, warm_up=800)


def test_confidences_that_know_beat_every_fixed_depth():
    """Half of the steps are easy and half hard: no fixed depth can tell, D-cut can."""
    make = requests_of(0.5, confidence="steps")
    fixed = max(
        simulate(FixedDepth(k), make=make, batch=8, table=_table("cpu"), tokens=4000).rate for k in (0, 2, 4, 6, 7)
    )
    planned = simulate(_planner("cpu", 0.5), make=make, batch=8, table=_table("cpu"), tokens=6000, warm_up=800)
    assert planned.rate > 1.1 * fixed


def test_a_mixture_is_faster_than_any_fixed_depth():
    outcome = _check("cpu", 8, "few good", "sure", prior=None, tokens=6000, warm_up=800, of_best=1.05)
    assert 0.02 < outcome.drafted_rows / outcome.rows < 0.5  # the good requests, which end sooner


def _two_drafters(rng, number):
    """Requests that suit one of two drafters, and no one knows which."""
    chances = {"dfly": 0.9, "mtp": 0.2} if rng.random() < 0.5 else {"dfly": 0.2, "mtp": 0.9}

    def propose(name):
        return lambda step: ([0.8] * DEPTHS[name], [chances[name]] * DEPTHS[name])

    return Request(number, max(16, round(rng.expovariate(1 / 150))), {name: propose(name) for name in DEPTHS})


def test_two_drafters_are_better_than_either():
    fixed = max(
        simulate(FixedDepth(k, name), make=_two_drafters, batch=8, table=_table("cpu"), tokens=4000).rate
        for name, k in [("dfly", 0), ("dfly", 3), ("dfly", 7), ("mtp", 2), ("mtp", 3)]
    )
    planner = _planner("cpu", depths=("dfly", "mtp"))
    planned = simulate(planner, make=_two_drafters, batch=8, table=_table("cpu"), tokens=8000, warm_up=800)
    assert planned.rate > 1.2 * fixed


def test_depth_does_not_flutter():
    """A steady request at a rate near the break-even: its drafter changes seldom."""
    planner = _planner("cpu", 0.47)
    make, table = requests_of(0.47, confidence="exact", length=100_000), _table("cpu")
    changes, last, steps = 0, None, 0
    choose = planner.draft

    def draft(running):
        nonlocal changes, last, steps
        chosen = choose(running)
        now = chosen[0] if 0 not in planner.step.probes else last
        changes += now != last
        last, steps = now, steps + 1
        return chosen

    planner.draft = draft
    simulate(planner, make=make, batch=1, table=table, tokens=3000)
    assert changes <= 0.02 * steps


@pytest.mark.parametrize("batch", [1, 8, 64])
def test_what_routing_expects_is_what_the_planner_gets(batch):
    """The route chosen by load when a request comes, and what the planner makes of a batch of its like."""
    costs, chance = _table("cpu"), {"dfly": 0.7, "mtp": 0.85}
    offers = [(name, [chance[name] ** k for k in range(1, DEPTHS[name] + 1)]) for name in DEPTHS]
    best = expectations(offers, costs=costs, batch_size=batch)[0]

    def make(rng, number):
        drafts = {
            name: (lambda step, name=name: ([chance[name]] * DEPTHS[name], [chance[name]] * DEPTHS[name]))
            for name in DEPTHS
        }
        return Request(number, max(16, round(rng.expovariate(1 / 150))), drafts)

    bundle = Bundle.model_validate(
        {
            "target": {"source": "x"},
            "drafters": [
                {"name": name, "source": "x", "family": "mtp" if name == "mtp" else "block", "mode": "no-think",
                 "depth": DEPTHS[name]} for name in DEPTHS
            ],
            "acceptance": [
                {"drafter": name, "workload": "chat", "cumulative": cumulative, "steps": 500}
                for name, cumulative in offers
            ],
        }
    )  # fmt: skip
    planner = Planned(StepPlanner.of(bundle, costs))
    outcome = simulate(planner, make=make, batch=batch, table=costs, tokens=1500 + 300 * batch)
    assert outcome.rate == pytest.approx(best.tokens_per_second, rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("confidence", ["sure", "exact", "noise"])
@pytest.mark.parametrize("chance", [0.1, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, *MIXTURES])
@pytest.mark.parametrize("batch", [1, 2, 4, 8, 16, 32, 64])
@pytest.mark.parametrize("table", TABLES)
def test_the_whole_matrix(table, batch, chance, confidence):
    """From a right measurement where there is one number to measure, and soon after the start.

    Where the best fixed depth is hardly better than plain decoding, and only if most of the batch is drafted for, what
    confidences are worth is learnt from few probes: that costs up to 5 % of the best depth's rate, and nothing of
    plain decoding's, for some ten thousand tokens (``test_in_the_long_run``).
    """
    prior = chance if isinstance(chance, float) else None
    tokens, warm_up = 4000 + 400 * batch, 300 * batch
    _check(table, batch, chance, confidence, prior=prior, tokens=tokens, warm_up=warm_up, of_best=0.95)


@pytest.mark.slow
@pytest.mark.parametrize("confidence", ["sure", "exact", "noise"])
@pytest.mark.parametrize(
    ("table", "batch", "chance"),
    [("cpu", 16, 0.5), ("cpu", 64, 0.5), ("dear", 1, 0.7), ("dear", 2, 0.8), ("dear", 8, 0.9), ("dear", 16, 0.95)],
)
def test_in_the_long_run(table, batch, chance, confidence):
    """The cells of the matrix that take longest to learn; a lone request's bad luck may still cost 3 %."""
    tokens, warm_up = 6000, 20_000 + 1000 * batch
    _check(table, batch, chance, confidence, prior=chance, tokens=tokens, warm_up=warm_up, of_best=0.97)


@pytest.mark.parametrize("depth", [0, 3, 7])
def test_what_a_fixed_depth_makes_of_the_tokens_it_served(depth):
    """The rate that the planner is compared with, against a run of that very policy."""
    make, table = requests_of(MIXTURES["thirds"], length=400), _table("cpu")
    run = simulate(FixedDepth(depth), make=make, batch=4, table=table, tokens=4000)
    assert run.fixed_rate(depth, batch=4, table=table) == pytest.approx(run.rate)
    assert len(run.tokens_by_chances) == 3


def test_the_world_is_the_same_for_every_policy():
    make = requests_of(lambda rng: [rng.random()] * 7)
    first, again = (make(random.Random("0:5"), 5) for _ in range(2))
    draws = [request.drafts["dfly"](random.Random(1)) for request in (first, again)]
    assert first.length == again.length and draws[0] == draws[1]
    runs = [simulate(FixedDepth(3), make=make, batch=4, table=_table("cpu"), tokens=500) for _ in range(2)]
    assert runs[0] == runs[1]
