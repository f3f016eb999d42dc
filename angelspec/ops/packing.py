"""First-fit: items of given lengths into rows of one length, in the order of the items. Plain integers."""

from __future__ import annotations

from collections.abc import Sequence


def first_fit(lengths: Sequence[int], *, row_length: int) -> list[list[int]]:
    """Put each item into the first row that still has room for it.

    A tree over the rows holds the largest room of each half, so that n items take n log n steps.

    Args:
        lengths: of the items, each from 1 to ``row_length``.
        row_length: room of an empty row.

    Returns:
        Per row, the indices of its items in the order in which they lie.

    Raises:
        ValueError: an item is empty or longer than a row.
    """
    for index, length in enumerate(lengths):
        if not 1 <= length <= row_length:
            raise ValueError(f"item {index} has length {length}; allowed: 1 to {row_length}")
    # any two neighbouring rows together hold more than one row's length, so there are fewer than these
    most_rows = min(len(lengths), 2 * -(-sum(lengths) // row_length) + 1)
    leaves = 1
    while leaves < most_rows:
        leaves *= 2
    room = [row_length] * (2 * leaves)
    rows: list[list[int]] = []
    for index, length in enumerate(lengths):
        node = 1
        while node < leaves:
            node *= 2
            if room[node] < length:
                node += 1
        row = node - leaves
        if row == len(rows):
            rows.append([])
        rows[row].append(index)
        room[node] -= length
        while node > 1:
            node //= 2
            left, right = room[2 * node], room[2 * node + 1]
            larger = left if left >= right else right
            if room[node] == larger:
                break
            room[node] = larger
    return rows
