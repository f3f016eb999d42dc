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

served_target = click.option(
    "--target", metavar="TARGET", help="A folder, hf:ORG/NAME, modelscope:ORG/NAME, or a known target's name."
)
"""Decorates a command that starts a server; gives it ``target``."""

served_drafters = click.option(
    "--drafter",
    "drafters",
    multiple=True,
    metavar="[NAME=]CHECKPOINT",
    help="A folder, hf:ORG/NAME, modelscope:ORG/NAME or a registered name; may repeat. NAME is what requests may route "
    "by (default: the algorithm, such as dfly or mtp).",
)
"""Decorates a command that starts a server; gives it ``drafters``."""

drafter_mode = click.option(
    "--mode",
    type=click.Choice(MODES),
    help="Thinking mode of drafters that say nothing of theirs (no angelspec_manifest.json, not registered).",
)
"""Decorates a command that puts drafters together; gives it ``mode``."""

drafter_license = click.option(
    "--license",
    "license_name",
    metavar="ID",
    callback=lambda context, parameter, text: text.lower() if text else text,  # as both hubs write identifiers
    help="Identifier of the drafter's licence, such as apache-2.0 (default: the target's).",
)
"""Decorates a command that writes a card; gives it ``license_name``."""
