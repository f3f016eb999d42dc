"""What the target knows of packed rows: tapped features and last hidden states, behind one versioned interface.

Three sources give the same tensors: ``OnlineFeatures`` runs the target inside the step, ``MemoryFeatures`` ran it
once and holds the result, ``DiskFeatures`` reads shards. Documents of a packed row are isolated in the target's
forward (``extraction``): a token attends to earlier tokens of its own document, at document-local positions.

Shapes: R rows, T tokens of a row, F features (number of taps times the target's hidden size), D target hidden size.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import psutil
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from angelspec.core.errors import DataError, MissingRequirement
from angelspec.core.files import read_json, write_json_atomic
from angelspec.training.distributed import Ranks
from angelspec.training.extraction import Features, extract

if TYPE_CHECKING:
    from angelspec.data.dataset import PackedRows
    from angelspec.targets.target import Target

FORMAT_VERSION = 1
"""Version of the interface and of the shards: raised when the meaning or layout of a stored tensor changes."""

ROWS_PER_EXTRACTION = 16
"""Rows given to ``extract`` at once when features are extracted ahead; fixed, so that a resumed one is exact."""
MAX_REFUSED_FRACTION = 0.02
"""Share of rows with non-finite features above which an extraction stops."""
_SHARD_BYTES = 256 * 2**20
_MANIFEST = "manifest.json"

Progress = Callable[[int, int], None]
"""Called with rows done and rows in all."""


class FeatureSource(Protocol):
    """Gives the features of rows by their index in one ``PackedRows``."""

    layer_ids: tuple[int, ...]

    def fetch(self, row_ids: Sequence[int]) -> Features:
        """Features of these rows, in this order."""
        ...


def bytes_per_row(row_length: int, *, hidden_size: int, num_taps: int, dtype: torch.dtype) -> int:
    """Bytes that the features of one packed row take, held or stored."""
    return row_length * hidden_size * (num_taps + 1) * dtype.itemsize


class OnlineFeatures:
    """Runs the target at every fetch."""

    def __init__(self, target: Target, rows: PackedRows, *, layer_ids: tuple[int, ...]) -> None:
        self.layer_ids = tuple(layer_ids)
        self._target, self._rows = target, rows

    def fetch(self, row_ids: Sequence[int]) -> Features:
        """Features of these rows, in this order."""
        index = torch.as_tensor(list(row_ids), dtype=torch.int64)
        return extract(
            self._target,
            tokens_RT=self._rows.tokens_RT[index],
            document_RT=self._rows.document_RT[index],
            position_RT=self._rows.position_RT[index],
            layer_ids=self.layer_ids,
        )


class MemoryFeatures:
    """Holds the features of all rows, computed once.

    Args:
        dtype: precision they are held in.
        progress: called after every few rows.

    Raises:
        MissingRequirement: they would not fit into free memory; the message gives both numbers.
        DataError: too many rows have non-finite features.
    """

    def __init__(
        self,
        target: Target,
        rows: PackedRows,
        *,
        layer_ids: tuple[int, ...],
        dtype: torch.dtype = torch.bfloat16,
        progress: Progress | None = None,
    ) -> None:
        self.layer_ids = tuple(layer_ids)
        num_rows, row_length = rows.tokens_RT.shape
        hidden_size = target.geometry.hidden_size
        needed = num_rows * bytes_per_row(
            row_length, hidden_size=hidden_size, num_taps=len(self.layer_ids), dtype=dtype
        )
        free = psutil.virtual_memory().available
        if needed > 0.9 * free:
            raise MissingRequirement(
                f"the features of {num_rows} rows take {_gib(needed)} of memory and {_gib(free)} are free",
                mend="set training.features=disk (or online), train on fewer rows, or tap fewer layers",
            )
        self._taps = torch.empty(num_rows, row_length, hidden_size * len(self.layer_ids), dtype=dtype)
        self._hidden = torch.empty(num_rows, row_length, hidden_size, dtype=dtype)
        self._finite = torch.ones(num_rows, dtype=torch.bool)
        online = OnlineFeatures(target, rows, layer_ids=self.layer_ids)
        for start in range(0, num_rows, ROWS_PER_EXTRACTION):
            batch = range(start, min(start + ROWS_PER_EXTRACTION, num_rows))
            features = online.fetch(batch)
            self._taps[start : batch.stop] = features.taps_RTF.cpu()
            self._hidden[start : batch.stop] = features.hidden_RTD.cpu()
            self._finite[start : batch.stop] = features.finite_R.cpu()
            if progress is not None:
                progress(batch.stop, num_rows)
        _refuse_if_many(int((~self._finite).sum()), num_rows)

    def fetch(self, row_ids: Sequence[int]) -> Features:
        """Features of these rows, in this order."""
        index = torch.as_tensor(list(row_ids), dtype=torch.int64)
        return Features(self._taps[index], self._hidden[index], self._finite[index])


class DiskFeatures:
    """Reads features from shards, written once by ``write_shards``."""

    def __init__(self, folder: Path, rows: PackedRows, *, target_digest: str) -> None:
        manifest = _read_manifest(folder)
        expected = _describe(rows, manifest, target_digest=target_digest)
        wrong = [
            f"{key} is {manifest.get(key)!r}, expected {value!r}"
            for key, value in expected.items()
            if manifest.get(key) != value
        ]
        if wrong:
            raise DataError(
                f"{folder} holds features of something else: {'; '.join(wrong)}",
                mend="remove the folder; it is written anew",
            )
        self.layer_ids = tuple(manifest["layer_ids"])
        self._folder, self._per_shard = folder, manifest["rows_per_shard"]
        self._num_rows = manifest["num_rows"]
        self._fingerprints = row_fingerprints(rows)
        self._open: dict[int, Any] = {}

    def fetch(self, row_ids: Sequence[int]) -> Features:
        """Features of these rows, in this order.

        Raises:
            DataError: a shard is missing, damaged, or holds other rows.
        """
        parts = [self._row(int(row)) for row in row_ids]
        return Features(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))

    def _row(self, row: int) -> tuple[Tensor, Tensor, Tensor]:
        shard, offset = divmod(row, self._per_shard)
        if shard not in self._open:
            path = _shard_path(self._folder, shard)
            first = shard * self._per_shard
            _verify_shard(path, self._fingerprints[first : first + self._per_shard])
            self._open[shard] = safe_open(path, framework="pt")
        file = self._open[shard]
        one = slice(offset, offset + 1)
        return tuple(file.get_slice(name)[one] for name in ("taps", "hidden", "finite"))


def row_fingerprints(rows: PackedRows) -> list[str]:
    """Content hash of what a row's features depend on: tokens, document borders, positions."""
    columns = [t.to(torch.int32).contiguous().numpy() for t in (rows.tokens_RT, rows.document_RT, rows.position_RT)]
    return [
        hashlib.sha256(b"".join(column[row].tobytes() for column in columns)).hexdigest()[:16]
        for row in range(len(columns[0]))
    ]


