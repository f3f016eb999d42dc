"""What a stage is: a name, what it depends on, and a function that fills its folder.

A stage is named by a fingerprint of everything it depends on: the part of the recipe it reads, the content of
files outside the run, and the digests of what earlier stages produced. A finished stage is reused, a half-finished
one is entered again with its folder as it was left, and a changed input gives another name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from angelspec.core.errors import TargetError
from angelspec.core.recipe import Recipe
from angelspec.pipeline.progress import Progress
from angelspec.pipeline.session import Session

if TYPE_CHECKING:
    from angelspec.targets.target import Target


@dataclass(frozen=True)
class StageOutput:
    """What a stage leaves to later ones."""

    digest: str
    """Content hash of its results; timings are not part of it."""
    summary: Mapping[str, Any]
    """Plain data: counts for the user and facts for later stages."""


@dataclass(frozen=True)
class StageResult:
    """A finished stage."""

    folder: Path
    fingerprint: str
    output: StageOutput
    seconds: float
    reused: bool


@dataclass(frozen=True)
class Work:
    """Everything a running stage may use."""

    recipe: Recipe
    folder: Path
    """The stage's own folder; kept when the stage is interrupted."""
    before: Mapping[str, StageResult]
    """Finished stages, by name."""
    session: Session
    progress: Progress

    def target(self, dtype: str) -> Target:
        """The target in ``float32`` or ``bfloat16``, after a look whether it is still the one of the stages before.

        Raises:
            TargetError: it is another one by now.
        """
        target, stage = self.session.target(dtype), self.before["target"]
        if target.digest != stage.output.digest:
            known, revision = stage.output.summary["source"], stage.output.summary["revision"]
            raise TargetError(
                f"{known} is another model by now than the one that {stage.folder} was made from"
                + (f" (revision {revision}; now {target.revision})" if revision else ""),
                mend=f"pin what you mean in target.source (…@{revision or 'REVISION'}), or remove that folder",
            )
        return target


@dataclass(frozen=True)
class Estimate:
    """What a stage will do and take, as far as the recipe alone tells."""

    does: str
    tokens: int | None = None
    disk_bytes: int | None = None
    memory_bytes: int | None = None
    note: str = ""


@dataclass(frozen=True)
class Stage:
    """One stage of a recipe."""

    name: str
    does: str
    """One line for the user, in the present tense."""
    needs: tuple[str, ...]
    """Names of the stages whose output it reads."""
    inputs: Callable[[Recipe], Mapping[str, Any]]
    """Plain data it depends on besides other stages; hashes of outside files included."""
    run: Callable[[Work], StageOutput]
    estimate: Callable[[Recipe], Estimate]
    version: int = 1
    """Raised when the stage's code changes what it produces."""
    by_all_ranks: bool = False
    """Whether every rank of a run enters it; the others are run by the first rank alone."""
