"""``angelspec data``: check files before a run meets them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from angelspec.data.check import RenderingCheck


@click.group()
def data() -> None:
    """Check training and evaluation data."""


@data.command("check")
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option(
    "--responses",
    type=click.Choice(["either", "given", "rollout"]),
    default="either",
    show_default=True,
    help="given: rows need an answer; rollout: answers are ignored; either: conversations need one, prompts none.",
)
@click.option("--quarantine", type=click.Path(path_type=Path), help="Write the refused rows to this file.")
@click.option("--recipe", help="Also render, mask and cut the rows as this recipe would; loads its target.")
def check_command(
    files: tuple[Path, ...], as_json: bool, responses: str, quarantine: Path | None, recipe: str | None
) -> None:
    """Validate FILES row by row; exit 1 if nothing is usable."""
    from angelspec.data.check import check_files

    rendering = None if recipe is None else _rendering(recipe)
    result = check_files(files, quarantine=quarantine, responses=responses, rendering=rendering)
    if as_json:
        click.echo(json.dumps(result, indent=2, ensure_ascii=False))
    else:
        click.echo(f"{result['accepted']} usable, {len(result['rejected'])} refused")
        for row in result["rejected"]:
            place = f"{row['file']}:" if "file" in row else ""
            click.echo(f"  {place}{row['line']}: {row['reason']}: {row['detail']}")
        for note in result["notes"]:
            place = f"{note['file']}:" if "file" in note else ""
            detail = f": {note['detail']}" if note["detail"] else ""
            click.echo(f"  {place}{note['line']}: kept, {note['note']}{detail}")
        if tokens := result.get("tokens"):
            click.echo(
                f"  {tokens['rows']} training rows of {tokens['total']:,} tokens, {tokens['supervised']:,} "
                f"({tokens['supervised_share']:.0%}) of them supervised"
            )
        if result["ignored_keys"]:
            keys = ", ".join(f"{key} ({count})" for key, count in result["ignored_keys"].items())
            click.echo(f"  keys that nothing reads: {keys}")
    sys.exit(0 if result["accepted"] else 1)


def _rendering(name: str) -> RenderingCheck:
    from angelspec.core.recipe_files import load_recipe
    from angelspec.data.chat import chat_format
    from angelspec.data.check import RenderingCheck
    from angelspec.pipeline.session import Session

    recipe = load_recipe(name)
    return RenderingCheck(
        chat_format(Session(recipe).target(recipe.target.dtype), mode=recipe.mode),
        max_prompt_tokens=recipe.data.max_prompt_tokens,
        max_document_tokens=recipe.pack.max_document_tokens,
        block_size=recipe.verify_width,
    )
