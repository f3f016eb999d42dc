"""The loop: its bookkeeping, its protocol with proposers, D-cut, and how answers end."""

import pytest
import torch
from decoding_builders import ScriptedProposer, random_prompts, small_target

from angelspec.core.errors import DataError
from angelspec.core.step_costs import StepCosts, VerifyPoint
from angelspec.decoding.answers import COMPONENTS
from angelspec.decoding.lookup import LookupProposer
from angelspec.decoding.plain import decode_without_cache
from angelspec.decoding.proposer import NoProposer
from angelspec.decoding.speculative import CutPolicy, decode

STOP = 1


@pytest.fixture(scope="module")
def target():
    return small_target(vocab_size=32)


def _oracle(target, prompts, *, max_new_tokens, wrong_every=None, temperature=0.0):
    """A script that knows the answers, and errs at every n-th position of a sequence."""
    answers = decode_without_cache(target, prompts, max_new_tokens=max_new_tokens, temperature=temperature, seed=0)
    whole = [prompt + answer.tokens for prompt, answer in zip(prompts, answers, strict=True)]

    def script(history):
        sequence = next(tokens for tokens in whole if tokens[: len(history)] == history)
        future = sequence[len(history) :] + [0] * 8  # behind the end: something
        if wrong_every is None:
            return future
        return [(token + 1) % 32 if (len(history) + i) % wrong_every == 0 else token for i, token in enumerate(future)]

    return script, [answer.tokens for answer in answers]


def _decode(target, proposer, prompts, **changes):
    settings = {"max_new_tokens": 20, "temperature": 0.0, "seed": 0, "batch_size": 4}
    return decode(target, proposer, prompts, **(settings | changes))


def test_the_protocol_and_the_features_hold_while_rows_come_and_go(target):
    prompts = random_prompts(11, vocab_size=32)
    script, expected = _oracle(target, prompts, max_new_tokens=20, wrong_every=3)
    proposer = ScriptedProposer(script, depth=4, target=target, layer_ids=(0, 1))
    run = _decode(target, proposer, prompts)
    assert [answer.tokens for answer in run.answers] == expected
    assert proposer.checked_features > sum(map(len, prompts))
    assert sum(sum(answer.accepted) for answer in run.answers) > 30


def test_a_perfect_drafter_commits_its_whole_block_and_the_bonus(target):
    prompt = random_prompts(1, vocab_size=32, seed=3)
    script, (expected,) = _oracle(target, prompt, max_new_tokens=20)
    assert STOP not in expected
    (answer,) = _decode(target, ScriptedProposer(script, depth=4), prompt).answers
    assert answer.tokens == expected
    assert answer.committed == [5, 5, 5, 4]  # 19 tokens after the one that prefill sampled
    assert answer.accepted == [4, 4, 4, 4]  # the limit says nothing against a proposal
    assert answer.finish_reason == "length"
    assert answer.counts(depth=4).mean_accepted_length == 19 / 4


def test_a_stop_token_inside_a_block_ends_the_answer_there(target):
    prompts = random_prompts(60, vocab_size=32, seed=1)
    script, expected = _oracle(target, prompts, max_new_tokens=40)
    inside = 0
    run = _decode(target, ScriptedProposer(script, depth=7), prompts, max_new_tokens=40)
    for answer, tokens in zip(run.answers, expected, strict=True):
        assert answer.tokens == tokens
        assert (answer.finish_reason == "stop") == (tokens[-1] == STOP)
        assert STOP not in tokens[:-1]
        if answer.finish_reason == "stop" and answer.committed:
            inside += answer.committed[-1] < 8
            assert answer.accepted[-1] <= answer.committed[-1]
    assert inside > 5, "no stop token fell inside a block: the test tests nothing"


def test_proposals_behind_a_stop_token_do_not_count_as_accepted(target):
    """Even where the target would have gone on with just these tokens."""
    prompts = random_prompts(20, vocab_size=32, seed=12)
    endless = decode_without_cache(target, prompts, max_new_tokens=20, temperature=0.0, seed=0, stop_token_ids=[])
    whole = [prompt + answer.tokens for prompt, answer in zip(prompts, endless, strict=True)]

    def script(history):
        return next(tokens for tokens in whole if tokens[: len(history)] == history)[len(history) :]

    stop = endless[0].tokens[3]
    run = _decode(target, ScriptedProposer(script, depth=7), prompts, stop_token_ids=[stop])
    assert run.answers[0].tokens == endless[0].tokens[:4]
    assert (run.answers[0].committed, run.answers[0].accepted, run.answers[0].proposed) == ([3], [3], [7])
    assert run.answers[0].counts(depth=7).accepted_through == (1, 1, 1, 0, 0, 0, 0)


def test_the_stop_token_may_be_the_first_token(target):
    prompts = random_prompts(40, vocab_size=32, seed=2)
    first = decode_without_cache(target, prompts, max_new_tokens=1, temperature=0.0, seed=0)
    stop = first[0].tokens[0]
    run = _decode(target, NoProposer(), prompts, stop_token_ids=[stop])
    assert run.answers[0].tokens == [stop]
    assert (run.answers[0].finish_reason, run.answers[0].committed) == ("stop", [])


@pytest.mark.parametrize("max_new_tokens", [1, 2, 3, 9])
def test_exact_length_whatever_the_block(target, max_new_tokens):
    prompts = random_prompts(9, vocab_size=32, seed=4)
    script, expected = _oracle(target, prompts, max_new_tokens=max_new_tokens)
    run = _decode(target, ScriptedProposer(script, depth=4), prompts, max_new_tokens=max_new_tokens)
    assert [answer.tokens for answer in run.answers] == expected
    assert all(len(answer.tokens) == max_new_tokens for answer in run.answers if answer.finish_reason == "length")
    assert all(sum(answer.committed) == len(answer.tokens) - 1 for answer in run.answers)


