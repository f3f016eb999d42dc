"""The registry of released drafters, and names of repositories."""

from __future__ import annotations

import json

import pytest
import yaml

from angelspec.core.errors import CheckpointError, HubError
from angelspec.core.geometry import spread_layer_ids
from angelspec.core.known_targets import KNOWN_TARGETS
from angelspec.core.locations import resource_folder
from angelspec.core.registry import load_registry, parse_registry, registry_schema
from angelspec.core.repositories import Repository, is_repository_name, names_a_hub

CHECKPOINTS = resource_folder("checkpoints")
ANGELSLIM = {
    "AngelSlim/Qwen3-8B-DFly-Block8": ("Qwen/Qwen3-8B", "dfly", 7),
    "AngelSlim/Hy3-DFly-Block8": ("tencent/Hy3", "dfly", 7),
    "AngelSlim/Hy3-DFly-Block8-Think-High": ("tencent/Hy3", "dfly", 7),
    "AngelSlim/Hy3-DFlash-B8": ("tencent/Hy3", "dflash", 7),
    "AngelSlim/Hy3-DFlash-B16": ("tencent/Hy3", "dflash", 15),
    "AngelSlim/Hy3-MTP-TTT3": ("tencent/Hy3", "mtp", 3),
    "AngelSlim/Qwen3-8B-MTP-TTT3": ("Qwen/Qwen3-8B", "mtp", 3),
}


def test_the_seven_public_drafters_are_registered():
    found = {entry.name: (entry.target, entry.algorithm, entry.proposals) for entry in load_registry().drafters}
    assert ANGELSLIM.items() <= found.items()
    modes = {entry.name: entry.mode for entry in load_registry().drafters}
    public = [name for name, mode in modes.items() if mode == "high-think" and name in ANGELSLIM]
    assert public == ["AngelSlim/Hy3-DFly-Block8-Think-High"]


def test_the_wrong_newest_revision_is_pinned():
    (place,) = load_registry().need("AngelSlim/Qwen3-8B-DFly-Block8").places
    assert (place.hub, place.revision) == ("hf", "5712926")


def test_every_entry_has_a_known_target_and_a_place():
    releases = {target.release: target for target in KNOWN_TARGETS.values() if target.release}
    for entry in load_registry().drafters:
        assert entry.target in releases, entry.name
        assert entry.places or (CHECKPOINTS / str(entry.folder)).is_dir(), entry.name
        if entry.folder is not None:
            assert (CHECKPOINTS / entry.folder / "angelspec_manifest.json").is_file(), entry.name
    assert len(spread_layer_ids(releases["Qwen/Qwen3-8B"].geometry.num_layers, 5)) == 5


def test_the_schema_is_up_to_date():
    written = (CHECKPOINTS / "registry.schema.json").read_text(encoding="utf-8")
    assert written == registry_schema(), "run: angelspec checkpoint schema > checkpoints/registry.schema.json"
    assert set(json.loads(written)["$defs"]["RegisteredDrafter"]["required"]) >= {"name", "target", "mode", "loading"}
    first = (CHECKPOINTS / "registry.yaml").read_text().splitlines()[0]
    assert first == "# yaml-language-server: $schema=registry.schema.json"


def test_found_by_name_and_by_repository():
    registry = load_registry()
    entry = registry.need("AngelSlim/Hy3-MTP-TTT3")
    assert registry.find("AngelSlim/Hy3-MTP-TTT3") is entry
    assert registry.find("nobody/nothing") is None
    assert {entry.name for entry in registry.for_target("Qwen/Qwen3-8B")} == {
        "AngelSlim/Qwen3-8B-DFly-Block8", "AngelSlim/Qwen3-8B-MTP-TTT3",
    }  # fmt: skip
    with pytest.raises(CheckpointError, match="did you mean 'AngelSlim/Hy3-DFlash-B8'"):
        registry.need("AngelSlim/Hy3-DFlash-B9")


