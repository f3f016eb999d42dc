import random

import pytest

from angelspec.ops.packing import first_fit


def plain_first_fit(lengths, row_length):
    """The definition: look at every row, from the first."""
    rows, room = [], []
    for index, length in enumerate(lengths):
        row = next((row for row, free in enumerate(room) if free >= length), len(rows))
        if row == len(rows):
            rows.append([])
            room.append(row_length)
        rows[row].append(index)
        room[row] -= length
    return rows


@pytest.mark.parametrize("seed", range(20))
def test_the_tree_finds_what_a_search_from_the_first_row_finds(seed):
    draw = random.Random(seed)
    row_length = draw.choice([1, 7, 64, 512])
    lengths = [draw.randint(1, row_length) for _ in range(draw.randint(0, 300))]
    assert first_fit(lengths, row_length=row_length) == plain_first_fit(lengths, row_length)


@pytest.mark.parametrize("length", [1, 33, 64])
def test_equal_lengths_fill_rows_in_order(length):
    rows = first_fit([length] * 10, row_length=64)
    per_row = 64 // length
    assert rows == [list(range(start, min(10, start + per_row))) for start in range(0, 10, per_row)]


def test_the_bound_on_rows_holds_in_the_worst_case():
    assert len(first_fit([33] * 1000, row_length=64)) == 1000  # every row just over half full
    assert len(first_fit([2, 64] * 500, row_length=64)) == 516


@pytest.mark.parametrize("lengths", [[0], [65], [3, -1]])
def test_impossible_lengths_are_named(lengths):
    with pytest.raises(ValueError, match="item [01] has length"):
        first_fit(lengths, row_length=64)


@pytest.mark.timeout(60)
def test_many_rows_with_no_room_are_not_searched_one_by_one():
    count = 150_000  # a search from the first row would compare ten thousand million times
    assert len(first_fit([257] * count, row_length=512)) == count
