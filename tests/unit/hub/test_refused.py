"""The table of what is never sent: checkpoints that are wrong, each with what is said of it.

Every row goes through the command, makes no request and ends with exit code 2.
"""

from __future__ import annotations

import json
import re

import pytest
from hub_builders import run
from safetensors.torch import load_file, save_file
from serving_builders import bench_result

LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\n"
TENSOR = "context_proj.weight"
INDEX = b'{"weight_map": {"a": "model-00002-of-00002.safetensors"}}'


def link(name, to):
    def arrange(tree):
        (tree.parent / "secret").write_text("password\n")
        (tree / name).unlink(missing_ok=True)
        (tree / name).symlink_to(to)

    return arrange


def write(name, content):
    return lambda tree: (tree / name).write_bytes(content)


def card(matter, body="text\n"):
    return write("README.md", f"---\n{matter}\n---\n{body}".encode("latin-1"))


def remove(name):
    return lambda tree: (tree / name).unlink()


def rename(name, to):
    return lambda tree: (tree / name).rename(tree / to)


def tensors(change):
    def arrange(tree):
        held = load_file(tree / "model.safetensors")
        change(held)
        save_file(held, tree / "model.safetensors")

    return arrange


def cut_weights(tree):
    (tree / "model.safetensors").write_bytes((tree / "model.safetensors").read_bytes()[:-9])


def edited(name, change):
    def arrange(tree):
        content = json.loads((tree / name).read_text())
        change(content)
        (tree / name).write_text(json.dumps(content))

    return arrange


def config(**changes):
    """Keys at the top level of ``config.json`` only."""
    return edited("config.json", lambda content: content.update(changes))


def everywhere(key, value):
    """A key of ``config.json`` wherever it stands, so that only the manifest contradicts it."""

    def change(content):
        for place in (content, content["dflash_config"], content["angelspec"]["drafter"]):
            assert place[key] != value
            place[key] = value

    return edited("config.json", change)


def manifest(**changes):
    return edited("angelspec_manifest.json", lambda content: content.update(changes))


def manifest_drafter(**changes):
    return edited("angelspec_manifest.json", lambda content: content["drafter"].update(changes))


def geometry(**changes):
    return edited("angelspec_manifest.json", lambda content: content["target"]["geometry"].update(changes))


