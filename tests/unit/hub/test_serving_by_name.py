"""``angelspec serve`` by names alone: target and drafter from a hub, through the registry that ships."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from huggingface_hub import constants
from serving_builders import install_fake_sglang

from angelspec.cli import serving_parts
from angelspec.cli.main import cli
from angelspec.core.bundle import load_bundle
from angelspec.core.known_targets import KNOWN_TARGETS
from angelspec.core.recipe_files import load_recipe
from angelspec.core.registry import load_registry
from angelspec.drafters.families import build_drafter
from angelspec.pipeline import probe
from angelspec.targets.sources import materialise

TARGET, DRAFTER, LACKING = "Qwen/Qwen3-8B", "AngelSlim/Qwen3-8B-DFly-Block8", "AngelSlim/Hy3-DFly-Block8"
OF_HY3 = {"vocab_size": 120832, "target_num_hidden_layers": 80, "mask_token_id": 120009}
STANDINS = (TARGET, "tencent/Hy3")


def published(recipe_name: str, **changes: Any) -> dict[str, bytes]:
    """A DFly as AngelSpec publishes it: a pickle, and a config.json in its own keys."""
    config = load_recipe(recipe_name).drafter_config()
    drafter = build_drafter(config).initialise(seed=0)
    weights = io.BytesIO()
    torch.save({f"draft_model.{key}": value for key, value in drafter.state_dict().items()}, weights)
    said = {
        "architectures": ["Qwen3DFlyModel"], "model_type": "qwen3", "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size, "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads, "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim, "vocab_size": config.vocab_size, "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings, **config.rope.to_config(),
        "num_target_layers": len(config.target_layer_ids), "target_hidden_size": config.target_hidden_size,
        "target_num_hidden_layers": config.target_num_layers, "target_layer_ids": list(config.target_layer_ids),
        "mask_token_id": config.mask_token_id, "block_size": config.block_size, "enable_hidden_correction": True,
        "hidden_correction_intermediate_size": config.correction_intermediate_size, **changes,
    }  # fmt: skip
    said = {key: value for key, value in said.items() if value is not None}
    return {"config.json": json.dumps(said).encode(), "pytorch_model.bin": weights.getvalue(), "README.md": b"# a card"}


def serve(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["serve", *arguments, "--dry-run"])


@pytest.fixture
def hf(both, tmp_path, monkeypatch):
    """A hub with a target of Qwen3's kind, and an installed fake of SGLang."""
    install_fake_sglang(tmp_path, monkeypatch)
    template, real = constants.HUGGINGFACE_CO_URL_TEMPLATE, constants.ENDPOINT  # read when the client was imported
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template.replace(real, both["hf"].endpoint))
    monkeypatch.setattr(constants, "ENDPOINT", both["hf"].endpoint)
    tiny = KNOWN_TARGETS["tiny-qwen3"].geometry  # what stands in for the large ones here
    small = {
        name: dataclasses.replace(known, geometry=tiny) if known.release in STANDINS else known
        for name, known in KNOWN_TARGETS.items()
    }
    for module in (probe, serving_parts):
        monkeypatch.setattr(module, "KNOWN_TARGETS", small)
    folder = materialise("random:qwen3")
    files = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file() and path.suffix != ".lock"}
    both["hf"].add(TARGET, files=files)
    return both["hf"]


def bundle_of(result: Result, tmp_path: Path) -> Any:
    assert result.exit_code == 0, result.output
    (file,) = (tmp_path / "cache" / "bundles").iterdir()
    return load_bundle(file)


def test_a_registered_drafter_is_served_at_its_pinned_revision(hf, tmp_path):
    entry = next(one for one in load_registry().drafters if one.name == DRAFTER)
    pinned = entry.repository.partition("@")[2]
    hf.add(DRAFTER, files=published("tiny-dfly-qwen3"))
    repository = hf.repositories[DRAFTER]
    right = pinned + "0" * (40 - len(pinned))
    repository.commits[right] = repository.commits.pop(repository.branches["main"])
    repository.commit("main", published("tiny-dfly-qwen3", **OF_HY3), "the wrong config.json")

    result = serve("--target", TARGET, "--drafter", DRAFTER)
    (drafter,) = bundle_of(result, tmp_path).drafters
    assert (drafter.algorithm, drafter.mode, drafter.depth) == ("dfly", "no-think", 3)
    assert pinned in result.output and "the newest config.json describes an 80-layer target" in result.output

    newest = serve("--target", TARGET, "--drafter", f"hf:{DRAFTER}@main")
    assert newest.exit_code == 2
    assert "vocab_size is 120832 but the target has 320" in newest.output
    assert "another revision may be right" in newest.output


def test_what_a_registered_drafter_lacks_comes_from_the_registry(hf, tmp_path):
    assert next(one for one in load_registry().drafters if one.name == LACKING).config_overrides == {"block_size": 8}
    hf.add("tencent/Hy3", files=hf.repositories[TARGET].tree("main"))
    hf.add(LACKING, files=published("tiny-dfly-qwen3", block_size=None))
    result = serve("--target", "hf:tencent/Hy3", "--drafter", LACKING)
    (drafter,) = bundle_of(result, tmp_path).drafters
    assert drafter.depth == 7
    assert (Path(drafter.source) / "model.safetensors").is_file(), "completed in angelspec's own format"
