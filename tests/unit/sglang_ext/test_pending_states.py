"""States wait in a ring by position until a drafter enters them, each with the token that follows it."""

from __future__ import annotations

import pytest
import torch

from sglang_ext.pending import PendingStates

SLOTS, CAPACITY = 4, 6


@pytest.fixture
def pending() -> PendingStates:
    return PendingStates(
        SLOTS, capacity=CAPACITY, tap_width=2, hidden_size=1, drafters=("a", "b"), dtype=torch.float32, device="cpu"
    )


def add(pending: PendingStates, slots: list[int], counts: list[int], first_token: int) -> None:
    total = sum(counts)
    token_N = torch.arange(first_token, first_token + total)
    pending.append(
        slots, counts, taps_NF=token_N[:, None].float().expand(-1, 2), hidden_ND=-token_N[:, None].float(),
        token_N=token_N,
    )  # fmt: skip


def test_states_come_back_row_by_row_with_the_token_after_each(pending: PendingStates) -> None:
    pending.reset(1, 10)
    pending.reset(3, 0)
    add(pending, [1, 3], [2, 3], 100)
    waiting = pending.take("a", [1, 3], anchors=torch.tensor([7, 8]))
    assert waiting is not None
    assert waiting.position_N.tolist() == [10, 11, 0, 1, 2]
    assert waiting.request_N.tolist() == [1, 1, 3, 3, 3]
    assert waiting.taps_NF[:, 1].tolist() == [100, 101, 102, 103, 104]
    assert waiting.hidden_ND[:, 0].tolist() == [-100, -101, -102, -103, -104]
    assert waiting.next_N.tolist() == [101, 7, 103, 104, 8]
    assert waiting.last_B.tolist() == [1, 4]


def test_drafters_reach_different_positions(pending: PendingStates) -> None:
    pending.reset(2, 4)
    add(pending, [2], [3], 50)
    pending.enter("a", 2, 7)
    assert pending.take("a", [2], anchors=torch.tensor([1])) is None
    assert pending.waiting("b", 2) == 3
    add(pending, [2], [2], 53)
    waiting = pending.take("a", [2], anchors=torch.tensor([1]))
    assert waiting is not None and waiting.position_N.tolist() == [7, 8]


def test_rows_that_wait_for_nothing_are_left_out(pending: PendingStates) -> None:
    for slot in (0, 1, 2):
        pending.reset(slot, 0)
    add(pending, [0, 2], [1, 2], 30)
    waiting = pending.take("b", [0, 1, 2], anchors=torch.tensor([5, 6, 7]))
    assert waiting is not None
    assert waiting.request_N.tolist() == [0, 2, 2]
    assert waiting.next_N.tolist() == [5, 32, 7]
    assert waiting.last_B.tolist() == [0, 2]


def test_the_ring_turns(pending: PendingStates) -> None:
    pending.reset(0, 0)
    for step in range(5):
        add(pending, [0], [3], 10 * step)
        waiting = pending.take("a", [0], anchors=torch.tensor([999]))
        assert waiting is not None
        assert waiting.taps_NF[:, 0].tolist() == [10 * step, 10 * step + 1, 10 * step + 2]
        assert waiting.next_N.tolist() == [10 * step + 1, 10 * step + 2, 999]
        pending.enter("a", 0, pending.length[0])


def test_a_new_request_in_the_slot_starts_from_its_prefix(pending: PendingStates) -> None:
    pending.reset(1, 0)
    add(pending, [1], [4], 10)
    pending.reset(1, 2)
    assert pending.length[1] == 2
    assert pending.waiting("a", 1) == pending.waiting("b", 1) == 0
