"""``angelspec publish`` and ``angelspec pull``: drafters to and from the hubs."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from angelspec.cli.options import drafter_license
from angelspec.core.errors import CheckpointError
from angelspec.core.repositories import Repository
from angelspec.hub.failures import NotConfirmed


@click.command()
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.option(
    "--to", "places", multiple=True, required=True, metavar="hf:ORG/NAME", help="hf: or modelscope:; may repeat."
)
@click.option("--private/--public", "private", default=True, show_default=True, help="Who may see the repository.")
@click.option("--revision", help="Branch to publish to (default: the hub's default branch).")
@drafter_license
@click.option(
    "--base-model", metavar="ORG/NAME", help="The target on the Hugging Face hub, where angelspec can't know."
)
@click.option("--message", default="Publish with angelspec", show_default=True, help="Of the commit.")
@click.option("--dry-run", is_flag=True, help="Stage, check and show what would go; make no request.")
@click.option("--yes", is_flag=True, help="Do not ask.")
def publish(
    checkpoint: Path,
    places: tuple[str, ...],
    private: bool,
    revision: str | None,
    license_name: str | None,
    base_model: str | None,
    message: str,
    dry_run: bool,
    yes: bool,
) -> None:
    """Publish the exported drafter in the folder CHECKPOINT, with a card made from its manifest and report.

    Exit codes: 0 published (or there already); 2 the checkpoint, a name or an option is wrong; 3 no token, or it may
    not; 4 the repository's visibility is another; 5 the hub is busy or out of reach; 6 the hub refuses the content; 7
    what was read back differs; 8 not found; 13 not confirmed, so nothing was sent; 1 several destinations failed in
    different ways.
    """
    from angelspec.core.manifest import DrafterManifest
    from angelspec.hub import publish as publishing
    from angelspec.hub.card import write_card
    from angelspec.hub.transport import require_clients
    from angelspec.pipeline import card_facts, probe

    destinations = [publishing.Destination(_branch(Repository.parse(place), revision), private) for place in places]
    if not dry_run:  # known before the checks, which take minutes, and before one hub has what the other lacks
        require_clients(destination.repository.hub for destination in destinations)
    manifest = DrafterManifest.read(checkpoint)
    base = base_model or (card_facts.base_model(manifest) if manifest else None)
    license_name = license_name or (card_facts.target_license(manifest) if manifest else None)
    if manifest is not None and license_name is None:
        raise CheckpointError("the target's licence is not known", mend="state the drafter's with --license")

    def say(text: str) -> None:
        click.echo(text, err=True)

    def card(folder: Path, manifest: DrafterManifest) -> str:
        repositories = [destination.repository for destination in destinations]
        name = repositories[0].name.split("/")[1]
        facts = card_facts.card_facts(folder, manifest, name=name, places=repositories, license=license_name, base=base)
        return write_card(facts)

    def drafting(folder: Path, manifest: DrafterManifest) -> list[str]:
        if probe.tensor_problems(folder, manifest):  # named already, and it would not load for them
            return []
        return probe.drafting_problems(folder, manifest, say=say)

    with publishing.prepare(
        checkpoint,
        license=license_name or publishing.OUR_LICENSE,
        base_model=base,
        write_card=card,
        checks={
            "the tensors": probe.tensor_problems,
            "the load test": card_facts.load_test_problems,
            "that it drafts": drafting,
        },
        say=say,
    ) as publication:
        _show(publication, destinations)
        if dry_run:
            click.echo("dry run: nothing was sent")
            return
        if not yes:
            _confirm(destinations)
        outcomes = publishing.publish(publication, destinations, message=message, say=say)
    for outcome in outcomes:
        click.echo(f"{outcome.destination}: {outcome.state}: {outcome.detail}", err=outcome.error is not None)
    sys.exit(publishing.exit_code(outcomes))


def _confirm(destinations) -> None:
    """Ask before anything is sent.

    Raises:
        NotConfirmed: the answer is no, or nobody can answer.
    """
    try:
        if click.confirm(f"publish to {', '.join(map(str, destinations))}?"):
            return
    except click.Abort:  # Ctrl-C, or no terminal
        click.echo()
    raise NotConfirmed("not confirmed: nothing was sent", mend="say --yes where nobody can answer")


def _branch(repository: Repository, revision: str | None) -> Repository:
    if revision is None or repository.revision in (None, revision):
        return repository.at(revision or repository.revision)
    raise click.UsageError(f"{repository} names a revision, and --revision another")


def _show(publication, destinations) -> None:
    stage = publication.stage
    click.echo(f"to {', '.join(map(str, destinations))}, licence {publication.license}:")
    for file in stage.files:
        click.echo(f"  {file.size:>13,}  {file.sha256}  {file.path}")
    click.echo(f"  {stage.total_bytes:>13,}  bytes in {len(stage.files)} files")
    if stage.left_out:
        click.echo("left out:")
        for item in stage.left_out:
            click.echo(f"  {item.path} ({item.why})")
    for warning in publication.warnings:
        click.echo(f"warning: {warning}")


@click.command()
@click.argument("name")
@click.option("--output", type=click.Path(file_okay=False, path_type=Path), help="Folder (default: angelspec's cache).")
def pull(name: str, output: Path | None) -> None:
    """Fetch the drafter NAME (hf:ORG/NAME[@REVISION], modelscope:..., or a registered name) and verify it.

    Sizes, hashes and shapes are checked; an interrupted fetch goes on where it was cut off. Mirrors are named by
    HF_ENDPOINT and MODELSCOPE_ENDPOINT. Exit codes as of `angelspec publish`.
    """
    from angelspec.cli.drafters import find

    found = find(name, output=output)
    click.echo(found.folder)
