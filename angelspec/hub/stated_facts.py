"""Whether a checkpoint states what a loader needs, and whether configuration and manifest say the same.

What the tensors must be is for those who can build the drafter; importing this loads no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from angelspec.core.errors import CheckpointError
from angelspec.core.files import read_json
from angelspec.core.geometry import Rope
from angelspec.core.manifest import DrafterManifest

_ALWAYS_STATED = ("architectures", "vocab_size", "max_position_embeddings", "rope_theta", "rope_parameters", "dtype",
                  "torch_dtype")  # fmt: skip
_STATED_BY_BLOCKS = ("block_size", "sample_from_anchor", "mask_token_id", "target_layer_ids", "target_hidden_size",
                     "target_num_hidden_layers")  # fmt: skip


def read_config(folder: Path) -> dict[str, Any]:
    """A checkpoint's ``config.json``.

    Raises:
        CheckpointError: there is none, or it is no JSON object.
    """
    path = folder / "config.json"
    try:
        config = read_json(path)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing", mend="export the drafter again") from None
    except ValueError as error:
        raise CheckpointError(f"{path} is no JSON: {error}", mend="export the drafter again") from None
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} holds no object", mend="export the drafter again")
    return config


def contradictions(folder: Path, manifest: DrafterManifest) -> list[str]:
    """What is not stated or contradicts itself, one sentence each (empty: nothing).

    Args:
        folder: of the checkpoint, with ``config.json``.
        manifest: that lies in it.

    Raises:
        CheckpointError: ``config.json`` can't be read.
    """
    config = read_config(folder)
    needed = _ALWAYS_STATED + (_STATED_BY_BLOCKS if manifest.drafter.family == "block" else ())
    found = [f"config.json does not state {key}" for key in needed if config.get(key) is None]
    found += _rope(config, manifest)
    dtypes = {str(config[key]).removeprefix("torch.") for key in ("dtype", "torch_dtype") if config.get(key)}
    if len(dtypes) > 1:
        found.append(f"config.json states two dtypes: {', '.join(sorted(dtypes))}")
    pairs = {
        "the mode": (manifest.mode, manifest.recipe.mode),
        "the algorithm": (manifest.algorithm, manifest.drafter.algorithm),
        "the mode family": (manifest.target.mode_family, manifest.recipe.target.mode_family),
        "the drafter's shape": (manifest.drafter, manifest.recipe.drafter_config()),
    }
    found += [f"the manifest and its recipe disagree on {what}" for what, (a, b) in pairs.items() if a != b]
    return found + [f"the manifest: {item}" for item in manifest.drafter.conflicts_with(manifest.target.geometry)]


def _rope(config: Mapping[str, Any], manifest: DrafterManifest) -> list[str]:
    try:
        rope = Rope.from_config(config)
    except ValueError as error:
        return [f"config.json: {error}"]
    if rope != manifest.drafter.rope:
        return [f"config.json's rope is {rope!r}, the manifest's {manifest.drafter.rope!r}"]
    return []
