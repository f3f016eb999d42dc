"""Whether a checkpoint states what a loader needs, and whether configuration, manifest and tensors say the same.

What the tensors' values and shapes must be is for those who can build the drafter; here the files are compared with
each other, from the weights' headers, so that importing this loads no torch.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
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
_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}
_LONGEST_HEADER = 100 * 2**20


def contradictions(folder: Path, manifest: DrafterManifest) -> list[str]:
    """What is not stated or contradicts itself, one sentence each (empty: nothing).

    Args:
        folder: of the checkpoint, with ``config.json`` and weights.
        manifest: that lies in it.
    """
    config = read_json(folder / "config.json")
    if not isinstance(config, dict):
        return ["config.json holds no object"]
    needed = _ALWAYS_STATED + (_STATED_BY_BLOCKS if manifest.drafter.family == "block" else ())
    found = [f"config.json does not state {key}" for key in needed if config.get(key) is None]
    found += _rope(config, manifest)
    found += _dtypes(folder, config)
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


def _dtypes(folder: Path, config: Mapping[str, Any]) -> list[str]:
    held: set[str] = set()
    for path in sorted(folder.glob("*.safetensors")):
        try:
            held |= set(tensor_dtypes(path))
        except CheckpointError as error:
            return [error.message]
    return [
        f"{key} is {config[key]!r} in config.json, but the tensors are {', '.join(sorted(held))}"
        for key in ("dtype", "torch_dtype")
        if config.get(key) is not None and held != {str(config[key]).removeprefix("torch.")}
    ]


def tensor_dtypes(path: Path) -> Iterator[str]:
    """The dtypes that a safetensors file's header names, as torch calls them.

    Raises:
        CheckpointError: no safetensors file.
    """
    with path.open("rb") as stream:
        start = stream.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else _LONGEST_HEADER + 1
        try:
            if length > _LONGEST_HEADER:
                raise ValueError("its header is cut or too long")
            header = json.loads(stream.read(length))
            entries = [entry["dtype"] for name, entry in header.items() if name != "__metadata__"]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path.name} is no safetensors file: {error}", mend="export it again") from error
    yield from (_DTYPES.get(name, name) for name in entries)
