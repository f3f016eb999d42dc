"""A full copy of a target, into which an MTP layer is put so that a server finds it there."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from angelspec.core.errors import CheckpointError
from angelspec.core.files import read_json, write_json_atomic
from angelspec.drafters.problem import Findings
from angelspec.drafters.weight_files import INDEX, SAFETENSORS, find_weights, safetensors_header

CONFIG_FILE = "config.json"
LAYER_FILE = "model-mtp.safetensors"
_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"}
"""Weight files; those that are not among the linked ones are other copies of the same."""
_ALONE = "model-target.safetensors"
"""New name of a target's only weight file: under its own name it would be taken for all of the weights."""


def read_target_config(target_folder: Path | None, dialect: str) -> dict[str, Any]:
    """The target's parsed ``config.json``.

    Raises:
        CheckpointError: no folder was given, or it holds no readable configuration.
    """
    if target_folder is None:
        raise CheckpointError(
            f"dialect '{dialect}' keeps the target's configuration, and no target was given",
            mend="give the target's folder (--target)",
        )
    try:
        config = read_json(Path(target_folder) / CONFIG_FILE)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{target_folder} has no readable {CONFIG_FILE}: {error}") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{Path(target_folder) / CONFIG_FILE} holds a {type(config).__name__}, not an object")
    return config


def copy_target(target_folder: Path, folder: Path) -> None:
    """Put all of a target but its configuration into ``folder``, with an index that has room for one more file.

    Weight files are hard links where the file system allows it, and are never written to.

    Raises:
        CheckpointError: the target's weights are no safetensors, or it has an MTP layer already.
    """
    findings = Findings()
    weights = find_weights(target_folder, findings)
    if findings.problems or any(path.suffix != ".safetensors" for path in weights):
        said = "; ".join(problem.detail for problem in findings.problems)
        raise CheckpointError(
            f"{target_folder} can't be copied: {said or 'its weights are no safetensors'}",
            mend="give the folder of a target in safetensors",
        )
    places: dict[str, str] = {}
    total = 0
    for path in weights:
        name = _ALONE if path.name == SAFETENSORS else path.name
        _link(path, folder / name)
        for tensor, entry in safetensors_header(path).items():
            places[tensor] = name
            total += entry["data_offsets"][1] - entry["data_offsets"][0]
    own = sorted(name for name in places if name.startswith("mtp."))
    if own:
        raise CheckpointError(
            f"{target_folder} has an MTP layer already ({own[0]} and {len(own) - 1} more)",
            mend="give the target without one",
        )
    for tensor, entry in safetensors_header(folder / LAYER_FILE).items():
        places[tensor] = LAYER_FILE
        total += entry["data_offsets"][1] - entry["data_offsets"][0]
    write_json_atomic(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))})
    for path in target_folder.iterdir():
        is_ours = path.name.startswith(".") or path.name in (CONFIG_FILE, INDEX)
        if path.is_file() and not is_ours and path.suffix not in _WEIGHTS:
            shutil.copy2(path, folder / path.name)


def _link(source: Path, place: Path) -> None:
    try:
        os.link(source.resolve(), place)
    except OSError:
        shutil.copy2(source, place)
