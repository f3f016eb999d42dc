"""Drafters measured on recorded answers take the very steps of real decoding."""

import pytest
from decoding_builders import ScriptedProposer, random_prompts, small_target
from drafter_builders import tiny_drafter
from mtp_builders import fitting_mtp

from angelspec.core.errors import DataError
from angelspec.decoding.block_proposer import BlockProposer
from angelspec.decoding.lookup import LookupProposer
from angelspec.decoding.mtp_proposer import MtpProposer
from angelspec.decoding.proposer import NoProposer
from angelspec.decoding.recording import decode_recorded, record, record_states
from angelspec.decoding.speculative import CutPolicy, decode

VOCABULARY = 50
LIMIT = 20


@pytest.fixture(scope="module")
def target():
    return small_target(vocab_size=VOCABULARY, num_layers=3)


@pytest.fixture(scope="module")
def prompts():
    return random_prompts(60, vocab_size=VOCABULARY, seed=4)


def _oracle(target, prompts, temperature):
    """Drafts the true answer, past its end too, with an error now and then; checks the states that it is given."""
    whole = [
        [*prompt, *answer.tokens]
        for prompt, answer in zip(
            prompts,
            decode(
                target, NoProposer(), prompts, max_new_tokens=LIMIT + 8, temperature=temperature, seed=5,
                batch_size=16, stop_token_ids=(), past_positions=True,
            ).answers,
            strict=True,
        )
    ]  # fmt: skip

    def script(history):
        future = next(tokens for tokens in whole if tokens[: len(history)] == history)[len(history) :] + [0] * 8
        return [(t + 1) % VOCABULARY if (len(history) + i) % 9 == 0 else t for i, t in enumerate(future)]

    return ScriptedProposer(script, depth=7, target=target, layer_ids=(0, 2))


def _proposers(target, prompts, temperature):
    yield _oracle(target, prompts, temperature)
    yield LookupProposer(max_match=2, num_proposals=5)
    fit = {"hidden_size": 32, "target_hidden_size": 32, "target_num_layers": 3, "target_layer_ids": (0, 1, 2)}
    yield BlockProposer(tiny_drafter("dfly", block_size=4, **fit).eval(), target=target, name="dfly")
    yield MtpProposer(fitting_mtp(target.geometry), target=target, name="mtp")


@pytest.mark.parametrize("cut", [None, CutPolicy(ratio=0.5)])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_step_is_that_of_decoding(target, prompts, temperature, cut):
    settings = {"max_new_tokens": LIMIT, "temperature": temperature, "seed": 5}
    recording = record(target, prompts, depth=7, batch_size=16, **settings)
    past_limit = accepted = 0
    for proposer in _proposers(target, prompts, temperature):
        expected = decode(target, proposer, prompts, batch_size=16, cut=cut, **settings).answers
        states = record_states(target, recording, layer_ids=proposer.layer_ids)
        finished = []  # a cut shares the verified slots among a batch's rows, so it depends on who they are
        found = decode_recorded(
            proposer, recording, states, batch_size=16 if cut else 9, cut=cut, progress=finished.append
        ).answers  # fmt: skip
        assert found == expected, proposer.name
        assert finished[-1] == len(prompts)
        accepted += sum(sum(answer.accepted) for answer in found)
        past_limit += sum(
            answer.finish_reason == "length" and answer.accepted[-1] + 1 > answer.committed[-1] for answer in found
        )
    assert {answer.finish_reason for answer in recording.answers} == {"stop", "length"}
    assert accepted > 500, "nothing was accepted: the test tests nothing"
    assert past_limit > 5, "no block reached past the limit: the test tests nothing"


def test_answers_may_end_at_the_targets_last_position(target):
    last = target.geometry.max_position_embeddings
    prompts = random_prompts(8, vocab_size=VOCABULARY, seed=4)
    prompts = [(prompt * last)[: last - LIMIT] for prompt in prompts]
    settings = {"max_new_tokens": LIMIT, "temperature": 0.0, "seed": 5}
    recording = record(target, prompts, depth=7, batch_size=8, **settings)
    past_positions = 0
    for proposer in _proposers(target, prompts, 0.0):
        expected = decode(target, proposer, prompts, batch_size=8, **settings).answers
        states = record_states(target, recording, layer_ids=proposer.layer_ids)
        found = decode_recorded(proposer, recording, states, batch_size=8).answers
        assert found == expected, proposer.name
        past_positions += sum(answer.accepted[-1] + 1 > answer.committed[-1] for answer in found)
    assert past_positions > 2, "no block reached past the positions: the test tests nothing"
    with pytest.raises(DataError, match="exceed the 512 positions"):
        record(target, prompts, depth=7, batch_size=8, **{**settings, "max_new_tokens": LIMIT + 1})


def test_an_error_in_the_recording_is_found(target, prompts):
    """The parity above can fail: one changed token changes steps."""
    settings = {"max_new_tokens": LIMIT, "temperature": 0.0, "seed": 5}
    proposer = LookupProposer(max_match=2, num_proposals=5)
    recording = record(target, prompts, depth=7, batch_size=16, **settings)
    states = record_states(target, recording, layer_ids=())
    expected = decode_recorded(proposer, recording, states, batch_size=16).answers
    longest = max(recording.answers, key=lambda answer: len(answer.tokens))
    longest.tokens[3] = (longest.tokens[3] + 1) % VOCABULARY
    assert decode_recorded(proposer, recording, states, batch_size=16).answers != expected


def test_nothing_to_measure(target):
    recording = record(target, [], depth=3, max_new_tokens=4, temperature=0.0, seed=0, batch_size=2)
    assert decode_recorded(LookupProposer(max_match=2, num_proposals=3), recording, [], batch_size=2).answers == []
