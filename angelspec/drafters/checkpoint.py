"""Drafter checkpoints: saved in our format and the public ones, loaded from all of them, judged by name.

Our format is a folder of ``model.safetensors`` (AngelSpec's public tensor names, without the target's embedding),
``config.json`` and ``angelspec_manifest.json``.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

from angelspec.core.drafter_config import BlockDrafterConfig
from angelspec.core.errors import CheckpointError, suggest
from angelspec.core.files import read_json, write_json_atomic
from angelspec.core.geometry import TargetGeometry
from angelspec.core.manifest import DrafterManifest
from angelspec.drafters.block import BlockDrafter
from angelspec.drafters.config_dialects import dialects_of, read_config, write_config
from angelspec.drafters.key_dialects import EMBEDDING_KEY, HEAD_KEY, Dialect, is_known_key, native_key, public_key
from angelspec.drafters.problem import Findings, Problem
from angelspec.drafters.weight_files import SAFETENSORS, find_weights, read_tensors

CONFIG_FILE = "config.json"
_UNUSED_HEADS = ("markov_head.", "confidence_head.")
_HARMLESS = {"dtype-differs"}
"""Problems that a check reports and that loading, which looks at the tensors themselves, need not refuse."""


class LoadedDrafter(NamedTuple):
    """What a checkpoint holds."""

    drafter: BlockDrafter
    config: BlockDrafterConfig
    manifest: DrafterManifest | None


@dataclass
class Inspection:
    """All that is to be said of a checkpoint."""

    problems: list[Problem]
    notes: list[str]
    """What was seen and is no problem: a missing configuration beside a bare file, tensors that are not used."""
    config: BlockDrafterConfig | None = None
    manifest: DrafterManifest | None = None
    tensors: dict[str, Tensor] = field(default_factory=dict)
    """By our names."""


def examine_checkpoint(
    path: Path,
    *,
    geometry: TargetGeometry | None = None,
    embedding_VD: Tensor | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> Inspection:
    """Read a drafter folder or a bare tensor file and find everything that is wrong with it.

    A bare file without a ``config.json`` beside it is judged as a file: readable, finite, and of known tensors.

    Args:
        path: a folder, or a safetensors or pickle file. Pickles are read as tensors only.
        geometry: the target's; the drafter must fit it.
        embedding_VD: the target's embedding, which a copy in the checkpoint must equal.
        overrides: fields of ``BlockDrafterConfig`` that the file lacks, stated by the caller.
    """
    findings = Findings()
    found = Inspection(findings.problems, findings.notes)
    if not path.exists():
        what = f"{path} points at {path.readlink()}, which is gone" if path.is_symlink() else f"{path} does not exist"
        findings.add("not-found", path.name, what)
        return found
    folder = path if path.is_dir() else path.parent
    files = find_weights(path, findings) if path.is_dir() else [path]
    raw = {key: value for file in files for key, value in read_tensors(file, findings).items()}
    found.tensors = _translate(raw, findings)
    has_config = (folder / CONFIG_FILE).is_file()
    if has_config:
        config_json = _read_config_file(folder / CONFIG_FILE, findings)
        if config_json is not None:
            found.config = read_config(config_json, findings, geometry=geometry, overrides=overrides)
            if raw:
                _compare_dtype(config_json, found.tensors, findings)
    elif path.is_dir():
        findings.add(
            "config-missing", CONFIG_FILE, f"{folder} has no {CONFIG_FILE}: block size, mask and taps are unknown",
            mend="restore config.json; a drafter can't be run without it",
        )  # fmt: skip
    else:
        findings.note(f"{path.name} has no {CONFIG_FILE} beside it: judged as a file; it can't be run like this")
    if found.config is not None:
        if geometry is not None:
            for conflict in found.config.conflicts_with(geometry):
                findings.add("target-differs", conflict.split()[0], conflict, mend="use the target it was trained for")
        if raw:
            _compare_shapes(found.config, found.tensors, findings)
        found.manifest = _read_manifest(folder, found.config, findings)
    elif raw:
        _check_names(found.tensors, findings)
    _check_finite(found.tensors, findings)
    if EMBEDDING_KEY in found.tensors:
        _compare_embedding(found.tensors[EMBEDDING_KEY], embedding_VD, findings)
    return found


def inspect_checkpoint(path: Path, geometry: TargetGeometry | None = None) -> list[Problem]:
    """What is wrong with a drafter folder or file; empty if nothing is. See :func:`examine_checkpoint`."""
    return examine_checkpoint(Path(path), geometry=geometry).problems


def load_drafter(
    path: Path,
    *,
    geometry: TargetGeometry | None = None,
    embedding_VD: Tensor | None = None,
    overrides: Mapping[str, Any] | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> LoadedDrafter:
    """Load a drafter from a folder of any dialect, or refuse with everything that is wrong with it.

    Raises:
        CheckpointError: one line per problem.
    """
    path = Path(path)
    found = examine_checkpoint(path, geometry=geometry, embedding_VD=embedding_VD, overrides=overrides)
    problems = [problem for problem in found.problems if problem.code not in _HARMLESS]
    if problems:
        lines = "\n".join(f"  {problem}" for problem in problems)
        raise CheckpointError(f"{path} can't be loaded: {len(problems)} problem(s)\n{lines}")
    if found.config is None:
        raise CheckpointError(f"{path} has no {CONFIG_FILE} beside it", mend="give the folder of an exported drafter")
    with torch.device("meta"):
        drafter = BlockDrafter(found.config)
    drafter.load_state_dict(
        {key: found.tensors[key].to(device=device, dtype=dtype) for key in drafter.state_dict()}, assign=True
    )
    return LoadedDrafter(drafter, found.config, found.manifest)


def save_drafter(
    drafter: BlockDrafter,
    folder: Path,
    *,
    dtype: torch.dtype | None = None,
    manifest: DrafterManifest | None = None,
    dialect: Dialect = "angelspec",
    embedding_VD: Tensor | None = None,
) -> Path:
    """Write a drafter folder, whole or not at all; an older export in its place is replaced.

    Args:
        drafter: its weights are copied.
        folder: of the export.
        dtype: of the tensors written; None: the parameters'.
        manifest: written beside the weights.
        dialect: names and configuration keys; see ``key_dialects.Dialect``.
        embedding_VD: the target's embedding, if a copy is wanted; servers take it from the target.

    Raises:
        CheckpointError: the dialect can't express this drafter, a weight is not finite, or ``folder`` holds something
            other than an export.
    """
    config = drafter.config
    if dialect not in dialects_of(config):
        raise CheckpointError(
            f"dialect '{dialect}' can't express a drafter of context '{config.context}' and head '{config.head}'",
            mend=f"use one of: {', '.join(dialects_of(config))}",
        )
    tensors = {key: value.detach() for key, value in drafter.state_dict().items()}
    if embedding_VD is not None:
        tensors[EMBEDDING_KEY] = embedding_VD.detach()
    dtype = dtype or drafter.context_norm.weight.dtype
    tensors = {public_key(key, dialect): value.to("cpu", dtype).contiguous() for key, value in tensors.items()}
    broken = [key for key, value in tensors.items() if not torch.isfinite(value).all()]
    if broken:
        raise CheckpointError(f"not exported: non-finite values in {', '.join(broken)}")
    folder = Path(folder)
    if folder.exists() and not (folder / CONFIG_FILE).is_file() and any(folder.iterdir()):
        raise CheckpointError(f"{folder} exists and is no drafter export", mend="choose another folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}.", suffix=".tmp"))
    try:
        save_file(tensors, temporary / SAFETENSORS, metadata={"format": "pt"})
        name = str(dtype).removeprefix("torch.")
        write_json_atomic(temporary / CONFIG_FILE, write_config(config, dialect=dialect, dtype=name))
        if manifest is not None:
            manifest.write(temporary)
        temporary.chmod(0o755)
        old = folder.with_name(f".{folder.name}.old.tmp")
        if folder.exists():
            folder.rename(old)
        temporary.rename(folder)
        shutil.rmtree(old, ignore_errors=True)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return folder


def convert_checkpoint(
    path: Path, folder: Path, *, dialect: Dialect, overrides: Mapping[str, Any] | None = None
) -> Path:
    """Write a checkpoint of any dialect again in another; tensors and their dtype stay as they are.

    Raises:
        CheckpointError: it can't be loaded, or the dialect can't express it.
    """
    found = examine_checkpoint(Path(path), overrides=overrides)
    stored = next((value.dtype for value in found.tensors.values()), torch.float32)
    loaded = load_drafter(path, overrides=overrides, dtype=stored)
    return save_drafter(
        loaded.drafter, folder, dialect=dialect, manifest=loaded.manifest, embedding_VD=found.tensors.get(EMBEDDING_KEY)
    )


def _read_config_file(path: Path, findings: Findings) -> dict[str, Any] | None:
    try:
        config = read_json(path)
    except (ValueError, OSError) as error:
        findings.add("config-unreadable", CONFIG_FILE, f"{path} is no JSON: {error}")
        return None
    if not isinstance(config, dict):
        findings.add("config-unreadable", CONFIG_FILE, f"{path} holds a {type(config).__name__}, not an object")
        return None
    return config


def _read_manifest(folder: Path, config: BlockDrafterConfig, findings: Findings) -> DrafterManifest | None:
    try:
        manifest = DrafterManifest.read(folder)
    except CheckpointError as error:
        findings.add("manifest-unreadable", "angelspec_manifest.json", error.message, mend=error.mend)
        return None
    if manifest is not None and manifest.drafter != config:
        ours, theirs = config.model_dump(), manifest.drafter.model_dump()
        for key in ours:
            if ours[key] != theirs[key]:
                findings.add(
                    "manifest-differs", key, f"{key} is {ours[key]} in config.json but {theirs[key]} in the manifest",
                    mend="export the drafter again",
                )  # fmt: skip
    return manifest


def _translate(raw: Mapping[str, Tensor], findings: Findings) -> dict[str, Tensor]:
    """Our names; two tensors that mean the same are a problem."""
    tensors: dict[str, Tensor] = {}
    sources: dict[str, str] = {}
    for name, value in raw.items():
        key = native_key(name)
        if key in tensors:
            findings.add("duplicate-tensor", key, f"{sources[key]} and {name} both mean {key}", mend="keep one of them")
        tensors[key], sources[key] = value, name
    if HEAD_KEY in tensors:
        findings.note(f"{HEAD_KEY} is ignored: logits come from the target's own head")
        del tensors[HEAD_KEY]
    return tensors


def _compare_shapes(config: BlockDrafterConfig, tensors: dict[str, Tensor], findings: Findings) -> None:
    try:
        with torch.device("meta"):
            expected = {key: tuple(value.shape) for key, value in BlockDrafter(config).state_dict().items()}
    except CheckpointError as error:
        findings.add("unsupported", "sample_from_anchor", error.message, mend=error.mend)
        return
    for key in [key for key in tensors if key.startswith(_UNUSED_HEADS) and key not in expected]:
        if config.head == "correction":
            findings.note(f"{key} is ignored: this drafter's head is the hidden correction")
            del tensors[key]
    optional = {EMBEDDING_KEY: (config.vocab_size, config.target_hidden_size)}
    unexpected = [key for key in tensors if key not in expected and key not in optional]
    for key, shape in expected.items():
        if key not in tensors:
            findings.add("missing-tensor", key, f"{key} {list(shape)} is missing{suggest(key, unexpected)}")
    for key in unexpected:
        findings.add(
            "unexpected-tensor", key, f"{key} {list(tensors[key].shape)} belongs to no part of this drafter",
            mend="remove it, or correct config.json so that it names the part",
        )  # fmt: skip
    for key, shape in {**expected, **optional}.items():
        if key in tensors and tuple(tensors[key].shape) != shape:
            findings.add(
                "misshapen-tensor",
                key,
                f"{key} is {list(tensors[key].shape)}, by config.json it should be {list(shape)}",
            )


def _check_names(tensors: Mapping[str, Tensor], findings: Findings) -> None:
    for key in tensors:
        if not is_known_key(key):
            findings.add("unexpected-tensor", key, f"{key} is no tensor of a block drafter")


def _check_finite(tensors: Mapping[str, Tensor], findings: Findings) -> None:
    for key, value in tensors.items():
        if not value.is_floating_point():
            findings.add(
                "misshapen-tensor",
                key,
                f"{key} holds {str(value.dtype).removeprefix('torch.')}, not numbers of a weight",
            )
            continue
        bad = int(value.numel() - torch.isfinite(value).sum())
        if bad:
            findings.add("non-finite", key, f"{key} holds {bad} of {value.numel()} values that are not finite")


def _compare_dtype(config: Mapping[str, Any], tensors: Mapping[str, Tensor], findings: Findings) -> None:
    held = sorted({str(value.dtype).removeprefix("torch.") for value in tensors.values()})
    stated = sorted({str(config[key]).removeprefix("torch.") for key in ("dtype", "torch_dtype") if config.get(key)})
    if stated and stated != held:
        findings.add(
            "dtype-differs", "dtype", f"config.json says {', '.join(stated)} but the tensors are {', '.join(held)}",
            mend="write the tensors' dtype into config.json",
        )  # fmt: skip


def _compare_embedding(stored: Tensor, embedding_VD: Tensor | None, findings: Findings) -> None:
    if embedding_VD is None:
        findings.note(f"{EMBEDDING_KEY} is ignored: the target's own embedding is used (not compared, none was given)")
    elif stored.shape != embedding_VD.shape or not torch.equal(stored, embedding_VD.to(stored.device, stored.dtype)):
        findings.add(
            "embedding-differs", EMBEDDING_KEY, f"{EMBEDDING_KEY} is not the target's embedding",
            mend="use the target it was trained for",
        )  # fmt: skip
