"""The road of a drafter: trained by a recipe, published to both hubs, pulled back from each, measured again."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner
from hub_builders import RECIPE, hubs

from angelspec.cli.main import cli
from angelspec.core.manifest import DrafterManifest
from angelspec.core.recipe_files import load_recipe
from angelspec.evaluation.report import Report
from angelspec.hub.card_metadata import split_card
from angelspec.pipeline.recipe_run import run_recipe


@pytest.fixture(scope="module")
def road(tmp_path_factory):
    """A finished run and two empty hubs; every command sees the same cache, so the target is at hand."""
    folder = tmp_path_factory.mktemp("road")
    with hubs(folder) as servers:
        yield run_recipe(load_recipe(RECIPE), output=folder / "run", store=folder / "store", quiet=True), servers


def command(*arguments) -> str:
    result = CliRunner().invoke(cli, [str(item) for item in arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_from_the_recipe_to_both_hubs_and_back(road, tmp_path):
    drafter, servers = road
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
        cards.add((folder / "README.md").read_text())
    (card,) = cards
    for temperature in report.temperatures:  # the same figures in manifest, report and card
        for suite in report.suites:
            counts = report.pooled(recipe, temperature=temperature, suites=[suite.name]).counts
            cells = [c for c in manifest.acceptance if (c.suite, c.temperature) == (suite.name, temperature)]
            assert sum(cell.finished.generated_tokens for cell in cells) == counts.generated_tokens
            if counts.mean_accepted_length is not None:
                assert f"{counts.mean_accepted_length:.2f}" in card
    for line in split_card(card)[1].splitlines():
        if found := re.fullmatch(r"!\[.*\]\((.*)\)", line):
            assert (folder / found[1]).is_file()
    assert json.loads(command("checkpoint", "check", folder, "--json"))["ok"]


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
