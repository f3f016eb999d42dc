"""Timing of whole batches: every measured step has all rows, whatever they decode."""

import pytest
import torch
from decoding_builders import ScriptedProposer, random_prompts, small_target

from angelspec.core.errors import DataError
from angelspec.decoding.answers import COMPONENTS
from angelspec.decoding.plain import decode_without_cache
from angelspec.decoding.proposer import NoProposer
from angelspec.decoding.speculative import Loop
from angelspec.decoding.timing import time_steps


@pytest.fixture(scope="module")
def target():
    return small_target(vocab_size=32)


def _time(target, proposer, prompts, **changes):
    settings = {"steps": 5, "unmeasured_steps": 2, "temperature": 0.0, "seed": 0}
    return time_steps(target, proposer, prompts, **(settings | changes))


def _rows_per_step(monkeypatch):
    rows, inner = [], Loop.step

    def step(self):
        rows.append(len(self.running))
        inner(self)

    monkeypatch.setattr(Loop, "step", step)
    return rows


@pytest.mark.parametrize("perfect", [True, False])
def test_every_row_runs_in_every_step(target, monkeypatch, perfect):
    """Rows that accept all reach the limit no earlier; rows that would stop go on."""
    prompts = random_prompts(6, vocab_size=32, seed=1)
    endless = decode_without_cache(target, prompts, max_new_tokens=40, temperature=0.0, seed=0, stop_token_ids=[])
    whole = [prompt + answer.tokens for prompt, answer in zip(prompts, endless, strict=True)]
    monkeypatch.setattr(target, "stop_token_ids", (endless[0].tokens[2],))

    def script(history):
        future = next(tokens for tokens in whole if tokens[: len(history)] == history)[len(history) :] + [0] * 4
        return future if perfect else [(future[0] + 1) % 32, *future[1:]]

    rows = _rows_per_step(monkeypatch)
    seconds = _time(target, ScriptedProposer(script, depth=4), prompts)
    assert rows == [6] * 7
    assert set(seconds) == set(COMPONENTS)
    assert seconds["prefill"] == 0
    assert all(seconds[part] > 0 for part in ("draft", "verify", "sample", "features"))


def test_unmeasured_steps_are_left_out(target, monkeypatch):
    rows = _rows_per_step(monkeypatch)
    one = _time(target, NoProposer(), [[2, 3]], steps=1, unmeasured_steps=40)
    assert len(rows) == 41
    many = _time(target, NoProposer(), [[2, 3]], steps=40, unmeasured_steps=1)
    assert one["verify"] < many["verify"] / 3


def test_an_answer_that_outgrows_the_target_is_refused(target):
    with pytest.raises(DataError, match="exceed the 512 positions"):
        _time(target, NoProposer(), [[2] * 505])
    assert torch.is_grad_enabled()
