"""``angelspec checkpoint show``: what a drafter is, what it was measured to do, and what the registry knows of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from angelspec.core.acceptance import pool
from angelspec.core.errors import CheckpointError
from angelspec.core.manifest import DrafterManifest
from angelspec.core.registry import RegisteredDrafter, Registry, load_registry
from angelspec.core.repositories import Repository, names_a_hub
from angelspec.drafters.checkpoint import examine_checkpoint
from angelspec.evaluation.tables import number
from angelspec.hub.resolve import on_this_machine
from angelspec.pipeline.progress import table_console

_SHOWN = ("block_size", "sample_from_anchor", "mask_token_id", "target_layer_ids", "num_layers", "num_depths")
"""Keys of a drafter's configuration that a person wants to see."""


def registry_rows(registry: Registry) -> list[dict[str, Any]]:
    """The registered drafters as plain data, with where each lies."""
    rows = []
    for drafter in registry.drafters:
        here = on_this_machine(drafter.name, registry=registry)
        rows.append({**drafter.model_dump(mode="json"), "here": str(here) if here is not None else None})
    return rows


def checkpoint_facts(name: str, registry: Registry | None = None) -> dict[str, Any]:
    """What is known of a drafter without fetching anything, as plain data.

    Args:
        name: a path, a repository's name, or a registered name.
        registry: None: the one that ships with angelspec.

    Raises:
        CheckpointError: nothing of that name is on this machine or in the registry.
    """
    registry = registry or load_registry()
    folder = on_this_machine(name, registry=registry)
    entry = registry.find(Repository.parse(name).name if names_a_hub(name) else name)
    if folder is None and entry is None:
        if names_a_hub(name):
            raise CheckpointError(f"{name} is not on this machine", mend=f"run: angelspec pull {name}")
        registry.need(name)
    facts: dict[str, Any] = {"name": name, "folder": str(folder) if folder is not None else None}
    if entry is not None:
        facts["registry"] = entry.model_dump(mode="json")
    if folder is not None:
        facts |= _folder_facts(folder, entry)
    return facts


def _folder_facts(folder: Path, entry: RegisteredDrafter | None) -> dict[str, Any]:
    found = examine_checkpoint(folder, overrides=entry.config_overrides if entry is not None else None)
    facts: dict[str, Any] = {
        "parameters": sum(tensor.numel() for tensor in found.tensors.values()),
        "problems": [str(problem) for problem in found.problems],
        "notes": list(found.notes),
    }
    if found.config is not None:
        facts["drafter"] = {**found.config.model_dump(mode="json"), "algorithm": found.config.algorithm,
                            "proposals": found.config.num_proposals}  # fmt: skip
    if found.manifest is not None:
        facts |= _manifest_facts(found.manifest)
    return facts


def _manifest_facts(manifest: DrafterManifest) -> dict[str, Any]:
    measured = []
    for cell in manifest.acceptance:
        lookup = cell.lookup_finished
        measured.append(
            {
                "suite": cell.suite,
                "workload": cell.workload,
                "temperature": cell.temperature,
                "accepted_length": cell.finished.mean_accepted_length,
                "lookup": lookup.mean_accepted_length if lookup is not None else None,
                "verify_steps": cell.finished.verify_steps,
            }
        )
    return {
        "mode": manifest.mode,
        "target": {"name": manifest.target.name, "source": manifest.target.source, "digest": manifest.target.digest},
        "recipe": manifest.recipe.name,
        "training": manifest.training.model_dump(mode="json"),
        "acceptance": measured,
        "accepted_length": {
            f"{temperature:g}": pool(
                cell.finished for cell in manifest.acceptance if cell.temperature == temperature
            ).mean_accepted_length
            for temperature in sorted({cell.temperature for cell in manifest.acceptance})
        },
        "angelspec": manifest.angelspec_version,
    }


def print_registry(registry: Registry) -> None:
    """The registry for a person."""
    table = Table("drafter", "target", "algorithm", "mode", "proposes", "on this machine", box=None, pad_edge=False)
    for row in registry_rows(registry):
        table.add_row(
            f"[bold]{row['name']}[/bold]", row["target"], row["algorithm"], row["mode"], str(row["proposals"]),
            row["here"] or "no",
        )  # fmt: skip
    console = table_console()
    console.print(table)
    console.print("details: angelspec checkpoint show NAME", highlight=False)


def print_facts(facts: dict[str, Any], *, console: Console | None = None) -> None:
    """The facts of one drafter for a person."""
    console = console or table_console()
    console.print(f"[bold]{facts['name']}[/bold]", highlight=False)
    rows = [("folder", facts["folder"] or f"not on this machine; run: angelspec pull {facts['name']}")]
    entry, drafter = facts.get("registry"), facts.get("drafter")
    if entry is not None:
        pinned = f"; not the newest: {entry['pinned_because']}" if entry["pinned_because"] else ""
        rows += [
            ("registered", f"{entry['repository'] or entry['folder']}{pinned}"),
            ("for", f"{entry['target']}, {entry['mode']} ({entry['mode_is']})"),
            ("licence", entry["license"]),
            ("loading", entry["loading"]),
            ("evidence", entry["evidence"]),
        ]
    if drafter is not None:
        rows.append(("algorithm", f"{drafter['algorithm']}, proposes {drafter['proposals']}"))
        for key in _SHOWN:
            if key in drafter:
                rows.append((key, str(drafter[key])))
        rows.append(("parameters", f"{facts['parameters']:,}"))
    if "target" in facts:
        training = facts["training"]
        rows += [
            (
                "target",
                f"{facts['target']['name']} from {facts['target']['source']} ({facts['target']['digest'][:16]})",
            ),
            ("mode", facts["mode"]),
            ("recipe", f"{facts['recipe']}, {training['steps']:,} steps, {training['target_tokens']:,} target tokens"),
            *((f"accepted length, temperature {t}", f"{v:.2f}") for t, v in facts["accepted_length"].items() if v),
        ]
    for label, value in rows:
        console.print(f"  {label}: {value}", highlight=False, markup=False)
    if facts.get("acceptance"):
        table = Table("suite", "workload", "temperature", "accepted length", "prompt lookup", box=None, pad_edge=False)
        for cell in facts["acceptance"]:
            table.add_row(cell["suite"], cell["workload"], f"{cell['temperature']:g}", number(cell["accepted_length"]),
                          number(cell["lookup"]))  # fmt: skip
        console.print(table)
    for problem in facts.get("problems", ()):
        console.print(f"  [red]problem[/red]: {problem}", highlight=False)
