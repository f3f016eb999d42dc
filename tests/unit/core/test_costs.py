"""The cost table: nearest-bucket lookup, joining of ranks, JSON."""

import pytest
from pydantic import ValidationError

from angelspec.core.costs import CostEntry, CostTable


def _table(scale=1.0, batches=(1, 4, 16)):
    entries = [
        CostEntry(batch_size=batch, verified_slots=batch * width, seconds=scale * (batch + width / 100))
        for batch in batches
        for width in (2, 4, 6, 8)
    ]
    return CostTable(machine="two CPU cores", prefix_tokens=128, entries=entries)


def test_exact_points_and_nearest_buckets():
    table = _table()
    assert table.seconds(4, 16) == 4.04
    assert table.seconds(5, 5 * 4) == 4.04  # nearest batch, same slots per row
    assert table.seconds(4, 5 * 4) == 4.06  # 5 slots per row lie between 4 and 6: the larger
    assert table.seconds(3, 3) == 4.02
    assert table.seconds(10, 80) == 16.08  # 4 and 16 are equally far in rows, but 4 is further than a factor of 2


def test_nothing_comparable_gives_none():
    assert _table().seconds(64, 128) is None
    assert CostTable().seconds(1, 1) is None


def test_equally_near_batches_take_the_larger():
    assert _table(batches=(4, 6)).seconds(5, 10) == 6.02


def test_round_trip_and_refusals():
    table = _table()
    assert CostTable.model_validate_json(table.model_dump_json()) == table
    with pytest.raises(ValidationError, match="anchors"):
        CostEntry(batch_size=4, verified_slots=3, seconds=1.0)
    with pytest.raises(ValidationError):
        CostEntry(batch_size=4, verified_slots=4, seconds=float("inf"))
    with pytest.raises(ValidationError, match="measured twice"):
        CostTable(entries=[CostEntry(batch_size=1, verified_slots=1, seconds=s) for s in (1.0, 2.0)])
    with pytest.raises(ValidationError):
        CostTable.model_validate({"entires": []})


def test_ranks_join_to_the_slowest():
    fast, slow = _table(), _table(scale=3.0)
    joined = CostTable.slowest([fast, slow])
    assert joined.entries == slow.entries
    with pytest.raises(ValueError, match="different points"):
        CostTable.slowest([fast, _table(batches=(2,))])
    with pytest.raises(ValueError, match="no cost tables"):
        CostTable.slowest([])
