"""The drafters in ``checkpoints/``: whole, described rightly, and as good as their reports say.

What the reports say of our own prompts is measured again, whole suites, by
``pytest -m slow tests/e2e/test_shipped_drafters.py`` (about two minutes a suite); a few short answers of each drafter
are decoded without the mark.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from angelspec.core.acceptance import AcceptanceCounts
from angelspec.core.locations import resource_folder
from angelspec.core.manifest import MANIFEST_FILE, DrafterManifest
from angelspec.core.recipe_files import RECIPE_FILE, recipe_text
from angelspec.core.registry import RegisteredDrafter, load_registry
from angelspec.data.reading import read_sources
from angelspec.decoding.proposers import drafter_proposer
from angelspec.drafters.checkpoint import examine_checkpoint, load_drafter
from angelspec.evaluation.acceptance import measure
from angelspec.evaluation.report import REPORT_FILE, Report
from angelspec.evaluation.suites import Suite
from angelspec.hub.card import write_card
from angelspec.hub.card_metadata import card_problems
from angelspec.pipeline.card_facts import base_model, card_facts
from angelspec.pipeline.measuring import suites_of
from angelspec.pipeline.session import Session

SHIPPED = {entry.name: entry for entry in load_registry().drafters if entry.folder is not None}
MOST_BYTES = 50_000_000
TOLERANCE = 0.04
"""Of an accepted length: another processor rounds the target's bfloat16 otherwise, and some answers change."""
SUITES = ("chat", "code", "math")
SAMPLE = {"suite": "math", "prompts": 6, "tokens": 48}
LEAST = {"smollm2-dfly-nothink": 1.6, "smollm2-mtp-nothink": 1.3, "smollm2-dfly-highthink": 1.6}
"""Accepted length on the sample; random weights have 1.0, and so do taps, an alignment or a mode that are wrong."""
PATH_OF_A_MACHINE = re.compile(r"(?<![\w.:/])/(?:home|root|tmp|work|users|mnt|data)/", re.IGNORECASE)


def folder_of(entry: RegisteredDrafter) -> Path:
    return resource_folder("checkpoints") / entry.folder


@pytest.fixture(params=list(SHIPPED))
def entry(request: pytest.FixtureRequest) -> RegisteredDrafter:
    return SHIPPED[request.param]


def test_the_drafters_of_the_embedded_target_ship():
    assert {(entry.algorithm, entry.mode) for entry in SHIPPED.values()} == {
        ("dfly", "no-think"), ("mtp", "no-think"), ("dfly", "high-think"),
    }  # fmt: skip
    weights = sum(path.stat().st_size for entry in SHIPPED.values() for path in folder_of(entry).glob("*.safetensors"))
    assert 0 < weights <= MOST_BYTES


def test_nothing_is_wrong_with_it(entry):
    folder = folder_of(entry)
    assert examine_checkpoint(folder).problems == []
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert card_problems(card, base_model=entry.target, license=entry.license) == []
    assert f"# {entry.name}\n" in card and f"**Thinking mode: {entry.mode}**" in card
    for picture in re.findall(r"!\[[^]]*\]\(([^)]+)\)", card):
        assert (folder / picture).is_file(), picture
    assert (folder / "LICENSE").is_file() and (folder / "report.md").is_file()


def test_the_registry_says_what_its_manifest_says(entry):
    manifest = DrafterManifest.read(folder_of(entry))
    drafter = manifest.drafter
    assert (manifest.algorithm, manifest.mode) == (entry.algorithm, entry.mode)
    assert drafter.num_proposals == entry.proposals
    assert getattr(drafter, "block_size", None) == entry.block_size
    assert manifest.target.name == "smollm2-135m-instruct"


def test_card_recipe_and_manifest_say_the_same(entry):
    """The card is what its facts make of it today, and the recipe that lies beside is the manifest's."""
    folder, manifest = folder_of(entry), DrafterManifest.read(folder_of(entry))
    facts = card_facts(folder, manifest, name=entry.name, license=entry.license, base=base_model(manifest))
    assert (folder / "README.md").read_text(encoding="utf-8") == write_card(facts)
    assert (folder / RECIPE_FILE).read_text(encoding="utf-8") == recipe_text(manifest.recipe)


