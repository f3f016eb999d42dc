"""The content-addressed folder of stages, shared by the runs that use it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock

from angelspec.core.files import read_json, write_json_atomic
from angelspec.core.fingerprint import fingerprint
from angelspec.pipeline.stage import Stage, StageOutput, StageResult

STAGE_FILE = "stage.json"
"""Marks a stage's folder as finished."""


def users_file(folder: Path) -> Path:
    """Beside a stage's folder: the output folders of the runs that have used it, a line each."""
    return folder.parent / f".{folder.name}.users"


def read_users(folder: Path) -> list[str]:
    """What ``users_file`` holds."""
    path = users_file(folder)
    return path.read_text(encoding="utf-8").splitlines() if path.is_file() else []


class Store:
    """Stage folders ``<stage>-<fingerprint>`` below one root; ``stage.json`` in one marks it finished."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def name_of(self, stage: Stage, inputs: Mapping[str, Any], before: Mapping[str, StageResult]) -> str:
        """The fingerprint of a stage, given its inputs and its finished predecessors."""
        return fingerprint(
            {
                "stage": stage.name,
                "version": stage.version,
                "inputs": inputs,
                "before": {name: before[name].output.digest for name in stage.needs},
            }
        )

    def folder(self, stage: Stage, name: str) -> Path:
        """Where a stage of that fingerprint lies or will lie."""
        return self.root / f"{stage.name}-{name}"

    def lock(self, stage: Stage, name: str) -> FileLock:
        """Held while a stage runs, so that two runs never fill one folder."""
        self.root.mkdir(parents=True, exist_ok=True)
        return FileLock(self.root / f".{stage.name}-{name}.lock")

    def note_user(self, folder: Path, output: Path) -> None:
        """Remember which run uses a stage, for ``angelspec clean``: the run's folder may lie anywhere."""
        users, line = users_file(folder), str(output.absolute())
        if line not in read_users(folder):
            with users.open("a", encoding="utf-8") as stream:
                stream.write(f"{line}\n")

    @staticmethod
    def finished(folder: Path) -> StageResult | None:
        """The finished stage in that folder, if it is finished."""
        if not (folder / STAGE_FILE).is_file():
            return None
        record = read_json(folder / STAGE_FILE)
        output = StageOutput(record["digest"], record["summary"])
        return StageResult(folder, record["fingerprint"], output, record["seconds"], reused=True)

    def finish(self, stage: Stage, name: str, output: StageOutput, *, seconds: float, inputs: Mapping) -> StageResult:
        """Mark a stage finished."""
        folder = self.folder(stage, name)
        record = {
            "stage": stage.name,
            "fingerprint": name,
            "digest": output.digest,
            "summary": dict(output.summary),
            "seconds": round(seconds, 3),
            "inputs": dict(inputs),
        }
        write_json_atomic(folder / STAGE_FILE, record)
        return StageResult(folder, name, output, seconds, reused=False)
