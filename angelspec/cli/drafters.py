"""How every command that takes a drafter finds it: by path, by a hub's name, or by a registered name."""

from __future__ import annotations

from pathlib import Path

import click

from angelspec.hub.resolve import FoundDrafter, find_drafter


def find(
    name: str, *, output: Path | None = None, needs_manifest: bool = False, bare_paths: bool = True
) -> FoundDrafter:
    """The drafter of that name, fetched and checked if it is not on this machine.

    Args:
        name: a path, hf:ORG/NAME[@REVISION], modelscope:ORG/NAME[@REVISION], or a registered name.
        output: a folder to fetch it into, instead of the cache.
        needs_manifest: fetch no drafter without one.
        bare_paths: whether the name of a folder counts without ``./`` before it.

    Raises:
        AngelspecError: there is none, it can't be fetched or can't be loaded.
    """

    def check(folder, entry):
        from angelspec.pipeline.probe import loading_problems

        return loading_problems(folder, entry)

    return find_drafter(
        name,
        output=output,
        check=check,
        needs_manifest=needs_manifest,
        bare_paths=bare_paths,
        say=lambda text: click.echo(text, err=True),
    )
