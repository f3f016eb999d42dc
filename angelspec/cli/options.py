"""Options that several commands share."""

from __future__ import annotations

import click

from angelspec.core.engine import SERVER_KEY_VARIABLE

server_key = click.option(
    "--api-key",
    envvar=SERVER_KEY_VARIABLE,
    metavar="KEY",
    help=f"Of the servers, where they have one [env: {SERVER_KEY_VARIABLE}].",
)
"""Decorates a command that asks running servers; gives it ``api_key``."""
