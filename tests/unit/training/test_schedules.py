import math

import pytest

from angelspec.training.schedules import learning_rate_factor


def curve(schedule, total, **settings):
    return [
        learning_rate_factor(step, total=total, schedule=schedule, **{"warmup_fraction": 0.1, "floor": 0.1, **settings})
        for step in range(total)
    ]


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd"])
def test_warm_up_rises_linearly_to_one_and_the_last_update_is_at_the_floor(schedule):
    factors = curve(schedule, 100)
    assert factors[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert max(factors) == factors[9] == 1.0
    assert factors[-1] == pytest.approx(0.1)
    assert all(a >= b for a, b in zip(factors[9:], factors[10:], strict=False))


def test_shapes_at_known_points():
    assert curve("linear", 101, warmup_fraction=0.0)[50] == pytest.approx(1 - 0.9 * 51 / 101)
    middle = curve("cosine", 100, warmup_fraction=0.0)[49]
    assert middle == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * 0.5)))
    wsd = curve("wsd", 100, decay_fraction=0.2)
    assert wsd[10:80] == [1.0] * 70
    assert wsd[80] == pytest.approx(1 - 0.9 / 20) and wsd[89] == pytest.approx(1 - 0.9 * 10 / 20)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd"])
@pytest.mark.parametrize("total", [1, 2, 3, 7])
@pytest.mark.parametrize("warmup", [0.0, 0.5, 0.99])
def test_short_stages_stay_between_floor_and_one(schedule, total, warmup):
    assert all(0.1 - 1e-12 <= factor <= 1.0 for factor in curve(schedule, total, warmup_fraction=warmup))


def test_refuses_steps_outside_the_stage():
    with pytest.raises(ValueError, match="outside"):
        learning_rate_factor(5, total=5, schedule="cosine", warmup_fraction=0.0)
