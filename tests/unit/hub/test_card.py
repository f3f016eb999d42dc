"""The card says what the manifest and the report say, and both hubs can read it."""

from __future__ import annotations

import re

import pytest
import yaml
from click.testing import CliRunner
from hub_builders import exported_drafter, manifest_of
from huggingface_hub import ModelCard
from serving_builders import bench_result, engine_state

from angelspec.cli.main import cli
from angelspec.core.acceptance import pool
from angelspec.core.recipe_files import load_recipe
from angelspec.core.repositories import Repository
from angelspec.hub.card import CardFacts, Measurement, ServeLine, SpeedLine, write_card
from angelspec.hub.card_metadata import card_problems, split_card
from angelspec.serving.answers import ServedDrafter
from angelspec.serving.bench_result import cells_of

OURS = ServedDrafter(name="dfly", algorithm="dfly", family="block", mode="no-think", depth=3)
"""The drafter of tiny-dfly-llama in a server."""
MEASUREMENT = Measurement(
    machine="two cores of a test, 2 threads",
    versions={"angelspec": "0.1.0", "torch": "2.9"},
    settings="up to 24 tokens, batch 4",
    measured="2026-01-01",
    commands=("angelspec recipe run x",),
    definitions={"accepted length": "tokens per step"},
    notes=("measured on a test",),
    speed=(SpeedLine("a", 0.0, 30.0, 20.0),),
    speed_of="the reference loop",
)


def card(recipe="smollm2-dfly-nothink", manifest=None, **changes) -> str:
    facts = {
        "manifest": manifest or manifest_of(load_recipe(recipe)),
        "name": "SmolLM2-DFly",
        "places": (Repository("hf", "alice/SmolLM2-DFly"), Repository("modelscope", "alice/SmolLM2-DFly")),
        "license": "apache-2.0",
        "weight_bytes": 20_000_000,
        "dtype": "bfloat16",
        "base_model": "HuggingFaceTB/SmolLM2-135M-Instruct",
        "target_license": "apache-2.0",
        "library": "sglang",
        "serve": (ServeLine("SGLang 0.5.23", "sglang serve --model-path X", "send enable_thinking=false"),),
        "measurement": MEASUREMENT,
        "plots": {"Accepted length": "accepted-length-t0.png"},
    }
    return write_card(CardFacts(**{**facts, **changes}))


def test_the_hub_reads_the_metadata():
    text = card()
    data = ModelCard(text).data
    assert data.license == "apache-2.0"
    assert data.base_model == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert (data.library_name, data.pipeline_tag) == ("sglang", "text-generation")
    assert {"speculative-decoding", "draft-model", "dfly", "no-think", "arxiv:2607.25852"} <= set(data.tags)
    assert "base_model_relation" not in split_card(text)[0]
    assert card_problems(text, base_model="HuggingFaceTB/SmolLM2-135M-Instruct", license="apache-2.0") == []


def test_results_are_those_of_the_manifest():
    manifest = manifest_of(load_recipe("smollm2-dfly-nothink"))
    text = card(manifest=manifest)
    results = ModelCard(text).data.eval_results
    expected = {cell.suite: round(pool([cell.finished]).mean_accepted_length, 3) for cell in manifest.acceptance}
    assert {result.dataset_name: result.metric_value for result in results} == expected
    body = split_card(text)[1]
    for suite, value in expected.items():
        assert re.search(rf"\| {suite} \(code\) \| {value:.2f} \|", body), body
    whole = pool(cell.finished for cell in manifest.acceptance)
    assert f"| all | {whole.mean_accepted_length:.2f} |" in body
    assert " | ".join(f"{rate:.3f}" for rate in whole.cumulative_acceptance) in body


