"""Held-out accepted length: the number that chooses the best checkpoint and ends a stage at a plateau.

At fixed anchors of held-out rows the drafter drafts greedily, left to right, by its own inference rule, and the
leading proposals that equal the data's tokens are counted. One plus their mean is what a verify step would commit if
the target said what the data says: exact for greedy answers of the target itself, and an estimate otherwise. A proposal
after a miss can't be accepted, so only blocks without a miss so far are drafted on.

Shapes: R rows, T tokens, A anchors, K proposals of a block, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from angelspec.core.acceptance import AcceptanceCounts
from angelspec.core.errors import TrainingError
from angelspec.drafters.block import BlockDrafter
from angelspec.drafters.drafting import exact_scores
from angelspec.ops.anchors import Anchors, sample_anchors
from angelspec.training.distributed import Ranks, whole_parameters
from angelspec.training.features import FeatureSource
from angelspec.training.steps import row_generator, supervise

if TYPE_CHECKING:
    from angelspec.data.dataset import PackedRows

_ROWS_PER_BATCH = 4
_HEAD_ROWS = 128
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


class HeldOutAcceptance:
    """Measures a block drafter on fixed anchors of held-out rows.

    Only anchors whose whole block is supervised are used, so every step is one of full depth.

    Args:
        num_anchors: drawn once, spread evenly over the rows; fewer where the rows hold fewer.
        seed: of the anchors.
        ranks: rows are shared out and counts added up.

    Raises:
        TrainingError: the held-out rows hold no anchor.
    """

    def __init__(
        self,
        drafter: BlockDrafter,
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
                "the held-out rows hold no block whose tokens are all supervised",
                mend="raise data.held_out_fraction, or give more or longer conversations",
            )

    @property
    def num_anchors(self) -> int:
        """Anchors that are measured."""
        return sum(len(positions) for positions in self._anchors.values())

    def _draw(self, num_anchors: int, seed: int) -> dict[int, Tensor]:
        """Positions by row. Each row offers its anchors in a random order; rows take turns until enough are taken."""
        rows, block_size = self._rows, self._drafter.config.block_size
        whole_RT = rows.loss_mask_RT.clone()
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
        depth = self._drafter.config.block_size - 1
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
        """Blocks, then blocks whose proposals 1..k are all right, by k: int64 [K + 1]."""
        device = self._embedding_VD.device
        index_R = torch.as_tensor(row_ids, dtype=torch.int64)
        tokens_RT = self._rows.tokens_RT[index_R].to(device, torch.int64)
        anchors = Anchors(
            torch.cat([torch.full_like(self._anchors[row], i) for i, row in enumerate(row_ids)]),
            torch.cat([self._anchors[row] for row in row_ids]),
        ).to(device)
        features = self._features.fetch(row_ids).to(device)
        states = self._drafter(
            features.taps_RTF,
            document_RT=self._rows.document_RT[index_R].to(device),
            position_RT=self._rows.position_RT[index_R].to(device),
            tokens_RT=tokens_RT,
            anchors=anchors,
            embedding_VD=self._embedding_VD,
        )
        labels_AK = supervise(
            tokens_RT,
            torch.ones_like(tokens_RT, dtype=torch.bool),
            anchors,
            block_size=self._drafter.config.block_size,
        ).labels_AK
        alive_A = torch.arange(anchors.count, device=device)
        previous_A = tokens_RT[anchors.row_A, anchors.position_A]
        through = [anchors.count]
        for slot in range(labels_AK.shape[1]):
            drafted_A = self._draft_slot(states.hidden_AKD[alive_A, slot], previous_A)
            right_A = drafted_A == labels_AK[alive_A, slot]
            alive_A, previous_A = alive_A[right_A], drafted_A[right_A]
            through.append(len(alive_A))
        return torch.tensor(through)

    def _draft_slot(self, hidden_AD: Tensor, previous_A: Tensor) -> Tensor:
        """Most probable token of one slot, given the token drafted before it."""
        markov = getattr(self._drafter, "markov_head", None)
        chosen = []
        for hidden, previous in zip(hidden_AD.split(_HEAD_ROWS), previous_A.split(_HEAD_ROWS), strict=True):
            score = exact_scores(
                hidden[:, None], self._head_VD, corrects=True, markov_bias=None if markov is None else markov.bias
            )
            states = self._drafter.apply_heads(hidden, previous, self._embedding_VD)
            chosen.append(score(0, states.corrected_AKD, states.markov_AKR)[0])
        return torch.cat(chosen)
