"""Batched generation gives what plain transformers gives, whatever is decoded beside a row."""

import pytest
import torch
from target_builders import FAMILIES, fresh_target, tiny_target, user

from angelspec.core.acceptance import repeated_ngram_share
from angelspec.core.errors import TargetError
from angelspec.data.generation import generate

TEXTS = ["Hi", "What is 3+4?", "Sort a list", "a", "Tell me about foxes, please", "Why?", "Count", "b" * 70, "Go on"]


def prompts(target, texts=TEXTS):
    return [target.render(user(text), mode="no-think", add_generation_prompt=True) for text in texts]


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_is_transformers_own(family):
    """Nine prompts through three slots: prefill with a shared prefix, replacement, compaction."""
    target = tiny_target(family)
    asked = prompts(target)
    answers = generate(target, asked, max_new_tokens=40, batch_size=3)
    assert {answer.finish_reason for answer in answers} == {"stop", "length"}
    for prompt, answer in zip(asked, answers, strict=True):
        theirs = target.model.generate(
            torch.tensor([prompt]), do_sample=False, max_new_tokens=40, eos_token_id=[258], pad_token_id=256
        )[0, len(prompt) :]
        assert list(answer.tokens) == theirs.tolist()
        assert (answer.finish_reason == "stop") == (answer.tokens[-1] == 258)


def test_an_answer_does_not_depend_on_its_neighbours():
    target = tiny_target("llama")
    asked, keys = prompts(target), [11 * index for index in range(len(TEXTS))]
    options = {"max_new_tokens": 30, "temperature": 0.8, "top_p": 0.9, "seed": 5}
    together = generate(target, asked, row_keys=keys, batch_size=4, **options)
    backwards = generate(target, asked[::-1], row_keys=keys[::-1], batch_size=9, **options)[::-1]
    assert together == backwards
    assert generate(target, asked[3:4], row_keys=keys[3:4], **options) == together[3:4]
    assert generate(target, asked, row_keys=keys, batch_size=4, **{**options, "seed": 6}) != together
    moved = generate(target, asked[:1], row_keys=[12], **options)
    assert moved != together[:1]


def test_samples_follow_the_targets_distribution():
    """First tokens of many rows of one prompt against the softmax of its logits."""
    target = tiny_target("qwen3")
    prompt = prompts(target, ["Hi"])[0]
    rows = 3000
    answers = generate(target, [prompt] * rows, max_new_tokens=1, temperature=1.3, batch_size=1000, seed=1)
    counts = torch.bincount(torch.tensor([answer.tokens[0] for answer in answers]), minlength=320)
    logits = target.logits(target.forward(torch.tensor([prompt])).hidden_BTD[0, -1])
    expected = torch.softmax(logits / 1.3, -1) * rows
    likely = expected >= 5
    assert likely.sum() > 5
    chi_square = ((counts - expected)[likely] ** 2 / expected[likely]).sum()
    degrees = int(likely.sum())
    assert chi_square < degrees + 5 * (2 * degrees) ** 0.5


def test_prompts_that_share_everything_but_the_end():
    target = tiny_target("llama")
    base = prompts(target, ["Hi"])[0]
    asked = [base, [*base, 65], base, [*base, 65, 66]]
    answers = generate(target, asked, max_new_tokens=12, batch_size=2)
    for prompt, answer in zip(asked, answers, strict=True):
        assert answer == generate(target, [prompt], max_new_tokens=12)[0]
    assert answers[0] == answers[2]
    assert answers[0] != answers[1]


def test_loops_are_stopped_only_where_asked():
    target = fresh_target("llama")
    with torch.no_grad():  # the head ignores all but the last token: a cycle soon
        for layer in target._layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    asked = prompts(target)[:3]
    through = generate(target, asked, max_new_tokens=120, stop_token_ids=[319])
    assert {answer.finish_reason for answer in through} == {"length"}
    stopped = generate(target, asked, max_new_tokens=120, stop_token_ids=[319], max_repeated_share=0.4)
    for whole, cut in zip(through, stopped, strict=True):
        assert cut.finish_reason == "loop"
        assert len(cut.tokens) == 64
        assert cut.tokens == whole.tokens[:64]
        assert repeated_ngram_share(cut.tokens) > 0.4


def test_progress_counts_everything():
    target = tiny_target("llama")
    seen = []
    answers = generate(
        target, prompts(target), max_new_tokens=20, batch_size=3, on_progress=lambda *done: seen.append(done)
    )
    assert seen == sorted(seen)
    assert seen[-1] == (sum(len(answer.tokens) for answer in answers), len(TEXTS))


def test_own_stop_tokens():
    target = tiny_target("llama")
    asked = prompts(target)[:2]
    free = generate(target, asked, max_new_tokens=20, stop_token_ids=[319])
    third = free[0].tokens[2]
    answer = generate(target, asked, max_new_tokens=20, stop_token_ids=[third])[0]
    assert answer.finish_reason == "stop"
    assert answer.tokens == free[0].tokens[: free[0].tokens.index(third) + 1]


def test_refusals():
    target = tiny_target("llama")
    with pytest.raises(ValueError, match="prompt 1 is empty"):
        generate(target, [[65], []], max_new_tokens=4)
    with pytest.raises(ValueError, match="exceeds 1024 positions"):
        generate(target, [[65] * 1000], max_new_tokens=40)
    assert generate(target, [], max_new_tokens=4) == []
    broken = fresh_target("llama")
    with torch.no_grad():
        broken.model.model.norm.weight.fill_(float("nan"))
    for temperature in (0.0, 1.0):
        with pytest.raises(TargetError, match="not finite"):
            generate(broken, [[65]], max_new_tokens=4, temperature=temperature)
