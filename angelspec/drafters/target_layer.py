"""A target's own MTP layer, from which a drafter may start."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from angelspec.core.drafter_config import MtpDrafterConfig
from angelspec.core.errors import CheckpointError
from angelspec.drafters.checkpoint import load_drafter


def load_target_layer(folder: Path, config: MtpDrafterConfig) -> dict[str, Tensor]:
    """The weights of the MTP layer in a target's folder; no other tensor of the target is read.

    Args:
        folder: the target's: Hy3's ``model.layers.<N>.*``, or ``mtp.*``.
        config: of the drafter that starts from it; the number of depths is its own affair.

    Returns:
        our names to float32 tensors, all of ``MtpDrafter(config).state_dict()``.

    Raises:
        CheckpointError: the target has no such layer, it is damaged, or it has another shape than the drafter; by name.
    """
    found = load_drafter(folder, overrides={"num_depths": config.num_depths})
    ours, theirs = config.model_dump(mode="json"), found.config.model_dump(mode="json")
    differing = [key for key in ours if ours[key] != theirs.get(key)]
    if config.moe is not None:
        differing = [key for key in differing if key != "intermediate_size"]  # of dense layers
    if differing:
        said = "; ".join(f"{key} is {theirs.get(key)} there, {ours[key]} here" for key in differing)
        raise CheckpointError(
            f"the MTP layer of {folder} does not fit the drafter: {said}",
            mend="set drafter.* to the layer's shape, or drop drafter.initial_checkpoint",
        )
    return found.drafter.state_dict()
