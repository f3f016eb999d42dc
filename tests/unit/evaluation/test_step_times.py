"""Step times: measured in turns, side by side, kept as units."""

import pytest
import torch
from decoding_builders import random_prompts, small_target
from drafter_builders import tiny_drafter

from angelspec.data.answers import Prompt
from angelspec.decoding.block_proposer import BlockProposer
from angelspec.decoding.lookup import LookupProposer
from angelspec.evaluation import step_times
from angelspec.evaluation.breakeven import PLAIN
from angelspec.evaluation.results import MeasureSettings
from angelspec.evaluation.step_times import measure_step_times, num_steps
from angelspec.evaluation.suites import Suite

SETTINGS = MeasureSettings(temperatures=(0.0, 1.0), max_new_tokens=24, batch_size=4, seed=3)


@pytest.fixture(scope="module")
def target():
    return small_target(vocab_size=50, num_layers=3)


@pytest.fixture(scope="module")
def suite():
    prompts = random_prompts(3, vocab_size=50, seed=4)
    return Suite("mixed", tuple(Prompt(f"a{i}", "math", tuple(tokens)) for i, tokens in enumerate(prompts)))


def _proposers(target):
    drafter = tiny_drafter(
        "dfly", hidden_size=32, target_hidden_size=32, target_num_layers=3, target_layer_ids=(0, 1, 2)
    ).eval()
    return [
        BlockProposer(drafter, target=target, name="dfly"), LookupProposer(max_match=3, num_proposals=5),
    ]  # fmt: skip


def test_all_runners_in_turns_at_every_temperature_and_batch_size(target, suite, tmp_path, monkeypatch):
    calls, seen = [], []
    inner = step_times.time_steps

    def recorded(target, proposer, prompts, **settings):
        calls.append((proposer.name, settings["temperature"], [list(prompt) for prompt in prompts]))
        return inner(target, proposer, prompts, **settings)

    monkeypatch.setattr(step_times, "time_steps", recorded)
    arguments = {"settings": SETTINGS, "batch_sizes": (5, 1), "steps": 2, "rounds": 2, "folder": tmp_path}
    proposers = _proposers(target)
    results = measure_step_times(target, proposers, suite, **arguments, advance=seen.append)
    names = ["dfly", "prompt lookup", "plain"]
    assert [name for name, _, _ in calls] == [*names, *names[::-1]] * 4
    assert [(r.proposer, r.temperature, r.batch_size) for r in results] == [
        (name, temperature, size)
        for temperature in (0.0, 1.0)
        for size in (1, 5)
        for name in ("dfly", "prompt lookup", PLAIN)
    ]
    tokens = [list(prompt.tokens) for prompt in suite.prompts]
    assert {len(batch): batch for _, _, batch in calls} == {1: tokens[:1], 5: [*tokens, *tokens[:2]]}
    assert all(r.steps == 4 and r.verify_seconds > 0 and r.sample_seconds > 0 for r in results)
    assert all(r.draft_seconds > 0 for r in results)
    total = num_steps(proposers, settings=SETTINGS, batch_sizes=(5, 1), steps=2, rounds=2)
    assert seen == sorted(seen) and seen[-1] == total == 2 * 2 * 3 * 2 * 2

    assert measure_step_times(target, proposers, suite, **arguments) == results
    assert len(calls) == 24
    measure_step_times(target, proposers[:1], suite, **arguments)  # other neighbours: measured side by side again
    assert len(calls) == 24 + 16


def test_handing_states_over_belongs_to_the_draft(target, suite, monkeypatch):
    spent = {"prefill": 9.0, "draft": 1.0, "verify": 2.0, "sample": 4.0, "features": 0.5}
    monkeypatch.setattr(step_times, "time_steps", lambda *arguments, **settings: dict(spent))
    greedy = SETTINGS.model_copy(update={"temperatures": (0.0,)})
    (result, _) = measure_step_times(
        target, _proposers(target)[:1], suite, settings=greedy, batch_sizes=(2,), steps=3, rounds=2
    )
    assert (result.draft_seconds, result.verify_seconds, result.sample_seconds) == (3.0, 4.0, 8.0)
    assert result.seconds_per_step == pytest.approx(15.0 / 6)
    assert not torch.is_inference_mode_enabled()
