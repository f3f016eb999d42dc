"""A bundle's acceptance is measured as it is served, and what can't be measured is said."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hub_builders import exported_drafter

from angelspec.cli import serving_parts
from angelspec.core.errors import BundleError, DataError
from angelspec.core.recipe_files import load_recipe
from angelspec.pipeline.bundle_measure import measure_bundle
from angelspec.pipeline.progress import Progress
from angelspec.serving.resolving import ResolvedBundle, compose_bundle, resolve_bundle


@pytest.fixture
def resolved(tmp_path, monkeypatch) -> ResolvedBundle:
    """A tiny target with two DFly drafters."""
    monkeypatch.setenv("ANGELSPEC_CACHE", str(tmp_path / "cache"))
    parts = serving_parts.parts()
    digest = parts.digest(parts.find_target("tiny-llama").folder, None)
    recipe = load_recipe("tiny-dfly-llama")
    for name in ("one", "two"):
        folder = exported_drafter(tmp_path / name, recipe=recipe)
        manifest = json.loads((folder / "angelspec_manifest.json").read_text())
        manifest["target"]["digest"] = digest
        (folder / "angelspec_manifest.json").write_text(json.dumps(manifest))
    drafters = [f"{name}={tmp_path / name}" for name in ("one", "two")]
    return resolve_bundle(compose_bundle("tiny-llama", drafters, parts=parts), parts=parts)


@pytest.fixture
def prompts(tmp_path) -> str:
    rows = [{"id": str(i), "workload": w, "prompt": f"say {w}"} for i, w in enumerate(["code", "chat", "code"])]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(tmp_path / "prompts.jsonl")


def with_template(resolved, index, template):
    drafter = resolved.drafters[index]
    target = drafter.manifest.recipe.target.model_copy(update={"chat_template": template})
    recipe = drafter.manifest.recipe.model_copy(update={"target": target})
    manifest = drafter.manifest.model_copy(update={"recipe": recipe})
    drafters = list(resolved.drafters)
    drafters[index] = dataclasses.replace(drafter, manifest=manifest)
    return dataclasses.replace(resolved, drafters=tuple(drafters))


def measured(resolved, prompts, *, max_new_tokens=12):
    return measure_bundle(resolved, [prompts], max_new_tokens=max_new_tokens, progress=Progress(quiet=True))


def test_every_workload_that_the_prompts_hold(resolved, prompts):
    found = measured(resolved, prompts)
    assert {(item.drafter, item.workload) for item in found} == {
        (drafter, workload) for drafter in ("one", "two") for workload in ("chat", "code")
    }


def test_a_workload_without_a_full_step_is_named(resolved, prompts):
    with pytest.raises(DataError, match="prompts of .*code.* verified all 3 proposals of .one.") as caught:
        measured(resolved, prompts, max_new_tokens=1)
    assert "--max-new-tokens" in caught.value.mend and "math" not in caught.value.message


def test_two_chat_templates_are_refused(resolved, prompts, tmp_path):
    (tmp_path / "mine.jinja").write_text("{{ messages }}")
    for index in (0, 1):  # also where the first has none
        with pytest.raises(BundleError, match="different chat templates"):
            measured(with_template(resolved, index, str(tmp_path / "mine.jinja")), prompts)