@pytest.mark.parametrize(
    "words",
    [
        "DFly **draft model for [HuggingFaceTB/SmolLM2-135M-Instruct](https://huggingface.co/Hugging",
        "**Thinking mode: no-think** (`enable_thinking=False`)",
        "In high-think mode the answers stay right",
        "angelspec pull hf:alice/SmolLM2-DFly",
        "angelspec pull modelscope:alice/SmolLM2-DFly",
        "Serve with SGLang 0.5.23: send enable_thinking=false",
        "8 slots, the anchor included",
        "`sample_from_anchor: false`",
        "20.0 MB, without the target's embedding",
        "| a | 0 | 1 | 30.0 | 20.0 | 1.50x |",
        "![Accepted length](accepted-length-t0.png)",
        "two cores of a test, 2 threads",
        "**accepted length**: tokens per step",
        "answered anew by the target itself, in no-think mode at temperature",
        "share 16 tokens in a row",
        "- measured on a test",
        "The target, without which it is of no use: apache-2.0",
    ],
)
def test_says(words):
    assert " ".join(words.split()) in " ".join(card().split())


def test_says_where_copying_the_prompt_is_as_good():
    recipe = load_recipe("smollm2-dfly-nothink")
    assert "no more than prompt lookup" not in card()
    cells = [cell.model_copy(update={"lookup_finished": cell.finished}) for cell in manifest_of(recipe).acceptance]
    half = cells[0].model_copy(update={"suite": "both", "workload": "math"})
    part = card(manifest=manifest_of(recipe, acceptance=(half,)))
    assert "on both (math) at temperature 0 (2.50 against 2.50)" in part
    worse = card(manifest=manifest_of(recipe, acceptance=tuple(cells))).partition("a drafter without weights, ")[2]
    assert worse.startswith("on a (code) at temperature 0 (2.50 against 2.50), b")


def test_says_what_is_not_known():
    bare = card(base_model=None, target_license=None, library=None, serve=(), measurement=None, plots={})
    assert "see its own card" in bare
    assert "library_name" not in bare and "base_model" not in bare
    unmeasured = card(manifest=manifest_of(load_recipe("smollm2-dfly-nothink"), acceptance=()))
    assert "Nothing was measured yet" in unmeasured and "model-index" not in unmeasured
    assert card_problems(bare, base_model=None, license="apache-2.0") == []


def test_says_how_many_of_the_steps_the_weights_have_seen():
    assert "steps: cold-start (30 steps). The whole" in card()
    manifest = manifest_of(load_recipe("smollm2-dfly-nothink"))
    training = manifest.training.model_copy(update={"steps": 20})
    text = card(manifest=manifest.model_copy(update={"training": training}))
    assert "entered the loss in 30 steps: cold-start (30 steps); these weights, the best" in text
    assert "have seen 20 of them." in text


def test_a_mode_family_of_one_mode_warns_of_no_other():
    recipe = load_recipe("tiny-dfly-llama")
    plain = recipe.model_copy(update={"target": recipe.target.model_copy(update={"mode_family": "plain"})})
    text = card(manifest=manifest_of(plain))
    assert "the template knows one mode" in text and "high-think mode the answers" not in text


def test_no_path_of_this_machine_is_shown():
    recipe = load_recipe(
        "tiny-dfly-llama",
        overrides=["data.train.0.source=file:/home/me/secret/rows.jsonl", "drafter.initial_checkpoint=/home/me/start"],
    )
    target = manifest_of(recipe).target.model_copy(update={"source": "folder:/home/me/models/llama"})
    text = card(manifest=manifest_of(recipe, training=manifest_of(recipe).training.model_copy(
        update={"initial_checkpoint": "/home/me/start"}), target=target))  # fmt: skip
    assert "/home/me" not in text
    assert "`file:rows.jsonl`" in text and "`folder:llama`" in text and "a training before it (`start`)" in text


def test_a_load_test_beside_the_weights_is_shown(tmp_path):
    folder = exported_drafter(tmp_path / "tiny")
    result = bench_result().model_copy(update={"engine": engine_state(OURS)})
    result.save(folder)
    done = CliRunner().invoke(cli, ["checkpoint", "card", str(folder), "--license", "apache-2.0"])
    assert done.exit_code == 0, done.output
    text = (folder / "README.md").read_text()
    assert "Served by SGLang 0.5.23 on a machine, measured 2026-11-30" in text
    cell = result.cell(traffic="code", concurrency=4, choice="dfly")
    assert f"| code | dfly | 4 | 19.0†‡ | 1.90x†‡ [{cell.speedup_low:.2f}, {cell.speedup_high:.2f}] | 2.00 | " in text
    assert "| code | ar |" not in text and "angelspec bench serve --url http://s" in text
    assert "8 requests, at least 2 per user a window" in text
    assert "- code, concurrency 4, dfly, repeat 2: 1 request(s) failed, first: p1: gone" in text
    assert "- **†**: a window was shorter" in text and "- **‡**: requests of a window failed" in text


