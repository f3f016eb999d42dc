"""Pulled files are the hub's, whole and verified. What goes wrong is in the table of ``test_pulling_failures``."""

from __future__ import annotations

import re

import pytest
from hub_servers import start
from huggingface_hub import constants

from angelspec.core.errors import AngelspecError, CheckpointError
from angelspec.core.files import read_json
from angelspec.core.repositories import Repository
from angelspec.hub.failures import HubUnavailable, IntegrityError
from angelspec.hub.pull import cached, drafter_cache, pull

NAME = "alice/tiny"
GET = r"GET .*(/resolve/|FilePath=)"


def files_of(folder) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def published(hub, publication):
    """The hub with a repository that holds the drafter, and more than that."""
    content = {file.path: file.source.read_bytes() for file in publication.stage.files}
    content["model.safetensors"] += bytes(200_000)  # large enough to break in the middle
    hub.add(NAME, files={**content, "modeling_evil.py": b"evil", ".env": b"x", "onnx/model.onnx": b"x",
                         "pytorch_model.bin": b"pickle", "License_AngelSlim.txt": b"licence"})  # fmt: skip
    hub.expected = {**content, "License_AngelSlim.txt": b"licence"}
    return hub


def name_of(hub, revision=None) -> Repository:
    return Repository(hub.kind, NAME, revision)


def test_fetches_a_drafter_and_nothing_else(published):
    folder = pull(name_of(published))
    assert files_of(folder) == published.expected
    assert re.fullmatch(r"tiny@[0-9a-f]{12}", folder.name)
    assert folder.parent == drafter_cache() / published.kind / "alice"
    assert [path.name for path in folder.parent.iterdir() if path.name.startswith(".")] == []


def test_the_second_time_nothing_is_fetched(published):
    folder = pull(name_of(published))
    before = len(published.asked(GET))
    assert pull(name_of(published)) == folder
    assert len(published.asked(GET)) == before


def test_a_new_commit_gets_a_folder_of_its_own(published):
    folder = pull(name_of(published))
    tree = published.repositories[NAME].tree(published.default_branch)
    published.repositories[NAME].commit(published.default_branch, {**tree, "report.md": b"# new\n"}, "newer")
    newer = pull(name_of(published))
    assert newer != folder and (newer / "report.md").read_bytes() == b"# new\n"
    assert files_of(folder) == published.expected
    assert cached(name_of(published)) == newer
    assert read_json(folder.parent / "tiny.refs.json") == {"": newer.name}


def test_into_a_folder(published, tmp_path):
    output = tmp_path / "mine" / "drafter"
    assert pull(name_of(published), output=output) == output
    assert files_of(output) == published.expected
    assert [path.name for path in output.parent.iterdir()] == ["drafter"]
    said = []
    pull(name_of(published), output=output, say=said.append)
    assert any("already" in text for text in said)


def test_a_connection_that_breaks_in_the_middle_is_resumed(published, waits, monkeypatch):
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1 << 14)  # what is received is written by chunks
    weights = r"GET .*(resolve.*model\.safetensors|FilePath=model\.safetensors)"
    published.fail(weights, drop="middle", times=1)
    folder = pull(name_of(published))
    assert files_of(folder) == published.expected
    resumed = [request.headers["range"] for request in published.asked(weights) if "range" in request.headers]
    assert resumed and not resumed[-1].startswith("bytes=0-")


def test_interrupted_and_started_again_goes_on_where_it_was(published, waits):
    weights = r"GET .*(resolve.*model\.safetensors|FilePath=model\.safetensors)"
    published.fail(weights, drop="request")
    with pytest.raises(HubUnavailable):
        pull(name_of(published))
    assert cached(name_of(published)) is None
    fetched = len(published.asked(r"GET .*config\.json"))
    published.faults.clear()
    assert files_of(pull(name_of(published))) == published.expected
    assert len(published.asked(r"GET .*config\.json")) == fetched


@pytest.mark.parametrize("path", ["config.json", "model.safetensors"])
def test_a_file_that_was_not_what_is_listed_is_fetched_again(published, waits, path):
    published.corrupt.add(path)
    with pytest.raises(IntegrityError):
        pull(name_of(published))
    published.corrupt.clear()
    assert files_of(pull(name_of(published))) == published.expected


def test_a_busy_hub_is_waited_for(published, waits):
    published.fail(r"GET .*(/tree/|/repo/files)", status=429, headers={"Retry-After": "11"}, times=1)
    assert files_of(pull(name_of(published))) == published.expected
    assert waits and (published.kind == "modelscope" or max(waits) in (11, 12))  # that client waits less than asked


def test_what_does_not_load_is_not_shown(published):
    said = []

    def check(folder):
        said.append(sorted(files_of(folder)))
        return ["misshapen-tensor: fc.weight"]

    with pytest.raises(CheckpointError, match="fc.weight"):
        pull(name_of(published), check=check)
    assert said == [sorted(published.expected)]
    assert cached(name_of(published)) is None
    before = len(published.asked(GET))
    pull(name_of(published), check=lambda folder: [])
    assert len(published.asked(GET)) == before, "fetched again although the files were right"


def test_pickles_are_taken_where_there_is_nothing_better(hub):
    hub.add(NAME, files={"config.json": b"{}", "pytorch_model.bin": b"x", "training_args.bin": b"x"})
    assert sorted(files_of(pull(name_of(hub)))) == ["config.json", "pytorch_model.bin"]


def test_public_without_a_token(published, monkeypatch):
    monkeypatch.delenv({"hf": "HF_TOKEN", "modelscope": "MODELSCOPE_API_TOKEN"}[published.kind])
    published.repositories[NAME].private = False
    assert files_of(pull(name_of(published))) == published.expected
    assert not any("authorization" in request.headers for request in published.requests)


def test_commits_by_their_beginning(monkeypatch):
    """As the registry pins them."""
    hub = start("hf", monkeypatch)
    hub.add(NAME, files={"config.json": b"{}", "model.safetensors": b"old"})
    pinned = hub.repositories[NAME].branches["main"]
    hub.repositories[NAME].commit("main", {"config.json": b"{}", "model.safetensors": b"wrong"}, "break it")
    folder = pull(name_of(hub, pinned[:7]))
    assert (folder / "model.safetensors").read_bytes() == b"old"
    assert folder.name == f"tiny@{pinned[:12]}"
    asked = len(hub.requests)
    assert cached(name_of(hub, pinned[:7])) == folder == cached(name_of(hub, pinned))
    assert len(hub.requests) == asked
    with pytest.raises(AngelspecError, match="no revision 'abcdef0'"):
        pull(name_of(hub, "abcdef0"))
    hub.close()
