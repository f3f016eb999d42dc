"""A verification is padded to a captured graph only where one will run."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("sglang")
from sglang_ext.profiling import padded_slots  # noqa: E402


def runner(graphs: object) -> SimpleNamespace:
    return SimpleNamespace(decode_cuda_graph_runner=graphs)


CAPTURED = runner(SimpleNamespace(capture_num_tokens=[64, 8, 16], max_bs=8))


@pytest.mark.parametrize(
    ("slots", "rows", "padded"), [(3, 2, 8), (8, 8, 8), (9, 8, 16), (60, 8, 64), (65, 8, 65), (9, 9, 9), (40, 20, 40)]
)
def test_the_smallest_graph_that_holds_slots_and_rows(slots: int, rows: int, padded: int) -> None:
    assert padded_slots(CAPTURED, slots, batch_size=rows) == padded


def test_without_graphs_nothing_is_padded() -> None:
    assert padded_slots(runner(None), 5, batch_size=3) == 5
