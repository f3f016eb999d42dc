"""How a drafter is served: engine, command and the mode's template arguments, by family and target."""

import json
import re
import shlex

import pytest

from angelspec.cli.serve_commands import serve
from angelspec.core.drafter_config import BlockDrafterConfig, MoeConfig, MtpDrafterConfig
from angelspec.core.geometry import Rope
from angelspec.serving.instructions import serve_instructions

SHAPE = {
    "hidden_size": 32, "intermediate_size": 64, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "vocab_size": 50,
    "rms_norm_eps": 1e-5, "max_position_embeddings": 128, "rope": Rope(theta=1e4), "target_hidden_size": 32,
    "target_num_layers": 6,
}  # fmt: skip


def _block(**parts):
    parts = {"context": "projection", "head": "none", **parts}
    return BlockDrafterConfig(
        **SHAPE, num_layers=2, target_layer_ids=(1, 3), block_size=8, mask_token_id=49, **parts
    )  # fmt: skip


def _mtp(**parts):
    return MtpDrafterConfig(**SHAPE, **{"num_depths": 3, **parts})


def _instructions(config, family):
    """The other engines'; ours comes first."""
    ours, *others = serve_instructions(
        config, checkpoint="runs/x/drafter", target="the/target", mode="no-think", family=family
    )
    assert ours.command == "angelspec serve --target hf:the/target --drafter runs/x/drafter"
    return others


def test_our_own_command_is_one_that_the_command_line_takes(tmp_path):
    (ours, *_) = serve_instructions(
        _mtp(), checkpoint=tmp_path / "my drafter", target=str(tmp_path), mode="high-think", family="smollm2"
    )
    words = shlex.split(ours.command)
    assert words[:2] == ["angelspec", "serve"]
    parsed = serve.make_context("serve", words[2:]).params
    assert parsed["target"] == str(tmp_path)
    assert parsed["drafters"] == (str(tmp_path / "my drafter"),)
    assert '"enable_thinking": true' in ours.note


def test_hy3s_layer_is_served_by_nextn():
    moe = MoeConfig(num_experts=4, experts_per_token=2, intermediate_size=16)
    (instruction,) = _instructions(_mtp(mlp="moe", moe=moe, num_depths=4), "hy3")
    fetch, convert, serve = (shlex.split(command) for command in instruction.command.split(" && "))
    assert fetch == ["hf", "download", "the/target", "--local-dir", "target"]
    assert convert[:5] == ["angelspec", "checkpoint", "convert", "runs/x/drafter", "runs/x/drafter-hy3"]
    assert convert[5:] == ["--to", "hy3", "--target", "target"]
    options = dict(zip(serve[2::2], serve[3::2], strict=True))
    assert options == {
        "--model-path": "target", "--speculative-algorithm": "NEXTN",
        "--speculative-draft-model-path": "runs/x/drafter-hy3", "--speculative-num-steps": "4",
        "--speculative-eagle-topk": "1", "--speculative-num-draft-tokens": "5",
    }  # fmt: skip
    assert '"reasoning_effort": "no_think"' in instruction.note


def test_qwen3_is_served_beside_a_copy_of_the_target():
    (instruction,) = _instructions(_mtp(), "qwen3")
    _, convert, serve = instruction.command.split(" && ")
    assert shlex.split(convert)[-4:] == ["--to", "qwen3", "--target", "target"]
    settings = json.loads(re.search(r"'(.*)'", serve)[1])
    assert settings == {"method": "mtp", "model": "runs/x/drafter-qwen3", "num_speculative_tokens": 3}
    assert '"enable_thinking": false' in instruction.note


def test_no_command_is_invented_where_no_engine_knows_the_drafter():
    assert _instructions(_mtp(), "smollm2") == []


@pytest.mark.parametrize(
    ("parts", "engine"), [({}, "SGLang"), ({"context": "fusion"}, "vLLM with the DFly pull request 50246")]
)
def test_block_drafters(parts, engine):
    (instruction,) = _instructions(_block(**parts), "qwen3")
    assert instruction.engine == engine
    assert "the/target" in instruction.command


def test_every_command_survives_a_space(tmp_path):
    target = tmp_path / "a target"
    target.mkdir()
    for config, family in ((_mtp(), "qwen3"), (_block(), "qwen3"), (_block(context="fusion"), "qwen3")):
        for instruction in serve_instructions(
            config, checkpoint="my drafter", target=str(target), mode="no-think", family=family
        ):
            for command in instruction.command.split(" && "):
                words = shlex.split(command)
                assert any("my drafter" in word for word in words)
                assert not {"my", "drafter", "a"} & set(words)
