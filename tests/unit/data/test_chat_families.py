"""Rows of given answers against the real chat templates of each family, through a loaded target."""

import pytest
import torch
from chat_builders import conversation

from angelspec.core.known_targets import KNOWN_TARGETS
from angelspec.core.recipe import TargetSection
from angelspec.data.chat import chat_format, prompt_rows, rows_of_given
from angelspec.data.rounds import first_round, next_round, visible_answer
from angelspec.targets.target import load_target

TURNS = (("system", "Be brief."), ("user", "q1"), ("assistant", "a1", "r1"), ("user", "q2"), ("assistant", "a2", "r2"))


@pytest.fixture(scope="module", params=["llama", "qwen3", "hy3"])
def target(request):
    known = KNOWN_TARGETS[f"tiny-{request.param}"]
    section = TargetSection(source=known.source, mode_family=known.mode_family)
    return load_target(section, dtype=torch.float32)


def decode(target, tokens):
    return target.tokenizer.decode([int(token) for token in tokens])


@pytest.mark.parametrize("mode", ["no-think", "high-think"])
def test_rows_are_what_the_server_sends_and_generates(target, mode):
    chat = chat_format(target, mode=mode)
    result = rows_of_given([conversation(*TURNS)], chat)
    assert result.rejected == [] and len(result.rows) == 2
    for number, row in enumerate(result.rows, start=1):
        prompt = [int(token) for token in row.tokens[~row.loss_mask]]
        history = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "q1"}]
        if number == 2:
            history += [{"role": "assistant", "content": "a1"}, {"role": "user", "content": "q2"}]
        # what a client sends: texts only, the template does the rest
        assert prompt == target.render(history, mode=mode, add_generation_prompt=True)
        answer = row.tokens[row.loss_mask]
        assert int(answer[-1]) in target.stop_token_ids and not set(answer[:-1].tolist()) & set(target.stop_token_ids)
        text = decode(target, answer[:-1])
        assert visible_answer(text, family=target.mode_family, mode=mode) == f"a{number}"
        assert (f"r{number}" in text) == (mode == "high-think")
        whole = decode(target, row.tokens)
        assert f"r{3 - number}" not in whole  # no reasoning of another turn


@pytest.mark.parametrize("mode", ["no-think", "high-think"])
def test_a_later_round_continues_what_a_training_row_shows(target, mode):
    chat = chat_format(target, mode=mode)
    questions = conversation(*(turn for turn in TURNS if turn[0] != "assistant"))
    second = next_round(first_round([questions]), {"c": "a1"})
    asked = prompt_rows([item.conversation for item in second], chat).prompts[0]
    given = rows_of_given([conversation(*TURNS)], chat).rows[1]
    assert list(asked.tokens) == given.tokens[~given.loss_mask].tolist() and asked.group == given.group


def test_texts_of_special_tokens_are_refused(target):
    chat = chat_format(target, mode="no-think")
    bad = conversation(("user", "<|im_end|>"), ("assistant", "a"))
    assert [str(r.reason) for r in rows_of_given([bad], chat).rejected] == ["special-token-text"]
    assert target.tokenizer.decode([319]) in chat.special_texts  # the mask token cannot come from a text


def test_a_tag_in_a_question_moves_no_span(target):
    chat = chat_format(target, mode="no-think")
    tag = target.mode_family.think_close
    turns = conversation(("user", f"what is {tag}?"), ("assistant", "a tag"))
    (row,) = rows_of_given([turns], chat).rows
    *answer, end = row.tokens[row.loss_mask].tolist()
    assert decode(target, answer) == "a tag" and end in target.stop_token_ids
