"""Drafters are placed one after another in the draft pool; what can't be served together is refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from angelspec.core.bundle import Bundle, load_bundle
from angelspec.core.errors import BundleError
from angelspec.drafters.checkpoint import save_drafter
from angelspec.drafters.families import build_drafter
from sglang_ext import settings
from tests.engine_builders import DRAFTERS, GEOMETRY, write_tiny_bundle


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    return load_bundle(write_tiny_bundle(tmp_path))


def test_layers_follow_one_another_and_features_are_shared(bundle: Bundle) -> None:
    plan = settings.place_drafters(bundle)
    assert [(place.drafter.name, place.first_layer, place.num_layers) for place in plan.places] == [
        ("mtp", 0, 1),
        ("dfly", 1, 2),
        ("dspark", 3, 1),
    ]
    assert plan.num_layers == 4
    assert plan.depth == 7
    assert plan.layer_ids == (0, 1, 2)
    size = plan.places[0].config.target_hidden_size
    dfly, dspark = plan.places[1:]
    taken = plan.tap_columns(dfly)
    assert taken is not None
    assert taken.tolist() == [*range(size), *range(2 * size, 3 * size)]
    assert torch.equal(plan.tap_columns(dspark), torch.arange(size, 3 * size))


def test_mtp_alone_has_a_layer_captured_that_sglang_hands_out(bundle: Bundle) -> None:
    """Without captured layers SGLang's models keep no last hidden states, and the last layer is never handed out."""
    plan = settings.place_drafters(bundle.model_copy(update={"drafters": bundle.drafters[:1]}))
    assert [place.drafter.name for place in plan.places] == ["mtp"]
    assert plan.layer_ids == (0,)
    assert plan.tap_columns(plan.places[0]) is None


def test_the_folder_describes_the_whole_model(bundle: Bundle, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ANGELSPEC_CACHE", str(tmp_path / "cache"))
    plan = settings.place_drafters(bundle)
    folder = settings.draft_folder(plan)
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == [settings.ARCHITECTURE]
    assert config["num_hidden_layers"] == 4
    assert config["block_size"] == 7
    assert config["target_layer_ids"] == [0, 1, 2]
    assert "dtype" not in config
    precise = settings.draft_folder(plan, ranks=2, dtype="bfloat16")
    assert precise != folder and json.loads((precise / "config.json").read_text())["dtype"] == "bfloat16"
    marker = load_file(folder / "model.safetensors")[settings.MARKER]
    assert bytes(marker.tolist()).decode() == plan.digest


def test_no_bundle_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(settings.BUNDLE_VARIABLE, raising=False)
    settings.current_plan.cache_clear()
    with pytest.raises(BundleError, match=settings.BUNDLE_VARIABLE):
        settings.current_plan()


def changed(bundle: Bundle, name: str, **changes: object) -> Bundle:
    drafters = tuple(
        drafter.model_copy(update=changes) if drafter.name == name else drafter for drafter in bundle.drafters
    )
    return bundle.model_copy(update={"drafters": drafters, "acceptance": (), "costs": None})


def test_a_depth_that_the_checkpoint_does_not_have(bundle: Bundle) -> None:
    with pytest.raises(BundleError, match="'dfly' is block of depth 5"):
        settings.place_drafters(changed(bundle, "dfly", depth=5))


def test_a_folder_without_a_configuration(bundle: Bundle, tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="'mtp': .*config.json does not exist"):
        settings.place_drafters(changed(bundle, "mtp", source=str(tmp_path / "nothing")))


def test_no_drafters(bundle: Bundle) -> None:
    with pytest.raises(BundleError, match="no drafters"):
        settings.place_drafters(bundle.model_copy(update={"drafters": (), "costs": None}))


def rewritten(bundle: Bundle, **changes: object) -> Bundle:
    """The bundle with another dspark drafter in the same place."""
    config = DRAFTERS["dspark"].model_copy(update=changes)
    save_drafter(build_drafter(config).initialise(seed=9), Path(bundle.drafter("dspark").source), dtype=torch.float32)
    return bundle


@pytest.mark.parametrize(("key", "value"), [("num_kv_heads", 4), ("vocab_size", 300)])
def test_shapes_that_cannot_share_a_pool(bundle: Bundle, key: str, value: int) -> None:
    with pytest.raises(BundleError, match=rf"'mtp' and 'dspark'.*{key} is"):
        settings.place_drafters(rewritten(bundle, **{key: value}))


def test_the_last_layer_cannot_be_tapped(bundle: Bundle) -> None:
    with pytest.raises(BundleError, match="last layer"):
        settings.place_drafters(rewritten(bundle, target_layer_ids=(1, GEOMETRY.num_layers - 1)))


def test_another_target_is_named(bundle: Bundle) -> None:
    plan = settings.place_drafters(bundle)
    settings.check_target(plan, GEOMETRY)
    with pytest.raises(BundleError, match=r"'dfly': vocab_size is \d+ but the target has 999"):
        settings.check_target(plan, GEOMETRY.model_copy(update={"vocab_size": 999}))
    with pytest.raises(BundleError, match=r"'mtp': target_num_layers"):
        settings.check_target(plan, GEOMETRY.model_copy(update={"num_layers": 2}))


def test_contents_that_changed_since_the_bundle_was_made_are_named(bundle: Bundle, tmp_path: Path) -> None:
    plan = settings.place_drafters(bundle)
    settings.check_contents(plan, tmp_path / "not-here")  # the bundle says nothing of contents
    drafters = [
        drafter.model_copy(update={"digest": settings.content_digest(Path(drafter.source))})
        for drafter in bundle.drafters
    ]
    target = bundle.target.model_copy(update={"digest": "e" * 64})
    plan = settings.place_drafters(bundle.model_copy(update={"drafters": tuple(drafters), "target": target}))
    settings.check_contents(plan, tmp_path / "not-here")
    config = plan.places[0].folder / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "note": "another"}))
    with pytest.raises(BundleError) as refused:
        settings.check_contents(plan, plan.places[1].folder)  # any folder that is not the target
    assert "drafter 'mtp'" in refused.value.message and "drafter 'dfly'" not in refused.value.message
    assert "the target: the content of" in refused.value.message and "made for eeee" in refused.value.message


def test_mtp_may_stop_earlier_but_not_go_deeper(bundle: Bundle) -> None:
    assert settings.place_drafters(changed(bundle, "mtp", depth=2)).depth == 7
    with pytest.raises(BundleError, match="'mtp' is mtp of depth 4"):
        settings.place_drafters(changed(bundle, "mtp", depth=4))
