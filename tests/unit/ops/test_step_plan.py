"""The plan of one step, against exhaustive search and by worked examples."""

import itertools
import random

import pytest

from angelspec.core.step_costs import DraftPoint, StepCosts, VerifyPoint
from angelspec.ops.dcut import FALLBACK_RATIO, RATIOS
from angelspec.ops.step_plan import CostCurves, DraftPlan, Row, fixed_cut, plan_drafting, plan_verification


def _curves(*, row=0.01, slot=0.002, fixed=0.05, block=(0.02, 0.001), mtp=(0.01, 0.001), depth=7, **changes):
    batches = (1, 4, 16)
    return CostCurves(
        StepCosts(
            verification=tuple(
                VerifyPoint(batch_size=b, slots=b * w, seconds=fixed + row * b + slot * b * (w - 1))
                for b in batches
                for w in range(1, depth + 2)
            ),
            drafting={
                name: tuple(DraftPoint(rows=b, seconds=start + each * b) for b in batches)
                for name, (start, each) in {"dfly": block, "mtp": mtp}.items()
            },
            **changes,
        ),
        depth=depth,
    )


def _row(chance, *, depth=7, name="dfly", **more):
    return Row({name: [chance**k for k in range(1, depth + 1)], **more})


def _exhaustive(rows, costs):
    """The best rate over every assignment and every K."""
    best, plain = 0.0, costs.verify(len(rows))
    for drafters in itertools.product(*[[None, *row.survivals] for row in rows]):
        counts = {name: drafters.count(name) for name in set(drafters) - {None}}
        offered = sorted(
            (s for row, name in zip(rows, drafters, strict=True) if name for s in row.survivals[name]), reverse=True
        )
        for kept in range(len(offered) + 1):
            rate = (len(rows) + sum(offered[:kept])) / (costs.draft(counts) + plain[kept])
            best = max(best, rate)
    return best


def _rate(plan):
    return plan.expected_tokens / plan.seconds


def test_a_batch_that_gains_nothing_decodes_plainly():
    plan = plan_drafting([_row(0.1)] * 4, costs=_curves())
    assert plan.drafters == (None,) * 4 and plan.drafted == {}
    assert plan.expected_tokens == 4 and plan.seconds == pytest.approx(0.09)


def test_a_batch_that_gains_is_drafted_for():
    plan = plan_drafting([_row(0.9)] * 4, costs=_curves())
    assert plan.drafters == ("dfly",) * 4 and plan.drafted == {"dfly": 4}
    assert plan.expected_tokens == pytest.approx(4 * sum(0.9**k for k in range(8)))


def test_only_the_rows_that_are_worth_it_are_drafted_for():
    rows = [_row(0.05), _row(0.9), _row(0.05), _row(0.9)]
    assert plan_drafting(rows, costs=_curves(block=(0.002, 0.02))).drafters == (None, "dfly", None, "dfly")
    assert plan_drafting(rows, costs=_curves(block=(0.02, 0.0))).drafters.count("dfly") >= 2
    rows = [_row(0.9)] * 3 + [_row(0.05)] * 5
    assert plan_drafting(rows, costs=_curves(slot=0.0002, block=(0.002, 0.02))).drafters == ("dfly",) * 3 + (None,) * 5


def test_a_row_whose_cut_is_bound_is_planned_at_that_cut():
    """Two proposals pay and five do not: with the cut off the step would be slower than plain decoding."""
    survivals, costs = {"dfly": [0.9, 0.7, 0.0, 0.0, 0.0, 0.0, 0.0]}, _curves(slot=0.01)
    assert plan_drafting([Row(survivals)] * 4, costs=costs).drafters == ("dfly",) * 4
    assert plan_drafting([Row(survivals, ratio=1.0)] * 4, costs=costs).drafters == (None,) * 4
    assert plan_drafting([Row(survivals, ratio=0.25)] * 4, costs=costs).drafters == ("dfly",) * 4


@pytest.mark.parametrize("ratios", [None, RATIOS])
@pytest.mark.parametrize("ratio", [0.25, 0.5, 1.0])
def test_what_is_foretold_of_bound_rows_is_what_the_cut_verifies(ratio, ratios):
    """Bound and free rows mixed, all forced: tokens and seconds of phase 2 with the estimates as confidences."""
    costs, chances = _curves(slot=0.004), [0.9, 0.5, 0.8, 0.3]
    rows = [
        Row({"dfly": [chance**k for k in range(1, 8)]}, forced=True, ratio=ratio if number % 2 else None)
        for number, chance in enumerate(chances)
    ]
    plan = plan_drafting(rows, costs=costs, ratios=ratios)
    acceptance, depths, owed = [[chance] * 7 for chance in chances], [7] * 4, [0] * 4
    kept = fixed_cut([acceptance[i] for i in (1, 3)], depths=[7, 7], ratio=ratio)
    for i, number in zip((1, 3), kept, strict=True):
        acceptance[i], depths[i], owed[i] = acceptance[i][:number], number, number
    seen = plan_verification(acceptance, depths=depths, drafted={"dfly": 4}, costs=costs, ratios=ratios, owed=owed)
    assert plan.expected_tokens == pytest.approx(seen.expected_tokens, rel=1e-6)
    slots = 4 + int(seen.kept_B.sum())
    assert plan.seconds == pytest.approx(costs.seconds(4, drafted={"dfly": 4})(4, slots), rel=1e-6)


