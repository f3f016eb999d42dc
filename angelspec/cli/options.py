"""Options that several commands share."""

from __future__ import annotations

import click

from angelspec.core.engine import SERVER_KEY_VARIABLE
from angelspec.core.modes import MODES

server_key = click.option(
    "--api-key",
    envvar=SERVER_KEY_VARIABLE,
    metavar="KEY",
    help=f"Of the servers, where they have one [env: {SERVER_KEY_VARIABLE}].",
)
"""Decorates a command that asks running servers; gives it ``api_key``."""

drafter_mode = click.option(
    "--mode",
    type=click.Choice(MODES),
    help="Thinking mode of drafters that say nothing of theirs (no angelspec_manifest.json, not registered).",
)
"""Decorates a command that puts drafters together; gives it ``mode``."""
