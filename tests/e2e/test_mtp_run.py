"""A whole MTP recipe on tiny random targets: trained, measured, exported, read back; resumed; by plan."""

from __future__ import annotations

import pytest

from angelspec.core.errors import CheckpointError
from angelspec.core.manifest import DrafterManifest
from angelspec.core.recipe_files import load_recipe
from angelspec.drafters.checkpoint import inspect_checkpoint, load_drafter
from angelspec.evaluation.report import Report
from angelspec.pipeline import training_stages
from angelspec.pipeline.plan import print_plan
from angelspec.pipeline.progress import Progress
from angelspec.pipeline.recipe_run import run_recipe
from angelspec.training.metrics import MetricsLog, read_metrics


class Sayings(Progress):
    """Remembers what was said."""

    def __init__(self):
        super().__init__(quiet=True)
        self.lines = []

    def say(self, text):
        self.lines.append(text)


@pytest.fixture(scope="module", autouse=True)
def _own_cache(tmp_path_factory):
    patch = pytest.MonkeyPatch()
    patch.setenv("ANGELSPEC_CACHE", str(tmp_path_factory.mktemp("cache")))
    yield
    patch.undo()


@pytest.mark.parametrize("name", ["tiny-mtp-llama", "tiny-mtp-hy3"])
def test_ends_with_a_checked_drafter_and_its_report(tmp_path, name):
    drafter = run_recipe(load_recipe(name), output=tmp_path, store=tmp_path / "store", quiet=True)
    assert inspect_checkpoint(drafter) == []
    manifest = DrafterManifest.read(drafter)
    assert (manifest.algorithm, manifest.drafter.num_depths) == ("mtp", 3)
    assert manifest.training.supervised_positions > 0
    assert load_drafter(drafter).config == manifest.drafter
    report = Report.load(drafter / "report.json")
    assert {d.name: d.depth for d in report.drafters}[name] == 3
    assert all(result.exact for result in report.exactness)
    steps = [event for event in read_metrics(drafter / "training") if event["kind"] == "step"]
    assert all(len(event["accuracy"]) == 3 for event in steps)
    assert steps[-1]["stage"] == "end-to-end" and steps[0]["loss_token"] > 0


def test_a_drafter_goes_on_from_another_one(tmp_path, monkeypatch):
    first = run_recipe(load_recipe("tiny-mtp-qwen3"), output=tmp_path / "a", store=tmp_path / "store", quiet=True)

    def goes_on(*changes):
        start = (f"drafter.initial_checkpoint={first}", "training.stages.cold-start.steps=2", *changes)
        recipe, said = load_recipe("tiny-mtp-qwen3", overrides=start), Sayings()
        again = run_recipe(recipe, output=tmp_path / "b", store=tmp_path / "store", quiet=True, progress=said)
        assert DrafterManifest.read(again).training.initial_checkpoint == str(first)
        return [line for line in said.lines if "starts from" in line or "warning" in line]

    log = MetricsLog(tmp_path / "log", resume_step=0)
    for step, length in ((0, 3.9), (2, 1.1)):
        log.write("held_out", step=step, stage="cold-start", values={"accepted_length": length})
    log.close()
    assert training_stages._length_at_start(tmp_path / "log") == 3.9
    assert training_stages._length_at_start(tmp_path / "empty") == 0.0
    monkeypatch.setattr(training_stages, "_length_at_start", lambda folder: 0.0)
    assert goes_on("training.on_policy=false") == []
    assert goes_on("mode=high-think") == ["  starts from a drafter of no-think answers; this one is for high-think"]
    monkeypatch.setattr(training_stages, "_length_at_start", lambda folder: 3.9)
    (warning,) = goes_on("training.seed=7")
    assert "warning: the drafter that it started from has a held-out accepted length of 3.900" in warning
    assert "training.stages.cold-start.learning_rate_scale" in warning
    monkeypatch.setattr(training_stages, "_length_at_start", lambda folder: 0.0)
    manifest = DrafterManifest.read(first)
    other = manifest.model_copy(update={"target": manifest.target.model_copy(update={"digest": "ab" * 32})})
    other.write(first)
    with pytest.raises(CheckpointError, match=r"trained for tiny-qwen3 of random:qwen3 \(abababababababab\), not for"):
        goes_on("training.stages.cold-start.steps=1")


def test_a_target_in_bfloat16_is_measured_and_its_exactness_in_float32(tmp_path):
    changes = ("evaluation.dtype=bfloat16", "training.stages.cold-start.steps=2", "training.stages.end-to-end.steps=2")
    recipe = load_recipe("tiny-mtp-llama", overrides=changes)
    report = Report.load(run_recipe(recipe, output=tmp_path, store=tmp_path / "s", quiet=True) / "report.json")
    assert report.target.dtype == "bfloat16"
    assert len(report.exactness) == 4 and all(result.exact for result in report.exactness)


@pytest.mark.parametrize("name", ["smollm2-mtp-nothink", "hy3-mtp-nothink"])
def test_is_planned_without_a_model(capsys, name):
    print_plan(load_recipe(name))
    text = " ".join(capsys.readouterr().out.split())
    assert "weights 1, 0.8, 0.64" in text
    assert {"smollm2-mtp-nothink": "4.2M parameters", "hy3-mtp-nothink": "M parameters"}[name] in text
