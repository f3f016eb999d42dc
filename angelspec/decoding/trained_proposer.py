"""What the proposers of trained drafters have in common: they fit their target, and are known by their weights."""

from __future__ import annotations

import hashlib
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from angelspec.core.errors import CheckpointError

if TYPE_CHECKING:
    from angelspec.drafters.families import Drafter
    from angelspec.targets.target import Target


class TrainedProposer:
    """A trained drafter beside its target.

    Args:
        drafter: in evaluation mode, on the target's device.
        target: gives embedding and vocabulary head.
        name: shown in tables.

    Raises:
        CheckpointError: drafter and target do not fit.
    """

    def __init__(self, drafter: Drafter, *, target: Target, name: str) -> None:
        conflicts = drafter.config.conflicts_with(target.geometry)
        if conflicts:
            raise CheckpointError(
                f"drafter '{name}' does not fit target {target.name}: {'; '.join(conflicts)}",
                mend="use a drafter trained for this target",
            )
        self.name = name
        self.depth: int = drafter.config.num_proposals
        self.layer_ids = tuple(drafter.config.target_layer_ids)
        self.drafter, self.target = drafter, target

    @cached_property
    def digest(self) -> str:
        """Content hash of configuration and weights."""
        content = hashlib.sha256(self.drafter.config.model_dump_json().encode())
        for name, tensor in sorted(self.drafter.state_dict().items()):
            content.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            content.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data)
        return content.hexdigest()[:16]


def whole(rows: Tensor, *, num_rows: int) -> Tensor | None:
    """None where ``rows`` are all ``num_rows`` in order, which spares a copy of a drafter's cache."""
    return None if len(rows) == num_rows and rows.tolist() == list(range(num_rows)) else rows
