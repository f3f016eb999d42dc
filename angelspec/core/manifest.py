"""The manifest of an exported drafter: what it is, what it was trained for and on, and what was measured.

It lies beside the weights as ``angelspec_manifest.json``. Evaluator, publisher, launcher and server read it; weights
alone never say which target, which thinking mode or which data they belong to.
"""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from angelspec.core.acceptance import AcceptanceCounts
from angelspec.core.drafter_config import DrafterConfig
from angelspec.core.errors import CheckpointError
from angelspec.core.files import read_json, write_text_atomic
from angelspec.core.geometry import TargetGeometry
from angelspec.core.modes import Mode
from angelspec.core.recipe import Recipe
from angelspec.core.workloads import Workload

MANIFEST_FILE = "angelspec_manifest.json"
FORMAT_VERSION = 1
"""Raised when a stored manifest of an earlier version can no longer be read as is."""

_STRICT = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=())


class TargetIdentity(BaseModel):
    """The one target that a drafter drafts for."""

    model_config = _STRICT

    name: str
    source: str
    """Where it came from, as in a recipe's target.source."""
    digest: str
    """Content hash of configuration, weights, tokenizer and chat template."""
    mode_family: str
    """How its chat template switches thinking."""
    geometry: TargetGeometry


class TrainedStage(BaseModel):
    """One finished stage of training."""

    model_config = _STRICT

    name: str
    steps: int = Field(ge=0)
    """Optimiser steps, those after its best checkpoint included."""


class TrainingRecord(BaseModel):
    """Where the weights come from."""

    model_config = _STRICT

    steps: int = Field(ge=0)
    """Optimiser steps that the exported weights have seen: of each stage those up to its best checkpoint, and none of a
    stage that brought no gain."""
    supervised_positions: int = Field(ge=0)
    """Proposals (of block slots, or of depths) that entered the loss, over all steps."""
    target_tokens: int = Field(ge=0)
    """Supervised tokens in the training rows (of the workloads that were trained on), counted once."""
    stages: tuple[TrainedStage, ...] = ()
    data_fingerprints: dict[str, str] = Field(default_factory=dict)
    """Content fingerprint by stage of the data's road (prompts, rollout, rows, ...)."""
    workloads: dict[Workload, int] = Field(default_factory=dict)
    """Documents that were trained on, by workload."""
    held_out_accepted_length: float | None = None
    """Of the exported checkpoint; None where none was measured."""
    initial_checkpoint: str | None = None
    """The drafter that training started from; None: fresh weights."""


class MeasuredAcceptance(BaseModel):
    """One cell of the evaluation: a suite's answers of one workload at one temperature."""

    model_config = _STRICT

    suite: str
    workload: Workload
    temperature: float = Field(ge=0)
    finished: AcceptanceCounts
    """Over answers that ended by themselves."""
    unfinished: AcceptanceCounts = AcceptanceCounts()
    """Over answers cut at the length limit."""
    lookup_finished: AcceptanceCounts | None = None
    """Prompt lookup on the same finished answers; None where it was not measured."""


class DrafterManifest(BaseModel):
    """Everything about an exported drafter that its weights do not say."""

    model_config = _STRICT

    format_version: int = FORMAT_VERSION
    angelspec_version: str
    algorithm: str
    """Published name of the combination, or its parts joined by '+'."""
    mode: Mode
    """The thinking mode it was trained for."""
    drafter: DrafterConfig
    target: TargetIdentity
    recipe: Recipe
    """The resolved recipe."""
    training: TrainingRecord
    acceptance: tuple[MeasuredAcceptance, ...] = ()
    """What was measured by speculative decoding."""
    report_files: tuple[str, ...] = ()
    """Full reports, relative to the manifest's folder."""

    def write(self, folder: Path) -> Path:
        """Write ``angelspec_manifest.json`` into ``folder``, atomically."""
        path = folder / MANIFEST_FILE
        write_text_atomic(path, self.model_dump_json(indent=2) + "\n")
        return path

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        """The manifest in ``folder``; None where there is none.

        Raises:
            CheckpointError: unreadable, of another format version, or with unknown or missing keys (named).
        """
        path = folder / MANIFEST_FILE
        if not path.is_file():
            return None
        try:
            content = read_json(path)
        except ValueError as error:
            raise CheckpointError(f"{path} is no JSON: {error}", mend="export the drafter again") from error
        version = content.get("format_version") if isinstance(content, dict) else None
        if version != FORMAT_VERSION:
            raise CheckpointError(
                f"{path} has format version {version!r}; this angelspec reads {FORMAT_VERSION}",
                mend="use the angelspec that wrote it, or export the drafter again",
            )
        try:
            return cls.model_validate(content)
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(str(part) for part in first["loc"])
            raise CheckpointError(f"{path}: {key}: {first['msg']}", mend="export the drafter again") from error
