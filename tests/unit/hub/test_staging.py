"""What goes, what stays, and what stops a publication, on trees with every trap."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess

import pytest
from hub_builders import PUBLISHED, lay_traps, plain_card

from angelspec.core.errors import CheckpointError
from angelspec.core.locations import license_file
from angelspec.hub.publish import prepare
from angelspec.hub.staging import git_blob_sha1


def staged(tree, **changes):
    arguments = {"license": "apache-2.0", "base_model": None, "write_card": plain_card, "checks": {}}
    return prepare(tree, **{**arguments, **changes})


def refusal(tree, **changes) -> str:
    with pytest.raises(CheckpointError) as caught, staged(tree, **changes):
        pass
    return str(caught.value)


def test_traps_stay_behind_and_are_named(tree, tmp_path):
    lay_traps(tree, tmp_path / "outside")
    with staged(tree) as publication:
        stage = publication.stage
        assert tuple(file.path for file in stage.files) == PUBLISHED
        assert {item.path: item.why for item in stage.left_out} == {
            ".cache/": "a folder that is no part of a publication",
            ".env": "hidden",
            ".ms_upload_cache": "hidden",
            "__pycache__/": "a folder that is no part of a publication",
            "data": "a link",
            "events.out.tfevents.1": "not on the list of what is published",
            "modeling_evil.py": "not on the list of what is published",
            "notes.txt": "a link",
            "pytorch_model.bin": "pickled; weights are published as safetensors",
            "training/optimizer.pt": "pickled; weights are published as safetensors",
            "training_state.pt": "pickled; weights are published as safetensors",
        }
        for file in stage.files:
            content = file.source.read_bytes()
            assert (file.size, file.sha256) == (len(content), hashlib.sha256(content).hexdigest())
        folder = stage.folder
    assert not folder.exists()


def test_the_copy_is_what_was_checked(tree):
    with staged(tree) as publication:
        (tree / "report.md").write_text("changed meanwhile")
        by_path = {file.path: file for file in publication.stage.files}
        assert by_path["report.md"].source.read_text() == "# small\n"


def test_the_users_own_token_is_found_whatever_its_shape(tree, monkeypatch):
    monkeypatch.setenv("MODELSCOPE_API_TOKEN", "an unusual token")
    (tree / "report.md").write_text("run with an unusual token\n")
    text = refusal(tree)
    assert "report.md holds an access token" in text and "unusual" not in text


def test_every_problem_is_named_at_once(tree):
    (tree / "config.json").unlink()
    (tree / "model.safetensors").write_bytes(b"")
    text = refusal(tree)
    assert "2 problem(s)" in text and "config.json is missing" in text and "model.safetensors is empty" in text


def test_a_licence_needs_its_text(tree):
    assert "put it as LICENSE beside config.json" in refusal(tree, license="mit")
    (tree / "LICENSE").write_text("MIT License\n")

    def card(folder, manifest):
        return plain_card(folder, manifest).replace("license: apache-2.0", "license: mit")

    with staged(tree, license="mit", write_card=card) as publication:
        assert (publication.stage.folder / "LICENSE").read_text() == "MIT License\n"


def test_a_licence_is_not_stated_over_the_text_of_another(tree):
    shutil.copyfile(license_file(), tree / "LICENSE")
    assert "LICENSE is not the text of licence 'mit'" in refusal(tree, license="mit")
    with staged(tree) as publication:
        assert publication.license == "apache-2.0"
    (tree / "LICENSE").write_text("MIT License\n\nPermission is hereby granted, not as by Apache License Version 2.\n")
    assert "LICENSE is not the text of licence 'apache-2.0'" in refusal(tree)


def test_places_in_a_load_test_are_warned_of(tree):
    texts = [
        "angelspec bench serve --url http://10.0.0.5:30000 --prompts file:/home/me/x.jsonl", "http://127.0.0.1:30000",
        "/data/models/secret", "tokens/s and/or 3/4", "http://localhost/x",
    ]  # fmt: skip
    (tree / "serve-bench.json").write_text(json.dumps(texts))
    with staged(tree) as publication:
        (warning,) = publication.warnings
    assert warning == (
        "serve-bench.json names local paths or addresses that everyone will read: /data/models/secret, "
        "file:/home/me/x.jsonl, http://10.0.0.5:30000"
    )


def test_what_the_checks_find_stops_it(tree):
    seen = []

    def check(folder, manifest):
        seen.append((folder, manifest.algorithm))
        return ["a tensor is wrong"]

    assert "a tensor is wrong" in refusal(tree, checks={"tensors": check})
    assert seen[0][0] != tree and seen[0][1] == "dfly"


def test_a_card_of_ones_own_is_kept(tree):
    own = "---\nlicense: apache-2.0\nbase_model: org/target\n---\n# Mine\n"
    (tree / "README.md").write_text(own)
    with staged(tree, base_model="org/target") as publication:
        assert (publication.stage.folder / "README.md").read_text() == own
    assert "base_model must be the target, org/other" in refusal(tree, base_model="org/other")


def test_local_paths_and_missing_figures_are_warned_of(tree, drafter):
    path = tree / "angelspec_manifest.json"
    content = json.loads(path.read_text())
    content["recipe"]["data"]["train"][0]["source"] = "file:/home/me/rows.jsonl"
    content["acceptance"] = []
    path.write_text(json.dumps(content))
    with staged(tree) as publication:
        assert any("file:/home/me/rows.jsonl" in warning for warning in publication.warnings)
        assert any("nothing was measured" in warning for warning in publication.warnings)
    with staged(drafter) as publication:
        assert publication.warnings == ()


def test_git_names_a_file_as_we_do(drafter):
    path = drafter / "config.json"
    named = subprocess.run(
        ["git", "hash-object", "--no-filters", str(path)], capture_output=True, text=True, check=True
    )
    assert git_blob_sha1(path) == named.stdout.strip()


def test_a_servers_address_is_warned_of_and_its_password_refused(tree):
    path = tree / "angelspec_manifest.json"
    content = json.loads(path.read_text())
    content["recipe"]["rollout"]["endpoint_url"] = "http://10.0.0.5:30000/v1"
    path.write_text(json.dumps(content))
    with staged(tree) as publication:
        assert any("http://10.0.0.5:30000/v1" in warning for warning in publication.warnings)
    content["recipe"]["rollout"]["endpoint_url"] = "http://jane:s3cret@10.0.0.5:30000/v1"
    path.write_text(json.dumps(content))
    with pytest.raises(CheckpointError) as caught, staged(tree):
        pass
    assert "s3cret" not in str(caught.value)
