"""Errors a user can act on. Each names the file, line or key that is wrong and the way to mend it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import ClassVar


class AngelspecError(Exception):
    """Base of every error shown to the user without a traceback.

    Args:
        message: what is wrong, naming the file, line or key.
        mend: what to do about it, as one imperative sentence.
    """

    exit_code: ClassVar[int] = 2
    """What the command ends with."""

    def __init__(self, message: str, *, mend: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.mend = mend

    def __str__(self) -> str:
        return self.message if self.mend is None else f"{self.message}\n  mend: {self.mend}"


class RecipeError(AngelspecError):
    """A recipe or an override that cannot be run as written."""


class TargetError(AngelspecError):
    """A target that cannot be found, loaded, or is not what the recipe says."""


class DataError(AngelspecError):
    """Data that cannot be used: unreadable, empty after checks, or too many bad rows."""


class CheckpointError(AngelspecError):
    """A drafter or training checkpoint that is incomplete, misshapen or ambiguous."""


class HubError(AngelspecError):
    """A hub, or a name on it, that cannot be used; its kinds are in ``hub/failures.py``."""


class TrainingError(AngelspecError):
    """A training that must not go on (non-finite steps, nothing to train on)."""


class BundleError(AngelspecError):
    """A bundle that cannot be served as written."""


class RequestError(AngelspecError):
    """A request that cannot be served as it is labelled."""


class Interrupted(AngelspecError):
    """A job that was asked to stop and has saved its state; running it again goes on from there."""

    exit_code = 130


class MissingRequirement(AngelspecError):
    """Hardware, a package or a service that a job needs and this machine lacks."""


def suggest(name: str, allowed: Iterable[str]) -> str:
    """Return ``" (did you mean 'x'?)"`` for the closest allowed name, or an empty string."""
    close = difflib.get_close_matches(name, list(allowed), n=1, cutoff=0.6)
    return f" (did you mean '{close[0]}'?)" if close else ""
