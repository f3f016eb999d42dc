"""``angelspec evaluate``: measure drafters by real speculative decoding, side by side."""

from __future__ import annotations

from pathlib import Path

import click

from angelspec.cli.drafters import find


@click.command()
@click.argument("checkpoints", nargs=-1, required=True)
@click.option(
    "--prompts",
    "prompts",
    multiple=True,
    metavar="[NAME=]SOURCE",
    help="Prompt files or builtin:… sets; may repeat (default: the suites of the first checkpoint's recipe).",
)
@click.option(
    "--temperature",
    "temperatures",
    multiple=True,
    type=click.FloatRange(min=0),
    help="May repeat (default: those of the first checkpoint's recipe).",
)
@click.option("--limit", type=click.IntRange(min=1), help="Prompts per suite (default: the recipe's).")
@click.option("--max-new-tokens", type=click.IntRange(min=1), help="Longest answer (default: the recipe's).")
@click.option("--batch-size", type=click.IntRange(min=1), help="Rows decoded together (default: the recipe's).")
@click.option(
    "--target", "target_source", metavar="SOURCE", help="Where the target lies, if not where the manifest says."
)
@click.option(
    "--shortlist",
    type=click.IntRange(min=0),
    help="Candidates per slot that a sequential head rescores; 0: the whole vocabulary.",
)
@click.option(
    "--dcut",
    "--cut",
    "cut",
    type=click.FloatRange(min=0, max=1, min_open=True),
    help="D-cut with this share of the proposals kept, for example 0.5.",
)
@click.option("--breakeven", is_flag=True, help="Measure what each drafter must reach to match the first MTP drafter.")
@click.option(
    "--breakeven-batch",
    "batches",
    multiple=True,
    type=click.IntRange(min=1),
    default=(1, 4, 16),
    show_default=True,
    help="Batch size of the break-even; may repeat.",
)
@click.option(
    "--shortlists",
    is_flag=True,
    help="Measure what a --shortlist of each size costs in accepted length and gains in time, with the first drafter "
    "that has a sequential head.",
)
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for JSON, Markdown and plots (default: runs/evaluation, or the next free runs/evaluation-N).",
)
@click.option("--overwrite", is_flag=True, help="Replace the report that lies in --output.")
@click.option("--quiet", is_flag=True, help="Show no progress.")
def evaluate(
    checkpoints: tuple[str, ...],
    prompts: tuple[str, ...],
    temperatures: tuple[float, ...],
    limit: int | None,
    max_new_tokens: int | None,
    batch_size: int | None,
    target_source: str | None,
    shortlist: int | None,
    cut: float | None,
    breakeven: bool,
    batches: tuple[int, ...],
    shortlists: bool,
    output: Path | None,
    overwrite: bool,
    quiet: bool,
) -> None:
    """Compare CHECKPOINTS with each other, with prompt lookup and with plain decoding.

    A checkpoint is a folder, hf:ORG/NAME[@REVISION], modelscope:ORG/NAME[@REVISION], or a registered name. It must hold
    angelspec's manifest, which names its target and mode: drafters published by others have none.
    """
    from angelspec.pipeline.evaluate_run import evaluate_checkpoints

    evaluate_checkpoints(
        [find(checkpoint, needs_manifest=True).folder for checkpoint in checkpoints],
        prompts=prompts,
        temperatures=temperatures or None,
        limit=limit,
        max_new_tokens=max_new_tokens,
        batch_size=batch_size,
        target_source=target_source,
        shortlist=shortlist,
        cut=cut,
        breakeven=batches if breakeven else (),
        shortlists=shortlists,
        output=output,
        overwrite=overwrite,
        quiet=quiet,
    )
