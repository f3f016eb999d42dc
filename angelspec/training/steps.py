"""One forward step per drafter family: row ids in, named loss terms out. The loop knows nothing more.

The families' steps are ``block_step`` and ``mtp_step``; here is what they share.

Shapes: R rows of a micro-batch, T tokens of a row, D hidden.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from angelspec.core.objective import Objective
from angelspec.training.features import FeatureSource
from angelspec.training.update import HEAD_DONE, StepTerms, now

if TYPE_CHECKING:
    from angelspec.data.dataset import PackedRows

IDLE_ROW = -1
"""A row id that stands for no row: its rank runs the same graph as the others and supervises nothing."""


class TrainingStep(Protocol):
    """What the loop needs of a drafter family."""

    def trainable_rows(self) -> list[int]:
        """Rows that can supervise something."""
        ...

    def __call__(self, row_ids: Sequence[int], *, objective: Objective, step: int) -> StepTerms:
        """Forward pass and loss terms of one micro-batch, ready for ``backward``."""
        ...


class MicroBatch(NamedTuple):
    """Some rows with what the target knows of them, on the training device."""

    tokens_RT: Tensor
    """int64."""
    document_RT: Tensor
    position_RT: Tensor
    loss_mask_RT: Tensor
    """bool: supervised tokens; none in rows that stand for no row or whose features are not finite."""
    taps_RTF: Tensor
    hidden_RTD: Tensor
    """Features: on the training device only if they were to be moved there."""
    num_refused_rows: int
    """Rows left out because their features are not finite."""


def take_rows(
    rows: PackedRows,
    features: FeatureSource,
    row_ids: Sequence[int],
    *,
    device: torch.device,
    moves_features: bool = True,
) -> MicroBatch:
    """Gather the rows of one micro-batch; ``IDLE_ROW`` stands for a row without any supervision.

    Args:
        moves_features: whether the features go to the device as well; otherwise they stay where the source holds them.
    """
    real = [max(row, 0) for row in row_ids]
    index_R = torch.as_tensor(real, dtype=torch.int64)
    idle_R = torch.as_tensor([row == IDLE_ROW for row in row_ids], device=device)
    known = features.fetch(real)
    if moves_features:
        known = known.to(device)
    finite_R = known.finite_R.to(device)
    usable_R = finite_R & ~idle_R
    return MicroBatch(
        tokens_RT=rows.tokens_RT[index_R].to(device, torch.int64),
        document_RT=rows.document_RT[index_R].to(device),
        position_RT=rows.position_RT[index_R].to(device),
        loss_mask_RT=rows.loss_mask_RT[index_R].to(device) & usable_R[:, None],
        taps_RTF=known.taps_RTF,
        hidden_RTD=known.hidden_RTD,
        num_refused_rows=int((~finite_R & ~idle_R).sum()),
    )


def row_generator(seed: int, *, step: int, row: int) -> torch.Generator:
    """Random stream of one row in one step: the same for any micro-batches, ranks and interruptions."""
    digest = hashlib.blake2b(f"{seed}/{step}/{row}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


class StepClock:
    """Seconds of a step's parts (target, backbone, head), where they are wanted.

    The backward pass belongs to the head until the gradient reaches a state that went into it (for an unrolled drafter
    the deepest one: what the head adds for the others is one product of small rows each). A running clock waits for
    the device at every reading.
    """

    def __init__(self, *, running: bool, device: torch.device) -> None:
        self.running = running
        self.seconds: dict[str, float] = {}
        self._device = device if running else None
        self._last = now(self._device)

    def lap(self, part: str) -> None:
        """Give the time since the last call (or the start) to a part."""
        if self.running:
            reading = now(self._device)
            self.seconds[part] = self.seconds.get(part, 0.0) + reading - self._last
            self._last = reading

    def watch(self, hidden: Tensor) -> None:
        """Note when the backward pass first reaches a state that went into the head."""
        if self.running and hidden.requires_grad:

            def reached(gradient: Tensor) -> None:
                self.seconds.setdefault(HEAD_DONE, now(self._device))

            hidden.register_hook(reached)