def test_token_ids_have_no_hidden_meaning(target):
    """Real tokens are never dropped by value, whatever is proposed or padded with (B28, z-lab's mask sentinel)."""
    prompts = random_prompts(6, vocab_size=32, seed=5)
    plain = decode_without_cache(target, prompts, max_new_tokens=20, temperature=0.0, seed=0)
    for token in (0, 1, 31):
        run = _decode(target, ScriptedProposer(lambda history, token=token: [token] * 5, depth=5), prompts)
        assert [answer.tokens for answer in run.answers] == [answer.tokens for answer in plain]


def test_rows_may_propose_differently_many_tokens(target):
    prompts = random_prompts(8, vocab_size=32, seed=6)
    script, expected = _oracle(target, prompts, max_new_tokens=20)
    ragged = ScriptedProposer(lambda history: script(history)[: len(history) % 5], depth=4)
    run = _decode(target, ragged, prompts)
    assert [answer.tokens for answer in run.answers] == expected
    assert {count for answer in run.answers for count in answer.proposed} == {0, 1, 2, 3, 4}


@pytest.mark.parametrize("policy", [CutPolicy(ratio=0.25), CutPolicy(ratio=0.6), CutPolicy()])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_cut_changes_what_is_verified_and_nothing_else(target, policy, temperature):
    prompts = random_prompts(10, vocab_size=32, seed=7)
    script, expected = _oracle(target, prompts, max_new_tokens=20, wrong_every=4, temperature=temperature)
    proposer = ScriptedProposer(script, depth=4)
    run = _decode(target, proposer, prompts, cut=policy, temperature=temperature)
    assert [answer.tokens for answer in run.answers] == expected
    proposed = sum(sum(answer.proposed) for answer in run.answers)
    drafted = sum(sum(answer.drafted) for answer in run.answers)
    steps = sum(len(answer.proposed) for answer in run.answers)
    ratio = 0.75 if policy.ratio is None else policy.ratio
    assert drafted == 4 * steps
    assert (proposed + steps) / (drafted + steps) == pytest.approx(ratio, abs=0.12)


def test_auto_follows_the_costs(target):
    prompts = random_prompts(4, vocab_size=32, seed=8)
    free = StepCosts(
        verification=tuple(VerifyPoint(batch_size=b, slots=b * w, seconds=1.0) for b in (1, 4) for w in (1, 5))
    )
    dear = StepCosts(
        verification=tuple(
            VerifyPoint(batch_size=b, slots=b * w, seconds=float(w**3)) for b in (1, 4) for w in range(1, 6)
        )
    )
    kept = []
    for costs in (free, dear):
        proposer = ScriptedProposer(lambda history: [0, 0, 0, 0], depth=4)
        run = _decode(target, proposer, prompts, cut=CutPolicy(costs=costs))
        kept.append(max(count for answer in run.answers for count in answer.proposed))
    assert kept[0] == 4
    assert kept[1] < 4


def test_the_random_stream_belongs_to_the_row_not_to_the_batch(target):
    prompts = random_prompts(7, vocab_size=32, seed=9)
    whole = _decode(target, NoProposer(), prompts, temperature=1.0, batch_size=7)
    order = [3, 0, 6, 2]
    part = _decode(
        target, LookupProposer(max_match=3, num_proposals=7), [prompts[i] for i in order],
        temperature=1.0, batch_size=2, row_ids=order,
    )  # fmt: skip
    assert [answer.tokens for answer in part.answers] == [whole.answers[i].tokens for i in order]
    other = _decode(target, NoProposer(), prompts, temperature=1.0, seed=1)
    assert [answer.tokens for answer in other.answers] != [answer.tokens for answer in whole.answers]


def test_progress_and_components_add_up(target):
    prompts = random_prompts(6, vocab_size=32, seed=10)
    finished = []
    run = _decode(target, LookupProposer(max_match=3, num_proposals=3), prompts, progress=finished.append)
    assert finished == sorted(finished)
    assert finished[-1] == 6
    assert set(run.seconds) == set(COMPONENTS)
    assert all(seconds > 0 for seconds in run.seconds.values())
    assert sum(run.seconds.values()) <= run.total_seconds


def test_what_cannot_be_decoded_is_refused(target):
    assert _decode(target, NoProposer(), []).answers == []
    with pytest.raises(ValueError, match="prompt 1 is empty"):
        _decode(target, NoProposer(), [[2], []])
    with pytest.raises(ValueError, match="at least 1"):
        _decode(target, NoProposer(), [[2]], max_new_tokens=0)
    with pytest.raises(DataError, match="exceed the 512 positions"):
        _decode(target, NoProposer(), [[2] * 493])
    assert len(_decode(target, NoProposer(), [[2] * 492], stop_token_ids=[]).answers[0].tokens) == 20


def test_a_long_row_that_is_gone_does_not_keep_the_cache_wide(target, monkeypatch):
    caches = []
    inner = target.new_cache
    monkeypatch.setattr(target, "new_cache", lambda **size: caches.append(inner(**size)) or caches[-1])
    widths = []

    def script(history):
        widths.append(caches[0].width)
        return []

    prompts = [[2] * 400, *([[3, 4]] * 4)]
    _decode(target, ScriptedProposer(script, depth=1), prompts, batch_size=2, stop_token_ids=[])
    assert widths[0] > 400
    assert widths[-1] <= 64


def test_decoding_leaves_no_gradient(target):
    run = _decode(target, NoProposer(), [[2, 3]])
    assert torch.is_grad_enabled()
    assert not any(parameter.requires_grad for parameter in target.model.parameters())
    assert run.answers[0].tokens
