"""Entry point of the ``angelspec`` command."""

from __future__ import annotations

import errno
import sys

import click

from angelspec import __version__
from angelspec.cli.bench_commands import bench
from angelspec.cli.bundle_commands import bundle
from angelspec.cli.checkpoint_commands import checkpoint
from angelspec.cli.clean_commands import clean
from angelspec.cli.data_commands import data
from angelspec.cli.demo_commands import demo
from angelspec.cli.doctor_commands import doctor
from angelspec.cli.evaluate_commands import evaluate
from angelspec.cli.hub_commands import publish, pull
from angelspec.cli.recipe_commands import recipe
from angelspec.cli.serve_commands import serve
from angelspec.core.errors import AngelspecError, Interrupted


class _Group(click.Group):
    """Shows a user error as one message, never as a traceback."""

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except (Interrupted, KeyboardInterrupt) as stopped:
            if isinstance(stopped, Interrupted):
                click.echo(f"{stopped}; run the same command again to go on from here", err=True)
            else:
                click.echo("\ninterrupted; the same command again takes up what it keeps of finished work", err=True)
            sys.exit(Interrupted.exit_code)
        except AngelspecError as error:
            click.echo(f"error: {error}", err=True)
            sys.exit(error.exit_code)
        except OSError as error:  # a full disk, a folder that may not be read or written
            if error.errno == errno.EPIPE:
                raise
            where = f"{error.filename}: " if error.filename is not None else ""
            click.echo(f"error: {where}{error.strerror or error or type(error).__name__}", err=True)
            sys.exit(AngelspecError.exit_code)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="angelspec")
def cli() -> None:
    """Train, measure, serve and publish speculative-decoding drafters."""


for command in (recipe, evaluate, data, checkpoint, bundle, serve, demo, publish, pull, bench, doctor, clean):
    cli.add_command(command)


def main() -> None:
    """Run the command line."""
    cli()


if __name__ == "__main__":
    main()