def test_a_load_test_without_faults_has_no_marks(tmp_path):
    folder = exported_drafter(tmp_path / "tiny")
    result = bench_result().model_copy(update={"engine": engine_state(OURS)})
    windows = tuple(w.model_copy(update={"too_short": False, "failures": (), "counters": None}) for w in result.windows)
    cells = tuple(cells_of(windows, baseline="ar"))
    result.model_copy(update={"windows": windows, "cells": cells}).save(folder)
    assert CliRunner().invoke(cli, ["checkpoint", "card", str(folder), "--license", "apache-2.0"]).exit_code == 0
    text = (folder / "README.md").read_text()
    assert "| 19.0 | 1.90x [" in text and "Faults" not in text and "†" not in text and "‡" not in text


def test_a_fault_of_plain_decoding_marks_the_speedup(tmp_path):
    folder = exported_drafter(tmp_path / "tiny")
    result = bench_result().model_copy(update={"engine": engine_state(OURS)})
    faulty = {"ar": {"too_short": True, "failures": ()}}
    windows = tuple(
        w.model_copy(update=faulty.get(w.choice, {"too_short": False, "failures": (), "counters": None}))
        for w in result.windows
    )
    cells = tuple(cells_of(windows, baseline="ar"))
    result.model_copy(update={"windows": windows, "cells": cells}).save(folder)
    assert CliRunner().invoke(cli, ["checkpoint", "card", str(folder), "--license", "apache-2.0"]).exit_code == 0
    text = (folder / "README.md").read_text()
    assert "| 19.0 | 1.90x† [" in text and "- code, concurrency 4, ar, repeat 1: the window took 10.0 s" in text


def test_a_load_test_that_does_not_name_its_target_says_so(tmp_path):
    folder = exported_drafter(tmp_path / "tiny")
    bench_result().model_copy(update={"engine": engine_state(OURS, target=None)}).save(folder)
    assert CliRunner().invoke(cli, ["checkpoint", "card", str(folder), "--license", "apache-2.0"]).exit_code == 0
    assert "- the file does not say which target was served" in (folder / "README.md").read_text()


@pytest.mark.parametrize(
    ("changes", "engine", "words"),
    [
        ({}, None, "does not say which drafters the server held"),
        ({}, [{"mode": "high-think"}], "dfly (dfly, high-think, depth 3), none of which is this drafter"),
        ({}, [{"depth": 7}], "none of which is this drafter (dfly, no-think, depth 3)"),
        ({}, [{"algorithm": "dflash"}], "none of which is this drafter"),
        ({}, [{}, {"name": "other"}], "several drafters like this one"),
        ({}, "c" * 64, "is of the target cccccccccccccccc, this drafter's is ab12ab12ab12ab12"),
        ({"mode": "high-think"}, [{}], "is of answers in high-think mode, this drafter's is no-think"),
        ({"route": "mtp"}, [{}], "none of which is this drafter alone"),
    ],
)
def test_a_load_test_of_something_else_is_refused(tmp_path, changes, engine, words):
    folder = exported_drafter(tmp_path / "tiny")
    result = bench_result()
    if isinstance(engine, list):
        held = engine_state(*(OURS.model_copy(update=change) for change in engine))
    else:
        held = engine and engine_state(OURS, target=engine)
    settings = result.settings.model_copy(update={"mode": changes.get("mode")})
    route = changes.get("route", "dfly")
    choices = tuple(
        one.model_copy(update={"route": route if one.name == "dfly" else one.route}) for one in result.choices
    )
    result.model_copy(update={"engine": held, "settings": settings, "choices": choices}).save(folder)
    refused = CliRunner().invoke(cli, ["checkpoint", "card", str(folder), "--license", "apache-2.0"])
    assert refused.exit_code == 2 and words in refused.output, refused.output


def test_says_whether_the_targets_embedding_is_held():
    recipe = load_recipe("smollm2-dfly-nothink", overrides=["export.include_embedding=true"])
    assert "20.0 MB, with the target's embedding and head" in card(manifest=manifest_of(recipe))


