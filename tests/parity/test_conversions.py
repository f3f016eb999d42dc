"""Every public checkpoint format is read, written in every other one that can say it, and back: nothing changes.

The public files are synthetic, with the names and shapes of what is published; what can't be loaded is refused by name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from drafter_builders import tiny_drafter
from mtp_builders import tiny_mtp, tiny_mtp_rows
from safetensors.torch import load_file, save_file
from test_dialects import PUBLISHED, ZLAB, public_config
from test_drafting import ANSWER, sequence
from test_mtp_dialects import QWEN3, target_config, write_target

from angelspec.cli.main import cli
from angelspec.core.drafter_config import MtpDrafterConfig
from angelspec.core.errors import CheckpointError
from angelspec.drafters.checkpoint import convert_checkpoint, inspect_checkpoint, load_drafter, save_drafter
from angelspec.drafters.config_dialects import dialects_of
from angelspec.drafters.families import Drafter

BORROWED = {"embed_tokens.weight": torch.ones(50, 20), "lm_head.weight": torch.ones(50, 20)}
LAYER = {"model_type": "qwen3", "hidden_act": "silu", "attention_bias": False}
VERIFIER = {"name_or_path": "Qwen/Qwen3-8B", "architectures": ["Qwen3ForCausalLM"]}


@dataclass(frozen=True)
class Public:
    """A published drafter."""

    drafter: Callable[[], Drafter]
    write: Callable[[Path, Drafter], Path]
    overrides: dict[str, Any] = field(default_factory=dict)
    """What its own configuration does not say."""


def written(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor], *, pickled: bool = False) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if pickled:
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file({key: value.contiguous() for key, value in tensors.items()}, folder / "model.safetensors")
    return folder


def trained(name: str) -> Callable[[Path, Drafter], Path]:
    """As AngelSpec's training ends: a pickle with the target's embedding and an unused head."""

    def write(folder: Path, drafter: Drafter) -> Path:
        config = public_config(drafter.config, block_size=4, **PUBLISHED[name])
        return written(folder, config, {**drafter.state_dict(), **BORROWED}, pickled=True)

    return write


def zlab(folder: Path, drafter: Drafter) -> Path:
    nested = {"mask_token_id": 49, "target_layer_ids": [1, 3, 6]}
    config = public_config(
        drafter.config, **PUBLISHED["dflash"], block_size=4, mask_token_id=None, target_layer_ids=None,
        target_num_hidden_layers=None, num_target_layers=8, dflash_config=nested,
    )  # fmt: skip
    return written(folder, config, renamed(drafter))


def served_dspark(folder: Path, drafter: Drafter) -> Path:
    """DeepSpec's name, under which the block size counts proposals."""
    architecture = {"architectures": ["Qwen3DSparkModel"]}
    config = public_config(drafter.config, **{**PUBLISHED["dspark"], **architecture}, block_size=3)
    return written(folder, config, renamed(drafter))


def speculators(kind: str) -> Callable[[Path, Drafter], Path]:
    """As the speculators library writes it."""

    def write(folder: Path, drafter: Drafter) -> Path:
        flat = public_config(drafter.config)
        taps = [item + 1 for item in flat.pop("target_layer_ids")]
        heads = {key: flat.pop(key) for key in ("mask_token_id", "target_hidden_size")}
        del flat["num_target_layers"], flat["target_num_hidden_layers"]
        config = {
            "architectures": ["DFlashDraftModel"], "speculators_model_type": kind, "speculators_version": "0.9.0",
            "speculators_config": {"algorithm": kind, "verifier": VERIFIER}, "block_size": 4, "draft_vocab_size": 50,
            "aux_hidden_state_layer_ids": taps, "transformer_layer_config": {**flat, **LAYER}, **heads,
            "sample_from_anchor": False,
        }  # fmt: skip
        if kind == "dspark":
            config |= {"markov_rank": 8, "markov_head_type": "vanilla", "enable_confidence_head": True}
            config["confidence_head_with_markov"] = True
        return written(folder, config, renamed(drafter))

    return write


