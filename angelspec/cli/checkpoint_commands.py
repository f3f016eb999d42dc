"""``angelspec checkpoint``: what is wrong with a drafter, and its other dialects."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click


@click.group()
def checkpoint() -> None:
    """Check and convert drafter checkpoints."""


@checkpoint.command("check")
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def check_command(path: Path, as_json: bool) -> None:
    """Say by name what is wrong with the drafter folder or file PATH; exit 1 if anything is."""
    from angelspec.drafters.checkpoint import inspect_checkpoint

    problems = inspect_checkpoint(path)
    if as_json:
        rows = [{"code": p.code, "key": p.key, "detail": p.detail, "mend": p.mend} for p in problems]
        click.echo(json.dumps({"path": str(path), "ok": not problems, "problems": rows}, indent=2))
    elif not problems:
        click.echo(f"{path}: ok")
    else:
        click.echo(f"{path}: {len(problems)} problem(s)")
        for problem in problems:
            click.echo(f"  {problem.code}: {problem.detail}" + (f"\n    mend: {problem.mend}" if problem.mend else ""))
    sys.exit(1 if problems else 0)


@checkpoint.command("convert")
@click.argument("path", type=click.Path(exists=True, path_type=Path))
@click.argument("output", type=click.Path(path_type=Path))
@click.option("--to", "dialect", required=True, help="angelspec, or a public dialect that can express the drafter.")
def convert_command(path: Path, output: Path, dialect: str) -> None:
    """Write the drafter PATH to the folder OUTPUT under the tensor and configuration names of another loader."""
    from angelspec.drafters.checkpoint import convert_checkpoint

    click.echo(f"written: {convert_checkpoint(path, output, dialect=dialect)}")
