"""Training checkpoints: whole or absent, found through pointers, never guessed.

Layout of a checkpoint folder::

    latest                  the name of the newest checkpoint, or "none" before the first
    best                    the name of the best one by the held-out metric, once there is one
    step-00000200/
        meta.json           format version, run id, step, progress, and the size of every other file
        model.safetensors optimiser.safetensors rng.safetensors     one rank
        sharded/            several ranks: torch.distributed.checkpoint (DCP)

A checkpoint is written to a hidden temporary folder, flushed to disk and renamed; then the pointers are replaced,
``best`` before ``latest``. A folder newer than ``latest`` is the rest of an interrupted save and is written again.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from angelspec.core.errors import CheckpointError
from angelspec.core.files import read_json, write_json_atomic, write_text_atomic
from angelspec.training.distributed import Ranks

FORMAT_VERSION = 1
"""Raised when a stored checkpoint of an earlier version can no longer be read as is."""

Reason = Literal["regular", "best", "interrupted", "final"]
_PARTS = ("model", "optimiser", "rng")
_SHARDED = "sharded"
_META = "meta.json"
_NONE = "none"


@dataclass(frozen=True)
class Snapshot:
    """One stored checkpoint: where it lies and everything in it that is no tensor."""

    path: Path
    step: int
    run_id: str
    reason: Reason
    world_size: int
    progress: dict[str, Any] = field(default_factory=dict)
    """What the loop needs to go on: stage, counters, best metric."""


class Checkpoints:
    """The checkpoints of one run in one folder.

    Args:
        folder: created at the first save.
        run_id: names everything the weights depend on; another run's checkpoints are refused. None, for reading
            only: whichever single run the folder holds.
        keep: how many of the newest are kept, besides what ``latest`` and ``best`` name.
        ranks: who writes; one rank writes safetensors, several write DCP.
    """

    def __init__(self, folder: Path, *, run_id: str | None, keep: int = 2, ranks: Ranks | None = None) -> None:
        self.folder = folder
        self.run_id = run_id
        self.keep = keep
        self.ranks = ranks or Ranks()

    # ---- reading

    def latest(self) -> Snapshot | None:
        """The newest checkpoint, or None where the run has none yet.

        Raises:
            CheckpointError: the folder holds another run's or two runs' checkpoints, the pointer is missing or
                names nothing, or a file is missing or short; each by name.
        """
        return self._pointed("latest")

    def best(self) -> Snapshot | None:
        """The best checkpoint by the held-out metric, or None; raises as ``latest`` does."""
        return self._pointed("best")

    def _pointed(self, pointer: str) -> Snapshot | None:
        stored = self._stored()
        path = self.folder / pointer
        if not path.exists():
            if stored and pointer == "latest":
                raise CheckpointError(
                    f"{self.folder} holds {len(stored)} checkpoint(s) but no 'latest' pointer, so which one to "
                    "resume is ambiguous",
                    mend=f"write one of these names into {path}: {', '.join(p.name for p in stored)}",
                )
            return None
        name = path.read_text(encoding="utf-8").strip()
        if name == _NONE:
            return None
        if name not in {p.name for p in stored}:
            raise CheckpointError(
                f"{path} points to '{name}', which is not there",
                mend=f"write one of these names into it: {', '.join(p.name for p in stored) or '(there are none)'}",
            )
        return self.read(self.folder / name)

    def _stored(self) -> list[Path]:
        """Finished checkpoints, oldest first, after making sure that they are of one run, and of this one."""
        if not self.folder.is_dir():
            return []
        paths = sorted(p for p in self.folder.iterdir() if p.is_dir() and not p.name.startswith("."))
        owners: dict[str, list[str]] = {}
        for path in paths:
            owners.setdefault(self._meta(path)["run_id"], []).append(path.name)
        if len(owners) > 1:
            listed = "; ".join(f"run {run}: {', '.join(names)}" for run, names in sorted(owners.items()))
            raise CheckpointError(
                f"{self.folder} holds checkpoints of {len(owners)} runs ({listed})",
                mend="move those of the other runs away; none is chosen for you",
            )
        if owners and self.run_id is not None and self.run_id not in owners:
            raise CheckpointError(
                f"{self.folder} belongs to run {next(iter(owners))}, not to this run ({self.run_id}): the recipe, "
                "the data or the drafter changed",
                mend="use another output folder, or restore what changed",
            )
        return paths

    def _meta(self, path: Path) -> dict[str, Any]:
        file = path / _META
        if not file.is_file():
            raise CheckpointError(
                f"{path} has no {_META}, so it is no finished checkpoint",
                mend="remove the folder if it is a leftover copy",
            )
        try:
            meta = read_json(file)
            version = meta["format_version"]
            meta["run_id"], meta["step"], meta["files"]
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise CheckpointError(f"{file} is not a checkpoint record: {error!r}") from error
        if version != FORMAT_VERSION:
            raise CheckpointError(
                f"{path} has format version {version}; this angelspec reads version {FORMAT_VERSION}",
                mend="resume it with the angelspec that wrote it",
            )
        return meta

    def read(self, path: Path) -> Snapshot:
        """Read a checkpoint's record and verify that every file of it is there in full.

        Raises:
            CheckpointError: naming each missing or short file.
        """
        meta = self._meta(path)
        wrong = []
        for name, size in meta["files"].items():
            file = path / name
            if not file.is_file():
                wrong.append(f"{name} is missing")
            elif file.stat().st_size != size:
                wrong.append(f"{name} has {file.stat().st_size} bytes instead of {size}")
        if wrong:
            raise CheckpointError(
                f"{path} is incomplete ({len(meta['files'])} files, saved by {meta['world_size']} rank(s)): "
                + "; ".join(wrong),
                mend="restore the files, or point 'latest' to another checkpoint",
            )
        return Snapshot(path, meta["step"], meta["run_id"], meta["reason"], meta["world_size"], meta["progress"])

    def load(self, snapshot: Snapshot, into: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Copy a checkpoint's tensors into existing ones, all or nothing.

        Args:
            into: parts (model, optimiser, rng) of tensors by name, shaped as they must be; a part that is left out
                is not read. Sharded (DTensor) and whole tensors go with checkpoints of any number of ranks. Random
                states that the checkpoint lacks (of additional ranks) stay as they are.

        Raises:
            CheckpointError: tensors are missing, unexpected, misshapen or non-finite, listed by name.
        """
        wanted = {f"{part}/{name}": t for part in into if part != "rng" for name, t in into[part].items()}
        rng = {f"rng/{name}": t for name, t in into.get("rng", {}).items()}
        reader = self._read_sharded if (snapshot.path / _SHARDED).is_dir() else self._read_whole
        shapes, fetch = reader(snapshot.path)
        found = {k: shape for k, shape in shapes.items() if k.split("/")[0] in into and not k.startswith("rng/")}
        complaints = _compare({k: tuple(t.shape) for k, t in wanted.items()}, found)
        if complaints:
            raise CheckpointError(
                f"{snapshot.path} does not fit this drafter: " + "; ".join(complaints),
                mend="resume with the recipe that wrote the checkpoint, or start a new run folder",
            )
        values = fetch({k: t for k, t in {**wanted, **rng}.items() if k in shapes})
        broken = [k for k, value in values.items() if value.is_floating_point() and not _is_finite(value)]
        if broken:
            raise CheckpointError(
                f"{snapshot.path} holds non-finite values: {_listed(broken)}",
                mend="point 'latest' to an earlier checkpoint",
            )
        with torch.no_grad():
            for key, value in values.items():
                (wanted.get(key) if key in wanted else rng[key]).copy_(value)

    @staticmethod
    def _read_whole(path: Path):
        shapes: dict[str, tuple[int, ...]] = {}
        for part in _PARTS:
            try:
                with safe_open(path / f"{part}.safetensors", framework="pt") as file:
                    shapes |= {f"{part}/{k}": tuple(file.get_slice(k).get_shape()) for k in file.keys()}  # noqa: SIM118
            except (SafetensorError, FileNotFoundError) as error:
                raise CheckpointError(f"{path / part}.safetensors can't be read: {error}") from error

        def fetch(into: Mapping[str, Tensor]) -> dict[str, Tensor]:
            values = {}
            for part in {key.split("/")[0] for key in into}:
                values |= {f"{part}/{k}": v for k, v in load_file(path / f"{part}.safetensors").items()}
            return {key: _like(values[key], into[key]) for key in into}

        return shapes, fetch

    @staticmethod
    def _read_sharded(path: Path):
        reader = dcp.FileSystemReader(path / _SHARDED)
        try:
            metadata = reader.read_metadata().state_dict_metadata
        except Exception as error:  # the reader unpickles: any damage shows as any exception
            raise CheckpointError(f"{path / _SHARDED}/.metadata can't be read: {error!r}") from error
        shapes = {key: tuple(entry.size) for key, entry in metadata.items() if hasattr(entry, "size")}

        def fetch(into: Mapping[str, Tensor]) -> dict[str, Tensor]:
            values = {key: torch.empty_like(tensor.detach()) for key, tensor in into.items()}
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*assuming the intent is to load in a single process.*")
                dcp.load(values, storage_reader=reader)
            return values

        return shapes, fetch

    # ---- writing

    def save(
        self,
        tensors: Mapping[str, Mapping[str, Tensor]],
        *,
        step: int,
        progress: Mapping[str, Any],
        reason: Reason = "regular",
        is_best: bool = False,
    ) -> Path:
        """Write one checkpoint atomically, point ``latest`` (and ``best``) at it, and drop what is superfluous.

        Args:
            tensors: parts (model, optimiser, rng) of tensors by name.
            step: updates done.
            progress: plain data of the loop, without clock times: equal runs write equal bytes.
        """
        name = _name(step)
        path, temporary = self.folder / name, self.folder / f".{name}.tmp"
        if self.ranks.is_first:
            self.folder.mkdir(parents=True, exist_ok=True)
            if not (self.folder / "latest").exists():
                write_text_atomic(self.folder / "latest", _NONE + "\n")
            for leftover in self.folder.glob(".step-*"):
                shutil.rmtree(leftover)
            temporary.mkdir()
        self.ranks.barrier()
        if self.ranks.world_size == 1:
            for part in _PARTS:
                whole = {k: _whole(t) for k, t in tensors.get(part, {}).items()}
                save_file(whole, temporary / f"{part}.safetensors")
        else:
            flat = {f"{part}/{k}": t.detach() for part in _PARTS for k, t in tensors.get(part, {}).items()}
            dcp.save(flat, checkpoint_id=temporary / _SHARDED)
        self.ranks.barrier()
        if self.ranks.is_first:
            files = sorted(p for p in temporary.rglob("*") if p.is_file())
            for file in files:
                _flush(file)
            meta = {
                "format_version": FORMAT_VERSION,
                "run_id": self.run_id,
                "step": step,
                "reason": reason,
                "world_size": self.ranks.world_size,
                "progress": dict(progress),
                "files": {str(f.relative_to(temporary)): f.stat().st_size for f in files},
            }
            write_json_atomic(temporary / _META, meta)
            _flush(temporary)
            replaced = self.folder / f".{name}.replaced"
            shutil.rmtree(replaced, ignore_errors=True)
            if path.exists():
                path.rename(replaced)
            temporary.rename(path)
            shutil.rmtree(replaced, ignore_errors=True)
            _flush(self.folder)
            if is_best:  # first: a run that is killed here goes on from before, and finds this one the best again
                write_text_atomic(self.folder / "best", name + "\n")
            write_text_atomic(self.folder / "latest", name + "\n")
            self._prune()
        self.ranks.barrier()
        return path

    def point_best(self, step: int | None) -> None:
        """Let ``best`` name what the progress of a resumed run calls best: a killed save may have left another there.

        Args:
            step: of the best checkpoint; None: there was none yet.
        """
        if not self.ranks.is_first:
            return
        if step is None:
            (self.folder / "best").unlink(missing_ok=True)
        elif (self.folder / _name(step)).is_dir():
            write_text_atomic(self.folder / "best", _name(step) + "\n")

    def _prune(self) -> None:
        """Keep the newest ones and all that a pointer names. A checkpoint left by an interruption goes first: a
        run that was stopped and resumed ends with the same folder as one that was not."""
        pointed = {
            (self.folder / pointer).read_text(encoding="utf-8").strip()
            for pointer in ("latest", "best")
            if (self.folder / pointer).exists()
        }
        stored = self._stored()
        interrupted = [p for p in stored if self._meta(p)["reason"] == "interrupted"]
        regular = [p for p in stored if p not in interrupted]
        for path in interrupted + regular[: -self.keep]:
            if path.name not in pointed:
                shutil.rmtree(path)


def _name(step: int) -> str:
    return f"step-{step:08d}"


def _whole(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).contiguous().cpu()


def _like(value: Tensor, tensor: Tensor) -> Tensor:
    if isinstance(tensor, DTensor):
        return distribute_tensor(value.to(tensor.device), tensor.device_mesh, tensor.placements)
    return value


def _is_finite(value: Tensor) -> bool:
    local = value.to_local() if isinstance(value, DTensor) else value
    return bool(torch.isfinite(local).all())


def _compare(wanted: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]]) -> list[str]:
    missing, unexpected = sorted(set(wanted) - set(found)), sorted(set(found) - set(wanted))
    misshapen = [
        f"{k} {list(found[k])} instead of {list(wanted[k])}"
        for k in sorted(set(wanted) & set(found))
        if wanted[k] != found[k]
    ]
    return [
        f"{label} {_listed(names)}"
        for label, names in (("missing", missing), ("unexpected", unexpected), ("misshapen", misshapen))
        if names
    ]


def _listed(names: list[str], limit: int = 8) -> str:
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
