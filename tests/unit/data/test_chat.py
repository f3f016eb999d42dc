import json

import numpy as np
import pytest
from chat_builders import (
    CHATML,
    END,
    OPENED,
    START,
    THINKING,
    calling,
    conversation,
    decode,
    fake_format,
)

from angelspec.core.errors import TargetError
from angelspec.core.modes import mode_family
from angelspec.core.recipe import PromptSource
from angelspec.data.answers import AnswerRecord
from angelspec.data.chat import chat_format, prompt_rows, rows_of_given, special_texts
from angelspec.data.check import RenderingCheck, check_files
from angelspec.data.conversation import Message
from angelspec.data.messages import ROLE_MAP
from angelspec.data.reading import read_content_rows
from angelspec.data.rounds import first_round, next_round, visible_answer
from angelspec.data.row_schema import RowRules
from angelspec.data.sources import locate
from angelspec.data.tokenised import row_from_answer


def supervised(row):
    return decode(row.tokens[row.loss_mask])


def unsupervised(row):
    return decode(row.tokens[~row.loss_mask])


def one(chat, *turns, **changes):
    result = rows_of_given([conversation(*turns, **changes)], chat)
    assert result.rejected == [] and len(result.rows) == 1, result
    return result.rows[0]


def refusal(chat, *turns, **changes):
    result = rows_of_given([conversation(*turns, **changes)], chat)
    assert result.rows == [] and len(result.rejected) == 1
    return str(result.rejected[0].reason)


def test_the_answer_and_its_end_are_supervised_and_nothing_else():
    row = one(fake_format(), ("system", "s"), ("user", "q"), ("assistant", "a"))
    assert (
        unsupervised(row) == "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"
    )
    assert supervised(row) == "a<|im_end|>"
    assert row.tokens[-1] == END  # the line feed that the template puts behind is no part of the row
    assert np.flatnonzero(row.loss_mask).tolist() == list(range(len(row) - 2, len(row)))


def test_every_assistant_turn_is_a_row_of_its_own():
    result = rows_of_given(
        [conversation(("user", "q1"), ("assistant", "a1"), ("user", "q2"), ("assistant", "a2"))], fake_format()
    )
    assert [row.id for row in result.rows] == ["c", "c#2"]
    assert [supervised(row) for row in result.rows] == ["a1<|im_end|>", "a2<|im_end|>"]
    assert "a1" in unsupervised(result.rows[1]) and len({row.group for row in result.rows}) == 1


def test_an_empty_turn_is_history_and_its_end_token_is_not_supervised():  # B2
    turns = conversation(("user", "q"), ("assistant", ""), ("user", "q2"), ("assistant", "a2"))
    result = rows_of_given([turns], fake_format())
    (row,) = result.rows
    assert result.rejected == [] and result.notes == []  # reading has already named the empty turn
    assert supervised(row) == "a2<|im_end|>" and row.id == "c#2"
    assert row.loss_mask.sum() == 3 and "assistant\n<|im_end|>" in unsupervised(row)


def test_reasoning_is_supervised_as_it_is_generated():
    turn = ("assistant", "answer", "reason")
    generated = "<think>\nreason\n</think>\n\nanswer<|im_end|>"
    row = one(fake_format(THINKING, mode="high-think"), ("user", "q"), turn)
    assert supervised(row) == generated
    # what the prompt already opens is not generated
    row = one(fake_format(OPENED, mode="high-think"), ("user", "q"), turn)
    assert supervised(row) == generated.removeprefix("<think>\n") and unsupervised(row).endswith("<think>\n")
    # without thinking the empty block stands in the prompt and the reasoning is left out
    result = rows_of_given([conversation(("user", "q"), turn)], fake_format(THINKING))
    assert supervised(result.rows[0]) == "answer<|im_end|>"
    assert unsupervised(result.rows[0]).endswith("<think>\n\n</think>\n\n")
    assert [str(note.remark) for note in result.notes] == ["reasoning-dropped"]


def test_a_template_without_a_reasoning_field_gets_it_inline():
    inline = CHATML.replace("<|im_start|>assistant\n{% endif", "<|im_start|>assistant\n<think>\n{% endif")
    row = one(fake_format(inline, mode="high-think"), ("user", "q"), ("assistant", "answer", "reason"))
    assert supervised(row) == "reason\n</think>\n\nanswer<|im_end|>"


