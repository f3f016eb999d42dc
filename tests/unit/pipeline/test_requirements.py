"""What is missing is said before anything is downloaded."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from angelspec.core.errors import MissingRequirement
from angelspec.core.geometry import Rope
from angelspec.core.recipe_files import list_recipes, load_recipe
from angelspec.drafters.checkpoint import save_drafter
from angelspec.drafters.families import build_drafter
from angelspec.pipeline.plan import print_plan
from angelspec.pipeline.recipe_run import run_recipe
from angelspec.pipeline.requirements import missing_requirements


@pytest.fixture
def no_network(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def test_a_gpu_recipe_stops_before_any_download(tmp_path, no_network, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(MissingRequirement) as caught:
        run_recipe(load_recipe("hy3-dfly-nothink"), output=tmp_path / "run", store=tmp_path / "store", quiet=True)
    assert "a way to stream features" in str(caught.value)
    assert "295 billion" in str(caught.value)
    assert "CUDA accelerator" in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_too_little_accelerator_memory_is_said_in_numbers(monkeypatch):
    class Card:
        total_memory = 24 * 2**30

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)  # the target lies whole on one
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda i: Card)
    missing = missing_requirements(load_recipe("qwen3-8b-dfly-nothink"), output=Path())
    assert any("75 GiB of memory on one accelerator: the largest here has 24 GiB" in item for item in missing)


def test_files_that_do_not_exist_stop_a_run_before_the_target_is_fetched():
    recipe = load_recipe("smollm2-dfly-nothink", overrides=["data.train.chat.source=file:nosuch.jsonl"])
    (missing,) = missing_requirements(recipe, output=Path())
    assert missing.startswith("data.train.chat.source: file:nosuch.jsonl does not exist; check the path")


def test_the_embedded_recipes_run_here():
    assert missing_requirements(load_recipe("smollm2-dfly-nothink"), output=Path()) == []


@pytest.mark.parametrize("name", [summary.name for summary in list_recipes()])
def test_every_recipe_is_planned_without_network_or_model(name, no_network, capsys):
    print_plan(load_recipe(name))
    text = capsys.readouterr().out
    for stage in ("target", "prompts", "decontaminate", "rollout", "pack", "train-", "evaluate", "export"):
        assert stage in text


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({}, []),
        ({"block_size": 6}, []),
        ({"mask_token_id": 318}, ["mask_token_id is 318 there, 319 here"]),
        ({"target_layer_ids": (1, 2, 4)}, ["target_layer_ids is [1, 2, 4] there, [1, 2, 3] here"]),
        ({"rope": Rope(theta=500.0), "rms_norm_eps": 0.5}, ["rms_norm_eps is 0.5 there, 1e-05 here; rope is {"]),
    ],
)
def test_a_start_whose_shapes_fit_but_that_is_another_drafter_is_said_before_anything_runs(tmp_path, changed, words):
    config = load_recipe("tiny-dfly-llama").drafter_config().model_copy(update=changed)
    start = save_drafter(build_drafter(config).initialise(seed=0), tmp_path / "start")
    recipe = load_recipe("tiny-dfly-llama", overrides=[f"drafter.initial_checkpoint={start}"])
    missing = missing_requirements(recipe, output=tmp_path)
    assert len(missing) == len(words)
    for text, word in zip(missing, words, strict=True):
        assert text.startswith("drafter.initial_checkpoint: the drafter in") and word in text


@pytest.mark.parametrize("key", ["target.chat_template", "drafter.initial_checkpoint"])
def test_paths_that_do_not_exist_are_said_before_anything_runs(key):
    recipe = load_recipe("smollm2-dfly-nothink", overrides=[f"{key}=/nosuch/place"])
    assert missing_requirements(recipe, output=Path()) == [f"{key}: '/nosuch/place' does not exist"]
