"""An exported drafter of a few thousand numbers with manifest, report and plots, and traps to lay beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from evaluation_builders import small_report
from hub_servers import LoopbackHub, start
from huggingface_hub import constants

from angelspec.cli.main import cli
from angelspec.core.manifest import DrafterManifest, MeasuredAcceptance, TargetIdentity, TrainedStage, TrainingRecord
from angelspec.core.recipe import Recipe
from angelspec.core.recipe_files import load_recipe
from angelspec.core.repositories import Repository
from angelspec.drafters.checkpoint import save_drafter
from angelspec.drafters.families import build_drafter
from angelspec.hub.card import CardFacts, write_card

RECIPE = "tiny-dfly-llama"


def run(*arguments: Any, answers: str | None = None) -> Result:
    """``angelspec`` with these arguments."""
    return CliRunner().invoke(cli, [str(item) for item in arguments], input=answers)


def command(*arguments: Any) -> str:
    """What ``angelspec`` prints, which goes well."""
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


LIST = r"GET .*(/tree/|/repo/files)"
"""Requests by which either hub lists files."""


@dataclass
class FailureRow:
    """What every table of failures says of one."""

    what: str
    arrange: Callable[[LoopbackHub, pytest.MonkeyPatch], None]
    code: int
    """Exit code."""
    message: str
    """Pattern of what is said."""


@contextmanager
def hubs(folder: Path) -> Iterator[dict[str, Any]]:
    """An empty hub of each kind, and a cache in ``folder``, for this process and its children; both are left after."""
    patch = pytest.MonkeyPatch()
    patch.setenv("ANGELSPEC_CACHE", str(folder / "cache"))
    patch.setenv("MODELSCOPE_HOME", str(folder / "modelscope"))
    patch.setenv("MODELSCOPE_CACHE", str(folder / "modelscope-cache"))
    patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    patch.setattr(constants, "HF_TOKEN_PATH", str(folder / "no-token"))
    patch.chdir(folder)
    servers = {kind: start(kind, patch) for kind in ("hf", "modelscope")}
    try:
        yield servers
    finally:
        for server in servers.values():
            server.close()
        patch.undo()


PNG = b"\x89PNG\r\n\x1a\n" + bytes(64)
PUBLISHED = (
    "LICENSE", "README.md", "accepted-length-t0.png", "angelspec_manifest.json", "config.json", "model.safetensors",
    "report.json", "report.md", "training/metrics.jsonl",
)  # fmt: skip
"""What a publication of ``exported_drafter`` holds."""


def manifest_of(recipe: Recipe, **changes) -> DrafterManifest:
    """As the export stage writes it, with the figures of ``small_report``."""
    target = recipe.target
    report = small_report(drafters=(recipe.name, "prompt lookup"))
    lookups = {result.suite: result for result in report.results if result.proposer == "prompt lookup"}
    acceptance = tuple(
        MeasuredAcceptance(
            suite=result.suite,
            workload=group.workload,
            temperature=result.temperature,
            finished=group.finished.counts,
            unfinished=group.unfinished.counts,
            lookup_finished=lookups[result.suite].pooled(finished=True).counts,
        )
        for result in report.results
        if result.proposer == recipe.name
        for group in result.groups
    )
    fields = {
        "angelspec_version": "0.1.0",
        "algorithm": recipe.drafter_config().algorithm,
        "mode": recipe.mode,
        "drafter": recipe.drafter_config(),
        "target": TargetIdentity(
            name=target.name, source=target.source, digest="ab12" * 16, mode_family=target.mode_family,
            geometry=target.geometry,
        ),
        "recipe": recipe,
        "training": TrainingRecord(
            steps=30, supervised_positions=1000, target_tokens=2000,
            stages=(TrainedStage(name="cold-start", steps=30),), workloads={"code": 4, "chat": 3},
        ),
        "acceptance": acceptance,
        "report_files": ("report.json", "report.md"),
    }  # fmt: skip
    return DrafterManifest(**{**fields, **changes})


def exported_drafter(folder: Path, *, recipe: Recipe | None = None, **changes) -> Path:
    """A folder as the export stage leaves it."""
    recipe = recipe or load_recipe(RECIPE)
    drafter = build_drafter(recipe.drafter_config()).initialise(seed=0)
    save_drafter(drafter, folder, dtype=torch.bfloat16, manifest=manifest_of(recipe, **changes))
    small_report(drafters=(recipe.name, "prompt lookup")).save(folder)
    (folder / "report.md").write_text("# small\n")
    (folder / "accepted-length-t0.png").write_bytes(PNG)
    (folder / "training").mkdir()
    (folder / "training" / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    return folder


def lay_traps(folder: Path, outside: Path) -> None:
    """What must never be published, in every shape it takes beside a drafter."""
    outside.mkdir(exist_ok=True)
    (outside / "secret.txt").write_text("outside\n")
    (folder / ".env").write_text("HF_TOKEN=hf_" + "a" * 30 + "\n")
    (folder / "training_state.pt").write_bytes(b"optimizer")
    (folder / "training" / "optimizer.pt").write_bytes(b"optimizer")
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    (folder / ".ms_upload_cache").write_text("{}")
    (folder / "__pycache__").mkdir()
    (folder / "__pycache__" / "x.pyc").write_bytes(b"\0")
    (folder / ".cache").mkdir()
    (folder / ".cache" / "note").write_text("x")
    (folder / "events.out.tfevents.1").write_bytes(b"x")
    (folder / "modeling_evil.py").write_text("print('evil')\n")
    (folder / "notes.txt").symlink_to(outside / "secret.txt")
    (folder / "data").symlink_to(outside)


def plain_card(folder: Path, manifest: DrafterManifest) -> str:
    """The card of a repository alice/tiny, without report."""
    places = (Repository("hf", "alice/tiny"), Repository("modelscope", "alice/tiny"))
    return write_card(
        CardFacts(
            manifest=manifest, name="tiny", places=places, license="apache-2.0", weight_bytes=12345, dtype="bfloat16"
        )
    )
