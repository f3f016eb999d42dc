"""Reading the tensors of a checkpoint, and saying why a file cannot be read."""

from __future__ import annotations

import json
import pickle
import zipfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from angelspec.core.files import LFS_START
from angelspec.drafters.problem import Findings

SAFETENSORS = "model.safetensors"
INDEX = "model.safetensors.index.json"
_PICKLE = "pytorch_model.bin"
_PICKLE_SUFFIXES = {".bin", ".pt", ".pth"}
_HEADER_LIMIT = 100_000_000


def find_weights(folder: Path, findings: Findings) -> list[Path]:
    """The weight files of a folder: one, or all shards of an index. Hidden and temporary files don't count.

    More than one set of weights is a problem, since either could be meant.
    """
    names = sorted(path.name for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))
    sets = [name for name in names if name in (SAFETENSORS, INDEX, _PICKLE)]
    if not sets:
        sets = [name for name in names if Path(name).suffix in {".safetensors", *_PICKLE_SUFFIXES}]
    if len(sets) > 1:
        findings.add(
            "ambiguous-weights", folder.name, f"{folder} holds several sets of weights: {', '.join(sets)}",
            mend="keep one of them",
        )  # fmt: skip
        return []
    if not sets:
        dangling = [path.name for path in folder.iterdir() if path.is_symlink() and not path.exists()]
        snapshots = sorted(path.name for path in folder.glob("step-*"))
        mend = "give a folder with model.safetensors"
        if snapshots:
            mend = "this is a folder of training checkpoints: export the drafter first, and check the export"
        elif dangling:
            mend = f"restore what {', '.join(dangling)} points at"
        findings.add("no-weights", SAFETENSORS, f"{folder} holds no weights ({SAFETENSORS} or {_PICKLE})", mend=mend)
        return []
    if sets[0] != INDEX:
        return [folder / sets[0]]
    try:
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        shards = sorted(set(index["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        findings.add("unreadable", INDEX, f"{folder / INDEX} is no index of shards: {error}")
        return []
    absent = [shard for shard in shards if not (folder / shard).is_file()]
    for shard in absent:
        findings.add("shard-missing", shard, f"{folder / shard} is named by {INDEX} but missing", mend="fetch it again")
    return [] if absent else [folder / shard for shard in shards]


def tensor_names(files: Iterable[Path]) -> set[str]:
    """Names in the headers of those files that are sound safetensors; nothing else is read."""
    names: set[str] = set()
    for path in files:
        if path.suffix in _PICKLE_SUFFIXES or not _is_sound(path):
            continue
        names.update(safetensors_header(path))
    return names


def safetensors_header(path: Path) -> dict[str, Any]:
    """Each tensor's entry (dtype, shape, data_offsets) in the header of a sound safetensors file."""
    with path.open("rb") as stream:
        header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
    return {name: entry for name, entry in header.items() if name != "__metadata__"}


def _is_sound(path: Path) -> bool:
    size, findings = path.stat().st_size, Findings()
    return size > 0 and _safetensors_layout_is_sound(path, size, findings)


def read_tensors(path: Path, findings: Findings, *, wanted: Callable[[str], bool] | None = None) -> dict[str, Tensor]:
    """Tensors of one file on the CPU; none, and a problem that says why, where it can't be read.

    Args:
        path: a safetensors or pickle file.
        findings: receives every problem.
        wanted: tells by name which tensors to read; None: all.
    """
    size = path.stat().st_size
    with path.open("rb") as stream:
        start = stream.read(1024)
    if size == 0:
        findings.add("empty-file", path.name, f"{path} has 0 bytes", mend="fetch or export it again")
        return {}
    if start.startswith(LFS_START):
        oid = next(
            (line.split()[-1] for line in start.decode("utf-8", "replace").splitlines() if line[:3] == "oid"), "?"
        )
        findings.add(
            "lfs-pointer", path.name, f"{path} is a Git LFS pointer ({oid}), not the weights",
            mend="run `git lfs pull`, or download the file itself",
        )  # fmt: skip
        return {}
    if path.suffix in _PICKLE_SUFFIXES:
        content = _read_pickle(path, findings)
        return {name: value for name, value in content.items() if wanted is None or wanted(name)}
    if not _safetensors_layout_is_sound(path, size, findings):
        return {}
    try:
        with safe_open(path, framework="pt") as stream:
            return {name: stream.get_tensor(name) for name in stream.keys() if wanted is None or wanted(name)}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        findings.add("unreadable", path.name, f"{path}: {error}", mend="fetch or export it again")
        return {}


def _safetensors_layout_is_sound(path: Path, size: int, findings: Findings) -> bool:
    """Compare the header's promise with the file's length: safetensors itself says the same of two different faults."""
    again = "fetch or export it again"
    with path.open("rb") as stream:
        prefix = stream.read(8)
        header_size = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or header_size > min(size - 8, _HEADER_LIMIT):
            is_short = len(prefix) < 8 or header_size <= _HEADER_LIMIT
            what = "ends inside its header" if is_short else "does not begin as a safetensors file does"
            findings.add(
                "truncated" if is_short else "unreadable", path.name, f"{path} ({size} bytes) {what}", mend=again
            )
            return False
        try:
            header = json.loads(stream.read(header_size))
            ends = [entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__"]
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            findings.add("unreadable", path.name, f"{path} has a broken header: {error}", mend=again)
            return False
    surplus = size - 8 - header_size - max(ends, default=0)
    if surplus < 0:
        findings.add("truncated", path.name, f"{path} is cut: {-surplus} bytes are missing at its end", mend=again)
    elif surplus > 0:
        findings.add("extra-bytes", path.name, f"{path} has {surplus} bytes too many at its end", mend=again)
    return surplus == 0


def _read_pickle(path: Path, findings: Findings) -> dict[str, Tensor]:
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        findings.add(
            "unsafe-pickle", path.name, f"{path} holds more than tensors and was not unpickled: {_first_line(error)}",
            mend="convert it to safetensors where it is trusted",
        )  # fmt: skip
        return {}
    except (RuntimeError, EOFError, ValueError, OSError, zipfile.BadZipFile) as error:
        findings.add("truncated", path.name, f"{path} is cut or damaged: {_first_line(error)}", mend="fetch it again")
        return {}
    for wrapper in ("state_dict", "model"):
        if isinstance(content, Mapping) and isinstance(content.get(wrapper), Mapping):
            content = content[wrapper]
    if not isinstance(content, Mapping) or not all(isinstance(value, Tensor) for value in content.values()):
        findings.add("unreadable", path.name, f"{path} is no mapping of names to tensors")
        return {}
    return dict(content)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