def test_each_row_has_its_own_drafter():
    row = {"dfly": [0.9] * 7, "mtp": [0.2] * 3}
    other = {"dfly": [0.05] * 7, "mtp": [0.95] * 3}
    assert plan_drafting([Row(row), Row(other)], costs=_curves()).drafters == ("dfly", "mtp")


def test_a_drafter_whose_start_is_dear_is_shared_or_left_out():
    row = {"dfly": [0.9**k for k in range(1, 8)], "mtp": [0.85**k for k in range(1, 4)]}
    plan = plan_drafting([Row(row)] + [_row(0.85, depth=3, name="mtp")] * 3, costs=_curves(block=(0.5, 0.0)))
    assert plan.drafters == ("mtp",) * 4


def test_forced_rows_are_drafted_for_by_their_best_drafter_whatever_it_costs():
    hopeless = Row({"dfly": [0.01] * 7, "mtp": [0.02] * 3}, forced=True)
    plan = plan_drafting([hopeless, _row(0.001), Row()], costs=_curves())
    assert plan.drafters == ("dfly", None, None)
    assert plan_drafting([Row(forced=True)], costs=_curves()).drafters == (None,)


def test_rows_without_a_drafter_decode_plainly():
    assert plan_drafting([Row(), _row(0.9)], costs=_curves()).drafters == (None, "dfly")
    assert plan_drafting([Row()], costs=_curves()).drafters == (None,)


def test_where_costs_are_not_known_only_forced_rows_are_drafted_for():
    unknown = CostCurves(StepCosts(), depth=7)
    rows = [_row(0.9), Row({"dfly": [0.9] * 7}, forced=True)]
    plan = plan_drafting(rows, costs=unknown)
    assert plan.drafters == (None, "dfly") and plan.seconds is None
    other = Row({"other": [0.99] * 7})
    assert plan_drafting([other, other], costs=_curves()).drafters == (None, None)


@pytest.mark.parametrize("seed", range(12))
def test_close_to_exhaustive_search(seed):
    rng = random.Random(seed)
    costs = _curves(
        slot=rng.choice([0.0002, 0.002, 0.008]),
        block=(rng.choice([0.002, 0.03]), rng.choice([0.0005, 0.004])),
        mtp=(rng.choice([0.001, 0.02]), rng.choice([0.0005, 0.002])),
        depth=3,
    )
    rows = []
    for _ in range(4):
        offers = {"dfly": [rng.random() ** 0.5] * 3, "mtp": [rng.random() ** 0.5] * 2}
        rows.append(
            Row({name: [s[0] ** k for k in range(1, len(s) + 1)] for name, s in offers.items() if rng.random() < 0.8})
        )
    best = _exhaustive(rows, costs)
    assert 0.99 * best <= _rate(plan_drafting(rows, costs=costs)) <= best * (1 + 1e-9)


def test_the_plan_knows_the_grid():
    costs = _curves(slot=0.012)
    free, coarse = (plan_drafting([_row(0.8)], costs=costs, ratios=ratios) for ratios in (None, (1.0,)))
    assert _rate(coarse) < _rate(free)
    assert coarse.drafters == (None,) or coarse.expected_tokens == pytest.approx(sum(0.8**k for k in range(8)))


def test_verification_is_cut_at_what_pays_and_drafting_is_sunk():
    costs = _curves(slot=0.02)
    cut = plan_verification([[0.9, 0.9, 0.1, 0.9], []], depths=[7, 0], drafted={"dfly": 1}, costs=costs)
    assert cut.kept_B.tolist() == [2, 0]
    sunk = plan_verification([[0.3]], depths=[1], drafted={"dfly": 1}, costs=_curves(slot=0.001))
    assert sunk.kept_B.tolist() == [1]  # not worth a draft, but worth a slot


def test_verification_with_a_grid_and_with_rows_that_are_owed():
    costs = _curves(slot=0.05)
    acceptance = [[0.1] * 7, [0.1] * 3, []]
    counts = {"dfly": 1, "mtp": 1}
    none = plan_verification(acceptance, depths=[7, 3, 0], drafted=counts, costs=costs)
    assert none.kept_B.tolist() == [0, 0, 0]
    owed = plan_verification(acceptance, depths=[7, 3, 0], drafted=counts, costs=costs, owed=[0, 2, 0])
    assert owed.kept_B.tolist() == [0, 2, 0]
    grid = plan_verification(acceptance, depths=[7, 3, 0], drafted=counts, costs=costs, ratios=RATIOS)
    assert grid.ratio == 0.25 and int(grid.kept_B.sum()) == 1  # ceil(13 / 4) = 4 slots, three of them anchors
    unknown = plan_verification(acceptance, depths=[7, 3, 0], drafted={"other": 1}, costs=costs)
    assert unknown.ratio == FALLBACK_RATIO


def test_a_fixed_cut_needs_no_costs():
    assert fixed_cut([[0.9, 0.9, 0.9], [0.5, 0.5]], depths=[3, 2], ratio=0.5) == [2, 0]
    assert fixed_cut([[], []], depths=[0, 0], ratio=1.0) == [0, 0]


def test_equal_input_gives_equal_plans():
    rows = [_row(0.8, mtp=[0.8, 0.64, 0.5]) for _ in range(8)]
    plans = {plan_drafting(list(rows), costs=_curves()) for _ in range(3)}
    assert len(plans) == 1 and isinstance(plans.pop(), DraftPlan)