GOOD = {
    "name": "a/b", "repository": "hf:a/b", "target": "c/d", "algorithm": "dfly", "mode": "no-think", "proposals": 7,
    "block_size": 8, "license": "apache-2.0", "loading": "plain", "evidence": "seen",
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, None),
        ({"folder": "a-b", "repository": None}, None),
        ({"algorithm": "mtp", "block_size": None, "proposals": 3}, None),
        ({"repository": "hf:a/b@123", "pinned_because": "newer ones are wrong"}, None),
        ({"repository": None}, "give repository, folder or both"),
        ({"block_size": None}, "block_size belongs to block drafters"),
        ({"proposals": 8}, "a block of 8 slots proposes 7, not 8"),
        ({"repository": "hf:a/b@123"}, "pinned revision and pinned_because"),
        ({"pinned_because": "x"}, "pinned revision and pinned_because"),
        ({"repository": "hub:a/b"}, "repository: 'hub:a/b' names no known hub.*; write hf:ORG/NAME"),
        ({"mirrors": ["hf:a/c", "hf:a/c@"]}, "mirrors: 'hf:a/c@' has no usable revision"),
        ({"mode": "low-think"}, "no-think"),
        ({"folder": "../x"}, "folder"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_entries_are_checked(changes, message):
    text = yaml.safe_dump({"drafters": [{key: v for key, v in {**GOOD, **changes}.items() if v is not None}]})
    if message is None:
        assert parse_registry(text).drafters
    else:
        with pytest.raises(CheckpointError, match=message) as caught:
            parse_registry(text)
        assert "1 problem(s)\n  a/b: " in str(caught.value)


def test_every_problem_is_said_by_name_and_key():
    entries = [
        GOOD,
        {**GOOD, "name": "c/d", "colour": "red", "mode": "low-think"},
        {key: value for key, value in GOOD.items() if key != "name"},
        "plain",
        {**GOOD, "name": "e/f", "repository": None},
    ]
    with pytest.raises(CheckpointError) as caught:
        parse_registry(yaml.safe_dump({"drafters": entries}))
    lines = [line.strip() for line in caught.value.message.splitlines()]
    assert lines[0] == "registry.yaml: 5 problem(s)"
    assert lines[1].startswith("c/d: mode: 'low-think' is not allowed")
    assert lines[2].startswith("c/d: colour: unknown key; allowed: name, repository")
    assert lines[3] == "drafters.2.name: is required"
    assert lines[4].startswith("drafters.3: ")
    assert lines[5] == "e/f: give repository, folder or both"
    for content in (["a"], {"drafters": "many"}, {"drafters": {"a": GOOD}}, {"format_version": 2, "drafters": [GOOD]}):
        with pytest.raises(CheckpointError, match="problem"):
            parse_registry(yaml.safe_dump(content))


def test_names_are_unique_and_the_file_is_yaml():
    with pytest.raises(CheckpointError, match="registered twice: a/b"):
        parse_registry(yaml.safe_dump({"drafters": [GOOD, GOOD]}))
    with pytest.raises(CheckpointError, match="no YAML"):
        parse_registry("drafters: [")


@pytest.mark.parametrize("text", ["hf:a/b", "modelscope:Tencent-Hunyuan/Hy3@v1", "hf:a/b.c-d_e@refs/pr/1"])
def test_repositories_are_written_as_they_are_read(text):
    assert str(Repository.parse(text)) == text


@pytest.mark.parametrize(
    "name", ["a//b", "a", "a/b/c", "-a/b", "a/b-", "a/b.", "a/b--c", "a/b..c", "ä/b", f"a/{'x' * 97}"]
)
def test_what_is_no_repository(name):
    assert not is_repository_name(name)
    with pytest.raises(HubError, match="no ORG/NAME"):
        Repository.parse(f"hf:{name}")


def test_another_hub_is_suggested():
    with pytest.raises(HubError, match="did you mean 'modelscope'"):
        Repository.parse("modelscop:a/b")
    assert names_a_hub("hf:a/b") and not names_a_hub("a/b") and not names_a_hub("folder:x")
    assert Repository.parse("hf:a/b@x").at(None) == Repository("hf", "a/b")
