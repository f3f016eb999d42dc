"""``angelspec checkpoint``: what a drafter is, what is wrong with it, its other dialects, and the registry."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from angelspec.cli.options import drafter_license

_STATED = click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="FIELD=VALUE",
    help="A field of the drafter's configuration that its config.json lacks, such as block_size=8; may repeat.",
)


@click.group()
def checkpoint() -> None:
    """Show, check and convert drafter checkpoints."""


@checkpoint.command("show")
@click.argument("name", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def show_command(name: str | None, as_json: bool) -> None:
    """Show the drafter NAME (a path, hf:ORG/NAME, modelscope:ORG/NAME or a registered name), or all registered ones.

    Nothing is fetched.
    """
    from angelspec.core.registry import load_registry
    from angelspec.pipeline import show_checkpoint as showing

    if name is None:
        if as_json:
            click.echo(json.dumps(showing.registry_rows(load_registry()), indent=2, ensure_ascii=False))
        else:
            showing.print_registry(load_registry())
        return
    facts = showing.checkpoint_facts(name)
    if as_json:
        click.echo(json.dumps(facts, indent=2, ensure_ascii=False))
    else:
        showing.print_facts(facts)


@checkpoint.command("schema")
def schema_command() -> None:
    """Print the JSON schema of the registry (checkpoints/registry.schema.json)."""
    from angelspec.core.registry import registry_schema

    click.echo(registry_schema(), nl=False)


@checkpoint.command("check")
@click.argument("path", type=click.Path(path_type=Path))
@_STATED
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def check_command(path: Path, settings: tuple[str, ...], as_json: bool) -> None:
    """Say by name what is wrong with the drafter folder or file PATH; exit 1 if anything is."""
    from angelspec.drafters.checkpoint import examine_checkpoint

    found = examine_checkpoint(path, overrides=_fields(settings))
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
@click.option(
    "--to",
    "dialect",
    required=True,
    help="angelspec (any drafter), dflash (DFlash), dspark (DSpark), qwen3 (dense MTP), hy3 (MTP with experts), sglang "
    "(the one of these that SGLang loads by itself) or vllm-speculators (DFlash and DSpark).",
)
@click.option(
    "--target",
    "target_folder",
    type=click.Path(path_type=Path),
    help="The target's folder: hy3 keeps its config.json, qwen3 is a full copy of it, vllm-speculators names its kind.",
)
@_STATED
def convert_command(
    path: Path, output: Path, dialect: str, target_folder: Path | None, settings: tuple[str, ...]
) -> None:
    """Write the drafter PATH to the folder OUTPUT under the tensor and configuration names of another loader."""
    from angelspec.drafters.checkpoint import convert_checkpoint

    written = convert_checkpoint(
        path, output, dialect=dialect, target_folder=target_folder, overrides=_fields(settings)
    )
    click.echo(f"written: {written}")


def _fields(settings: tuple[str, ...]) -> dict[str, Any]:
    """What the caller states of a drafter's configuration.

    Raises:
        CheckpointError: no ``=``, no YAML, or a field that no drafter has.
    """
    from angelspec.core.drafter_config import BlockDrafterConfig, MtpDrafterConfig
    from angelspec.core.errors import CheckpointError, suggest
    from angelspec.core.yaml_text import YamlError, parse_yaml

    known = {**BlockDrafterConfig.model_fields, **MtpDrafterConfig.model_fields}
    fields: dict[str, Any] = {}
    for setting in settings:
        name, separator, text = setting.partition("=")
        if not separator:
            raise CheckpointError(
                f"--set '{setting}' is not of the form FIELD=VALUE", mend="such as --set block_size=8"
            )
        if name not in known:
            raise CheckpointError(
                f"--set '{setting}': no drafter has a field '{name}'{suggest(name, known)}",
                mend=f"fields: {', '.join(sorted(known))}",
            )
        try:
            fields[name] = parse_yaml(text)
        except YamlError as error:
            raise CheckpointError(f"--set '{setting}': the value is no YAML ({error})") from None
    return fields


@checkpoint.command("card")
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.option("--name", help="By which its commands name the drafter (default: the folder's name, or the recipe's).")
@drafter_license
@click.option("--base-model", metavar="ORG/NAME", help="The target on the Hugging Face hub, if angelspec can't know.")
@click.option("--overwrite", is_flag=True, help="Write a README.md that is there anew.")
def card_command(
    folder: Path, name: str | None, license_name: str | None, base_model: str | None, overwrite: bool
) -> None:
    """Write the model card (README.md) and LICENSE of the exported drafter in FOLDER, to read or to edit.

    `angelspec publish` makes the same card, with the places it goes to, where a drafter has none of its own.
    """
    from angelspec.core.errors import CheckpointError
    from angelspec.core.files import write_text_atomic
    from angelspec.core.manifest import MANIFEST_FILE, DrafterManifest
    from angelspec.hub.card import write_card
    from angelspec.hub.publish import add_license
    from angelspec.hub.staging import CARD_FILE
    from angelspec.pipeline.card_facts import base_model as known_base
    from angelspec.pipeline.card_facts import card_facts, target_license
    from angelspec.pipeline.recipe_run import DRAFTER_FOLDER

    manifest = DrafterManifest.read(folder)
    if manifest is None:
        raise CheckpointError(f"{folder} has no {MANIFEST_FILE}", mend="give the folder of an exported drafter")
    card = folder / CARD_FILE
    if card.exists() and not overwrite:
        raise CheckpointError(f"{card} is there already", mend="say --overwrite to write it anew")
    license_name = license_name or target_license(manifest)
    if license_name is None:
        raise CheckpointError("the target's licence is not known", mend="state the drafter's with --license")
    add_license(folder, license_name)
    facts = card_facts(
        folder,
        manifest,
        name=name or (manifest.recipe.name if folder.resolve().name == DRAFTER_FOLDER else folder.resolve().name),
        license=license_name,
        base=base_model or known_base(manifest),
    )
    write_text_atomic(card, write_card(facts))
    click.echo(f"written: {card}")
