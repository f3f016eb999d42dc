"""``angelspec evaluate``: both families side by side, and the break-even with MTP."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from drafter_builders import tiny_drafter
from mtp_builders import fitting_mtp

from angelspec.cli.main import cli
from angelspec.core.errors import CheckpointError, DataError, RecipeError, RequestError
from angelspec.core.manifest import DrafterManifest, TargetIdentity, TrainingRecord
from angelspec.core.recipe_files import load_recipe
from angelspec.evaluation.breakeven import PLAIN, BreakEven
from angelspec.evaluation.report import Report
from angelspec.pipeline import evaluate_run
from angelspec.pipeline.evaluate_run import evaluate_checkpoints
from angelspec.pipeline.session import Session
from angelspec.targets.target import load_target
from angelspec.training.export import export_drafter


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Exports of an untrained drafter of each family for the tiny random llama: (block, MTP)."""
    patch = pytest.MonkeyPatch()
    patch.setenv("ANGELSPEC_CACHE", str(tmp_path_factory.mktemp("cache")))
    recipe = load_recipe("tiny-dfly-llama")
    target = load_target(recipe.target, dtype=torch.float32)
    geometry = target.geometry
    block = tiny_drafter(
        "dfly", hidden_size=geometry.hidden_size, target_hidden_size=geometry.hidden_size,
        vocab_size=geometry.vocab_size, target_num_layers=geometry.num_layers, target_layer_ids=(1, 3, 4),
        mask_token_id=geometry.vocab_size - 1, max_position_embeddings=geometry.max_position_embeddings,
    ).eval()  # fmt: skip
    folders = []
    for name, drafter in {"blocks": block, "depths": fitting_mtp(geometry)}.items():
        manifest = DrafterManifest(
            angelspec_version="0.1.0",
            algorithm=drafter.config.algorithm,
            mode=recipe.mode,
            drafter=drafter.config,
            target=TargetIdentity(
                name=target.name,
                source=recipe.target.source,
                digest=target.digest,
                mode_family=recipe.target.mode_family,
                geometry=geometry,
            ),
            recipe=recipe,
            training=TrainingRecord(steps=0, supervised_positions=0, target_tokens=0),
        )
        folder = tmp_path_factory.mktemp("exports") / name
        folders.append(export_drafter(drafter, folder, dtype=torch.float32, manifest=manifest, geometry=geometry))
    yield tuple(folders)
    patch.undo()


def test_both_families_in_one_report_with_the_break_even(checkpoints, tmp_path):
    evaluate_checkpoints(
        checkpoints, temperatures=(0.0,), limit=1, max_new_tokens=6, batch_size=2, breakeven=(1, 2), output=tmp_path,
        quiet=True,
    )  # fmt: skip
    report = Report.load(tmp_path / "report.json")
    assert {d.name: (d.identity["kind"], d.depth) for d in report.drafters} == {
        "blocks": ("block", 3), "depths": ("mtp", 3), "prompt lookup": ("lookup", 7),
    }  # fmt: skip
    assert next(d for d in report.drafters if d.name == "depths").description == "mtp, one dense layer, 3 depths"
    assert report.exactness and all(result.exact for result in report.exactness)
    assert {result.proposer for result in report.results} == {"blocks", "depths", "prompt lookup"}
    figures = BreakEven(report, temperature=0.0)
    assert (figures.mtp, figures.batch_sizes) == ("depths", (1, 2))
    assert figures.others == ("blocks", "prompt lookup", PLAIN)
    assert all(figures.needed("blocks", batch_size=size, mtp_length=3.0) > 0 for size in (1, 2))
    text = (tmp_path / "report.md").read_text()
    assert "### Break-even with depths" in text and "### Step time" in text
    assert "](breakeven-t0.png)" in text and (tmp_path / "breakeven-t0.png").stat().st_size > 1000


@pytest.mark.parametrize(("prompts", "loaded"), [(0, ["bfloat16"]), (1, ["bfloat16", "float32"])])
def test_the_target_in_float32_is_loaded_only_to_compare(checkpoints, tmp_path, monkeypatch, prompts, loaded):
    folder = shutil.copytree(checkpoints[0], tmp_path / "blocks")
    manifest = DrafterManifest.read(folder)
    changes = (f"evaluation.exactness_prompts={prompts}", "evaluation.dtype=bfloat16")
    manifest.model_copy(update={"recipe": load_recipe("tiny-dfly-llama", overrides=changes)}).write(folder)
    asked, inner = [], Session.target
    monkeypatch.setattr(Session, "target", lambda self, dtype: asked.append(dtype) or inner(self, dtype))
    evaluate_checkpoints(
        [folder], temperatures=(0.0,), limit=1, max_new_tokens=6, output=tmp_path / "report", quiet=True
    )
    assert asked == loaded
    assert bool(Report.load(tmp_path / "report" / "report.json").exactness) == bool(prompts)


