"""Held-out accepted length: the number that chooses the best checkpoint and ends a stage at a plateau.

At fixed anchors of held-out rows the drafter drafts greedily, left to right, by its own inference rule, and the
leading proposals that equal the data's tokens are counted. One plus their mean is what a verify step would commit if
the target said what the data says: exact for greedy answers of the target itself, and an estimate otherwise. A proposal
after a miss can't be accepted, so only drafts without a miss so far are drafted on.

How a family drafts at an anchor is in ``block_held_out`` and ``mtp_held_out``.

Shapes: R rows, T tokens, A anchors, K proposals, D hidden, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from angelspec.core.acceptance import AcceptanceCounts
from angelspec.core.errors import TrainingError
from angelspec.ops.anchors import Anchors, sample_anchors
from angelspec.training.distributed import Ranks, whole_parameters
from angelspec.training.features import FeatureSource
from angelspec.training.steps import MicroBatch, row_generator, take_rows

if TYPE_CHECKING:
    from angelspec.data.dataset import PackedRows

_ROWS_PER_BATCH = 4
HEAD_ROWS = 128
"""Positions whose logits are held at once."""


@dataclass(frozen=True)
class HeldOutResult:
    """Acceptance at the held-out anchors, as the counters of ``core.acceptance``: an anchor is a verify step."""

    counts: AcceptanceCounts

    @property
    def accepted_length(self) -> float:
        """Mean tokens per verify step, bonus included."""
        return self.counts.mean_accepted_length

    def record(self) -> dict[str, Any]:
        """Plain data for the metrics log."""
        return {
            "accepted_length": self.accepted_length,
            "per_position": list(self.counts.cumulative_acceptance),
            "anchors": self.counts.verify_steps,
        }


class HeldOutAcceptance(ABC):
    """Measures a drafter on fixed anchors of held-out rows.

    An anchor is the last committed token of a verify step. Only anchors that are supervised with all their proposals
    are used, so every step is one of full depth.

    Args:
        num_anchors: drawn once, spread evenly over the rows; fewer where the rows hold fewer.
        seed: of the anchors.
        ranks: rows are shared out and counts added up.

    Raises:
        TrainingError: the held-out rows hold no anchor.
    """

    def __init__(
        self,
        drafter: nn.Module,
        *,
        rows: PackedRows,
        features: FeatureSource,
        embedding_VD: Tensor,
        head_VD: Tensor,
        num_anchors: int,
        seed: int,
        ranks: Ranks | None = None,
    ) -> None:
        self._drafter, self._rows, self._features = drafter, rows, features
        self._embedding_VD, self._head_VD = embedding_VD, head_VD
        self._ranks = ranks or Ranks()
        self._anchors = self._draw(num_anchors, seed)
        if not self._anchors:
            raise TrainingError(
                "the held-out rows hold no anchor whose proposals are all supervised",
                mend="raise data.held_out_fraction, or give more or longer conversations",
            )

    @property
    def num_anchors(self) -> int:
        """Anchors that are measured."""
        return sum(len(positions) for positions in self._anchors.values())

    @property
    def depth(self) -> int:
        """Proposals of a draft."""
        return self._drafter.config.num_proposals

    def _draw(self, num_anchors: int, seed: int) -> dict[int, Tensor]:
        """Positions by row. Each row offers its anchors in a random order; rows take turns until enough are taken."""
        rows, block_size = self._rows, self.depth + 1
        whole_RT = rows.loss_mask_RT & (rows.position_RT > 0)  # a first token follows no state of the target
        for slot in range(1, block_size):
            whole_RT[:, :-slot] &= rows.loss_mask_RT[:, slot:]
            whole_RT[:, -slot:] = False
        offers: list[tuple[int, Tensor]] = []
        for row in range(len(rows.tokens_RT)):
            drawn = sample_anchors(
                whole_RT[row : row + 1],
                rows.document_RT[row : row + 1],
                block_size=block_size,
                num_anchors=num_anchors,
                generator=row_generator(seed, step=-1, row=row),
            )
            if drawn.count:
                order = torch.randperm(drawn.count, generator=row_generator(seed, step=-2, row=row))
                offers.append((row, drawn.position_A.cpu()[order]))
        most, total = 0, 0
        while total < num_anchors and any(len(positions) > most for _, positions in offers):
            total += sum(len(positions) > most for _, positions in offers)
            most += 1
        taken = {row: positions[:most] for row, positions in offers}
        for row in reversed(list(taken)):
            if total <= num_anchors:
                break
            if len(taken[row]) == most:
                taken[row] = taken[row][: most - 1]
                total -= 1
        return {row: positions.sort().values for row, positions in taken.items() if len(positions)}

    @torch.no_grad()
    def __call__(self) -> HeldOutResult:
        """Measure the drafter as it is now."""
        depth = self.depth
        through_K = torch.zeros(depth + 1, dtype=torch.int64)
        mine = list(self._anchors)[self._ranks.rank :: self._ranks.world_size]
        with whole_parameters(self._drafter):
            for start in range(0, len(mine), _ROWS_PER_BATCH):
                through_K += self._measure(mine[start : start + _ROWS_PER_BATCH])
        self._ranks.sum(through_K)
        blocks, accepted = int(through_K[0]), through_K[1:].tolist()
        return HeldOutResult(
            AcceptanceCounts(
                generated_tokens=blocks + sum(accepted),
                verify_steps=blocks,
                proposed_tokens=blocks * depth,
                drafted_tokens=blocks * depth,
                full_depth_steps=blocks,
                accepted_through=tuple(accepted),
            )
        )

    def _measure(self, row_ids: Sequence[int]) -> Tensor:
        """Anchors, then anchors whose proposals 1..k are all right, by k: int64 [K + 1]."""
        batch = take_rows(self._rows, self._features, row_ids, device=self._embedding_VD.device)
        anchors = Anchors(
            torch.cat([torch.full_like(self._anchors[row], i) for i, row in enumerate(row_ids)]),
            torch.cat([self._anchors[row] for row in row_ids]),
        ).to(batch.tokens_RT.device)
        proposal_K = torch.arange(1, self.depth + 1, device=batch.tokens_RT.device)
        labels_AK = batch.tokens_RT[anchors.row_A[:, None], anchors.position_A[:, None] + proposal_K]
        return torch.tensor([anchors.count, *self._survivors(batch, anchors, labels_AK)])

    @abstractmethod
    def _survivors(self, batch: MicroBatch, anchors: Anchors, labels_AK: Tensor) -> list[int]:
        """Draft at every anchor of some rows; how many drafts are right up to proposal k, by k - 1."""