TABLE = [
    ("a broken link", link("latest", "step-7"), "latest is a link to step-7, which does not exist"),
    ("weights that are a broken link", link("model.safetensors", "gone"), "model.safetensors is a link to gone, which"),
    ("a report that is a link out of the tree", link("report.md", "../secret"),
     "report.md is a link to ../secret; only real files are published"),
    ("weights of zero bytes", write("model.safetensors", b""), "model.safetensors is empty"),
    ("weights that are an LFS pointer", write("model.safetensors", LFS_POINTER),
     "is a Git LFS pointer, not the weights"),
    ("no weights", remove("model.safetensors"), "model.safetensors is missing"),
    ("only pickled weights", rename("model.safetensors", "pytorch_model.bin"), "model.safetensors is missing"),
    ("a shard without index", rename("model.safetensors", "model-00001-of-00002.safetensors"),
     "model.safetensors.index.json is missing beside"),
    ("an index that names a shard that is not there", write("model.safetensors.index.json", INDEX),
     "model-00002-of-00002.safetensors, which .* names, is missing"),
    ("no config", remove("config.json"), "config.json is missing"),
    ("a config that is no JSON", write("config.json", b"{"), "config.json is no JSON"),
    ("a config that is a list", write("config.json", b"[]"), "config.json holds no object"),
    ("no manifest", remove("angelspec_manifest.json"), "angelspec_manifest.json is missing"),
    ("a load test of another drafter", lambda tree: bench_result().save(tree),
     "serve-bench.json does not say which drafters"),
    ("a missing tensor", tensors(lambda held: held.pop(TENSOR)),
     r"missing-tensor: context_proj.weight \[64, 192\] is missing"),
    ("a value that is not finite", tensors(lambda held: held[TENSOR][0, 0].fill_(float("nan"))),
     "non-finite: context_proj.weight holds 1 of 12288 values"),
    ("tensors of two dtypes", tensors(lambda held: held.update({TENSOR: held[TENSOR].float()})),
     "config.json says bfloat16 but the tensors are bfloat16, float32"),
    ("cut weights", cut_weights, "truncated: .*/model.safetensors is cut: 9 bytes are missing at its end"),
    ("weights with bytes behind their end", write("model.safetensors", b"\x02" + bytes(7) + b"{}extra"),
     "extra-bytes: .*/model.safetensors has 5 bytes too many"),
    ("weights that end in their header", write("model.safetensors", bytes(4)),
     r"truncated: .* \(4 bytes\) ends inside its header"),
    ("weights with a header of endless length", write("model.safetensors", b"\xff" * 64),
     r"unreadable: .* \(64 bytes\) does not begin as a safetensors file"),
    ("weights that are a text", write("model.safetensors", b"x" * 900),
     r"unreadable: .* \(900 bytes\) does not begin as a safetensors file"),
    ("two block sizes", config(block_size=6), "block_size is 6 at the top level but 4 under dflash_config"),
    ("another block size", everywhere("block_size", 6), "block_size is 6 in config.json but 4 in the manifest"),
    ("another slot convention", everywhere("sample_from_anchor", True),
     "sample_from_anchor is True in config.json but False in the manifest"),
    ("another mask token", everywhere("mask_token_id", 318),
     "mask_token_id is 318 in config.json but 319 in the manifest"),
    ("other layer ids", everywhere("target_layer_ids", [0, 2, 4]),
     r"target_layer_ids is \(0, 2, 4\) in config.json but \(1, 2, 3\) in the manifest"),
    ("two ropes", config(rope_theta=5e5), r"config.json: rope_theta is given as \[10000.0, 500000.0\]"),
    ("another rope", config(rope_theta=5e5, rope_parameters={"rope_type": "default", "rope_theta": 5e5}),
     r"config.json's rope is Rope\(theta=500000.0, .* the manifest's Rope\(theta=10000.0,"),
    ("two dtypes", config(torch_dtype="torch.float16"), "config.json states two dtypes: bfloat16, float16"),
    ("another dtype", config(dtype="float32", torch_dtype="float32"),
     "dtype-differs: config.json says float32 but the tensors are bfloat16"),
    ("a drafter that is not its recipe's", manifest_drafter(mask_token_id=318),
     "the manifest and its recipe disagree on the drafter's shape"),
    ("another mode", manifest(mode="high-think"), "the manifest and its recipe disagree on the mode"),
    ("another algorithm", manifest(algorithm="dflash"), "the manifest and its recipe disagree on the algorithm"),
    ("another target", geometry(vocab_size=999), "the manifest: vocab_size is 320 but the target has 999"),
    ("a fact that is not stated", config(target_hidden_size=None), "config.json does not state target_hidden_size"),
    ("a card without front matter", write("README.md", b"# hello\n"), "no front matter"),
    ("a card whose front matter is no YAML", card("license: ["), r"no YAML \(line \d"),
    ("a card that is a list", card("- license"), "is no mapping"),
    ("a card under another licence", card("license: mit"), "license is mit, but"),
    ("a card without licence", card("tags: [x]"), "license must be an identifier"),
    ("a card with a number among its tags", card("license: apache-2.0\ntags: [1]"),
     "tags must be a text or a list of texts"),
    ("a card with results that no hub can read", card("license: apache-2.0\nmodel-index: 3"), "model-index"),
    ("a card that says nothing", card("license: apache-2.0", "\n"), "says nothing"),
    ("a card that is not UTF-8", card("license: apache-2.0", "\xff\n"), "is not UTF-8"),
    ("a token in the card", card("license: apache-2.0\nbase_model: org/tiny-llama", "hf_" + "a" * 34),
     "README.md holds an access token"),
    ("a token in the training log", write("training/metrics.jsonl", b"{'k': 'sk-" + b"a" * 40 + b"'}"),
     "training/metrics.jsonl holds an access token"),
]  # fmt: skip


@pytest.mark.parametrize(("arrange", "message"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])
def test_refused(arrange, message, tree, no_network):
    arrange(tree)
    result = run("publish", tree, "--to", "hf:alice/tiny", "--yes")
    assert result.exit_code == 2, result.output
    assert re.search(message, " ".join(result.output.split())), result.output


def test_what_is_wrong_with_a_tensor_is_said_once(tree, no_network):
    tensors(lambda held: held.pop(TENSOR))(tree)
    result = run("publish", tree, "--to", "hf:alice/tiny", "--yes")
    assert result.exit_code == 2
    assert result.output.count(f"{TENSOR} [64, 192] is missing") == 1
