"""The sequential half of a block's draft as CUDA graphs, one per number of rows.

Choosing K tokens from left to right is some hundred small kernels, whose launches cost a GPU more than their work. It
reads no cache and waits for nothing, so it is recorded once and replayed. A graph is only used after its replay gave
what the eager code gives.

Shapes: B rows, S rows of a graph (S >= B), K proposals, D hidden.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from angelspec.drafters.drafting import Drafts

logger = logging.getLogger(__name__)
Choose = Callable[[Tensor, Tensor], Drafts]
"""(hidden_BKD, anchor_B) -> what ``BlockDrafter.choose`` gives."""
Replay = Callable[[], None]
Record = Callable[[Callable[[], Drafts]], tuple[Replay, Drafts]]
"""(function) -> a replay of what it did, and its results, which every replay writes anew."""
_AGREE = 1e-3
"""Of confidences: a product may be computed another way while it is recorded."""


_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64)


def graph_sizes(most: int) -> list[int]:
    """Rows of the graphs for batches of up to ``most`` rows; those of more than 64 are large enough without."""
    most = min(most, _SIZES[-1])
    return [*(size for size in _SIZES if size < most), most]


def cuda_recorder() -> Record:
    """Records on the current device; all graphs of one recorder share their memory, so one replays at a time."""
    pool = torch.cuda.graph_pool_handle()

    def record(function: Callable[[], Drafts]) -> tuple[Replay, Drafts]:
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):  # libraries choose their kernels and make their workspaces outside a recording
            for _ in range(2):
                function()
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            results = function()
        return graph.replay, results

    return record


@dataclass(frozen=True)
class _Graph:
    hidden_SKD: Tensor
    anchor_S: Tensor
    replay: Replay
    drafts: Drafts


class ChoiceGraphs:
    """``choose`` by replaying; more rows than the largest graph has go through ``choose`` itself.

    Args:
        choose: the eager code.
        like_BKD: states of the shape, dtype and device that will come; B is of no account.
        vocab_size: anchors are below it.
        sizes: rows of the graphs.
        record: see ``cuda_recorder``.

    Raises:
        RuntimeError: something can't be recorded, or a replay gives something else.
    """

    def __init__(
        self, choose: Choose, *, like_BKD: Tensor, vocab_size: int, sizes: Sequence[int], record: Record
    ) -> None:
        self._choose = choose
        self._graphs: list[_Graph] = []
        for size in sorted(sizes, reverse=True):  # the largest first: the others find its memory free
            hidden_SKD = like_BKD.new_zeros(size, *like_BKD.shape[1:])
            anchor_S = torch.zeros(size, dtype=torch.int64, device=like_BKD.device)
            replay, drafts = record(lambda hidden=hidden_SKD, anchor=anchor_S: choose(hidden, anchor))
            self._graphs.insert(0, _Graph(hidden_SKD, anchor_S, replay, drafts))
        for graph in self._graphs:
            self._check(graph, vocab_size)

    def __call__(self, hidden_BKD: Tensor, anchor_B: Tensor) -> Drafts:
        """What ``choose`` gives for these rows."""
        rows = anchor_B.shape[0]
        graph = next((graph for graph in self._graphs if graph.anchor_S.shape[0] >= rows), None)
        if graph is None:
            return self._choose(hidden_BKD, anchor_B)
        graph.hidden_SKD[:rows] = hidden_BKD
        graph.anchor_S[:rows] = anchor_B
        graph.replay()
        return Drafts(graph.drafts.tokens_BK[:rows].clone(), graph.drafts.confidence_BK[:rows].clone())

    def _check(self, graph: _Graph, vocab_size: int) -> None:
        rows = graph.anchor_S.shape[0]
        generator = torch.Generator().manual_seed(rows)
        hidden_SKD = torch.randn(graph.hidden_SKD.shape, generator=generator).to(graph.hidden_SKD)
        anchor_S = torch.randint(0, vocab_size, (rows,), generator=generator).to(graph.anchor_S)
        found, truth = self(hidden_SKD, anchor_S), self._choose(hidden_SKD, anchor_S)
        apart = (found.confidence_BK - truth.confidence_BK).abs().max()
        if not torch.equal(found.tokens_BK, truth.tokens_BK) or not apart <= _AGREE:
            raise RuntimeError(
                f"the graph of {rows} rows gives other drafts than the code that it was recorded from "
                f"(confidences differ by up to {float(apart):.2g})"
            )
