"""A name becomes a folder: a path, the registry, a hub, the cache."""

from __future__ import annotations

import pytest

from angelspec.core.errors import CheckpointError, HubError
from angelspec.core.locations import resource_folder
from angelspec.core.registry import parse_registry
from angelspec.hub import resolve
from angelspec.hub.failures import HubUnavailable, NotOnHub
from angelspec.hub.pull import names_a_commit
from angelspec.hub.resolve import find_drafter

FILES = {"config.json": b"{}", "model.safetensors": b"right"}


def registry(*entries: str):
    common = (
        "target: a/b, algorithm: dfly, mode: no-think, proposals: 7, block_size: 8, license: x, loading: x, evidence: x"
    )
    return parse_registry("drafters: [" + ", ".join("{" + f"{entry}, {common}" + "}" for entry in entries) + "]")


def test_a_path_comes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "alice" / "tiny").mkdir(parents=True)
    found = find_drafter("alice/tiny", registry=registry("name: alice/tiny, repository: 'hf:alice/tiny'"))
    assert (found.folder.resolve(), found.name, found.entry) == (tmp_path / "alice" / "tiny", "tiny", None)


def test_a_name_of_a_hub(hub):
    hub.add("alice/tiny", files=FILES)
    found = find_drafter(f"{hub.kind}:alice/tiny", registry=registry())
    assert (found.folder / "model.safetensors").read_bytes() == b"right"
    assert (found.name, found.entry) == (f"{hub.kind}:alice/tiny", None)


def test_a_pinned_revision_is_taken_unless_another_is_named(both):
    hub = both["hf"]
    hub.add("alice/tiny", files=FILES)
    pinned = hub.repositories["alice/tiny"].branches["main"]
    hub.repositories["alice/tiny"].commit("main", {**FILES, "model.safetensors": b"wrong"}, "break it")
    known = registry(f"name: alice/tiny, repository: 'hf:alice/tiny@{pinned[:7]}', pinned_because: it broke")
    for text in ("alice/tiny", "hf:alice/tiny"):
        said = []
        found = find_drafter(text, registry=known, say=said.append)
        assert (found.folder / "model.safetensors").read_bytes() == b"right"
        assert found.entry.name == "alice/tiny"
    assert any("because it broke" in text for text in said)
    newest = find_drafter("hf:alice/tiny@main", registry=known)
    assert (newest.folder / "model.safetensors").read_bytes() == b"wrong"


def test_a_cached_commit_needs_no_hub(both):
    hub = both["hf"]
    hub.add("alice/tiny", files=FILES)
    commit = hub.repositories["alice/tiny"].branches["main"]
    first = find_drafter(f"hf:alice/tiny@{commit}", registry=registry())
    asked = len(hub.requests)
    assert find_drafter(f"hf:alice/tiny@{commit}", registry=registry()).folder == first.folder
    assert len(hub.requests) == asked


def test_a_hub_out_of_reach_is_replaced_by_the_cache(hub, waits):
    hub.add("alice/tiny", files=FILES)
    name = f"{hub.kind}:alice/tiny"
    first = find_drafter(name, registry=registry())
    hub.fail("", status=503)
    said = []
    assert find_drafter(name, registry=registry(), say=said.append).folder == first.folder
    assert any("can't be reached" in text for text in said)
    with pytest.raises(HubUnavailable):
        find_drafter(f"{hub.kind}:alice/other", registry=registry())


def test_offline_the_cache_serves_without_a_wait(both, monkeypatch, waits):
    from huggingface_hub import constants

    both["hf"].add("alice/tiny", files=FILES)
    first = find_drafter("hf:alice/tiny", registry=registry())
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    asked = len(both["hf"].requests)
    assert find_drafter("hf:alice/tiny", registry=registry()).folder == first.folder
    with pytest.raises(HubUnavailable, match="HF_HUB_OFFLINE forbids"):
        find_drafter("hf:alice/other", registry=registry())
    assert (len(both["hf"].requests), waits) == (asked, [])


def test_mirrors_are_tried_in_turn(both):
    both["modelscope"].add("bob/tiny", files=FILES)
    known = registry("name: alice/tiny, repository: 'hf:alice/tiny', mirrors: ['modelscope:bob/tiny']")
    found = find_drafter("alice/tiny", registry=known)
    assert found.folder.parent.parent.name == "modelscope"
    both["modelscope"].repositories.clear()
    with pytest.raises(NotOnHub, match="hf:alice/tiny"):
        find_drafter("alice/tiny", registry=registry("name: alice/tiny, repository: 'hf:alice/tiny'"))


def test_the_check_hears_what_the_registry_knows(both):
    both["hf"].add("alice/tiny", files=FILES)
    known = registry("name: alice/tiny, repository: 'hf:alice/tiny', config_overrides: {block_size: 8}")
    heard = []
    find_drafter("alice/tiny", registry=known, check=lambda folder, entry: heard.append(entry) or [])
    assert [entry.config_overrides for entry in heard] == [{"block_size": 8}]


def test_a_drafter_that_ships_lies_beside_the_registry(tmp_path, monkeypatch):
    known = registry("name: small, folder: small-dfly")
    with pytest.raises(CheckpointError, match="should lie in"):
        find_drafter("small", registry=known)
    monkeypatch.setattr(resolve, "resource_folder", lambda name: tmp_path)
    (tmp_path / "small-dfly").mkdir()
    found = find_drafter("small", registry=known)
    assert (found.folder, found.name) == (tmp_path / "small-dfly", "small")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("AngelSlim/Qwen3-8B-DFly-Block9", "did you mean 'AngelSlim/Qwen3-8B-DFly-Block8'"),
        ("runs/none/drafter", "neither a folder nor a registered drafter"),
        ("hf:a//b", "no ORG/NAME"),
        ("hf:alone", "no ORG/NAME"),
        ("hf:a/b@", "no usable revision"),
        ("modelscope:../x", "no ORG/NAME"),
    ],
)
def test_what_is_no_drafters_name(text, message):
    with pytest.raises((CheckpointError, HubError), match=message) as caught:
        find_drafter(text)
    assert caught.value.exit_code == 2


def test_the_shipped_registry_is_used_by_default():
    assert (resource_folder("checkpoints") / "registry.yaml").is_file()


def test_a_drafter_that_ships_is_copied_where_it_is_asked_for(tmp_path):
    output = tmp_path / "mine"
    found = find_drafter("smollm2-dfly-nothink", output=output)
    assert found.folder == output
    shipped = resource_folder("checkpoints") / "smollm2-dfly-nothink"
    assert (output / "model.safetensors").read_bytes() == (shipped / "model.safetensors").read_bytes()
    with pytest.raises(CheckpointError, match="mine exists"):
        find_drafter("smollm2-dfly-nothink", output=output)
    with pytest.raises(CheckpointError, match="nothing is fetched"):
        find_drafter(str(output), output=tmp_path / "other")


@pytest.mark.parametrize(
    ("revision", "commit"), [("abc1234", True), ("20250801", False), ("1" * 40, True), ("main", False), (None, False)]
)
def test_a_date_is_no_commit(revision, commit):
    assert names_a_commit(revision) == commit
