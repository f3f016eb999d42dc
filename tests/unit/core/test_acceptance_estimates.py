"""Estimates of a request's acceptance, and the budget for finding out."""

import pytest

from angelspec.core.calibration import evidence
from angelspec.core.estimates import SWITCH_DISCOUNT, Estimates, ProbeBudget

CONFIDENT = evidence([0.9] * 3)


def _estimates(**changes):
    return Estimates({"mtp": 3, "dfly": 5}, **changes)


def _draft(estimates, request="a", *, drafted=CONFIDENT, verified=3, accepted=3, times=1, drafter="mtp"):
    for _ in range(times):
        estimates.observe(request, drafter, drafted, verified=verified, accepted=accepted)


def test_a_new_request_starts_from_what_was_measured():
    estimates = _estimates(measured={("mtp", "code"): [0.8, 0.6, 0.5]})
    estimates.open("a", workload="code", drafters=("mtp",))
    assert estimates.survivals("a", "mtp") == [0.8, 0.6, 0.5]


def test_positions_that_were_not_measured_continue_and_never_rise():
    estimates = _estimates(measured={("dfly", "code"): [0.8, 0.6]})
    estimates.open("a", workload="code", drafters=("dfly", "mtp"))
    survivals = estimates.survivals("a", "dfly")
    assert len(survivals) == 5 and survivals[:2] == [0.8, 0.6]
    assert survivals == sorted(survivals, reverse=True) and 0 < survivals[4] < 0.2
    assert len(estimates.survivals("a", "mtp")) == 3


def test_it_follows_what_happens_to_the_request():
    estimates = _estimates(measured={("mtp", "chat"): [0.5, 0.25, 0.125]})
    for request in ("good", "bad"):
        estimates.open(request, workload="chat", drafters=("mtp",))
    _draft(estimates, "good", times=25)
    _draft(estimates, "bad", times=25, accepted=0)
    good, bad = estimates.survivals("good", "mtp"), estimates.survivals("bad", "mtp")
    assert good[2] > 0.75 and bad[0] < 0.15
    assert all(1 >= a >= b >= 0 for s in (good, bad) for a, b in zip(s, s[1:], strict=False))


def test_a_cut_says_nothing_about_what_was_cut():
    cut, whole = _estimates(), _estimates()
    for estimates in (cut, whole):
        estimates.open("a", workload="chat", drafters=("mtp",))
    _draft(cut, verified=1, accepted=1, times=30)
    _draft(whole, verified=3, accepted=1, times=30)  # the second proposal is always wrong
    assert cut.survivals("a", "mtp")[2] > 0.5
    assert whole.survivals("a", "mtp")[1] < 0.3


def test_weak_drafts_are_weak_even_if_they_are_never_verified():
    """Only strong drafts are verified; what a draft is worth is the mean over all."""
    estimates = _estimates()
    estimates.open("a", workload="chat", drafters=("mtp",))
    weak = evidence([0.05] * 3)
    for _ in range(30):
        _draft(estimates)
        _draft(estimates, drafted=weak, verified=0, accepted=0)
    assert estimates.survivals("a", "mtp")[0] == pytest.approx(0.5, abs=0.1)


def test_peers_start_from_what_others_showed_and_each_counts_a_little():
    estimates = _estimates(measured={("mtp", "chat"): [0.9, 0.8, 0.7]})
    for number in range(40):
        estimates.open(f"r{number}", workload="chat", drafters=("mtp",))
        _draft(estimates, f"r{number}", times=6, accepted=0)
        estimates.close(f"r{number}")
    estimates.open("new", workload="chat", drafters=("mtp",))
    assert estimates.survivals("new", "mtp")[0] < 0.2
    estimates.open("other", workload="code", drafters=("mtp",))
    assert estimates.survivals("other", "mtp")[0] > 0.5  # another workload has other peers


def test_one_long_request_does_not_speak_for_its_peers():
    estimates = _estimates(measured={("mtp", "chat"): [0.2, 0.1, 0.05]})
    estimates.open("long", workload="chat", drafters=("mtp",))
    _draft(estimates, "long", times=8)
    estimates.open("before", workload="chat", drafters=("mtp",))
    _draft(estimates, "long", times=500)
    estimates.open("after", workload="chat", drafters=("mtp",))
    assert estimates.survivals("after", "mtp") == estimates.survivals("before", "mtp")
    assert estimates.survivals("long", "mtp")[0] > 0.9


def test_a_change_of_drafter_needs_an_advantage():
    estimates = _estimates(measured={("mtp", "chat"): [0.8] * 3, ("dfly", "chat"): [0.8] * 5})
    estimates.open("a", workload="chat", drafters=("mtp", "dfly"))
    assert estimates.survivals("a", "dfly")[0] == 0.8  # a fresh request uses none yet
    _draft(estimates)
    assert estimates.survivals("a", "dfly")[0] == pytest.approx(0.8 * (1 - SWITCH_DISCOUNT))
    estimates.observe_plain("a")
    undiscounted = estimates.survivals("a", "mtp")[0] / (1 - SWITCH_DISCOUNT)
    _draft(estimates, verified=0, accepted=0)
    assert estimates.survivals("a", "mtp")[0] == pytest.approx(undiscounted, abs=0.05)


def test_how_long_ago_a_drafter_was_asked():
    estimates = _estimates()
    estimates.open("a", workload="chat", drafters=("mtp", "dfly"))
    assert estimates.last_drafted("a", "mtp") == (True, 0)
    estimates.observe_plain("a")
    _draft(estimates)
    estimates.observe_plain("a")
    assert estimates.last_drafted("a", "mtp") == (False, 1)
    assert estimates.last_drafted("a", "dfly") == (True, 3)


def test_requests_that_ended_are_ignored():
    estimates = _estimates()
    estimates.open("a", workload="chat", drafters=("mtp",))
    estimates.close("a")
    estimates.close("a")
    estimates.observe_plain("a")
    _draft(estimates)


def test_what_was_learnt_about_confidences_goes_back_to_the_bundle():
    estimates = _estimates()
    estimates.open("a", workload="chat", drafters=("mtp",))
    _draft(estimates, accepted=0, times=50)
    stored = estimates.calibration("mtp")
    assert stored.outcomes == 50
    again = _estimates(calibrations={"mtp": stored})
    again.open("b", workload="chat", drafters=("mtp",))
    assert again.acceptance("b", "mtp", CONFIDENT)[0] < 0.3


def test_the_budget_spends_a_share_and_is_repaid():
    budget = ProbeBudget(share=0.01)
    budget.earn(8.0, batch_size=8)
    assert budget.affords(10.0) and not budget.affords(13.0)  # a reserve to begin with, in proportion to the batch
    budget.spend(12.0)
    assert not budget.affords(0.1)
    for _ in range(9):
        budget.earn(8.0, batch_size=8)
    assert budget.affords(0.7) and not budget.affords(0.75)
    budget.spend(0.7 - 3)
    assert budget.affords(2.9)
