"""``angelspec bench``: how fast the parts are on this machine."""

from __future__ import annotations

import click


@click.group()
def bench() -> None:
    """Measure speed and memory."""


@bench.command("train")
@click.argument("recipe_name", metavar="[RECIPE]", required=False)
@click.option("--set", "overrides", multiple=True, metavar="SECTION.FIELD=VALUE", help="Override one recipe value.")
@click.option("--preset", metavar="NAME", help="A preset of the recipe.")
@click.option(
    "--objective",
    "objectives",
    multiple=True,
    type=click.Choice(["ce", "lk", "e2e"]),
    help="Without RECIPE: objectives to measure; may repeat (default: all).",
)
@click.option(
    "--matmul",
    "matmuls",
    multiple=True,
    type=click.Choice(["float32", "bfloat16"]),
    help="Precision of the matrix products; may repeat.",
)
@click.option(
    "--reference",
    type=click.Choice(["dfly", "mtp"]),
    default="dfly",
    show_default=True,
    help="Without RECIPE: the drafter to measure.",
)
@click.option("--repeats", type=int, default=5, show_default=True, help="Measured steps; the median is reported.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def train_command(
    recipe_name: str | None,
    overrides: tuple[str, ...],
    preset: str | None,
    objectives: tuple[str, ...],
    matmuls: tuple[str, ...],
    reference: str,
    repeats: int,
    as_json: bool,
) -> None:
    """Measure a training step of RECIPE, or of a reference configuration.

    Those have SmolLM2's geometry and a row of 512 tokens: DFly of 5 layers, 5 taps and 64 blocks of 8, or dense MTP of
    3 depths, on-policy.
    """
    from angelspec.training.bench import bench_training, print_bench

    results = bench_training(
        recipe_name,
        overrides=overrides,
        preset=preset,
        objectives=objectives,
        matmuls=matmuls,
        reference=reference,
        repeats=repeats,
    )
    if as_json:
        import json

        click.echo(json.dumps([result.model_dump(mode="json") for result in results], indent=2))
    else:
        print_bench(results)