def renamed(drafter: Drafter) -> dict[str, torch.Tensor]:
    return {ZLAB.get(key, key): value for key, value in drafter.state_dict().items()}


def trained_mtp(layer: str, *, pickled: bool) -> Callable[[Path, Drafter], Path]:
    """AngelSpec's own, and as it renames the layer for vLLM."""

    def write(folder: Path, drafter: Drafter) -> Path:
        config = {
            **target_config(drafter), "architectures": ["MTPDraftModel"], "model_type": "mtp",
            "mlp_type": drafter.config.mlp, "num_hidden_layers": 1, "qk_norm": True, "target_hidden_size": 20,
            "tie_lm_head": True,
        }  # fmt: skip
        tensors = {key.replace("midlayer.", layer): value for key, value in drafter.state_dict().items()}
        return written(folder, config, {**tensors, **(BORROWED if pickled else {})}, pickled=pickled)

    return write


def hy3_layer(folder: Path, drafter: Drafter) -> Path:
    """A layer of Hy3 by itself: experts apart, output by input."""
    tensors = {}
    for key, value in drafter.state_dict().items():
        name = f"model.layers.8.{key.removeprefix('midlayer.')}"
        kind = name.rpartition("experts_")[2] if ".experts_" in name else None
        if kind is None:
            tensors[name] = value
            continue
        stem = name.rpartition("experts_")[0]
        tensors |= {f"{stem}experts.{i}.{kind}.weight": matrix.T for i, matrix in enumerate(value)}
    config = {**target_config(drafter), "num_nextn_predict_layers": 1, "_mtp_spec_layer": 8}
    return written(folder, config, tensors)


def qwen3_target(folder: Path, drafter: Drafter) -> Path:
    """A full target with the layer in it."""
    names = {native: public for public, native in QWEN3.items()}
    layer = {
        f"mtp.{names.get(key, key.replace('midlayer.', 'layers.0.'))}": value
        for key, value in drafter.state_dict().items()
    }
    return write_target(folder, drafter, extra=layer, num_nextn_predict_layers=1)


DEPTH = {"target_num_layers": 8}
FORMATS: dict[str, Public] = {
    **{f"AngelSpec {name}, pickle": Public(lambda name=name: tiny_drafter(name), trained(name)) for name in PUBLISHED},
    "z-lab DFlash": Public(lambda: tiny_drafter("dflash"), zlab),
    "Qwen3DSparkModel": Public(lambda: tiny_drafter("dspark"), served_dspark),
    "speculators DFlash": Public(lambda: tiny_drafter("dflash"), speculators("dflash"), DEPTH),
    "speculators DSpark": Public(lambda: tiny_drafter("dspark"), speculators("dspark"), DEPTH),
    "AngelSpec MTP, dense, pickle": Public(lambda: tiny_mtp("dense"), trained_mtp("midlayer.", pickled=True), DEPTH),
    "AngelSpec MTP, experts, pickle": Public(lambda: tiny_mtp("moe"), trained_mtp("midlayer.", pickled=True), DEPTH),
    "AngelSpec MTP for vLLM": Public(lambda: tiny_mtp("moe"), trained_mtp("layers.0.", pickled=False), DEPTH),
    "Hy3's own layer": Public(lambda: tiny_mtp("moe"), hy3_layer),
    "Qwen3 with a layer": Public(lambda: tiny_mtp("dense"), qwen3_target),
}


