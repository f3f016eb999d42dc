"""``angelspec bundle``: one target and the drafters that serve it together, as a file."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from angelspec.cli.options import drafter_mode, server_key
from angelspec.core.errors import RequestError
from angelspec.core.modes import Mode


@click.group()
def bundle() -> None:
    """Write, show and check bundles: a target, its drafters, their routes, and what was measured of them."""


@bundle.command("create")
@click.option(
    "--target", required=True, metavar="TARGET", help="A folder, hf:ORG/NAME, modelscope:ORG/NAME, or a known name."
)
@click.option(
    "--drafter",
    "drafters",
    multiple=True,
    required=True,
    metavar="[NAME=]CHECKPOINT",
    help="A folder, hf:ORG/NAME, modelscope:ORG/NAME or a registered name; may repeat, in order of preference.",
)
@drafter_mode
@click.option(
    "--route",
    "routes",
    multiple=True,
    metavar="[WORKLOAD][/MODE]=ROUTE",
    help="A fixed route, such as code=dfly, math/high-think=mtp or =ar for all; may repeat, the first that holds "
    "decides (default: by load).",
)
@click.option(
    "--measure",
    "prompts",
    multiple=True,
    metavar="[NAME=]SOURCE",
    help="Measure acceptance on these prompts (a file or builtin:…) with the reference loop; may repeat. Without it, "
    "the figures of the drafters' own evaluation are taken.",
)
@click.option("--limit", type=click.IntRange(min=1), help="Prompts per source of --measure.")
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=128, show_default=True, help="Of --measure.")
@click.option("--batch-size", type=click.IntRange(min=1), default=8, show_default=True, help="Of --measure.")
@click.option("--name", default="", help="Of the bundle.")
@click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("bundle.yaml"),
    show_default=True,
    help="File to write: JSON where it ends in .json, else YAML. Paths in it are relative to it.",
)
@click.option("--overwrite", is_flag=True, help="Replace the bundle that lies there, with what it has learnt.")
@click.option("--quiet", is_flag=True, help="Show no progress.")
def create_command(
    target: str,
    drafters: tuple[str, ...],
    mode: Mode | None,
    routes: tuple[str, ...],
    prompts: tuple[str, ...],
    limit: int | None,
    max_new_tokens: int,
    batch_size: int,
    name: str,
    output: Path,
    overwrite: bool,
    quiet: bool,
) -> None:
    """Write a bundle of a target and its drafters, after checking that they fit.

    Step costs are not measured here: the server measures them when it starts, on the machine that it serves on.
    """
    from angelspec.cli import serving_parts
    from angelspec.serving.resolving import compose_bundle, resolve_bundle, with_acceptance, with_routes

    if output.exists() and not overwrite:
        raise RequestError(f"{output} exists", mend="choose another --output, or replace it with --overwrite")
    parts = serving_parts.parts()
    made = compose_bundle(target, drafters, parts=parts, name=name, mode=mode, relative_to=output.resolve().parent)
    made = with_routes(made, routes)
    resolved = resolve_bundle(made.located(output.resolve().parent), parts=parts)
    if prompts:
        from angelspec.pipeline.bundle_measure import measure_bundle
        from angelspec.pipeline.progress import Progress

        progress = Progress(quiet=quiet)
        with progress.running():
            measured = measure_bundle(
                resolved, prompts, limit=limit, max_new_tokens=max_new_tokens, batch_size=batch_size, progress=progress
            )
        made = with_acceptance(made, measured)
    made.save(output)
    click.echo(f"written: {output}")
    _show(output)
    click.echo(f"serve it: angelspec serve --bundle {output}")


@bundle.command("show")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def show_command(file: Path, as_json: bool) -> None:
    """Show the bundle FILE; nothing is fetched or loaded."""
    from angelspec.core.bundle import load_bundle

    if as_json:
        click.echo(json.dumps(load_bundle(file).model_dump(mode="json"), indent=2, ensure_ascii=False))
    else:
        _show(file)


@bundle.command("fetch")
@click.argument("file", type=click.Path(path_type=Path))
def fetch_command(file: Path) -> None:
    """Fetch the drafters that the bundle FILE names, and print the file of a bundle that names their folders.

    It lies in angelspec's cache. SGLang's own launcher calls this for a bundle with names in it.
    """
    from angelspec.cli import serving_parts
    from angelspec.core.bundle import load_bundle
    from angelspec.serving.launch import keep_bundle

    named = load_bundle(file)
    folders = [serving_parts.find_drafter(drafter.source, bare_paths=False).folder for drafter in named.drafters]
    drafters = tuple(
        drafter.model_copy(update={"source": str(folder.resolve())})
        for drafter, folder in zip(named.drafters, folders, strict=True)
    )
    click.echo(keep_bundle(named.model_copy(update={"drafters": drafters})))


@bundle.command("check")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def check_command(file: Path, as_json: bool) -> None:
    """Say what keeps the bundle FILE from being served, as `angelspec serve` would; exit 1 if anything does.

    Drafters and target are fetched where they are not on this machine, and every tensor is looked at.
    """
    from angelspec.cli import serving_parts
    from angelspec.core.bundle import check_bundle, load_bundle
    from angelspec.core.errors import AngelspecError
    from angelspec.serving.resolving import resolve_bundle

    problems, notes = check_bundle(file), []
    if not problems:
        try:
            resolved = resolve_bundle(load_bundle(file), parts=serving_parts.parts())
            notes = [f"{drafter.entry.name}: {note}" for drafter in resolved.drafters for note in drafter.notes]
        except AngelspecError as error:
            problems = [str(error)]
    if as_json:
        result = {"file": str(file), "ok": not problems, "problems": problems, "notes": notes}
        click.echo(json.dumps(result, indent=2, ensure_ascii=False))
    else:
        click.echo(f"{file}: {len(problems)} problem(s)" if problems else f"{file}: ok")
        for line in [*problems, *(f"note: {note}" for note in notes)]:
            click.echo(f"  {line}")
    sys.exit(1 if problems else 0)


@bundle.command("learn")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--url", required=True, help="Of a server that was started with FILE, e.g. http://127.0.0.1:30000.")
@server_key
def learn_command(file: Path, url: str, api_key: str | None) -> None:
    """Write into the bundle FILE what a running server measured and learnt.

    These are the costs of its steps, as it measured them when it started, and how far each drafter's confidences can
    be trusted, as served requests have shown. A server that starts with FILE begins with both. Costs hold on the same
    hardware, engine and flags alone, and are measured again elsewhere; FILE's paths, routes and settings stay.
    """
    from angelspec.core.bundle import read_bundle
    from angelspec.serving.client import Client
    from angelspec.serving.resolving import with_learnt

    before = read_bundle(file)
    with Client(url, api_key=api_key) as client:
        engine = client.server_info().extension(url)
    with_learnt(before, engine).save(file)
    outcomes = {name: calibration.outcomes for name, calibration in engine.calibrations.items()}
    for drafter in before.drafters:
        seen = outcomes.get(drafter.name, 0)
        click.echo(f"{drafter.name}: " + (f"learnt from {seen} verified proposals" if seen else "nothing verified yet"))
    click.echo("step costs: " + ("those that the server plans by" if engine.costs else "the server has none"))
    click.echo(f"written: {file}")


def _show(file: Path) -> None:
    from angelspec.core.bundle import load_bundle
    from angelspec.pipeline.progress import table_console
    from angelspec.serving.plan_table import print_bundle

    print_bundle(load_bundle(file), console=table_console())
