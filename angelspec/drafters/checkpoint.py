"""Drafter checkpoints: saved in our format and the public ones, loaded from all of them, judged by name.

Our format is a folder of ``model.safetensors`` (AngelSpec's public tensor names, without the target's embedding),
``config.json`` and ``angelspec_manifest.json``. An MTP layer may also lie inside its target's own files.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

from angelspec.core.drafter_config import BlockDrafterConfig, MtpDrafterConfig
from angelspec.core.errors import CheckpointError, TargetError, suggest
from angelspec.core.files import is_free, read_json, replace_folder, restore_folder, write_json_atomic
from angelspec.core.geometry import TargetGeometry
from angelspec.core.manifest import DrafterManifest
from angelspec.drafters.config_dialects import dialect_called, holds_a_target, is_foreign, read_config, write_config
from angelspec.drafters.experts import keeps_float32
from angelspec.drafters.families import Drafter, build_drafter
from angelspec.drafters.key_dialects import (
    EMBEDDING_KEY,
    HEAD_KEY,
    Dialect,
    is_known_key,
    native_key,
    public_key,
    stripped,
)
from angelspec.drafters.mtp_layouts import MtpLayout, find_layout, fuse_experts, public_tensors
from angelspec.drafters.problem import Findings, Problem
from angelspec.drafters.target_copy import CONFIG_FILE, LAYER_FILE, copy_target, read_target_config
from angelspec.drafters.weight_files import SAFETENSORS, find_weights, read_tensors, tensor_names

_UNUSED_HEADS = ("markov_head.", "confidence_head.")
HARMLESS = {"dtype-differs"}
"""Problems that a check reports and that loading, which looks at the tensors themselves, need not refuse."""


class LoadedDrafter(NamedTuple):
    """What a checkpoint holds."""

    drafter: Drafter
    config: BlockDrafterConfig | MtpDrafterConfig
    manifest: DrafterManifest | None


@dataclass
class Inspection:
    """All that is to be said of a checkpoint."""

    problems: list[Problem]
    notes: list[str]
    """What was seen and is no problem: a missing configuration beside a bare file, tensors that are not used."""
    config: BlockDrafterConfig | MtpDrafterConfig | None = None
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
        overrides: fields of the configuration that the file lacks, stated by the caller.
    """
    findings = Findings()
    found = Inspection(findings.problems, findings.notes)
    if not path.exists():
        what = f"{path} does not exist; a released drafter is fetched by: angelspec pull NAME --output FOLDER"
        if path.is_symlink():
            what = f"{path} points at {path.readlink()}, which is gone"
        findings.add("not-found", path.name, what)
        return found
    folder = path if path.is_dir() else path.parent
    files = find_weights(path, findings) if path.is_dir() else [path]
    has_config = (folder / CONFIG_FILE).is_file()
    config_json = _read_config_file(folder / CONFIG_FILE, findings) if has_config else None
    raw, layout = _read_weights(files, config_json, findings)
    found.tensors, refused = _translate(raw, layout, findings)
    if has_config:
        if config_json is not None:
            found.config = read_config(config_json, findings, geometry=geometry, overrides=overrides)
            if raw and (layout is None or layout.dialect != "qwen3"):  # there the configuration is the target's
                _compare_dtype(config_json, found.tensors, findings)
    elif path.is_dir():
        findings.add(
            "config-missing", CONFIG_FILE, f"{folder} has no {CONFIG_FILE}: the drafter's shape is unknown",
            mend="restore config.json; a drafter can't be run without it",
        )  # fmt: skip
    else:
        findings.note(f"{path.name} has no {CONFIG_FILE} beside it: judged as a file; it can't be run like this")
    if found.config is not None:
        if geometry is not None:
            for conflict in found.config.conflicts_with(geometry):
                findings.add("target-differs", conflict.split()[0], conflict, mend="use the target it was trained for")
        if raw:
            _compare_shapes(found.config, found.tensors, findings, refused=refused)
            _compare_layer(found.config, layout, findings)
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
    dtype: torch.dtype | None = torch.float32,
    device: torch.device | str = "cpu",
) -> LoadedDrafter:
    """Load a drafter from a folder of any dialect, or refuse with everything that is wrong with it.

    Args:
        path: a folder; also that of a whole target with an MTP layer, of which only this layer is read.
        geometry: the target's; the drafter must fit it.
        embedding_VD: the target's embedding, which a copy in the checkpoint must equal.
        overrides: fields of the configuration that the file lacks, stated by the caller.
        dtype: of the parameters, but for what chooses experts (``experts.keeps_float32``); None: as stored.
        device: of the parameters.

    Raises:
        CheckpointError: one line per problem.
    """
    path = Path(path)
    found = examine_checkpoint(path, geometry=geometry, embedding_VD=embedding_VD, overrides=overrides)
    problems = [problem for problem in found.problems if problem.code not in HARMLESS]
    if problems:
        lines = "\n".join(f"  {problem}" for problem in problems)
        raise CheckpointError(f"{path} can't be loaded: {len(problems)} problem(s)\n{lines}")
    if found.config is None:
        raise CheckpointError(f"{path} has no {CONFIG_FILE} beside it", mend="give the folder of an exported drafter")
    with torch.device("meta"):
        drafter = build_drafter(found.config)

    def placed(key: str) -> Tensor:
        wanted = torch.float32 if dtype is not None and keeps_float32(key) else dtype
        return found.tensors[key].to(device=device, dtype=wanted)

    drafter.load_state_dict({key: placed(key) for key in drafter.state_dict()}, assign=True)
    return LoadedDrafter(drafter, found.config, found.manifest)


