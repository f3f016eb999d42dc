"""What a drafter may start from: another drafter of its configuration, or its target's own MTP layer."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from angelspec.core.drafter_config import DrafterConfig, MtpDrafterConfig
from angelspec.core.errors import CheckpointError
from angelspec.core.geometry import TargetGeometry
from angelspec.drafters.checkpoint import LoadedDrafter, load_drafter

_LENGTHS = {"block_size", "num_depths"}
"""Fields that no weight depends on: a drafter may go on with longer or shorter drafts than it had."""


def load_start(folder: Path, config: DrafterConfig, *, geometry: TargetGeometry) -> LoadedDrafter:
    """Another drafter to start from, in float32.

    Args:
        folder: of an exported drafter, in any dialect.
        config: of the drafter that starts from it; how far it drafts is its own affair.
        geometry: the target's.

    Raises:
        CheckpointError: it can't be loaded, or is another drafter, which the weights' shapes need not show (another
            mask token, other taps, another rope); by name.
    """
    found = load_drafter(folder, geometry=geometry)
    _require_same(found.config, config, of=f"the drafter in {folder}")
    return found


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
    _require_same(found.config, config, of=f"the MTP layer of {folder}")
    return found.drafter.state_dict()


def _require_same(found: DrafterConfig, config: DrafterConfig, *, of: str) -> None:
    ours, theirs = config.model_dump(mode="json"), found.model_dump(mode="json")
    free = _LENGTHS if getattr(config, "moe", None) is None else {*_LENGTHS, "intermediate_size"}  # of dense layers
    differing = [key for key in ours if key not in free and ours[key] != theirs.get(key)]
    if "family" in differing:
        differing = ["family"]
    if differing:
        said = "; ".join(f"{key} is {theirs.get(key)} there, {ours[key]} here" for key in differing)
        raise CheckpointError(
            f"{of} does not fit the drafter: {said}",
            mend="set drafter.* to its configuration, or drop drafter.initial_checkpoint",
        )
