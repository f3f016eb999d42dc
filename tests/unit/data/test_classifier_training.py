"""Weights are made from prompts alone, and the same prompts make the same weights."""

import json
from collections import Counter

import pytest

from angelspec.core.classifier import ClassifierWeights
from angelspec.core.errors import DataError
from angelspec.core.locations import prompt_folder
from angelspec.data.classifier_training import Labelled, confusion, fit, main, read_labelled, shown


def test_fitted_on_the_shipped_prompts_alone_it_holds_on_the_held_out_ones(tmp_path, capsys):
    out = tmp_path / "weights.json"
    main(["fit", str(prompt_folder() / "train"), "--out", str(out)])
    first = out.read_text()
    main(["fit", str(prompt_folder() / "train"), "--out", str(out)])
    assert out.read_text() == first
    content = json.loads(first)
    assert content["rows"] == 1080
    names = [name.split()[0] for name in content["fitted_on"]]
    assert names == ["train/chat.jsonl", "train/code.jsonl", "train/math.jsonl"]
    table = confusion(read_labelled(prompt_folder() / "eval"), ClassifierWeights.read(out))
    assert sum(table[w][w] for w in table) >= 0.93 * 120
    capsys.readouterr()
    main(["check", str(prompt_folder() / "eval"), "--weights", str(out)])
    assert capsys.readouterr().out.strip() == shown(table)


def test_rows_are_read_in_both_schemas(tmp_path):
    rows = [
        {"domain": "math", "source": "x", "turns": ["1 + 1?"]},
        {"workload": "chat", "text": "Hello"},
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    read = [(row.workload, row.turns) for row in read_labelled(tmp_path)]
    assert read == [("math", ("1 + 1?",)), ("chat", ("Hello",))]


def test_rows_that_cannot_be_used_are_named(tmp_path):
    with pytest.raises(DataError, match="no \\*.jsonl rows"):
        read_labelled(tmp_path)
    (tmp_path / "a.jsonl").write_text('{"workload": "chat", "turns": ["a"]}\n{"workload": "maths", "turns": ["a"]}\n')
    with pytest.raises(DataError, match="a.jsonl:2"):
        read_labelled(tmp_path)


def test_a_large_source_does_not_drown_a_small_one():
    rows = [Labelled((f"How many dollars are {i} cents?",), "math", "a", "large") for i in range(900)]
    rows += [Labelled(("Prove the theorem.",), "math", "a", "small")] * 30
    rows += [Labelled(("How are you?",), "chat", "a", "chat")] * 30
    rows += [Labelled(("```python\nx\n```",), "code", "b", "code")] * 30
    weights = fit(rows)
    loaded = ClassifierWeights(dict(zip(weights["workloads"], weights["bias"], strict=True)), weights["votes"])
    assert confusion(rows, loaded)["math"] == Counter({"math": 930})


def test_the_matrix_is_shown():
    table = {"chat": Counter(chat=3, math=1), "code": Counter(code=4), "math": Counter(math=2)}
    assert "9 of 10 right: 90.00%" in shown(table)
