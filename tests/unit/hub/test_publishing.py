"""A publication goes up through the real clients, is read back, and is never made by accident."""

from __future__ import annotations

import re
import sys

import pytest
from hub_builders import PUBLISHED
from hub_servers import SIGNATURE, start

from angelspec.core.repositories import Repository
from angelspec.hub.failures import ContentRefused
from angelspec.hub.publish import Destination, exit_code, publish

NAME = "alice/tiny"
CREATE = r"POST /api/(repos/create|v1/models)$"


def go(publication, *destinations, say=lambda text: None):
    return publish(publication, destinations, message="Publish with angelspec", say=say)


def to(hub, *, private=True, revision=None) -> Destination:
    return Destination(Repository(hub.kind, NAME, revision), private)


def assert_holds(hub, publication, *, branch=None):
    tree = hub.repositories[NAME].tree(branch or hub.default_branch)
    assert {path: content for path, content in tree.items() if path != ".gitattributes"} == {
        file.path: file.source.read_bytes() for file in publication.stage.files
    }


@pytest.mark.parametrize("private", [True, False])
def test_creates_uploads_in_one_commit_and_reads_back(hub, publication, private):
    (outcome,) = go(publication, to(hub, private=private))
    assert (outcome.state, outcome.error) == ("published", None), outcome.detail
    assert tuple(file.path for file in publication.stage.files) == PUBLISHED
    assert_holds(hub, publication)
    repository = hub.repositories[NAME]
    assert repository.private is private
    assert len(repository.messages) == 2 and repository.messages[-1].startswith("Publish with angelspec")
    assert len(hub.asked(CREATE)) == 1
    last = hub.requests[-1]
    assert last.method == "GET" and re.search("tree|files", last.path)


def test_the_same_content_again_is_a_no_op(hub, publication):
    go(publication, to(hub))
    before = len(hub.requests)
    (outcome,) = go(publication, to(hub))
    assert outcome.state == "unchanged" and "already" in outcome.detail
    assert [request.method for request in hub.requests[before:]] == ["GET"] * len(hub.requests[before:])
    assert len(hub.repositories[NAME].commits) == 2


def test_what_an_earlier_publication_left_is_removed_in_the_same_commit(hub, publication):
    old = {"serve-bench.json": b"{}", "speedup.png": b"old", "training/metrics.jsonl": b"old"}
    hub.add(NAME, files={**old, "modeling_x.py": b"theirs", ".gitattributes": b"x"})
    said = []
    (outcome,) = go(publication, to(hub), say=said.append)
    assert outcome.state == "published", outcome.detail
    assert "it also holds, and keeps, modeling_x.py" in outcome.detail
    assert any("removing what an earlier publication left: serve-bench.json, speedup.png" in text for text in said)
    tree = hub.repositories[NAME].tree(hub.default_branch)
    assert set(tree) == {*PUBLISHED, "modeling_x.py", ".gitattributes"}
    assert len(hub.repositories[NAME].messages) == 3
    (again,) = go(publication, to(hub))
    assert again.state == "unchanged" and "exactly" not in again.detail and "modeling_x.py" in again.detail
    tree["speedup.png"] = b"old"
    (third,) = go(publication, to(hub))
    assert third.state == "published" and "speedup.png" not in hub.repositories[NAME].tree(hub.default_branch)


def test_a_change_of_one_file_sends_no_weights_again(hub, publication, drafter, tmp_path):
    go(publication, to(hub))
    hub.repositories[NAME].tree(hub.default_branch)["report.md"] = b"# other\n"
    puts = len(hub.asked("^PUT"))
    (outcome,) = go(publication, to(hub))
    assert outcome.state == "published"
    assert_holds(hub, publication)
    assert len(hub.asked("^PUT")) == puts


def test_a_branch(hub, publication):
    hub.add(NAME)
    if hub.kind == "modelscope":
        (outcome,) = go(publication, to(hub, revision="v1"))
        assert exit_code([outcome]) == 8 and "no branch 'v1'" in outcome.detail
        hub.repositories[NAME].branches["v1"] = hub.repositories[NAME].branches["master"]
    (outcome,) = go(publication, to(hub, revision="v1"))
    assert outcome.state == "published", outcome.detail
    assert_holds(hub, publication, branch="v1")
    assert "config.json" not in hub.repositories[NAME].tree(hub.default_branch)


def test_a_client_that_is_not_installed_stops_its_own_destination_only(both, publication, monkeypatch):
    monkeypatch.setitem(sys.modules, "modelscope_hub", None)
    monkeypatch.delitem(sys.modules, "angelspec.hub.modelscope", raising=False)
    outcomes = go(publication, to(both["modelscope"]), to(both["hf"]))
    assert [outcome.state for outcome in outcomes] == ["failed", "published"]
    assert "pip install -e '.[modelscope]'" in outcomes[0].detail and exit_code(outcomes) == 2


def test_a_commit_that_we_have_not_seen_is_not_built_upon(both, publication):
    hub = both["hf"]
    repository = hub.add(NAME)
    real = hub._preupload

    def meanwhile(request, query, name, revision):
        repository.commit("main", {"README.md": b"theirs"}, "somebody else")
        return real(request, query, name, revision)

    hub._preupload = meanwhile
    (outcome,) = go(publication, to(hub))
    assert isinstance(outcome.error, ContentRefused) and "changed the repository meanwhile" in outcome.detail
    assert repository.tree("main") == {"README.md": b"theirs"}


def test_files_without_a_listed_hash_are_read_back_whole(monkeypatch, publication):
    hub = start("modelscope", monkeypatch)
    hub.tells_hashes = False
    (outcome,) = go(publication, to(hub))
    assert outcome.state == "published", outcome.detail
    assert set(PUBLISHED) == {
        re.search(r"FilePath=([^&]+)", request.path)[1].replace("%2F", "/") for request in hub.asked("FilePath")
    }
    hub.corrupt.add("config.json")
    hub.repositories.clear()
    (outcome,) = go(publication, to(hub))
    assert exit_code([outcome]) == 7 and "config.json has another content" in outcome.detail
    hub.close()


def test_requests_carry_the_token_and_nothing_shows_it(hub, publication, capfd):
    said = []
    outcomes = go(publication, to(hub), say=said.append)
    assert any(request.headers.get("authorization") == f"Bearer {hub.token}" for request in hub.requests)
    captured = capfd.readouterr()
    shown = captured.out + captured.err + "".join(said) + outcomes[0].detail
    assert hub.token not in shown and SIGNATURE not in shown
