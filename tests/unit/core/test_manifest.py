"""The manifest of an exported drafter."""

import json

import pytest

from angelspec.core.errors import CheckpointError
from angelspec.core.manifest import DrafterManifest, TargetIdentity, TrainingRecord
from angelspec.core.recipe_files import load_recipe


@pytest.fixture(params=["tiny-dfly-llama", "tiny-mtp-llama", "tiny-mtp-hy3"])
def manifest(request) -> DrafterManifest:
    recipe = load_recipe(request.param)
    target = recipe.target
    return DrafterManifest(
        angelspec_version="0.1.0",
        algorithm=recipe.drafter_config().algorithm,
        mode=recipe.mode,
        drafter=recipe.drafter_config(),
        target=TargetIdentity(
            name=target.name, source=target.source, digest="ab12", mode_family=target.mode_family,
            geometry=target.geometry,
        ),
        recipe=recipe,
        training=TrainingRecord(steps=3, supervised_positions=10, target_tokens=20, workloads={"code": 4}),
    )  # fmt: skip


def test_written_and_read_is_the_same(manifest, tmp_path):
    assert DrafterManifest.read(tmp_path) is None
    manifest.write(tmp_path)
    assert DrafterManifest.read(tmp_path) == manifest


def test_what_cannot_be_read_is_named(manifest, tmp_path):
    path = manifest.write(tmp_path)
    content = json.loads(path.read_text())
    for change, message in [
        ({"format_version": 99}, "format version 99"),
        ({"mode": "some-think"}, "mode"),
        ({"extra": 1}, "extra"),
    ]:
        path.write_text(json.dumps({**content, **change}))
        with pytest.raises(CheckpointError, match=message):
            DrafterManifest.read(tmp_path)
    path.write_text("[]")
    with pytest.raises(CheckpointError, match="format version None"):
        DrafterManifest.read(tmp_path)
    path.write_text("{")
    with pytest.raises(CheckpointError, match="no JSON"):
        DrafterManifest.read(tmp_path)
