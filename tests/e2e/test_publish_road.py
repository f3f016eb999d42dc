"""The road of a drafter: trained by a recipe, published to both hubs, pulled back from each, measured again."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from card_figures import card_figures, report_figures
from hub_builders import RECIPE, command, hubs

from angelspec.core.manifest import DrafterManifest
from angelspec.core.recipe_files import load_recipe
from angelspec.evaluation.report import Report
from angelspec.hub.card_metadata import split_card
from angelspec.pipeline.recipe_run import run_recipe

MORE_ANSWERS = ("evaluation.max_new_tokens=24", "evaluation.batch_size=12", "data.evaluation.0.limit=12",
                "data.evaluation.1.limit=12")  # fmt: skip
"""So many that some end and some proposals are accepted, and the figures differ."""


@pytest.fixture(scope="module")
def road(tmp_path_factory):
    """A finished run and two empty hubs; every command sees the same cache, so the target is at hand."""
    folder = tmp_path_factory.mktemp("road")
    with hubs(folder) as servers:
        recipe = load_recipe(RECIPE, overrides=MORE_ANSWERS)
        yield run_recipe(recipe, output=folder / "run", store=folder / "store", quiet=True), servers


def test_from_the_recipe_to_both_hubs_and_back(road, tmp_path):
    drafter, servers = road
    assert json.loads(command("checkpoint", "check", drafter, "--json"))["ok"]
    output = command("publish", drafter, "--to", "hf:alice/Tiny-DFly", "--to", "modelscope:alice/Tiny-DFly", "--yes")
    assert output.count("published") == 2
    manifest = DrafterManifest.read(drafter)
    report = Report.load(drafter / "report.json")
    recipe = manifest.recipe.name
    cards = set()
    for kind in servers:
        folder = Path(command("pull", f"{kind}:alice/Tiny-DFly").strip().splitlines()[-1])
        assert DrafterManifest.read(folder) == manifest
        assert Report.load(folder / "report.json") == report
        for name in ("model.safetensors", "config.json"):
            assert (folder / name).read_bytes() == (drafter / name).read_bytes()
        assert json.loads(command("checkpoint", "check", folder, "--json"))["ok"]
        cards.add((folder / "README.md").read_text())
    (card,) = cards
    figures = card_figures(card)
    assert figures == report_figures(report, recipe)
    assert len(set(figures.lengths.values())) > 3, "figures that are all alike show nothing"
    for temperature in report.temperatures:
        for suite in report.suites:
            counts = report.pooled(recipe, temperature=temperature, suites=[suite.name]).counts
            cells = [c for c in manifest.acceptance if (c.suite, c.temperature) == (suite.name, temperature)]
            assert sum(cell.finished.generated_tokens for cell in cells) == counts.generated_tokens
    for line in split_card(card)[1].splitlines():
        if found := re.fullmatch(r"!\[.*\]\((.*)\)", line):
            assert (folder / found[1]).is_file()


def test_measured_again_by_its_name_it_is_as_good(road, tmp_path):
    drafter, servers = road
    command("publish", drafter, "--to", "hf:alice/again", "--yes")
    command("evaluate", "hf:alice/again", "--output", tmp_path / "report", "--quiet")
    again, first = Report.load(tmp_path / "report" / "report.json"), Report.load(drafter / "report.json")
    ours = DrafterManifest.read(drafter).recipe.name
    (name,) = [item.name for item in again.drafters if item.name.startswith("again@")]
    for temperature in first.temperatures:
        for finished in (True, False):
            assert again.pooled(name, temperature=temperature, finished=finished).counts == first.pooled(
                ours, temperature=temperature, finished=finished
            ).counts  # fmt: skip
