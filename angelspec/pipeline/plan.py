"""``angelspec recipe run --plan``: the resolved recipe and what every stage will do, touching no model."""

from __future__ import annotations

import yaml
from rich.syntax import Syntax
from rich.table import Table

from angelspec.core.byte_sizes import byte_size
from angelspec.core.recipe import Recipe
from angelspec.pipeline.progress import table_console
from angelspec.pipeline.stages import stages_of


def print_plan(recipe: Recipe) -> None:
    """Print the plan."""
    console = table_console()
    text = yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
    console.print(Syntax(text, "yaml", background_color="default", word_wrap=True))
    table = Table(
        "stage", "what it will do", "tokens", "disk", "memory", title=f"plan of {recipe.name}", title_justify="left"
    )
    for number, stage in enumerate(stages_of(recipe), start=1):
        estimate = stage.estimate(recipe)
        does = estimate.does + (f" [dim]({estimate.note})[/dim]" if estimate.note else "")
        tokens = "" if estimate.tokens is None else f"{estimate.tokens:,}"
        disk, memory = (byte_size(count, unknown="") for count in (estimate.disk_bytes, estimate.memory_bytes))
        table.add_row(f"{number} {stage.name}", does, tokens, disk, memory)
    console.print(table)
    console.print("[dim]Estimates assume answers of 60 % of the longest allowed and prompts of 100 tokens.[/dim]")
