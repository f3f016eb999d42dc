"""Chat, code and mathematics told apart, in several languages, quickly, and with reasons."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from angelspec.core.classifier import SPEAKS_FOR, ClassifierWeights, classify, classify_text, features, shipped_weights
from angelspec.core.fingerprint import file_sha256
from angelspec.core.locations import prompt_folder
from angelspec.core.workloads import WORKLOADS

MULTILINGUAL = Path(__file__).with_name("multilingual_prompts.jsonl")


def _rows(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _right(rows):
    answers = [classify_text(*row["turns"]).workload for row in rows]
    return sum(answer == row["workload"] for answer, row in zip(answers, rows, strict=True)) / len(rows)


def test_the_prompts_that_were_held_out_in_the_package():
    rows = [row for name in WORKLOADS for row in _rows(prompt_folder() / "eval" / f"{name}.jsonl")]
    assert _right(rows) >= 0.95


def test_prompts_in_many_languages_that_were_written_for_this_test():
    """Five of the languages (cs, da, hi, uk, vi) are in no list of words."""
    rows = _rows(MULTILINGUAL)
    assert len({row["language"] for row in rows}) >= 20
    assert _right(rows) >= 0.95
    for language in {row["language"] for row in rows}:
        assert _right([row for row in rows if row["language"] == language]) >= 2 / 3, language


def test_reasons_are_given():
    found = classify_text("Write a Python function `mean(xs)` that returns the average of a list.")
    assert found.workload == "code" and found.probability > 0.8
    names = [name for name, _ in found.evidence]
    assert any(name in ("concept programming language", "cue inline code", "cue function call") for name in names)
    assert str(found).startswith("code (") and names[0] in str(found)
    unsure = classify_text("")
    assert unsure.evidence == () and unsure.workload in WORKLOADS


def test_votes_add_up_to_the_decision():
    weights = ClassifierWeights(
        bias=dict.fromkeys(WORKLOADS, 0.0), votes={"cue code fence": (-1.0, 2.0, -1.0), "cue percent": (0.0, -1.0, 1.0)}
    )
    found = classify_text("```\nx\n``` 5 % 6 %", weights=weights)
    assert found.workload == "code"
    assert dict(found.evidence)["cue code fence"] > 0 > dict(found.evidence)["cue percent"]


def test_messages_of_a_chat():
    code = "Write a JavaScript function that debounces another function."
    system = {"role": "system", "content": "You solve equations."}
    assert classify([system, {"role": "user", "content": code}]).workload == "code"
    parts = [{"type": "text", "text": code}, {"type": "image_url", "image_url": {"url": "x"}}]
    assert classify([{"role": "user", "content": parts}]) == classify_text(code)
    follow_up = [
        {"role": "user", "content": code},
        {"role": "assistant", "content": "..."},
        {"role": "user", "content": "Shorter, please."},
    ]
    assert classify(follow_up).workload == "code"
    assert classify([]).workload in WORKLOADS
    assert classify([{"role": "user", "content": None}]).workload in WORKLOADS


def test_the_latest_message_weighs_most():
    code, story = "Fix this: ```python\nfor i in range(5) print(i)\n```", "Tell me a bedtime story about a fox."
    assert classify_text(code, "Thanks!", story).workload == "chat"
    assert classify_text(story, "Thanks!", code).workload == "code"


def test_features_can_be_read():
    found = features("What is 15 % of 80? Use `f(x)`.")
    assert {"cue percent", "cue inline code", "cue number"} <= set(found)
    assert all(isinstance(name, str) and value > 0 for name, value in found.items())
    assert features("") == {}
    assert set(found) <= set(SPEAKS_FOR)
    assert "concept code noun" in features("写一个函数")
    assert "concept programming language" in features("用JavaScript写")  # scripts may touch


def test_what_stands_in_code_says_nothing_about_the_question():
    code = "def tip(bill):\n    return bill * 0.15  # 15 % of $20\n"
    assert not {"cue number", "cue percent", "cue money"} & set(features(f"Explain:\n\n```python\n{code}```"))
    assert not {"cue number", "cue percent", "cue money"} & set(features(f"Explain:\n{code}"))
    assert "cue number" not in features("1. apples\n2. pears\n(3) figs")  # marks of a list


def test_a_call_takes_less_than_a_millisecond():
    rows = [row for name in WORKLOADS for row in _rows(prompt_folder() / "eval" / f"{name}.jsonl")]
    texts = [row["turns"][0] for row in [*rows, *_rows(MULTILINGUAL)]]
    texts += ["word 12 + x " * 3000, "数" * 20000, "a" * 50000]
    shipped_weights()
    for text in texts:
        classify_text(text)
    took = []
    for text in texts:
        start = time.process_time()
        for _ in range(5):
            classify_text(text)
        took.append((time.process_time() - start) / 5)
    assert sorted(took)[len(took) // 2] < 0.001
    assert max(took) < 0.004, "a long text is read only in part"


def test_nothing_but_the_standard_library_is_loaded():
    script = (
        "import sys; before = set(sys.modules)\n"
        "from angelspec.core.classifier import classify_text\nclassify_text('hello')\n"
        "new = {m.split('.')[0] for m in set(sys.modules) - before}\n"
        "print(sorted(new - set(sys.stdlib_module_names) - {'angelspec'}))"
    )
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"


def test_weights_name_what_they_were_fitted_on():
    from angelspec.core.classifier import WEIGHTS_FILE

    content = json.loads(WEIGHTS_FILE.read_text(encoding="utf-8"))
    files = {path.name: file_sha256(path)[:16] for path in (prompt_folder() / "train").glob("*.jsonl")}
    assert {f"train/{name} {digest}" for name, digest in files.items()} <= set(content["fitted_on"])
    assert not any(name.startswith("eval") for name in content["fitted_on"])
    assert set(content["votes"]) == set(SPEAKS_FOR)
    for name, votes in content["votes"].items():
        assert max(votes) == votes[content["workloads"].index(SPEAKS_FOR[name])], name


@pytest.mark.parametrize("text", ["x" * 10, "\ud800 lone", "\x00", "🙂" * 50, "```" * 2000, "(" * 5000, "1" * 5000])
def test_strange_texts_are_classified(text):
    assert classify_text(text).workload in WORKLOADS