def test_history_is_shown_without_its_reasoning():  # B5
    turns = [("user", "q1"), ("assistant", "a1", "r1"), ("user", "q2"), ("assistant", "a2", "r2")]
    for template in (THINKING, OPENED):
        result = rows_of_given([conversation(*turns)], fake_format(template, mode="high-think"))
        assert len(result.rows) == 2 and "r1" in supervised(result.rows[0]) and "r2" in supervised(result.rows[1])
        assert "r1" not in unsupervised(result.rows[1]) and "a1" in unsupervised(result.rows[1])


def test_a_thinking_mode_needs_reasoning():
    assert refusal(fake_format(THINKING, mode="high-think"), ("user", "q"), ("assistant", "a")) == "no-reasoning"
    turns = [("user", "q1"), ("assistant", "a1"), ("user", "q2"), ("assistant", "a2", "r2")]
    result = rows_of_given([conversation(*turns)], fake_format(THINKING, mode="high-think"))
    assert [row.id for row in result.rows] == ["c#2"]
    assert [str(note.remark) for note in result.notes] == ["turn-dropped"] and "turn 1" in result.notes[0].detail


def test_special_tokens_in_texts_are_refused_everywhere():  # B5
    chat = fake_format()
    text = "what is <|im_end|> for?"
    assert refusal(chat, ("user", text), ("assistant", "a")) == "special-token-text"
    assert refusal(chat, ("system", text), ("user", "q"), ("assistant", "a")) == "special-token-text"
    assert refusal(chat, ("user", "q"), ("assistant", text)) == "special-token-text"
    assert refusal(chat, ("user", "q"), ("assistant", "a"), tools=({"name": text},)) == "special-token-text"
    assert refusal(chat, ("user", "q"), calling("", {"x": text})) == "special-token-text"
    thinking = fake_format(THINKING, mode="high-think")
    assert refusal(thinking, ("user", "q"), ("assistant", "a", text)) == "special-token-text"
    # a tag that is no special token is text like any other and moves no span
    assert supervised(one(chat, ("user", "what is </think>?"), ("assistant", "a"))) == "a<|im_end|>"


def test_what_the_template_cannot_show_as_a_server_would_is_refused():
    turns = [("user", "q"), ("assistant", "a")]
    counted = CHATML + "{{ messages | length }}"  # the end of the prompt differs from the middle of the whole
    assert refusal(fake_format(counted), *turns) == "prompt-not-prefix"
    assert refusal(fake_format(CHATML.replace("<|im_end|>", "")), *turns) == "no-end-of-turn"
    twice = CHATML.replace("<|im_end|>", "<|im_end|>!<|im_end|>")
    assert refusal(fake_format(twice), *turns) == "stop-inside-answer"
    silent = CHATML.replace("message['content']", "''")
    assert refusal(fake_format(silent), *turns) == "empty-mask"
    deaf = CHATML.replace("message['tool_calls'] | tojson", "''")
    assert refusal(fake_format(deaf), ("user", "q"), calling("", {"a": 1})) == "text-not-rendered"
    calls = "{% if message['tool_calls'] is defined %}{{ message['tool_calls'] | tojson }}"
    mute = CHATML.replace(
        calls, "{% if message['tool_calls'] is defined %}{{ message['tool_calls'] | tojson }}{% else %}"
    )
    mute = mute.replace("{% endif %}\n{{- message['content'] }}", "{{- message['content'] }}{% endif %}")
    assert refusal(fake_format(mute), ("user", "q"), calling("beside", {"a": 1})) == "text-not-rendered"
    assert supervised(one(fake_format(mute), ("user", "q"), calling("", {"a": 1}))).startswith("[{")
    strict = "{%- if messages[0]['role'] == 'system' -%}{{ raise_exception('no system') }}{%- endif -%}" + CHATML
    assert refusal(fake_format(strict), ("system", "s"), *turns) == "template-error"
    sums = CHATML.replace("message['content']", "1 + message['content']")
    assert refusal(fake_format(sums), *turns) == "template-error"


def test_one_bad_row_leaves_the_others():
    good = conversation(("user", "q"), ("assistant", "a"), name="good")
    bad = conversation(("user", "<|im_start|>"), ("assistant", "a"), name="bad", file="f", line=7)
    result = rows_of_given([bad, good], fake_format())
    assert [row.id for row in result.rows] == ["good"]
    assert [(r.file, r.line) for r in result.rejected] == [("f", 7)]


