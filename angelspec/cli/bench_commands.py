"""``angelspec bench``: how fast the parts are on this machine."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import click

from angelspec.cli.options import server_key
from angelspec.core.errors import RequestError


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
    from angelspec.pipeline.session import best_device
    from angelspec.training.bench import bench_training, print_bench

    results = bench_training(
        recipe_name,
        overrides=overrides,
        preset=preset,
        objectives=objectives,
        matmuls=matmuls,
        reference=reference,
        repeats=repeats,
        device=best_device(),
    )
    if as_json:
        import json

        click.echo(json.dumps([result.model_dump(mode="json") for result in results], indent=2))
    else:
        print_bench(results)


@bench.command("length")
@click.option(
    "--length",
    "lengths",
    multiple=True,
    type=click.IntRange(min=8),
    default=(512, 1024, 2048, 4096, 8192),
    show_default=True,
    help="Tokens of a row; three at least.",
)
@click.option(
    "--extrapolate",
    multiple=True,
    type=click.IntRange(min=8),
    default=(32768, 131072),
    show_default=True,
    help="Longer rows to extrapolate to; may repeat.",
)
@click.option("--depths", type=click.IntRange(min=2), default=3, show_default=True, help="Depths of the MTP drafter.")
@click.option("--objective", type=click.Choice(["ce", "lk", "e2e"]), default="lk", show_default=True)
@click.option("--matmul", type=click.Choice(["float32", "bfloat16"]), default="float32", show_default=True)
@click.option("--repeats", type=click.IntRange(min=1), default=3, show_default=True, help="Measured steps a length.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def length_command(
    lengths: tuple[int, ...],
    extrapolate: tuple[int, ...],
    depths: int,
    objective: str,
    matmul: str,
    repeats: int,
    as_json: bool,
) -> None:
    """Measure how an MTP training step grows with its row: one depth, all depths, all depths recomputed.

    The reference configuration of `bench train --reference mtp`, at other lengths.
    """
    from angelspec.pipeline.session import best_device
    from angelspec.training.growth import bench_length, print_growth

    grown = bench_length(
        lengths, num_depths=depths, objective=objective, matmul=matmul, repeats=repeats, device=best_device()
    )
    if as_json:
        import json

        click.echo(json.dumps([growth.model_dump(mode="json") for growth in grown], indent=2))
    else:
        print_growth(grown, extrapolate=extrapolate)


@bench.command("serve")
@click.option("--url", required=True, help="Of a server that `angelspec serve` started, e.g. http://127.0.0.1:30000.")
@click.option("--control-url", help="Of a server without the extension and the same target, measured in turns.")
@click.option(
    "--prompts",
    multiple=True,
    required=True,
    metavar="[NAME=]SOURCE",
    help="A prompt file or builtin:… set; may repeat: each is measured, and all together as 'mixed'.",
)
@click.option("--no-mixed", is_flag=True, help="Do not measure several prompt sets together.")
@click.option("--limit", type=click.IntRange(min=1), help="Prompts per set.")
@click.option(
    "--concurrency",
    multiple=True,
    type=click.IntRange(min=1),
    default=(1, 4, 8),
    show_default=True,
    help="Users at a time; may repeat.",
)
@click.option(
    "--route",
    "routes",
    multiple=True,
    default=("auto",),
    show_default=True,
    metavar="ROUTE[:CUT]",
    help="auto, ar (always measured) or a drafter; may repeat. With :CUT it is measured with this cut alone.",
)
@click.option(
    "--dcut",
    "cuts",
    multiple=True,
    default=("auto",),
    show_default=True,
    metavar="CUT",
    help="auto, off or a keep ratio, for routes that name none; may repeat.",
)
@click.option(
    "--requests",
    type=click.IntRange(min=1),
    default=32,
    show_default=True,
    help="Measured requests per window.",
)
@click.option(
    "--requests-per-user",
    type=click.IntRange(min=2),
    default=2,
    show_default=True,
    help="At least so many times the concurrency, so that windows of many users last long enough.",
)
@click.option(
    "--max-tokens",
    type=click.IntRange(min=1),
    default=512,
    show_default=True,
    help="Longest answer; answers end by themselves before.",
)
@click.option("--temperature", type=click.FloatRange(min=0), default=0.0, show_default=True, help="Of every request.")
@click.option(
    "--repeats",
    type=click.IntRange(min=1),
    default=3,
    show_default=True,
    help="Windows per cell; the order of the choices is rotated between them.",
)
@click.option(
    "--mode",
    type=click.Choice(["no-think", "high-think"]),
    help="Thinking mode (default: the drafters', where they share one, else the template's).",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of the prompts' order and of every request.")
@click.option(
    "--minimum-seconds",
    type=click.FloatRange(min=0, min_open=True),
    default=10.0,
    show_default=True,
    help="Shorter windows are marked in every table.",
)
@server_key
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("runs/serve-bench"),
    show_default=True,
    help="Folder for serve-bench.json, serve-bench.md and plots.",
)
@click.option("--overwrite", is_flag=True, help="Replace a result that lies there.")
@click.option("--quiet", is_flag=True, help="Show no progress.")
def serve_command(
    url: str,
    control_url: str | None,
    prompts: tuple[str, ...],
    no_mixed: bool,
    limit: int | None,
    concurrency: tuple[int, ...],
    routes: tuple[str, ...],
    cuts: tuple[str, ...],
    requests: int,
    requests_per_user: int,
    max_tokens: int,
    temperature: float,
    repeats: int,
    mode: str | None,
    seed: int,
    minimum_seconds: float,
    api_key: str | None,
    output: Path,
    overwrite: bool,
    quiet: bool,
) -> None:
    """Measure a running server under closed-loop load, every choice in turns beside plain decoding.

    Each user sends its next prompt when its last answer has ended. A window begins after every user's first answer and
    ends when the prompts run out. All choices get the same prompts, seeds and limits from one engine, by the request's
    route and cut; the prefix cache is emptied before each window. Speedups are paired by repeat and have 95 % t
    intervals (over the logarithms), so give at least 3 repeats.

    The result is written after every window, so that what was measured stays if a server dies or you stop it.

    Exit codes: 0 measured; 2 a route, a cut, prompts or the output are wrong; 11 a server is out of reach; 12 measured
    and written, but requests failed; 130 interrupted.
    """
    from angelspec.evaluation.machine import Machine
    from angelspec.evaluation.serve_plot import plot_bench
    from angelspec.evaluation.serve_tables import print_bench, write_bench_report
    from angelspec.pipeline.progress import table_console
    from angelspec.pipeline.serve_prompts import traffics_of
    from angelspec.serving.bench import choices_of, run_bench
    from angelspec.serving.bench_result import RESULT_FILE, BenchResult, BenchSettings
    from angelspec.serving.failures import BenchFailed

    settings = BenchSettings(
        concurrency=tuple(dict.fromkeys(concurrency)),
        requests=requests,
        requests_per_user=requests_per_user,
        max_tokens=max_tokens,
        temperature=temperature,
        repeats=repeats,
        seed=seed,
        mode=mode,
        minimum_seconds=minimum_seconds,
    )
    if (output / RESULT_FILE).exists() and not overwrite:
        raise RequestError(
            f"{output / RESULT_FILE} exists", mend="choose another --output, or replace it with --overwrite"
        )
    output.mkdir(parents=True, exist_ok=True)
    result: BenchResult | None = None

    def keep(so_far: BenchResult) -> None:
        nonlocal result
        result = so_far
        so_far.save(output)

    try:
        run_bench(
            url,
            traffics_of(prompts, limit=limit, mixed=not no_mixed),
            settings=settings,
            choices=choices_of(routes, cuts),
            control_url=control_url,
            api_key=api_key,
            hardware=f"client and, if local, server: {Machine.here().description}",
            command=told_command(sys.argv[1:]),
            say=(lambda text: None) if quiet else (lambda text: click.echo(text, err=True)),
            keep=keep,
        )
    finally:
        if result is not None:
            plots = {caption: picture.name for caption, picture in plot_bench(result, output).items()}
            report = write_bench_report(result, output, plots=plots)
            print_bench(result, console=table_console())
            click.echo(f"result: {output / RESULT_FILE}\nreport: {report}")
    assert result is not None, "at least one window was measured"
    failed = sum(len(window.failures) for window in result.windows)
    if failed:
        raise BenchFailed(f"{failed} requests failed; what they would have given is missing from the figures")


_SAYS_NOTHING = ("--output", "--overwrite", "--quiet")
"""Of how it was measured; and a folder of one machine has no place in a result."""


def told_command(arguments: list[str]) -> str:
    """The command as a result may tell it: without keys, passwords in addresses, and where it was written.

    Args:
        arguments: of the command line, after the program's name.
    """
    from angelspec.core.addresses import without_login

    shown: list[str] = []
    before = ""
    for argument in map(without_login, arguments):
        name, equals, _ = argument.partition("=")
        if before == "--output" or name in _SAYS_NOTHING:
            pass
        elif before == "--api-key":
            shown.append("...")
        else:
            shown.append("--api-key=..." if name == "--api-key" and equals else argument)
        before = argument
    return shlex.join(["angelspec", *shown])
