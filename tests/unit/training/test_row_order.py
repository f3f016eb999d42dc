import pytest

from angelspec.training.row_order import RowOrder


def order(**settings):
    return RowOrder(range(7), **{"rows_per_step": 2, "seed": 1, "stage": 0, "epochs": 2.0, **settings})


def stream(o):
    return [row for step in range(o.num_steps) for row in o.step(step)]


def test_every_epoch_is_a_permutation_of_its_own_and_epochs_meet_inside_a_step():
    o = order()
    assert o.num_steps == 7
    rows = stream(o)
    assert sorted(rows[:7]) == sorted(rows[7:]) == list(range(7)) and rows[:7] != rows[7:]


def test_a_step_depends_on_nothing_but_its_number():
    assert [order().step(number) for number in (6, 2, 4)] == [order().step(number) for number in (6, 2, 4)]
    straight = order()
    assert [straight.step(number) for number in range(7)] == [order().step(number) for number in range(7)]


def test_seed_and_stage_change_the_order():
    assert stream(order()) != stream(order(seed=2)) != stream(order(stage=1))


def test_fractions_of_an_epoch_and_a_short_last_step():
    o = order(epochs=0.7)
    assert o.num_entries == 5 and o.num_steps == 3 and len(o.step(2)) == 1


def test_steps_run_over_as_many_epochs_as_they_take():
    o = order(epochs=None, steps=10)
    assert len(stream(o)) == 20 and sorted(stream(o)[7:14]) == list(range(7))


def test_needs_one_length():
    with pytest.raises(ValueError, match="exactly one"):
        order(steps=3)
