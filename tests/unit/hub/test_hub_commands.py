"""The commands: a dry run without a request, the question before publishing, exit codes, drafters by name."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from hub_builders import PUBLISHED, exported_drafter, lay_traps, manifest_of, run
from hub_servers import SIGNATURE

from angelspec.core.acceptance import AcceptanceCounts
from angelspec.core.manifest import DrafterManifest
from angelspec.core.recipe_files import load_recipe
from angelspec.data.reasons import Reason, Rejection
from angelspec.decoding.answers import Decoded
from angelspec.drafters.checkpoint import load_drafter
from angelspec.evaluation import acceptance
from angelspec.pipeline import probe
from angelspec.targets.target import load_target


@pytest.fixture(scope="module", autouse=True)
def _no_shared_target_cache(tmp_path_factory):
    """Random targets are made once for the module."""
    patch = pytest.MonkeyPatch()
    patch.setenv("ANGELSPEC_CACHE", str(tmp_path_factory.mktemp("targets")))
    yield
    patch.undo()


def test_a_dry_run_makes_no_request_and_shows_everything(tree, tmp_path, no_network, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_" + "s" * 34)
    lay_traps(tree, tmp_path / "outside")
    result = run("publish", tree, "--to", "hf:alice/tiny", "--to", "modelscope:alice/tiny", "--dry-run")
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    shown = {
        line.split()[2]: line.split()[:2] for line in lines if len(line.split()) == 3 and len(line.split()[1]) == 64
    }
    assert tuple(sorted(shown)) == PUBLISHED
    content = (tree / "model.safetensors").read_bytes()
    assert shown["model.safetensors"] == [f"{len(content):,}", hashlib.sha256(content).hexdigest()]
    left = "\n".join(lines[lines.index("left out:") :])
    for name in (".env", "training_state.pt", "__pycache__/", "notes.txt", "training/optimizer.pt"):
        assert f"  {name} (" in left
    assert "to hf:alice/tiny (private), modelscope:alice/tiny (private), licence apache-2.0" in result.output
    assert lines[-1] == "dry run: nothing was sent"
    assert "hf_s" not in result.output


def test_a_client_that_is_not_installed_is_named_before_anything_is_sent(tree, no_network, monkeypatch):
    monkeypatch.delitem(sys.modules, "angelspec.hub.modelscope", raising=False)
    monkeypatch.setitem(sys.modules, "modelscope_hub", None)
    places = ("--to", "hf:alice/tiny", "--to", "modelscope:alice/tiny")
    result = run("publish", tree, *places, "--yes")
    assert result.exit_code == 2
    assert "ModelScope needs the package 'modelscope'" in result.output and "pip install" in result.output
    assert run("publish", tree, *places, "--dry-run").exit_code == 0


def test_the_guard_of_the_dry_run_sees_a_request(tree, both, no_network):
    for kind in both:
        result = run("publish", tree, "--to", f"{kind}:alice/tiny", "--yes")
        assert isinstance(result.exception, AssertionError) and "a request was made" in str(result.exception)


def test_asks_before_it_publishes(tree, both):
    arguments = ("publish", tree, "--to", "hf:alice/tiny", "--public")
    declined = run(*arguments, answers="n\n")
    assert declined.exit_code == 13 and "publish to hf:alice/tiny (public)? [y/N]" in declined.output
    assert "nothing was sent" in declined.output
    nobody = run(*arguments, answers="")
    assert nobody.exit_code == 13 and "--yes" in nobody.output
    assert both["hf"].requests == []
    agreed = run(*arguments, answers="y\n")
    assert agreed.exit_code == 0, agreed.output
    assert both["hf"].repositories["alice/tiny"].private is False


def test_publishes_to_both_and_says_so_for_each(tree, both):
    arguments = ["publish", tree, "--yes", "--message", "first"]
    for kind in both:
        arguments += ["--to", f"{kind}:alice/tiny"]
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    for kind, server in both.items():
        assert f"{kind}:alice/tiny (private): published: {server.endpoint}" in result.output
        assert server.repositories["alice/tiny"].private is True
        assert server.repositories["alice/tiny"].messages[-1] == "first"
        assert server.token not in result.output and SIGNATURE not in result.output
    again = run(*arguments)
    assert again.output.count(": unchanged: ") == 2 and again.exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--to", "hf:a//b"], 2, "no ORG/NAME"),
        (["--to", "github:a/b"], 2, "names no known hub"),
        (["--to", "hf:a/b@x", "--revision", "y"], 2, "names a revision, and --revision another"),
        (["--to", "hf:a/b", "--license", "mit"], 2, "put it as LICENSE"),
        ([], 2, "Missing option '--to'"),
    ],
)
def test_wrong_options(tree, no_network, arguments, code, message):
    result = run("publish", tree, *arguments, "--dry-run")
    assert result.exit_code == code and message in result.output, result.output


def test_a_target_of_unknown_licence_asks_for_one(tree, no_network):
    content = json.loads((tree / "angelspec_manifest.json").read_text())
    content["recipe"]["target"]["name"] = None
    (tree / "angelspec_manifest.json").write_text(json.dumps(content))
    result = run("publish", tree, "--to", "hf:a/b", "--dry-run")
    assert result.exit_code == 2 and "--license" in result.output
    result = run("publish", tree, "--to", "hf:a/b", "--dry-run", "--license", "Apache-2.0", "--base-model", "org/x")
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("kind", ["hf", "modelscope"])
def test_pulled_by_name_it_is_the_same_drafter(tree, both, kind, tmp_path):
    name = f"{kind}:alice/tiny"
    assert run("publish", tree, "--to", name, "--yes").exit_code == 0
    result = run("pull", name)
    assert result.exit_code == 0, result.output
    folder = result.stdout.strip().splitlines()[-1]
    pulled, ours = load_drafter(folder), load_drafter(tree)
    assert pulled.config == ours.config and pulled.manifest == ours.manifest
    assert all((a == b).all() for a, b in zip(pulled.drafter.parameters(), ours.drafter.parameters(), strict=True))
    elsewhere = run("pull", name, "--output", tmp_path / "here")
    assert elsewhere.exit_code == 0 and (tmp_path / "here" / "README.md").is_file()
    shown = json.loads(run("checkpoint", "show", name, "--json").stdout)
    assert (shown["folder"], shown["mode"], shown["problems"]) == (folder, "no-think", [])


def test_evaluate_takes_names(both, tree, monkeypatch):
    seen = []
    monkeypatch.setattr(
        "angelspec.pipeline.evaluate_run.evaluate_checkpoints", lambda folders, **named: seen.extend(folders)
    )
    assert run("publish", tree, "--to", "hf:alice/tiny", "--yes").exit_code == 0
    result = run("evaluate", "hf:alice/tiny", tree)
    assert result.exit_code == 0, result.output
    assert [DrafterManifest.read(folder).algorithm for folder in seen] == ["dfly", "dfly"]
    assert run("evaluate", "alice/nothing").exit_code == 2


def test_evaluate_fetches_nothing_without_a_manifest(both, tree, tmp_path):
    content = {path.name: path.read_bytes() for path in tree.iterdir() if path.is_file()}
    del content["angelspec_manifest.json"]
    for kind in both:
        both[kind].add("alice/plain", files=content)
        result = run("evaluate", f"{kind}:alice/plain")
        assert result.exit_code == 2 and "has no angelspec_manifest.json" in result.output, result.output
        assert "nothing was fetched" in result.output and "model.safetensors" not in result.output
    assert not list(tmp_path.rglob("*.partial"))
    assert run("pull", "hf:alice/plain").exit_code == 0


def test_show_lists_the_registry_and_details(tree):
    assert "AngelSlim/Qwen3-8B-DFly-Block8" in run("checkpoint", "show").stdout
    rows = json.loads(run("checkpoint", "show", "--json").stdout)
    assert len(rows) >= 7 and {row["here"] for row in rows if "/" in row["name"]} == {None}
    assert all(Path(row["here"]).is_dir() for row in rows if "/" not in row["name"])  # those that ship
    text = run("checkpoint", "show", "AngelSlim/Hy3-DFlash-B8").stdout
    assert "not on this machine" in text and "120023" in text
    text = run("checkpoint", "show", tree).stdout
    manifest = DrafterManifest.read(tree)
    assert "proposes 3" in text and "mask_token_id: 319" in text and manifest.target.digest[:16] in text
    length = manifest.acceptance[0].finished.mean_accepted_length
    assert f"{length:.2f}" in text
    assert run("checkpoint", "show", "hf:alice/none").exit_code == 2


# ------------------------------------------------------------------------------- the probe, which runs the drafter


@pytest.fixture(scope="module")
def beside_its_target(tmp_path_factory):
    """An export whose manifest names the random target that is made here."""
    recipe = load_recipe("tiny-dfly-llama")
    target = load_target(recipe.target, dtype=torch.float32)
    manifest = manifest_of(recipe)
    identity = manifest.target.model_copy(update={"digest": target.digest})
    folder = tmp_path_factory.mktemp("probe") / "drafter"
    return exported_drafter(folder, target=identity)


def test_the_drafter_answers_as_its_target_does(beside_its_target):
    manifest = DrafterManifest.read(beside_its_target).model_copy(update={"acceptance": ()})
    said = []
    assert probe.drafting_problems(beside_its_target, manifest, say=said.append) == []
    assert len(said) == 1 and "drafted on 3 prompts: accepted length 1." in said[0]


def test_a_drafter_that_accepts_nothing_contradicts_its_report(beside_its_target, monkeypatch):
    manifest = DrafterManifest.read(beside_its_target)
    assert max(cell.finished.mean_accepted_length for cell in manifest.acceptance) > 1.5
    real = probe.decode

    def nothing_accepted(*arguments, **named):
        answers = real(*arguments, **named)
        for answer in answers.answers:
            answer.accepted = [0] * len(answer.accepted)
        return answers

    monkeypatch.setattr(probe, "decode", nothing_accepted)
    (problem,) = probe.drafting_problems(beside_its_target, manifest)
    assert "no proposal was accepted" in problem and "its report says 2.25" in problem
    lucky = manifest.acceptance[0]
    nothing = AcceptanceCounts(generated_tokens=400, verify_steps=400)
    poor = lucky.model_copy(update={"workload": "math", "finished": nothing, "unfinished": nothing})
    assert probe.drafting_problems(beside_its_target, manifest.model_copy(update={"acceptance": (poor, lucky)})) == []


def test_a_drafter_that_changes_the_answers_is_refused(beside_its_target, monkeypatch):
    real = probe.decode

    def changed(*arguments, **named):
        answers = real(*arguments, **named)
        answers.answers[0].tokens[3] += 1
        return answers

    monkeypatch.setattr(probe, "decode", changed)
    (problem,) = probe.drafting_problems(beside_its_target, DrafterManifest.read(beside_its_target))
    assert "answers the prompt" in problem and "from its token 3 on" in problem


def test_a_rounding_tie_hides_no_real_difference(beside_its_target, monkeypatch):
    real, gaps = probe.decode, iter([1e-9, 0.5])

    def changed(*arguments, **named):
        answers = real(*arguments, **named)
        for index, position in ((0, 3), (1, 5)):
            answers.answers[index].tokens[position] += 1
        return answers

    monkeypatch.setattr(probe, "decode", changed)
    monkeypatch.setattr(acceptance, "_top2_gap", lambda target, tokens: next(gaps))
    (problem,) = probe.drafting_problems(beside_its_target, DrafterManifest.read(beside_its_target))
    assert "from its token 5 on (top-2 logit gap 0.5)" in problem


def test_a_target_that_ends_at_once_proves_nothing(beside_its_target, monkeypatch):
    real, plain = probe.decode, probe.decode_plain

    def ended(*arguments, **named):
        run = real(*arguments, **named)
        answers = [Decoded(tokens=answer.tokens[:1], finish_reason="stop") for answer in run.answers]
        return dataclasses.replace(run, answers=answers)

    def plainly(*arguments, **named):
        return [Decoded(tokens=answer.tokens[:1], finish_reason="stop") for answer in plain(*arguments, **named)]

    monkeypatch.setattr(probe, "decode", ended)
    monkeypatch.setattr(probe, "decode_plain", plainly)
    (problem,) = probe.drafting_problems(beside_its_target, DrafterManifest.read(beside_its_target))
    assert problem == "the target ends every answer to 3 prompts at once, so nothing was drafted"


def test_prompts_that_the_template_refuses_are_named(beside_its_target, monkeypatch):
    real = probe.prompt_rows

    def refusing(conversations, form):
        rendered = real(conversations, form)
        refused = [Rejection("eval.jsonl", n, Reason.TEMPLATE_ERROR, "no such role") for n in range(len(conversations))]
        return dataclasses.replace(rendered, prompts=rendered.prompts[:1], rejected=refused)

    monkeypatch.setattr(probe, "prompt_rows", refusing)
    (problem,) = probe.drafting_problems(beside_its_target, DrafterManifest.read(beside_its_target))
    assert "prompts to draft on: " in problem and "no such role" in problem


def test_another_target_is_refused(beside_its_target):
    manifest = DrafterManifest.read(beside_its_target)
    other = manifest.model_copy(update={"target": manifest.target.model_copy(update={"digest": "0" * 64})})
    (problem,) = probe.drafting_problems(beside_its_target, other)
    assert "is not the one it was trained for" in problem


def test_an_export_is_loaded_back_even_without_its_target(tree):
    said = []
    manifest = DrafterManifest.read(tree)
    assert probe.drafting_problems(tree, manifest, say=said.append) == []
    assert "not on this machine" in said[0]
    shutil.copyfile(tree / "report.json", tree / "model.safetensors")
    assert probe.drafting_problems(tree, manifest) != []
