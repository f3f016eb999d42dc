import random

import numpy as np
import pytest
from chat_builders import conversation

from angelspec.data import decontaminate as module
from angelspec.data.decontaminate import decontaminate


def words(texts):
    """A tokenizer for tests: one id per word."""
    return [[int(word) for word in text.split()] for text in texts]


def text(tokens):
    return " ".join(map(str, tokens))


def ask(name, *texts, source="train", answer=None):
    turns = [("user", item) for item in texts]
    if answer is not None:
        turns.append(("assistant", answer))
    return conversation(*turns, name=name, source=source, file="f", line=3)


def test_sixteen_shared_tokens_drop_a_prompt_and_fifteen_do_not():
    shared = list(range(100, 116))
    evaluation = [ask("e1", text([1, 2, *shared, 3]), source="gsm8k")]
    train = [
        ask("inside", text([7, 8, *shared, 9])),
        ask("alone", text(shared)),
        ask("fifteen", text([7, *shared[:15], 9, *shared[1:], 5])),
        ask("split over turns", text([7, *shared[:8]]), text([*shared[8:], 9])),
        ask("second turn", "1 2 3", text([0, *shared])),
        ask("answer", "1 2 3", answer=text([0, *shared])),
    ]
    result = decontaminate(train, evaluation, tokenise=words, n=16)
    assert [c.id for c in result.kept] == ["fifteen", "split over turns"]
    assert [o.conversation.id for o in result.dropped] == ["inside", "alone", "second turn", "answer"]
    assert {(o.evaluation_id, o.evaluation_source) for o in result.dropped} == {("e1", "gsm8k")}
    assert result.counts == {"train": {"gsm8k": 4}}
    rejection = result.dropped[0].rejection()
    assert (rejection.file, rejection.line, str(rejection.reason)) == ("f", 3, "contaminated")
    assert "'e1' of gsm8k" in rejection.detail and "16 contiguous tokens" in rejection.detail


def test_short_texts_must_be_equal_as_a_whole():
    evaluation = [ask("e", "5 6 7", source="mtbench")]
    result = decontaminate([ask("same", "5 6 7"), ask("longer", "4 5 6 7 8")], evaluation, tokenise=words, n=16)
    assert [c.id for c in result.kept] == ["longer"] and "whole short text" in result.dropped[0].detail


def test_evaluation_answers_count_and_shared_system_turns_do_not():
    long = text(range(50))
    evaluation = [conversation(("system", long), ("user", "1"), ("assistant", text(range(60, 90))), source="e")]
    train = [conversation(("system", long), ("user", "2"), name="a"), ask("b", text(range(65, 85)))]
    result = decontaminate(train, evaluation, tokenise=words, n=16)
    assert [c.id for c in result.kept] == ["a"]


def test_against_the_definition_on_random_texts(monkeypatch):
    draw = random.Random(0)
    n = 4

    def random_text():
        return text(draw.choices(range(6), k=draw.randint(1, 40)))

    evaluation = [ask(f"e{i}", random_text(), random_text(), source=f"s{i % 3}") for i in range(8)]
    train = [ask(f"t{i}", random_text()) for i in range(60)]
    monkeypatch.setattr(module, "_BATCH", 7)
    grams = {}
    for example in evaluation:
        for message in example.messages:
            tokens = tuple(words([message.content])[0])
            for start in range(len(tokens) - n + 1):
                grams.setdefault(tokens[start : start + n], set()).add(example.id)
            if len(tokens) < n:
                grams.setdefault(tokens, set()).add(example.id)
    expected = {}
    for item in train:
        tokens = tuple(words([item.messages[0].content])[0])
        hits = set().union(*(grams.get(tokens[i : i + n], set()) for i in range(max(1, len(tokens) - n + 1))))
        if hits:
            expected[item.id] = hits
    seen = []
    result = decontaminate(train, evaluation, tokenise=words, n=n, on_rows=seen.append)
    assert {o.conversation.id for o in result.dropped} == set(expected) and 10 < len(expected) < 60
    assert all(o.evaluation_id in expected[o.conversation.id] for o in result.dropped)
    assert sum(seen) == 60 and len(seen) == 9


@pytest.mark.parametrize("value", [0, 7])
def test_equal_hashes_of_other_tokens_drop_nothing(monkeypatch, value):
    monkeypatch.setattr(
        module, "_window_hashes", lambda tokens, n: np.full(max(0, len(tokens) - n + 1), value, np.uint64)
    )
    evaluation = [ask("e1", text(range(20))), ask("e2", text(range(100, 120)))]
    train = [ask("other", text(range(200, 230))), ask("same", text(range(100, 116)))]
    result = decontaminate(train, evaluation, tokenise=words, n=16)
    assert [c.id for c in result.kept] == ["other"] and result.dropped[0].evaluation_id == "e2"


def test_nothing_to_compare_with():
    train = [ask("a", text(range(30)))]
    assert decontaminate(train, [], tokenise=words, n=16).kept == train
    assert decontaminate([], train, tokenise=words, n=16).kept == []