def test_the_report_says_what_the_manifest_says(entry):
    folder, manifest = folder_of(entry), DrafterManifest.read(folder_of(entry))
    report = Report.load(folder / REPORT_FILE)
    measured = {(cell.suite, cell.temperature) for cell in manifest.acceptance}
    assert measured == {(suite.name, at) for suite in report.suites for at in report.settings.temperatures}
    for cell in manifest.acceptance:
        for counts, finished in ((cell.finished, True), (cell.unfinished, False)):
            pooled = report.pooled(
                manifest.recipe.name, temperature=cell.temperature, finished=finished, suites=[cell.suite],
                workloads=[cell.workload],
            )  # fmt: skip
            assert counts == pooled.counts


def test_its_files_name_no_machine(entry):
    for path in folder_of(entry).rglob("*"):
        if path.suffix in (".json", ".jsonl", ".md", ".yaml"):
            assert not PATH_OF_A_MACHINE.search(path.read_text(encoding="utf-8")), path


@pytest.fixture(scope="module")
def sessions() -> dict[str, Session]:
    return {}


def decoded(
    folder: Path, sessions: dict[str, Session], *, suite: str, **settings: int
) -> tuple[Suite, AcceptanceCounts]:
    """One of our own suites, decoded greedily with a drafter as its report says, and what was accepted."""
    manifest, report = DrafterManifest.read(folder), Report.load(folder / REPORT_FILE)
    recipe = manifest.recipe
    target = sessions.setdefault(recipe.target.source, Session(recipe)).target(report.target.dtype)
    assert target.digest == report.target.digest, f"{folder / MANIFEST_FILE} is for another target"
    sources = [source for source in recipe.data.evaluation if source.name == suite]
    assert [source.source for source in sources] == [f"builtin:eval/{suite}"]
    read = read_sources(sources, recipe.data, responses="rollout")
    limit = settings.pop("prompts", recipe.evaluation.prompts_per_suite)
    (prompts,) = suites_of(
        read.accepted,
        target,
        recipe,
        names=[suite],
        limit=limit,
        quarantine=folder / "never-written",
        say=pytest.fail,
    )
    loaded = load_drafter(folder, geometry=target.geometry, embedding_VD=target.embedding_VD)
    drafter = loaded.drafter.eval().requires_grad_(False)
    proposer = drafter_proposer(drafter, target=target, name=recipe.name, shortlist=recipe.evaluation.shortlist)
    changed = report.settings.model_copy(update={"temperatures": (0.0,), **settings})
    with torch.no_grad():
        (result,) = measure(target, [proposer], [prompts], settings=changed)
    return prompts, result.pooled(finished=True).counts + result.pooled(finished=False).counts


def test_it_drafts_what_the_target_says(entry, sessions):
    _, counts = decoded(
        folder_of(entry), sessions, suite=SAMPLE["suite"], prompts=SAMPLE["prompts"], max_new_tokens=SAMPLE["tokens"]
    )
    print(f"{entry.name}: {counts.mean_accepted_length:.3f}")
    assert counts.mean_accepted_length > LEAST[entry.name]


@pytest.mark.slow
@pytest.mark.parametrize("suite", SUITES)
def test_its_figures_come_out_again(entry, suite, sessions):
    report = Report.load(folder_of(entry) / REPORT_FILE)
    name = DrafterManifest.read(folder_of(entry)).recipe.name
    prompts, counts = decoded(folder_of(entry), sessions, suite=suite)
    recorded = next(facts for facts in report.suites if facts.name == suite)
    assert (prompts.digest, len(prompts.prompts)) == (recorded.digest, recorded.prompts)
    before = [report.pooled(name, temperature=0.0, finished=done, suites=[suite]).counts for done in (True, False)]
    assert counts.mean_accepted_length == pytest.approx((before[0] + before[1]).mean_accepted_length, rel=TOLERANCE)


def test_the_bundle_of_the_demo_holds_them():
    from angelspec.cli import serving_parts
    from angelspec.core.bundle import load_bundle, of_checkpoint
    from angelspec.core.model_content import content_digest
    from angelspec.serving.resolving import resolve_bundle

    bundle = load_bundle(resource_folder("checkpoints") / "bundle.yaml")
    assert {drafter.source for drafter in bundle.drafters} == set(SHIPPED)
    resolved = resolve_bundle(bundle, parts=serving_parts.parts())
    assert {Path(drafter.source) for drafter in resolved.bundle.drafters} == set(map(folder_of, SHIPPED.values()))
    expected = []
    for drafter in bundle.drafters:
        folder = folder_of(SHIPPED[drafter.source])
        known, acceptance = of_checkpoint(DrafterManifest.read(folder), name=drafter.name, source=drafter.source)
        assert drafter == known.model_copy(update={"digest": content_digest(folder)})
        expected += acceptance
    assert list(bundle.acceptance) == expected
    assert {line.workload for line in expected} == {"chat", "code", "math"}