def proposals(drafter: Drafter) -> list[list[int]]:
    """What it drafts greedily from one state after another."""
    torch.manual_seed(0)
    if isinstance(drafter.config, MtpDrafterConfig):
        rows = tiny_mtp_rows(drafter.config, lengths=((17,), (12,), (9,)), row_length=18)
        cache = drafter.context_cache(3, capacity=18)
        hidden = drafter.extend(
            cache, rows.hidden_RTD[:, :7], rows.tokens_RT[:, 1:8], counts_B=torch.tensor([7, 5, 3]), rows=None,
            embedding_VD=rows.embedding_VD,
        )  # fmt: skip
        states = drafter.draft_states(
            cache, hidden, num_depths=3, embedding_VD=rows.embedding_VD, head_VD=rows.head_VD, rows=None
        )
        return [tokens.tolist() for _, tokens, _ in states]
    taps, tokens, embedding, head = sequence(drafter.config)
    cache, found = drafter.context_cache(3, capacity=ANSWER), []
    for position in (5, 9, 12):
        drafter.extend_context(cache, taps[:, int(cache.lengths[0]) : position])
        drafts = drafter.draft(
            cache, anchor_tokens_B=tokens[:, position], anchor_positions_B=torch.full((3,), position),
            embedding_VD=embedding, head_VD=head,
        )  # fmt: skip
        found += drafts.tokens_BK.tolist()
    return found


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """All but a copy of the target's embedding, which formats that lie beside or in the target leave to it."""
    tensors = load_file(folder / "model.safetensors")
    tensors.pop("embed_tokens.weight", None)
    return tensors


@pytest.mark.parametrize("name", list(FORMATS))
def test_every_public_format_goes_through_every_other_and_back(name: str, tmp_path: Path) -> None:
    public = FORMATS[name]
    drafter = public.drafter()
    source = public.write(tmp_path / "public", drafter)
    target = None
    if isinstance(drafter.config, MtpDrafterConfig):
        target = write_target(tmp_path / "target", drafter)
    loaded = load_drafter(source, overrides=public.overrides)
    assert loaded.config == drafter.config
    drafts = proposals(drafter)
    assert len({str(one) for one in drafts}) > 1
    assert proposals(loaded.drafter) == drafts

    ours = convert_checkpoint(source, tmp_path / "ours", dialect="angelspec", overrides=public.overrides)
    first = weights(ours)
    others = dialects_of(drafter.config)
    for dialect in others:
        there = convert_checkpoint(
            source, tmp_path / dialect, dialect=dialect, overrides=public.overrides, target_folder=target
        )
        assert inspect_checkpoint(there) == []
        assert proposals(load_drafter(there).drafter) == drafts, dialect
        back = convert_checkpoint(there, tmp_path / f"back-{dialect}", dialect="angelspec")
        last = weights(back)
        assert first.keys() == last.keys()
        assert all(torch.equal(first[key], last[key]) and first[key].dtype == last[key].dtype for key in first), dialect
        assert (ours / "config.json").read_text() == (back / "config.json").read_text(), dialect
    assert len(others) > 1 or name in ("AngelSpec dfly, pickle", "AngelSpec dflare, pickle")


@pytest.mark.parametrize(
    ("drafter", "dialect"),
    [
        (lambda: tiny_drafter("dflash"), "dflash"),
        (lambda: tiny_drafter("dspark"), "dspark"),
        (lambda: tiny_mtp("moe"), "hy3"),
    ],
)
def test_sglang_is_what_sglang_loads(drafter: Callable[[], Drafter], dialect: str, tmp_path: Path) -> None:
    made = drafter()
    target = write_target(tmp_path / "target", made) if dialect == "hy3" else None
    ours = save_drafter(made, tmp_path / "ours")
    for name in ("sglang", dialect):
        convert_checkpoint(ours, tmp_path / name, dialect=name, target_folder=target)
    for file in ("config.json", "model.safetensors"):
        assert (tmp_path / "sglang" / file).read_bytes() == (tmp_path / dialect / file).read_bytes()