def save_drafter(
    drafter: Drafter,
    folder: Path,
    *,
    dtype: torch.dtype | None = None,
    manifest: DrafterManifest | None = None,
    dialect: Dialect | Literal["sglang"] = "angelspec",
    embedding_VD: Tensor | None = None,
    target_folder: Path | None = None,
) -> Path:
    """Write a drafter folder, whole or not at all; an older export in its place is replaced.

    Args:
        drafter: its weights are copied.
        folder: of the export.
        dtype: of the tensors written, but for what chooses experts (``experts.keeps_float32``); None: the parameters'.
        manifest: written beside the weights.
        dialect: names and configuration keys; see ``key_dialects.Dialect``; sglang: the one that SGLang loads.
        embedding_VD: the target's embedding, if a copy is wanted; servers take it from the target.
        target_folder: the target's, for the dialects hy3, which keeps its ``config.json``, qwen3, which is a full
            copy of it, and vllm-speculators, which may name what it is.

    Raises:
        CheckpointError: the dialect can't express this drafter, a weight is not finite, the target does not fit, or
            ``folder`` holds something other than an export.
    """
    config = drafter.config
    dialect = dialect_called(dialect, config)
    tensors = {key: value.detach() for key, value in drafter.state_dict().items()}
    if embedding_VD is not None and dialect not in ("hy3", "qwen3"):
        tensors[EMBEDDING_KEY] = embedding_VD.detach()
    tensors = {
        key: value.to("cpu", torch.float32 if dtype is not None and keeps_float32(key) else dtype)
        for key, value in tensors.items()
    }
    broken = [key for key, value in tensors.items() if not torch.isfinite(value).all()]
    if broken:
        raise CheckpointError(f"not exported: non-finite values in {', '.join(broken)}")
    if isinstance(config, MtpDrafterConfig):
        tensors = public_tensors(tensors, config, dialect)
    else:
        tensors = {public_key(key, dialect): value for key, value in tensors.items()}
    needed = dialect in ("hy3", "qwen3") or (dialect == "vllm-speculators" and target_folder is not None)
    target_config = read_target_config(target_folder, dialect) if needed else None
    source = "" if manifest is None else manifest.target.source
    target_name = source.removeprefix("hf:") if source.startswith("hf:") else None
    name = str(dtype or drafter.dtype).removeprefix("torch.")
    written = write_config(config, dialect=dialect, dtype=name, target_config=target_config, target_name=target_name)
    _check_reads_back(config, written, dialect)
    folder = Path(folder)
    restore_folder(folder)
    require_replaceable(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}.", suffix=".tmp"))
    try:
        weights = {key: value.contiguous() for key, value in tensors.items()}
        save_file(weights, temporary / (LAYER_FILE if dialect == "qwen3" else SAFETENSORS), metadata={"format": "pt"})
        if dialect == "qwen3":
            copy_target(Path(target_folder), temporary)
        write_json_atomic(temporary / CONFIG_FILE, written)
        if manifest is not None:
            manifest.write(temporary)
        temporary.chmod(0o755)
        replace_folder(temporary, folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return folder


def require_replaceable(folder: Path) -> None:
    """Stop where a drafter can't be put without losing something else.

    Raises:
        CheckpointError: the folder holds something, and no drafter export.
    """
    if not is_free(folder) and not _is_export(folder):
        raise CheckpointError(f"{folder} exists and is no drafter export", mend="move it, or choose another folder")


def _is_export(folder: Path) -> bool:
    """Whether a folder holds a drafter, and no target."""
    if not (folder / CONFIG_FILE).is_file():
        return False
    findings = Findings()
    config = _read_config_file(folder / CONFIG_FILE, findings)
    return config is not None and not holds_a_target(config) and not is_foreign(config)


def _check_reads_back(
    config: BlockDrafterConfig | MtpDrafterConfig, written: Mapping[str, Any], dialect: Dialect
) -> None:
    """Where the target's configuration is kept, what it says must be true of the drafter too."""
    findings = Findings()
    if read_config(written, findings) != config:
        said = "; ".join(problem.detail for problem in findings.problems)
        raise CheckpointError(
            f"dialect '{dialect}' can't express this drafter beside the given target: {said}",
            mend="give the target it was trained for, or use dialect angelspec",
        )


def convert_checkpoint(
    path: Path,
    folder: Path,
    *,
    dialect: Dialect | Literal["sglang"],
    overrides: Mapping[str, Any] | None = None,
    target_folder: Path | None = None,
) -> Path:
    """Write a checkpoint of any dialect again in another; tensors and their dtype stay as they are.

    Args:
        path: of the checkpoint.
        folder: of the new one; it must not exist, or be empty.
        dialect: of the new one.
        overrides: fields of the configuration that the file lacks, stated by the caller.
        target_folder: see :func:`save_drafter`.

    Raises:
        CheckpointError: it can't be loaded, the dialect can't express it, or something lies where it would be written.
    """
    folder = Path(folder)
    if not is_free(folder):
        raise CheckpointError(
            f"{folder} exists: it is not replaced", mend="choose another folder, or remove it yourself"
        )
    found = examine_checkpoint(Path(path), overrides=overrides)
    loaded = load_drafter(path, overrides=overrides, dtype=None)
    return save_drafter(
        loaded.drafter, folder, dialect=dialect, manifest=loaded.manifest,
        embedding_VD=found.tensors.get(EMBEDDING_KEY), target_folder=target_folder,
    )  # fmt: skip


def _read_weights(
    files: Sequence[Path], config: Mapping[str, Any] | None, findings: Findings
) -> tuple[dict[str, Tensor], MtpLayout | None]:
    """All tensors of a drafter, and where an MTP layer lies among them; of a whole target no more than this layer."""
    layout = find_layout(tensor_names(files), findings)
    before = len(findings.problems)
    is_whole = config is not None and holds_a_target(config)
    nothing = is_whole or (config is not None and is_foreign(config))  # which may have hundreds of gigabytes
    wanted = layout.holds if layout is not None else _nothing if nothing else None
    raw: dict[str, Tensor] = {}
    for file in files:
        raw |= read_tensors(file, findings, wanted=wanted)
    if is_whole and layout is None and files and len(findings.problems) == before:
        findings.add(
            "no-mtp-layer", CONFIG_FILE,
            f"{files[0].parent} is a target without an MTP layer (no model.layers.<N>.eh_proj, no mtp.*)",
            mend="train a drafter from fresh weights",
        )  # fmt: skip
    if layout is None and raw:  # pickles have no header
        layout = find_layout(raw, findings)
        if layout is not None:
            raw = {name: value for name, value in raw.items() if layout.holds(name)}
    if layout is not None and layout.prefix:
        findings.note(f"only {layout.prefix}* is read: the other tensors are the target's")
    return raw, layout


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


def _read_manifest(
    folder: Path, config: BlockDrafterConfig | MtpDrafterConfig, findings: Findings
) -> DrafterManifest | None:
    try:
        manifest = DrafterManifest.read(folder)
    except CheckpointError as error:
        findings.add("manifest-unreadable", "angelspec_manifest.json", error.message, mend=error.mend)
        return None
    if manifest is not None and manifest.drafter != config:
        ours, theirs = config.model_dump(), manifest.drafter.model_dump()
        for key in ours:
            if ours[key] != theirs.get(key):
                findings.add(
                    "manifest-differs", key,
                    f"{key} is {ours[key]} in config.json but {theirs.get(key)} in the manifest",
                    mend="export the drafter again",
                )  # fmt: skip
    return manifest


def _nothing(name: str) -> bool:
    return False


def _translate(
    raw: Mapping[str, Tensor], layout: MtpLayout | None, findings: Findings
) -> tuple[dict[str, Tensor], set[str]]:
    """Our names; two tensors that mean the same are a problem. Also our names of what a problem keeps out."""
    tensors: dict[str, Tensor] = {}
    sources: dict[str, str] = {}
    for name, value in raw.items():
        key = native_key(name) if layout is None else layout.native_key(stripped(name))
        if key in tensors:
            findings.add("duplicate-tensor", key, f"{sources[key]} and {name} both mean {key}", mend="keep one of them")
        tensors[key], sources[key] = value, name
    if HEAD_KEY in tensors:
        findings.note(f"{HEAD_KEY} is ignored: logits come from the target's own head")
        del tensors[HEAD_KEY]
    refused = set() if layout is None else fuse_experts(tensors, sources, findings)
    return tensors, refused


def _compare_layer(config: BlockDrafterConfig | MtpDrafterConfig, layout: MtpLayout | None, findings: Findings) -> None:
    """The layer behind a target's last one is numbered by how many it has."""
    if layout is not None and layout.layer is not None and layout.layer != config.target_num_layers:
        findings.add(
            "config-conflict", "num_hidden_layers",
            f"the MTP layer is model.layers.{layout.layer}, but config.json states {config.target_num_layers} layers",
        )  # fmt: skip


def _compare_shapes(
    config: BlockDrafterConfig | MtpDrafterConfig,
    tensors: dict[str, Tensor],
    findings: Findings,
    *,
    refused: Collection[str],
) -> None:
    try:
        with torch.device("meta"):
            state = build_drafter(config).state_dict()
            expected = {key: tuple(value.shape) for key, value in state.items() if key not in refused}
    except CheckpointError as error:
        findings.add("unsupported", "sample_from_anchor", error.message, mend=error.mend)
        return
    except TargetError as error:
        findings.add("unsupported", "rope", error.message, mend=error.mend)
        return
    for key in [key for key in tensors if key.startswith(_UNUSED_HEADS) and key not in expected]:
        if getattr(config, "head", None) == "correction":
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
            findings.add("unexpected-tensor", key, f"{key} is no tensor of a drafter")


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
    held = {key: str(value.dtype).removeprefix("torch.") for key, value in tensors.items() if not keeps_float32(key)}
    held = sorted(set(held.values()))
    stated = sorted({str(config[key]).removeprefix("torch.") for key in ("dtype", "torch_dtype") if config.get(key)})
    if stated and stated != held:
        findings.add(
            "dtype-differs", "dtype", f"config.json says {', '.join(stated)} but the tensors are {', '.join(held)}",
            mend="write the tensors' dtype into config.json",
        )  # fmt: skip


def _compare_embedding(stored: Tensor, embedding_VD: Tensor | None, findings: Findings) -> None:
    if embedding_VD is None:
        findings.note(f"{EMBEDDING_KEY} is ignored: the target's own embedding is used (not compared, none was given)")
        return
    coarser = min(stored.dtype, embedding_VD.dtype, key=lambda dtype: dtype.itemsize)  # either may be a rounded copy
    ours, theirs = stored.to(coarser), embedding_VD.to(stored.device, coarser)
    if ours.shape != theirs.shape or not torch.equal(ours, theirs):
        findings.add(
            "embedding-differs", EMBEDDING_KEY, f"{EMBEDDING_KEY} is not the target's embedding",
            mend="use the target it was trained for",
        )  # fmt: skip
