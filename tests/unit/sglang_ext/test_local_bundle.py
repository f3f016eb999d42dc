"""The plain launcher takes a bundle as a user writes it: what it names is found before the engine reads it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from angelspec.core.bundle import load_bundle
from angelspec.core.engine import BUNDLE_VARIABLE
from angelspec.core.errors import BundleError
from angelspec.core.locations import resource_folder
from sglang_ext import settings
from sglang_ext.local_bundle import settle_bundle
from tests.engine_builders import write_tiny_bundle


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANGELSPEC_CACHE", str(tmp_path / "cache"))


def test_registered_names_become_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = resource_folder("checkpoints") / "bundle.yaml"
    monkeypatch.setenv(BUNDLE_VARIABLE, str(shipped))
    settle_bundle()
    settled = os.environ[BUNDLE_VARIABLE]
    named, local = load_bundle(shipped), load_bundle(Path(settled))
    assert [drafter.source for drafter in named.drafters] == [Path(one.source).name for one in local.drafters]
    assert all((Path(drafter.source) / "model.safetensors").is_file() for drafter in local.drafters)
    places = [drafter.model_copy(update={"source": ""}) for drafter in local.drafters]
    assert places == [drafter.model_copy(update={"source": ""}) for drafter in named.drafters]
    assert local.model_copy(update={"drafters": named.drafters}) == named, "nothing else changed"
    assert [place.drafter.name for place in settings.place_drafters(local).places] == ["mtp", "dfly", "dfly-high-think"]
    settle_bundle()
    assert os.environ[BUNDLE_VARIABLE] == settled, "a process started from here finds nothing to do"


def test_folders_stay_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(write_tiny_bundle(tmp_path))
    monkeypatch.setenv(BUNDLE_VARIABLE, path)
    settle_bundle()
    assert os.environ[BUNDLE_VARIABLE] == path


def test_a_name_that_nobody_has_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_tiny_bundle(tmp_path)
    path.write_text(path.read_text().replace("./dfly", "smollm2-dfly-nothing"))
    monkeypatch.setenv(BUNDLE_VARIABLE, str(path))
    with pytest.raises(BundleError, match=r"(?s)can't be had.*smollm2-dfly-nothing"):
        settle_bundle()
