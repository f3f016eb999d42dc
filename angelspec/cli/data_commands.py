"""``angelspec data``: check files before a run meets them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click


@click.group()
def data() -> None:
    """Check training and evaluation data."""


@data.command("check")
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--quarantine", type=click.Path(path_type=Path), help="Write the refused rows to this file.")
def check_command(files: tuple[Path, ...], as_json: bool, quarantine: Path | None) -> None:
    """Validate FILES row by row; exit 1 if nothing is usable."""
    from angelspec.data.check import check_files

    result = check_files(files, quarantine=quarantine)
    if as_json:
        click.echo(json.dumps(result, indent=2, ensure_ascii=False))
    else:
        click.echo(f"{result['accepted']} usable, {len(result['rejected'])} refused")
        for row in result["rejected"]:
            place = f"{row['file']}:" if "file" in row else ""
            click.echo(f"  {place}{row['line']}: {row['reason']}: {row['detail']}")
    sys.exit(0 if result["accepted"] else 1)
