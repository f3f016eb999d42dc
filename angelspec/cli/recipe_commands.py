"""``angelspec recipe``: list, show, check, run, compare."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click
import yaml

from angelspec.core.recipe_files import check_recipe, list_recipes, load_recipe

_set = click.option(
    "--set", "overrides", multiple=True, metavar="SECTION.FIELD=VALUE", help="Override one value; may repeat."
)
_preset = click.option("--preset", metavar="NAME", help="A preset of the recipe, for example quick.")


@click.group()
def recipe() -> None:
    """List, inspect, check, run and compare recipes."""


@recipe.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_command(as_json: bool) -> None:
    """List the shipped recipes."""
    summaries = list_recipes()
    if as_json:
        rows = [{"name": s.name, "description": s.description, "presets": list(s.presets)} for s in summaries]
        click.echo(json.dumps(rows, indent=2, ensure_ascii=False))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("recipe", "what it trains", "presets", box=None, pad_edge=False)
    for summary in summaries:
        table.add_row(f"[bold]{summary.name}[/bold]", summary.description, ", ".join(summary.presets))
    Console().print(table)


@recipe.command("show")
@click.argument("name")
@_preset
@_set
def show_command(name: str, preset: str | None, overrides: tuple[str, ...]) -> None:
    """Print the fully resolved recipe NAME as YAML."""
    resolved = load_recipe(name, preset=preset, overrides=overrides)
    click.echo(yaml.safe_dump(resolved.model_dump(mode="json"), sort_keys=False, allow_unicode=True), nl=False)


@recipe.command("check")
@click.argument("names", nargs=-1, required=True)
@_preset
@_set
def check_command(names: tuple[str, ...], preset: str | None, overrides: tuple[str, ...]) -> None:
    """Check recipes (names or YAML files) without loading a model; exit 1 if one is wrong."""
    wrong = 0
    for name in names:
        problems = check_recipe(name, preset=preset, overrides=overrides)
        wrong += bool(problems)
        click.echo(f"{name}: ok" if not problems else f"{name}: wrong\n{problems[0]}")
    sys.exit(1 if wrong else 0)


@recipe.command("run")
@click.argument("name")
@_preset
@_set
@click.option("--plan", is_flag=True, help="Print the resolved recipe and every stage's estimate; run nothing.")
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder of the run (default: runs/NAME, or runs/NAME-PRESET).",
)
@click.option(
    "--store",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder of the stages, shared by runs (default: runs/store, or OUTPUT/store with --output).",
)
@click.option("--quiet", is_flag=True, help="Show no progress.")
def run_command(
    name: str,
    preset: str | None,
    overrides: tuple[str, ...],
    plan: bool,
    output: Path | None,
    store: Path | None,
    quiet: bool,
) -> None:
    """Run recipe NAME: from the target to a measured, exported drafter. Interrupt and rerun it freely."""
    resolved = load_recipe(name, preset=preset, overrides=overrides)
    if plan:
        from angelspec.pipeline.plan import print_plan

        print_plan(resolved)
        return
    run_name = resolved.name if preset is None else f"{resolved.name}-{preset}"
    folder = output or Path("runs") / run_name
    store = store or (Path("runs") / "store" if output is None else output / "store")

    from angelspec.pipeline.recipe_run import run_recipe

    run_recipe(resolved, output=folder, store=store, quiet=quiet)


@recipe.command("compare")
@click.argument("name")
@_set
@click.option("--plan", is_flag=True, help="Print the variants and their recipes' differences; run nothing.")
@click.option(
    "--output", type=click.Path(file_okay=False, path_type=Path), help="Folder of the report (default: runs/NAME)."
)
@click.option(
    "--store",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder of the stages, shared by runs (default: runs/store, or OUTPUT/store with --output).",
)
@click.option("--quiet", is_flag=True, help="Show no progress.")
def compare_command(
    name: str, overrides: tuple[str, ...], plan: bool, output: Path | None, store: Path | None, quiet: bool
) -> None:
    """Train the variants of comparison NAME (or a YAML file), several seeds each, and measure which is better."""
    from angelspec.core.comparison import load_comparison

    comparison = load_comparison(name).with_overrides(overrides)
    runs = list(comparison.runs())
    if plan:
        click.echo(f"{comparison.name}: {comparison.description}")
        click.echo(f"recipe {comparison.base}, seeds {', '.join(map(str, comparison.seeds))}: {len(runs)} trainings")
        for variant, changes in {"every variant": comparison.set, **comparison.variants}.items():
            click.echo(f"  {variant}:" + ("" if changes else " the recipe as it is"))
            for key, value in changes.items():
                click.echo(f"    {key}={json.dumps(value)}")
        for ordering in comparison.orderings:
            click.echo(f"  expected: {ordering.better} > {ordering.worse} ({ordering.claim})")
        return
    folder = output or Path("runs") / comparison.name
    store = store or (Path("runs") / "store" if output is None else output / "store")

    from angelspec.pipeline.compare_run import run_comparison

    run_comparison(comparison, output=folder, store=store, quiet=quiet)


@recipe.command("reference")
def reference_command() -> None:
    """Print the reference of all recipe keys (recipes/README.md)."""
    from angelspec.core.recipe_reference import recipe_reference

    click.echo(recipe_reference(), nl=False)
