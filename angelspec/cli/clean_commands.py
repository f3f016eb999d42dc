"""``angelspec clean``: list and remove old runs and caches."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.option(
    "--older-than", default="0d", show_default=True, metavar="AGE", help="Unchanged for so long: 12h, 30d, 2w."
)
@click.option("--larger-than", default="0", show_default=True, metavar="SIZE", help="At least so large: 500MB, 2GB.")
@click.option("--runs", type=click.Path(file_okay=False, path_type=Path), default=Path("runs"), show_default=True)
@click.option("--named", is_flag=True, help="Also offer what something still names; each is asked about by itself.")
@click.option("--list", "only_list", is_flag=True, help="Only list.")
@click.option("--yes", is_flag=True, help="Do not ask about what nothing names.")
def clean(older_than: str, larger_than: str, runs: Path, named: bool, only_list: bool, yes: bool) -> None:
    """List runs, stages, converted targets and drafters of the cache, and remove them after asking.

    What a run, a pointer, the registry or a known target still names stays, unless --named offers it and it is
    confirmed, one by one. What a command works in now stays in any case.
    """
    from angelspec.pipeline import cleaning

    items = cleaning.find_items(
        runs, older_than=cleaning.parse_age(older_than), larger_than=cleaning.parse_size(larger_than)
    )
    if not items:
        click.echo("nothing to remove")
        return
    used = [item for item in items if item.in_use]
    for item in items:
        why = "; in use now" if item in used else "".join(f"; needed by {name}" for name in item.named_by[:3])
        click.echo(f"{item.size / 1e6:>10,.1f} MB {item.age_days:>6.1f} d  {item.what:<20} {item.path}{why}")
    free = [item for item in items if not item.named_by and item not in used]
    needed = [item for item in items if item.named_by and item not in used]
    if only_list:
        return
    chosen = []
    if free:
        total = sum(item.size for item in free) / 1e6
        if yes or click.confirm(f"remove the {len(free)} that nothing needs ({total:,.1f} MB)?"):
            chosen += free
    else:
        click.echo("something needs each of them" + ("" if named else "; --named offers them too"))
    for item in needed if named else ():
        if click.confirm(f"{item.path} is needed by {', '.join(item.named_by)}. Remove it all the same?"):
            chosen.append(item)
    removed = []
    for item in chosen:
        if cleaning.remove(item):
            removed.append(item)
        else:
            click.echo(f"{item.path} stays: a command began to work in it")
    click.echo(f"removed {len(removed)}, {sum(item.size for item in removed) / 1e6:,.1f} MB")
