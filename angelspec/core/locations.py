"""Where things lie: the recipes and checkpoints that ship with angelspec, and the user's cache."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs

from angelspec.core.files import expanded

_PACKAGE = Path(__file__).resolve().parent.parent


def resource_folder(name: str) -> Path:
    """The shipped folder ``recipes`` or ``checkpoints``, from a clone or from an installed wheel.

    Raises:
        FileNotFoundError: neither place holds it (a broken installation).
    """
    for candidate in (_PACKAGE / "_resources" / name, _PACKAGE.parent / name):
        if candidate.is_dir():
            return candidate
    raise FileNotFoundError(f"angelspec's '{name}' folder is missing beside {_PACKAGE}; reinstall angelspec")


def license_file() -> Path:
    """The text of angelspec's own licence, Apache-2.0, from a clone or from an installed wheel.

    Raises:
        FileNotFoundError: neither place holds it (a broken installation).
    """
    for candidate in (_PACKAGE / "_resources" / "LICENSE", _PACKAGE.parent / "LICENSE"):
        if candidate.is_file():
            return candidate
    raise FileNotFoundError(f"angelspec's LICENSE is missing beside {_PACKAGE}; reinstall angelspec")


def prompt_folder() -> Path:
    """The prompt set that ships inside the package."""
    return _PACKAGE / "data" / "prompts"


def cache_folder() -> Path:
    """The user's cache: ``$ANGELSPEC_CACHE`` if set, else the platform's cache folder."""
    override = os.environ.get("ANGELSPEC_CACHE")
    return expanded(override) if override else Path(platformdirs.user_cache_dir("angelspec"))