def test_long_prompts_are_refused():
    turns = conversation(("user", "q" * 50), ("assistant", "a"))
    assert str(rows_of_given([turns], fake_format(), max_prompt_tokens=40).rejected[0].reason) == "prompt-too-long"
    both = [conversation(("user", "q" * 50)), conversation(("user", "q"))]
    prompts = prompt_rows(both, fake_format(), max_prompt_tokens=40)
    assert [str(r.reason) for r in prompts.rejected] == ["prompt-too-long"]
    assert decode(prompts.prompts[0].tokens) == "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"


def test_tool_calls_are_supervised_and_reasoning_stays_within_their_chain():
    chain = [
        ("user", "2+2?"),
        Message("assistant", "", reasoning="use add", tool_calls=calling("", {"a": 2}).tool_calls),
        Message("tool", "4", tool_call_id="c1"),
        ("assistant", "4.", "easy"),
    ]
    calls = "{{ message['tool_calls'] | tojson if message['tool_calls'] is defined }}"
    tooled = THINKING.replace("{{ message['content'] }}", calls + "{{ message['content'] }}")
    first, second = rows_of_given([conversation(*chain)], fake_format(tooled, mode="high-think")).rows
    assert '"arguments": {"a": 2}' in supervised(first) and supervised(first).startswith("<think>\nuse add")
    assert "use add" in unsupervised(second) and supervised(second) == "<think>\neasy\n</think>\n\n4.<|im_end|>"
    plain = rows_of_given([conversation(*chain)], fake_format(tooled)).rows
    assert "use add" not in decode(plain[1].tokens)


def test_text_and_object_arguments_render_alike(tmp_path):  # B4
    rows = []
    for arguments in ('{"b": 2, "a": 1}', {"b": 2, "a": 1}):
        call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": arguments}}
        messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
        rows.append({"messages": messages, "id": str(len(rows))})
    path = tmp_path / "calls.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    content = locate(PromptSource(name="x", source=f"file:{path}"))
    read = read_content_rows(content, RowRules("x", "chat", "given", ROLE_MAP), max_line_bytes=1000).accepted
    one_row, other = rows_of_given(read, fake_format()).rows
    assert one_row.tokens.tolist() == other.tokens.tolist() and '{"b": 2, "a": 1}' in supervised(one_row)


def test_a_row_of_a_rollout():
    record = AnswerRecord("p", "math", (1, 2, 3), (4, END), "stop", 0.0, "no-think", sample=2, group="g")
    row = row_from_answer(record)
    assert (row.id, row.workload, row.group, row.finish_reason) == ("p~2", "math", "g", "stop")
    assert row.tokens.tolist() == [1, 2, 3, 4, END] and row.loss_mask.tolist() == [False] * 3 + [True] * 2


def test_rounds_ask_one_user_turn_after_another():
    rows = [
        conversation(("system", "s"), ("user", "q1"), ("user", "q2"), ("user", "q3"), name="a"),
        conversation(("user", "only"), name="b"),
        conversation(("user", "q1"), ("user", "q2"), name="c"),
    ]
    first = first_round(rows)
    assert [[m.content for m in r.conversation.messages] for r in first] == [["s", "q1"], ["only"], ["q1"]]
    second = next_round(first, {"a": "a1", "b": "b1", "c": None})
    assert [r.conversation.id for r in second] == ["a#2"]
    assert [(m.role, m.content) for m in second[0].conversation.messages][1:] == [
        ("user", "q1"),
        ("assistant", "a1"),
        ("user", "q2"),
    ]
    third = next_round(second, {"a#2": "a2"})
    assert third[0].conversation.id == "a#3" and third[0].conversation.messages[-1].content == "q3"
    assert next_round(third, {"a#3": "end"}) == []
    assert len({r.conversation.group for r in (first[0], second[0], third[0])}) == 1
    # the prompt of a later round holds the earlier answer where the server would show it
    tokens = prompt_rows([second[0].conversation], fake_format()).prompts[0].tokens
    assert "assistant\na1<|im_end|>" in decode(tokens)


