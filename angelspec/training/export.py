"""From a run's best checkpoint to the folder that a server loads, read back and compared bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from angelspec.core.drafter_config import DrafterConfig
from angelspec.core.errors import CheckpointError
from angelspec.core.geometry import TargetGeometry
from angelspec.core.manifest import DrafterManifest
from angelspec.drafters.checkpoint import load_drafter, save_drafter
from angelspec.drafters.experts import keeps_float32
from angelspec.drafters.families import Drafter, build_drafter
from angelspec.training.run import trained_weights


def export_drafter(
    drafter: Drafter,
    folder: Path,
    *,
    dtype: torch.dtype,
    manifest: DrafterManifest | None = None,
    embedding_VD: Tensor | None = None,
    geometry: TargetGeometry | None = None,
) -> Path:
    """Write a drafter and load it back as a user would.

    Args:
        drafter: its weights are rounded to ``dtype``, but for what chooses experts.
        folder: of the export; an earlier export there is replaced.
        embedding_VD: the target's embedding, if a copy is wanted.
        geometry: the target's, which the drafter must fit.

    Raises:
        CheckpointError: a weight is not finite, or what was read back differs; by name.
    """
    save_drafter(drafter, folder, dtype=dtype, manifest=manifest, embedding_VD=embedding_VD)
    loaded = load_drafter(folder, geometry=geometry, embedding_VD=embedding_VD, dtype=dtype)
    written = {
        name: tensor.detach().to("cpu", torch.float32 if keeps_float32(name) else dtype)
        for name, tensor in drafter.state_dict().items()
    }
    found = loaded.drafter.state_dict()
    wrong = sorted(set(written) ^ set(found)) + [
        name for name in written if name in found and not torch.equal(written[name], found[name])
    ]
    if loaded.config != drafter.config:
        wrong.append("config.json")
    if wrong:
        raise CheckpointError(f"the export {folder} does not load back as it was: {', '.join(wrong)}")
    return folder


def export_run(
    run_folder: Path,
    config: DrafterConfig,
    folder: Path,
    *,
    dtype: torch.dtype,
    which: Literal["best", "last"] = "best",
    manifest: DrafterManifest | None = None,
    embedding_VD: Tensor | None = None,
    geometry: TargetGeometry | None = None,
) -> Path:
    """Export the best (or last) checkpoint of a training run; see ``export_drafter`` and ``run.trained_weights``."""
    weights, _ = trained_weights(run_folder, config, which=which)
    drafter = build_drafter(config)
    drafter.load_state_dict(weights)
    return export_drafter(drafter, folder, dtype=dtype, manifest=manifest, embedding_VD=embedding_VD, geometry=geometry)
