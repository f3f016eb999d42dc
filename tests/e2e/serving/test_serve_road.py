"""The road of a new user: a recipe is run, its drafter checked, published to both hubs, pulled, served and asked."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from card_figures import card_estimates, card_figures, report_figures, server_estimates
from hub_builders import RECIPE, command, hubs

from angelspec.core.manifest import DrafterManifest
from angelspec.core.recipe_files import load_recipe
from angelspec.core.request_label import RequestLabel
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

TO_THE_END = ("evaluation.temperatures=[1]", "evaluation.max_new_tokens=400")
"""Every answer ends: a card counts those, a server all."""


@pytest.fixture(scope="module")
def pulled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """From each hub: trained by the recipe, checked and published."""
    folder = tmp_path_factory.mktemp("road")
    with hubs(folder):
        recipe = load_recipe(RECIPE, overrides=TO_THE_END)
        trained = run_recipe(recipe, output=folder / "run", store=folder / "store", quiet=True)
        assert command("checkpoint", "check", trained).startswith(f"{trained}: ok")
        command("publish", trained, *(word for name in NAMES.values() for word in ("--to", name)), "--yes")
        yield {kind: Path(command("pull", name).splitlines()[-1]) for kind, name in NAMES.items()}


@pytest.fixture(scope="module")
def server(pulled: dict[str, Path]) -> Iterator[Client]:
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


def test_the_same_figures_in_card_report_and_server(server: Client, pulled: dict[str, Path]) -> None:
    engine = server.server_info().extension("the server")
    assert [one.name for one in engine.drafters] == [f"from-{kind}" for kind in NAMES]
    for kind, folder in pulled.items():
        recipe, report = DrafterManifest.read(folder).recipe.name, Report.load(folder / "report.json")
        card = card_figures((folder / "README.md").read_text())
        assert card == report_figures(report, recipe)
        told = {one.workload: one for one in engine.acceptance if one.drafter == f"from-{kind}"}
        assert card_estimates((folder / "README.md").read_text()) == server_estimates(told.values())
        assert set(told) == {"chat", "code"}, "what the recipe measures"
        for workload, one in told.items():
            assert not report.pooled(recipe, temperature=1.0, finished=False, workloads=[workload]).answers
            counts = report.pooled(recipe, temperature=1.0, workloads=[workload]).counts
            assert (one.steps, one.cumulative) == (counts.full_depth_steps, pytest.approx(counts.cumulative_acceptance))
            assert card.lengths[workload, 1.0][2] == f"{one.steps:,}"
        steps = sum(one.steps for one in told.values())
        shares = [sum(one.cumulative[k] * one.steps for one in told.values()) / steps for k in range(3)]
        assert card.positions[1.0] == [*(f"{share:.3f}" for share in shares), f"{steps:,}"]
        assert shares[0] > 0, "figures that are all zero show nothing"