def test_shortlists_of_every_size_are_measured_and_drawn(checkpoints, tmp_path):
    evaluate_checkpoints(
        checkpoints[::-1], temperatures=(0.0,), limit=1, max_new_tokens=6, batch_size=2, shortlists=True,
        output=tmp_path, quiet=True,
    )  # fmt: skip
    report = Report.load(tmp_path / "report.json")
    assert [result.size for result in report.shortlist] == [8, 16, 32, 64, 128, None]
    assert report.notes == ("shortlists were measured with blocks alone",)
    text = (tmp_path / "report.md").read_text()
    assert "### Shortlist of the sequential head" in text and "Most tokens/s: " in text
    assert "](shortlist.png)" in text and (tmp_path / "shortlist.png").stat().st_size > 1000


def test_no_report_is_replaced_unasked(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("evaluation", "evaluation-2", "evaluation-3"):
        folder = evaluate_run.report_folder(None, overwrite=False)
        assert folder == Path("runs") / name
        folder.mkdir(parents=True)
        (folder / "report.json").write_text("{}")
    with pytest.raises(RequestError, match=r"report.json exists") as caught:
        evaluate_checkpoints([tmp_path], output=folder, quiet=True)
    assert "--overwrite" in caught.value.mend
    assert evaluate_run.report_folder(folder, overwrite=True) == folder


def test_shortlists_need_a_sequential_head_and_say_so_before_anything_is_loaded(checkpoints, tmp_path, monkeypatch):
    monkeypatch.setattr(evaluate_run, "Session", None)
    with pytest.raises(CheckpointError, match="none of depths has one"):
        evaluate_checkpoints(checkpoints[1:], shortlists=True, output=tmp_path, quiet=True)


def test_the_break_even_needs_an_mtp_drafter_and_says_so_before_anything_is_loaded(checkpoints, tmp_path, monkeypatch):
    monkeypatch.setattr(evaluate_run, "Session", None)
    with pytest.raises(CheckpointError, match="blocks is of another family") as caught:
        evaluate_checkpoints(checkpoints[:1], breakeven=(1,), output=tmp_path, quiet=True)
    assert "add an MTP drafter" in caught.value.mend


@pytest.mark.parametrize(
    "option",
    [
        ("--limit", "0"), ("--max-new-tokens", "0"), ("--batch-size", "0"), ("--temperature", "-1"), ("--dcut", "0"),
        ("--dcut", "1.5"),
    ],
)  # fmt: skip
def test_a_value_that_cannot_be_is_refused_by_the_option(tmp_path, option):
    result = CliRunner().invoke(cli, ["evaluate", str(tmp_path), *option])
    assert result.exit_code == 2
    assert f"Invalid value for '{option[0]}'" in result.output


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"limit": 0}, "evaluation.prompts_per_suite"), ({"temperatures": [-1.0]}, "evaluation.temperatures"),
        ({"batch_size": 0}, "evaluation.batch_size"), ({"cut": float("nan")}, "--dcut nan"),
        ({"cut": 1.5}, "--dcut 1.5"),
    ],
)  # fmt: skip
def test_a_value_that_cannot_be_is_named_before_anything_is_loaded(checkpoints, tmp_path, monkeypatch, wrong, words):
    monkeypatch.setattr(evaluate_run, "Session", None)
    with pytest.raises(RecipeError, match=words):
        evaluate_checkpoints(checkpoints[:1], output=tmp_path, quiet=True, **wrong)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], ()),
        (["--breakeven"], (1, 4, 16)),
        (["--breakeven", "--breakeven-batch", "2", "--breakeven-batch", "8"], (2, 8)),
    ],
)
def test_the_commands_batch_sizes(tmp_path, monkeypatch, options, expected):
    received = {}
    monkeypatch.setattr(evaluate_run, "evaluate_checkpoints", lambda checkpoints, **given: received.update(given))
    result = CliRunner().invoke(cli, ["evaluate", str(tmp_path), *options])
    assert result.exit_code == 0, result.output
    assert received["breakeven"] == expected
    assert CliRunner().invoke(cli, ["evaluate", str(tmp_path), "--breakeven-batch", "0"]).exit_code == 2


def test_prompts_that_did_not_come_with_the_drafter_are_named(checkpoints, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(checkpoints[0], folder)
    path = folder / "angelspec_manifest.json"
    document = json.loads(path.read_text())
    document["recipe"]["data"]["evaluation"][0]["source"] = "file:gone.jsonl"
    path.write_text(json.dumps(document))
    with pytest.raises(DataError, match="gone.jsonl") as refused:
        evaluate_checkpoints([folder], quiet=True)
    assert "--prompts" in refused.value.mend
