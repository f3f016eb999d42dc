"""The road of a new user: a recipe is run, its drafter published to both hubs, pulled from each, served and asked."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hub_builders import RECIPE, hubs

from angelspec.cli.main import cli
from angelspec.core.manifest import DrafterManifest
from angelspec.core.recipe_files import load_recipe
from angelspec.core.request_label import RequestLabel
from angelspec.core.workloads import WORKLOADS
from angelspec.evaluation.report import Report
from angelspec.pipeline.recipe_run import run_recipe
from angelspec.serving.client import Client
from angelspec.serving.wire import Sampling
from tests.engine_builders import served

pytest.importorskip("sglang")
QUESTIONS = {
    "chat": "Tell me about your day.",
    "code": "Write a Python function that adds two numbers.",
    "math": "What is 12 * 7 + 3?",
}
NAMES = {"hf": "hf:alice/tiny-dfly", "modelscope": "modelscope:alice/tiny-dfly"}


def command(*arguments: Any) -> str:
    result = CliRunner().invoke(cli, [str(item) for item in arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Trained by the recipe, published to both hubs and pulled from each."""
    folder = tmp_path_factory.mktemp("road")
    with hubs(folder):
        trained = run_recipe(load_recipe(RECIPE), output=folder / "run", store=folder / "store", quiet=True)
        command("publish", trained, *(word for name in NAMES.values() for word in ("--to", name)), "--yes")
        for name in NAMES.values():
            command("pull", name)
        yield trained


@pytest.fixture(scope="module")
def server(drafter: Path) -> Iterator[Client]:
    """``angelspec serve`` with the drafter of each hub."""
    drafters = [word for kind, name in NAMES.items() for word in ("--drafter", f"from-{kind}={name}")]
    with served("--target", "tiny-llama", "--no-probe", *drafters, log=Path("serve.log")) as client:
        yield client


def test_one_question_per_workload(server: Client) -> None:
    for workload, question in QUESTIONS.items():
        for kind in NAMES:
            answer = server.chat(
                [{"role": "user", "content": question}],
                sampling=Sampling(max_tokens=24, temperature=0.0),
                label=RequestLabel(route=f"from-{kind}"),
                details=True,
            )
            assert answer.metadata is not None
            assert (answer.metadata.workload, answer.metadata.route) == (workload, f"from-{kind}")
            assert answer.metadata.speculative_steps == answer.metadata.verify_steps > 0
        plain = server.chat(
            [{"role": "user", "content": question}],
            sampling=Sampling(max_tokens=24, temperature=0.0),
            label=RequestLabel(route="ar"),
        )
        assert answer.text == plain.text, "a drafter changed what the target says"


def test_the_same_figures_in_card_report_and_server(server: Client, drafter: Path) -> None:
    engine = server.server_info().extension("the server")
    assert [one.name for one in engine.drafters] == [f"from-{kind}" for kind in NAMES]
    manifest, report = DrafterManifest.read(drafter), Report.load(drafter / "report.json")
    told = {(one.drafter, one.workload): one for one in engine.acceptance}
    for workload in WORKLOADS:
        finished, cut = (
            report.pooled(manifest.recipe.name, temperature=0.0, finished=ended, workloads=[workload]).counts
            for ended in (True, False)
        )
        counts = finished + cut
        for kind in NAMES:
            one = told.get((f"from-{kind}", workload))
            assert (one is None) == (not counts.full_depth_steps)
            if one is not None:
                assert one.cumulative == pytest.approx(counts.cumulative_acceptance)
    assert told, "nothing was measured"
