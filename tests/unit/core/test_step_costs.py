"""Step costs as a sum of measured parts: interpolation, what is not known, and the fit to whole steps."""

import pytest
from pydantic import ValidationError

from angelspec.core.step_costs import DraftPoint, MeasuredFor, StepCosts, VerifyPoint


def _costs(**changes):
    verification = [
        VerifyPoint(batch_size=batch, slots=batch * width, seconds=batch * (1 + 0.1 * (width - 1)))
        for batch in (1, 4, 8)
        for width in (1, 4, 8)
    ]
    drafting = {
        "dfly": [DraftPoint(rows=1, seconds=0.5), DraftPoint(rows=8, seconds=1.2)],
        "mtp": [DraftPoint(rows=4, seconds=0.4)],
    }
    return StepCosts.model_validate({"verification": verification, "drafting": drafting, **changes})


def test_profiled_points_are_exact_and_between_them_it_is_linear():
    costs = _costs()
    assert costs.verify_seconds(4, 16) == pytest.approx(4 * 1.3)
    assert costs.verify_seconds(4, 8) == pytest.approx(4 * 1.1)  # width 2 of 1 and 4
    assert costs.verify_seconds(6, 6 * 4) == pytest.approx(6 * 1.3)  # batch 6 of 4 and 8, at equal width
    assert costs.draft_seconds("dfly", 1) == 0.5
    assert costs.draft_seconds("dfly", 3) == pytest.approx(0.5 + 0.7 * 2 / 7)
    assert costs.draft_seconds("dfly", 0) == 0.0


def test_beyond_the_profile_the_last_slope_goes_on_for_a_while():
    costs = _costs()
    assert costs.verify_seconds(16, 16) == pytest.approx(16)
    assert costs.verify_seconds(4, 4 * 10) == pytest.approx(4 * 1.9)
    assert costs.draft_seconds("dfly", 16) == pytest.approx(2.0)
    assert costs.verify_seconds(17, 17) is None
    assert costs.draft_seconds("dfly", 17) is None
    assert costs.draft_seconds("mtp", 2) == 0.4  # below the only point: its seconds, not less


def test_a_falling_end_is_not_extrapolated_downwards():
    costs = _costs(drafting={"dfly": [DraftPoint(rows=1, seconds=2.0), DraftPoint(rows=2, seconds=1.0)]})
    assert costs.draft_seconds("dfly", 4) == 1.0


def test_a_whole_step_is_the_sum_of_its_parts():
    costs = _costs()
    whole = costs.seconds(8, drafted={"dfly": 3, "mtp": 4}, slots=32)
    assert whole == pytest.approx(costs.draft_seconds("dfly", 3) + 0.4 + 8 * 1.3)
    assert costs.seconds(8, drafted={}, slots=8) == pytest.approx(8.0)
    assert costs.seconds(8, drafted={"unknown": 1}, slots=16) is None
    assert StepCosts().seconds(1, drafted={}, slots=1) is None


def test_tiers_cost_what_they_are_padded_to():
    costs = _costs(tiers=(4, 16, 32))
    assert costs.verify_seconds(4, 5) == costs.verify_seconds(4, 16) == pytest.approx(4 * 1.3)
    assert costs.verify_seconds(4, 4) == pytest.approx(4)
    assert costs.verify_seconds(8, 40) == pytest.approx(8 * 1.4)  # beyond the last tier: as it is
    small = _costs(tiers=(4, 16, 32), tiers_up_to=4)
    assert small.verify_seconds(4, 5) == costs.verify_seconds(4, 16)
    assert small.verify_seconds(8, 20) < small.verify_seconds(8, 32) == costs.verify_seconds(8, 20)


def test_refusals():
    with pytest.raises(ValidationError, match="anchors"):
        VerifyPoint(batch_size=4, slots=3, seconds=1.0)
    with pytest.raises(ValidationError, match="plain step"):
        _costs(verification=[VerifyPoint(batch_size=2, slots=4, seconds=1.0)])
    with pytest.raises(ValidationError, match=r"drafting\.dfly: measured twice"):
        _costs(drafting={"dfly": [DraftPoint(rows=1, seconds=1.0), DraftPoint(rows=1, seconds=2.0)]})
    with pytest.raises(ValidationError, match="no points"):
        _costs(drafting={"dfly": []})
    with pytest.raises(ValidationError, match="ascending"):
        _costs(tiers=(8, 4))
    with pytest.raises(ValidationError):
        _costs(verfication=[])


def test_costs_hold_for_what_they_were_measured_for():
    here = MeasuredFor(
        hardware="2 cores", engine="sglang 0.5.23", target="ab", drafters={"dfly": "cd"}, flags={"tp": 1}
    )
    there = here.model_copy(update={"hardware": "4 cores", "flags": {"tp": 1, "dtype": "float32"}})
    assert here.differences(here) == [] and here.fingerprint == here.model_copy().fingerprint
    assert here.fingerprint != there.fingerprint
    assert here.differences(there) == [
        "flags.dtype was absent, is float32",
        "hardware was 2 cores, is 4 cores",
    ]


def test_round_trip():
    costs = _costs(measured_for=MeasuredFor(hardware="x", engine="y", target="z"), tiers=(8, 16))
    assert StepCosts.model_validate_json(costs.model_dump_json()) == costs
