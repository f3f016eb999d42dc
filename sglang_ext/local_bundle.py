"""A bundle names its drafters as users do, by a folder, a hub's or a registered name; the engine reads folders."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from angelspec.core.bundle import load_bundle
from angelspec.core.engine import BUNDLE_VARIABLE
from angelspec.core.errors import BundleError


def settle_bundle() -> None:
    """Have the drafters that the environment's bundle names fetched, by ``angelspec bundle fetch``, and put the bundle
    of their folders into the environment, which the processes started from here on inherit. Nothing is done where all
    are folders already.

    Raises:
        BundleError: the bundle is wrong, or a drafter can't be found or fetched; with the command's own words.
    """
    file = os.environ.get(BUNDLE_VARIABLE)
    if not file:
        return  # ``settings.current_plan`` says so
    if all(Path(drafter.source).is_absolute() for drafter in load_bundle(Path(file)).drafters):
        return
    command = [sys.executable, "-m", "angelspec", "bundle", "fetch", file]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BundleError(f"{file}: its drafters can't be had\n{done.stderr.strip()}")
    os.environ[BUNDLE_VARIABLE] = done.stdout.splitlines()[-1]