def write_shards(
    target: Target,
    rows: PackedRows,
    *,
    layer_ids: tuple[int, ...],
    folder: Path,
    dtype: torch.dtype = torch.bfloat16,
    rows_per_shard: int | None = None,
    ranks: Ranks | None = None,
    progress: Progress | None = None,
) -> DiskFeatures:
    """Compute the features of all rows into shards and open them.

    Finished shards are kept when called again: a shard is the unit of resuming. Each is written under a temporary
    name and renamed, and carries the fingerprints of its rows. Several ranks share the shards out.

    Raises:
        MissingRequirement: what is still to be written is larger than the free space; with both numbers.
        DataError: the folder holds features of something else, or too many rows have non-finite features.
    """
    ranks = ranks or Ranks()
    num_rows, row_length = rows.tokens_RT.shape
    hidden_size = target.geometry.hidden_size
    row_bytes = bytes_per_row(row_length, hidden_size=hidden_size, num_taps=len(layer_ids), dtype=dtype)
    if rows_per_shard is None:
        whole = _SHARD_BYTES // row_bytes // ROWS_PER_EXTRACTION
        rows_per_shard = max(1, whole) * ROWS_PER_EXTRACTION
    manifest = {
        "layer_ids": list(layer_ids),
        "hidden_size": hidden_size,
        "dtype": str(dtype).removeprefix("torch."),
        "rows_per_shard": rows_per_shard,
    }
    manifest |= _describe(rows, manifest, target_digest=target.digest)
    if ranks.is_first:
        if (folder / _MANIFEST).exists() and read_json(folder / _MANIFEST) != manifest:
            raise DataError(
                f"{folder} holds features of something else (its {_MANIFEST} differs)",
                mend="remove the folder; it is written anew",
            )
        folder.mkdir(parents=True, exist_ok=True)
    fingerprints = row_fingerprints(rows)
    shards = range(-(-num_rows // rows_per_shard))
    todo = [shard for shard in shards if not _shard_path(folder, shard).exists()]
    needed = sum(min(rows_per_shard, num_rows - shard * rows_per_shard) for shard in todo) * row_bytes
    ranks.barrier()
    if ranks.is_first:
        free = shutil.disk_usage(folder).free
        if needed > 0.95 * free:
            raise MissingRequirement(
                f"the features of {num_rows} rows need {_gib(needed)} more on disk; {folder} has {_gib(free)} free",
                mend="free space, set training.features=online, train on fewer rows, or tap fewer layers",
            )
        write_json_atomic(folder / _MANIFEST, manifest)
    online = OnlineFeatures(target, rows, layer_ids=tuple(layer_ids))
    for shard in todo[ranks.rank :: ranks.world_size]:
        first = shard * rows_per_shard
        last = min(first + rows_per_shard, num_rows)
        parts = []
        for start in range(first, last, ROWS_PER_EXTRACTION):
            parts.append(online.fetch(range(start, min(start + ROWS_PER_EXTRACTION, last))).to("cpu", dtype))
            if progress is not None:
                progress(min(start + ROWS_PER_EXTRACTION, last), num_rows)
        path = _shard_path(folder, shard)
        # another run may fill the same folder: a pack's features serve all drafters that tap alike
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        save_file(
            {
                "taps": torch.cat([part.taps_RTF for part in parts]),
                "hidden": torch.cat([part.hidden_RTD for part in parts]),
                "finite": torch.cat([part.finite_R for part in parts]),
            },
            temporary,
            metadata={"fingerprints": json.dumps(fingerprints[first:last])},
        )
        with temporary.open("rb+") as stream:
            os.fsync(stream.fileno())
        temporary.replace(path)
    ranks.barrier()
    refused = 0
    for shard in shards:
        first = shard * rows_per_shard
        path = _shard_path(folder, shard)
        _verify_shard(path, fingerprints[first : first + rows_per_shard])
        with safe_open(path, framework="pt") as file:
            refused += int((~file.get_tensor("finite")).sum())
    _refuse_if_many(refused, num_rows)
    return DiskFeatures(folder, rows, target_digest=target.digest)


def _describe(rows: PackedRows, manifest: dict[str, Any], *, target_digest: str) -> dict[str, Any]:
    num_rows, row_length = rows.tokens_RT.shape
    hidden_size, num_taps = manifest["hidden_size"], len(manifest["layer_ids"])
    return {
        "format_version": FORMAT_VERSION,
        "target_digest": target_digest,
        "num_rows": num_rows,
        "rows_digest": hashlib.sha256("".join(row_fingerprints(rows)).encode()).hexdigest()[:16],
        "shapes": {
            "taps": [row_length, hidden_size * num_taps],
            "hidden": [row_length, hidden_size],
            "finite": [],
        },
    }


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / _MANIFEST
    if not path.is_file():
        raise DataError(f"{folder} has no {_MANIFEST}, so it holds no features", mend="write the shards first")
    manifest = read_json(path)
    if manifest.get("format_version") != FORMAT_VERSION:
        raise DataError(
            f"{path} has format version {manifest.get('format_version')!r}; this angelspec reads {FORMAT_VERSION}",
            mend="remove the folder; it is written anew",
        )
    return manifest


def _shard_path(folder: Path, shard: int) -> Path:
    return folder / f"shard-{shard:05d}.safetensors"


def _verify_shard(path: Path, fingerprints: list[str]) -> None:
    try:
        with safe_open(path, framework="pt") as file:
            found = json.loads((file.metadata() or {}).get("fingerprints", "[]"))
    except (SafetensorError, FileNotFoundError) as error:
        raise DataError(f"{path} can't be read: {error}", mend="remove this file; it is written anew") from error
    if found != fingerprints:
        raise DataError(f"{path} holds other rows than expected", mend="remove this file; it is written anew")


def _refuse_if_many(refused: int, num_rows: int) -> None:
    if refused > MAX_REFUSED_FRACTION * num_rows:
        raise DataError(
            f"the target gave non-finite features for {refused} of {num_rows} rows",
            mend="set target.dtype=float32, or look at the rows: more than 2% of them are refused",
        )


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB"
