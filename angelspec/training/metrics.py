"""Where training writes down how it goes: one JSON line per event, and TensorBoard beside it if wanted."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from angelspec.core.errors import MissingRequirement
from angelspec.core.files import write_text_atomic
from angelspec.core.installing import install_hint

FILE_NAME = "metrics.jsonl"


class MetricsLog:
    """Appends events to ``metrics.jsonl`` in a run's folder, each flushed as it is written.

    Args:
        folder: of the run.
        resume_step: events after this step belong to updates that will be repeated; they are dropped.
        tracker: an additional sink.

    Raises:
        MissingRequirement: the tracker's package is not installed.
    """

    def __init__(self, folder: Path, *, resume_step: int, tracker: Literal["none", "tensorboard"] = "none") -> None:
        self.path = folder / FILE_NAME
        folder.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            kept = [json.dumps(event) + "\n" for event in read_metrics(folder) if event["step"] <= resume_step]
            write_text_atomic(self.path, "".join(kept if resume_step else []))
        self._stream = self.path.open("a", encoding="utf-8")
        self._board = None
        if tracker == "tensorboard":
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError as error:
                raise MissingRequirement(
                    "training.tracker is tensorboard and the package tensorboard is not installed",
                    mend=f"{install_hint('tracking')}, or set training.tracker=none",
                ) from error
            self._board = SummaryWriter(folder / "tensorboard", purge_step=resume_step + 1)

    def write(self, kind: str, *, step: int, stage: str, values: Mapping[str, Any]) -> None:
        """Append one event: ``{"kind", "step", "stage", ...values}``."""
        event = {"kind": kind, "step": step, "stage": stage, **_without_nan(values)}
        self._stream.write(json.dumps(event, allow_nan=False) + "\n")
        self._stream.flush()
        if self._board is not None:
            for key, value in values.items():
                if isinstance(value, (int, float)):
                    self._board.add_scalar(f"{kind}/{key}", value, step)
                elif isinstance(value, list) and all(isinstance(item, (int, float)) for item in value):
                    for number, item in enumerate(value, start=1):
                        self._board.add_scalar(f"{kind}/{key}_{number}", item, step)

    def close(self) -> None:
        """Close all sinks."""
        self._stream.close()
        if self._board is not None:
            self._board.close()


def _without_nan(value: Any) -> Any:
    """JSON has no NaN: non-finite numbers become their names."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _without_nan(item) for key, item in value.items()}
    return [_without_nan(item) for item in value] if isinstance(value, list) else value


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Every whole event of a run, in order; a last line cut short by a crash is left out."""
    path = folder / FILE_NAME
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines[:-1] if line]
