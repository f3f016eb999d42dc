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
    from angelspec.drafters.checkpoint import examine_checkpoint

    found = examine_checkpoint(path)
    problems = found.problems
    if as_json:
        rows = [{"code": p.code, "key": p.key, "detail": p.detail, "mend": p.mend} for p in problems]
        result = {"path": str(path), "ok": not problems, "problems": rows, "notes": found.notes}
        click.echo(json.dumps(result, indent=2, ensure_ascii=False))
    else:
        click.echo(f"{path}: {len(problems)} problem(s)" if problems else f"{path}: ok")
        for problem in problems:
            click.echo(f"  {problem.code}: {problem.detail}" + (f"\n    mend: {problem.mend}" if problem.mend else ""))
        for note in found.notes:
            click.echo(f"  note: {note}")
    sys.exit(1 if problems else 0)


@checkpoint.command("convert")
@click.argument("path", type=click.Path(path_type=Path))
@click.argument("output", type=click.Path(path_type=Path))
@click.option("--to", "dialect", required=True, help="angelspec, or a public dialect that can express the drafter.")
@click.option(
    "--target",
    "target_folder",
    type=click.Path(path_type=Path),
    help="The target's folder: hy3 keeps its config.json, qwen3 is a full copy of it.",
)
def convert_command(path: Path, output: Path, dialect: str, target_folder: Path | None) -> None:
    """Write the drafter PATH to the folder OUTPUT under the tensor and configuration names of another loader."""
    from angelspec.drafters.checkpoint import convert_checkpoint

    click.echo(f"written: {convert_checkpoint(path, output, dialect=dialect, target_folder=target_folder)}")
