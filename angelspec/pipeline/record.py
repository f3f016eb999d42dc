"""What a run has entered and finished: ``stages.json`` in its output folder, written as it goes.

It names the stages for ``angelspec clean`` and for the other ranks of the run, also where the run was interrupted.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from angelspec.core.errors import MissingRequirement
from angelspec.core.files import read_json, write_json_atomic
from angelspec.pipeline.stage import StageResult

RECORD_FILE = "stages.json"
RUN_LOCK = ".run.lock"
"""In a run's output folder; held while the run goes on."""
LOOK_SECONDS = 0.5
"""Between two looks of a rank at what the first one has done."""


@contextmanager
def only_run_in(output: Path) -> Iterator[None]:
    """Hold a run's output folder.

    Raises:
        MissingRequirement: another run holds it.
    """
    output.mkdir(parents=True, exist_ok=True)
    lock = FileLock(output / RUN_LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise MissingRequirement(
            f"another run writes into {output} now", mend="wait for it, or give this one another --output"
        ) from None
    try:
        yield
    finally:
        lock.release()


class RunRecord:
    """The record of one run, as the process that runs its stages writes it.

    Args:
        output: the run's folder; a record of an earlier run in it is replaced.
    """

    def __init__(self, output: Path) -> None:
        self.path = output / RECORD_FILE
        self._stages: dict[str, dict[str, Any]] = {}
        self._write()

    def enter(self, name: str, folder: Path) -> None:
        """A stage is about to run, or to be reused, in this folder."""
        self._stages[name] = {"folder": str(folder.absolute()), "digest": None, "seconds": None}
        self._write()

    def finish(self, name: str, result: StageResult) -> None:
        """The stage has ended."""
        self._stages[name] |= {"digest": result.output.digest, "seconds": round(result.seconds, 1)}
        self._write()

    def _write(self) -> None:
        write_json_atomic(self.path, self._stages)


def read_record(output: Path) -> dict[str, dict[str, Any]]:
    """The stages of a run by name; empty if there is no readable record."""
    try:
        stages = read_json(output / RECORD_FILE)
    except (OSError, ValueError):
        return {}
    return {key: value for key, value in stages.items() if isinstance(value, dict)} if isinstance(stages, dict) else {}


def await_stage(output: Path, name: str) -> Path:
    """Where a stage runs, once another rank has entered it.

    Raises:
        MissingRequirement: that rank's record can't be seen from here.
    """
    while (stage := read_record(output).get(name)) is None:
        if not (output / RECORD_FILE).is_file():
            raise MissingRequirement(
                f"the first rank's {output / RECORD_FILE} can't be seen by this one",
                mend="let all ranks run in a folder that they share",
            )
        time.sleep(LOOK_SECONDS)
    return Path(stage["folder"])
