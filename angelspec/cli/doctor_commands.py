"""``angelspec doctor``: what this machine can run, and what is missing."""

from __future__ import annotations

import json
import sys

import click


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def doctor(as_json: bool) -> None:
    """Show what this machine can run, versions, caches and their sizes, what is missing and how to get it.

    Exit code 1 where a package is missing without which nothing runs.
    """
    from angelspec.pipeline.doctor import examine, print_examination

    examination = examine()
    if as_json:
        click.echo(json.dumps(examination, indent=2, ensure_ascii=False))
    else:
        print_examination(examination)
    sys.exit(int(any(found is None for found in examination["packages"].values())))