@pytest.mark.parametrize(
    ("drafter", "name", "words"),
    [
        (lambda: tiny_drafter("dfly"), "sglang", "dialect 'sglang' can't express.*context 'hybrid'.*angelspec serve"),
        (lambda: tiny_drafter("dfly"), "vllm-speculators", "can't express"),
        (lambda: tiny_mtp("dense"), "sglang", "can't express an MTP drafter.*'dense'.*use one of: angelspec, qwen3"),
        (lambda: tiny_drafter("dflash"), "vllm-speculator", "no dialect 'vllm-speculator'.*vllm-speculators"),
    ],
)
def test_what_cannot_be_converted_says_so(drafter: Any, name: str, words: str, tmp_path: Path) -> None:
    ours = save_drafter(drafter(), tmp_path / "ours")
    result = CliRunner().invoke(cli, ["checkpoint", "convert", str(ours), str(tmp_path / "out"), "--to", name])
    assert result.exit_code == 2
    assert not (tmp_path / "out").exists()
    text = " ".join(result.output.split())
    assert re.search(words, text), text


def test_the_caller_states_what_a_file_lacks(tmp_path: Path) -> None:
    """As the published Hy3 DFly, whose config.json does not say its block size."""
    drafter = tiny_drafter("dfly")
    config = public_config(drafter.config, **PUBLISHED["dfly"])
    folder = str(written(tmp_path / "public", config, dict(drafter.state_dict())))

    def run(*words: str) -> tuple[int, str]:
        result = CliRunner().invoke(cli, ["checkpoint", *words])
        return result.exit_code, " ".join(result.output.split())

    code, said = run("check", folder)
    assert code == 1 and "config.json does not state block_size" in said
    assert run("check", folder, "--set", "block_size=4") == (0, f"{folder}: ok" + said.partition("included)")[2])
    out = str(tmp_path / "ours")
    assert run("convert", folder, out, "--to", "angelspec", "--set", "block_size=4")[0] == 0
    assert load_drafter(Path(out)).config == drafter.config
    for setting, words in {
        "block_siz=4": "no drafter has a field 'block_siz' (did you mean 'block_size'?)",
        "block_size": "is not of the form FIELD=VALUE",
        "block_size=[": "the value is no YAML",
    }.items():
        code, said = run("check", folder, "--set", setting)
        assert code == 2 and words in said


def test_speculators_name_the_target_they_were_trained_for(tmp_path: Path) -> None:
    drafter = tiny_drafter("dflash")
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "config.json").write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"]}))
    folder = save_drafter(drafter, tmp_path / "out", dialect="vllm-speculators", target_folder=tmp_path / "target")
    config = json.loads((folder / "config.json").read_text())
    assert config["speculators_config"]["verifier"] == {"name_or_path": None, "architectures": ["Qwen3ForCausalLM"]}
    assert config["aux_hidden_state_layer_ids"] == [2, 4, 7]
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 3


REFUSED: dict[str, tuple[dict[str, Any], dict[str, torch.Tensor], tuple[str, str]]] = {
    "Eagle3": ({"architectures": ["LlamaForCausalLMEagle3"]}, {}, ("unsupported", "architectures")),
    "speculators Eagle3": ({"speculators_model_type": "eagle3"}, {}, ("unsupported", "speculators_model_type")),
    "a pruned vocabulary": ({"draft_vocab_size": 32}, {"d2t": torch.zeros(32)}, ("unsupported", "draft_vocab_size")),
    "gated taps": ({"fusion_type": "gated_sum"}, {}, ("unsupported", "fusion_type")),
    "a recurrent Markov head": (
        {**PUBLISHED["dspark"], "markov_head_type": "rnn"}, {}, ("unsupported", "markov_head_type"),
    ),
    "a block that begins at the anchor": (
        {**PUBLISHED["dspark"], "sample_from_anchor": True}, {}, ("unsupported", "sample_from_anchor"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", list(REFUSED))
def test_formats_that_are_not_ours_to_load_are_refused_by_name(name: str, tmp_path: Path) -> None:
    changes, tensors, expected = REFUSED[name]
    drafter = tiny_drafter("dspark" if "markov_rank" in changes else "dflash")
    config = public_config(drafter.config, **{"block_size": 4, **PUBLISHED["dflash"], **changes})
    folder = written(tmp_path / "public", config, {**drafter.state_dict(), **tensors})
    assert expected in [(problem.code, problem.key) for problem in inspect_checkpoint(folder)]
    with pytest.raises(CheckpointError):
        load_drafter(folder)