def test_a_card_is_written_beside_a_drafter_that_is_on_no_hub(tmp_path):
    folder = exported_drafter(tmp_path / "tiny")

    def written(*options):
        return CliRunner().invoke(cli, ["checkpoint", "card", str(folder), *options])

    assert written("--license", "apache-2.0", "--name", "shipped").exit_code == 0
    text = (folder / "README.md").read_text()
    assert text.count("# shipped\n") == 1 and "angelspec pull" not in text and "shipped" in text.split("## Use")[1]
    assert "Apache License" in (folder / "LICENSE").read_text()
    again = written("--license", "apache-2.0")
    assert again.exit_code == 2 and "--overwrite" in again.output
    assert written("--license", "apache-2.0", "--overwrite").exit_code == 0
    assert "# tiny\n" in (folder / "README.md").read_text()
    assert (
        "give the folder of an exported drafter"
        in CliRunner().invoke(cli, ["checkpoint", "card", str(tmp_path)]).output
    )


def test_a_target_that_lies_on_no_hub_is_served_by_its_name_and_by_us_alone(tmp_path):
    folder = exported_drafter(tmp_path / "mine", recipe=load_recipe("smollm2-dfly-nothink"))
    assert CliRunner().invoke(cli, ["checkpoint", "card", str(folder)]).exit_code == 0
    text = (folder / "README.md").read_text()
    assert "angelspec serve --target smollm2-135m-instruct --drafter mine" in text and "vllm serve" not in text
    assert "base_model: HuggingFaceTB/SmolLM2-135M-Instruct" in text


def test_data_sets_of_the_hub_are_named():
    recipe = load_recipe("qwen3-8b-dfly-nothink")
    metadata = yaml.safe_load(split_card(card(manifest=manifest_of(recipe), base_model="Qwen/Qwen3-8B"))[0])
    assert metadata["datasets"] and all("/" in name for name in metadata["datasets"])
    train = [source.model_copy(update={"source": f"{source.source}@v2"}) for source in recipe.data.train]
    pinned = recipe.model_copy(update={"data": recipe.data.model_copy(update={"train": tuple(train)})})
    again = yaml.safe_load(split_card(card(manifest=manifest_of(pinned), base_model="Qwen/Qwen3-8B"))[0])
    assert again["datasets"] == metadata["datasets"]


def test_every_table_is_whole():
    """As many cells in each row as columns, or a hub shows it as text."""
    lines = split_card(card())[1].splitlines()
    blocks, block = [], []
    for line in [*lines, ""]:
        if line.startswith("|"):
            block.append(line)
        elif block:
            blocks.append(block)
            block = []
    assert len(blocks) >= 4
    for block in blocks:
        widths = {len(re.split(r"(?<!\\)\|", line)) for line in block}
        assert len(widths) == 1 and re.fullmatch(r"[|\-:]+", block[1]), block


@pytest.mark.parametrize("text", ["", "# x\n", "---\nlicense: apache-2.0\n", "---\n"])
def test_no_front_matter(text):
    assert card_problems(text, base_model=None, license="apache-2.0") == [
        "README.md has no front matter between two lines of ---"
    ]


def test_front_matter_of_a_windows_editor():
    text = "---\r\nlicense: apache-2.0\r\n---\r\n# x\r\n"
    assert card_problems(text, base_model=None, license="apache-2.0") == []
    (problem,) = card_problems("\ufeff" + text, base_model=None, license="apache-2.0")
    assert "byte-order mark" in problem  # behind which huggingface_hub finds no metadata


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("base_model: nobody", "is no ORG/NAME"),
        ("base_model: [a/b, 3]", "a text or a list of texts"),
        ("license: Apache License 2.0", "an identifier in small letters"),
        ("pipeline_tag: [x]", "pipeline_tag must be one text"),
        ("library_name: 3", "library_name must be one text"),
    ],
)
def test_wrong_metadata_is_named(line, message):
    key = line.split(":")[0]
    lines = {"license": "license: apache-2.0", key: line}
    text = "---\n" + "\n".join(lines.values()) + "\n---\n# x\n"
    assert any(message in item for item in card_problems(text, base_model=None, license="apache-2.0"))