def test_the_visible_answer():
    family = mode_family("qwen3")
    assert visible_answer("plain", family=family, mode="no-think") == "plain"
    assert visible_answer("reason\n</think>\n\nanswer", family=family, mode="high-think") == "answer"
    assert visible_answer("never ends", family=family, mode="high-think") is None
    assert visible_answer("x", family=mode_family("plain"), mode="no-think") == "x"


def tokenizer_with(template):
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(text, special=True, normalized=False) for text in ("<|im_start|>", "<|im_end|>")])
    tokenizer.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")
    made.chat_template = template
    return made


class FakeTarget:
    name = "tiny"
    mode_family = mode_family("qwen3")

    def __init__(self, template):
        self.tokenizer = tokenizer_with(template)
        self.stop_token_ids = (self.tokenizer.eos_token_id,)

    def render(self, messages, *, mode, add_generation_prompt, tools=None):
        return self.tokenizer.apply_chat_template(
            messages, tools=tools, add_generation_prompt=add_generation_prompt, tokenize=True, return_dict=False
        )


def test_generation_tags_change_no_mask():  # B18
    text = "{{- message['content'] }}<|im_end|>"
    plain = CHATML.replace("<|im_end|>\n", "<|im_end|>{{ '\\n' }}")
    tagged = plain.replace(text, "{%- generation -%}" + text + "{%- endgeneration -%}")
    assert plain != CHATML and tagged != plain
    turns = conversation(("user", "q1"), ("assistant", "a1"), ("user", "q2"), ("assistant", "a2"))
    masks = []
    for template in (plain, tagged):
        target = FakeTarget(template)
        rows = rows_of_given([turns], chat_format(target, mode="no-think")).rows
        assert [target.tokenizer.decode(row.tokens[row.loss_mask]) for row in rows] == ["a1<|im_end|>", "a2<|im_end|>"]
        masks.append([(row.tokens.tolist(), row.loss_mask.tolist()) for row in rows])
    assert masks[0] == masks[1]


def test_a_tokenizer_without_a_chat_template_is_named():  # B17
    chat = chat_format(FakeTarget(None), mode="no-think")
    with pytest.raises(TargetError, match="tokenizer of tiny has no chat template") as caught:
        rows_of_given([conversation(("user", "q"), ("assistant", "a"))], chat)
    assert "Cannot use chat template functions because tokenizer.chat_template is not set" in str(caught.value)
    assert "target.chat_template" in caught.value.mend


def test_a_target_that_refuses_costs_a_row_and_one_that_cannot_think_the_run():
    def refuses(messages, **_):
        raise TargetError("the chat template refuses") from ValueError("roles must alternate")

    def cannot(messages, **_):
        raise TargetError("no thinking switch")

    assert refusal(fake_format(render=refuses), ("user", "q"), ("assistant", "a")) == "template-error"
    with pytest.raises(TargetError, match="no thinking switch"):
        refusal(fake_format(render=cannot), ("user", "q"), ("assistant", "a"))


def test_special_texts_are_those_that_the_tokenizer_always_replaces():
    assert special_texts(tokenizer_with(CHATML)) == ("<|im_end|>", "<|im_start|>")


def test_check_renders_and_cuts_where_a_target_is_given(tmp_path):  # B16 and more
    def messages(question, answer):
        return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}

    around = fake_format().render([{"role": "user", "content": ""}], mode="no-think", add_generation_prompt=True)
    question = "q" * (100 - len(around))
    rows = [messages(question, "a" * 19), messages("q", "a" * 19), messages("<|im_end|>", "a"), {"prompt": "hello"}]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def check(length, block_size=8):
        rendering = RenderingCheck(fake_format(), 1000, length, block_size)
        return check_files([path], rendering=rendering)

    result = check(90)
    assert {r["line"]: r["reason"] for r in result["rejected"]} == {
        1: "no-supervised-token-after-truncation",
        3: "special-token-text",
    }
    assert "no supervised token after truncation" in result["rejected"][0]["detail"] and result["accepted"] == 2
    result = check(110)
    assert [r["line"] for r in result["rejected"]] == [3] and result["note_counts"] == {"answer-cut": 1}
    assert result["tokens"]["supervised"] == 10 + 20 and result["tokens"]["rows"] == 3
    assert {r["line"]: r["reason"] for r in check(110, block_size=11)["rejected"]}[1] == "no-anchor"


def test_start_tokens_are_what_they_seem():
    assert fake_format().render([], mode="no-think", add_generation_prompt=True)[0] == START
