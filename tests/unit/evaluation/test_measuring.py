"""Measuring on a small target with a real drafter: counts, groups, units that are kept, exactness, speed."""

import json

import pytest
import torch
from decoding_builders import random_prompts, small_target
from drafter_builders import tiny_drafter

from angelspec.core.errors import DataError
from angelspec.data.answers import Prompt
from angelspec.decoding import verifiers
from angelspec.decoding.block_proposer import BlockProposer
from angelspec.decoding.lookup import LookupProposer
from angelspec.decoding.plain import decode_without_cache
from angelspec.decoding.proposer import NoProposer
from angelspec.decoding.speculative import CutPolicy, decode
from angelspec.evaluation import acceptance, suite_decoding
from angelspec.evaluation.acceptance import (
    batch_groups,
    check_exactness,
    compare_answers,
    measure,
    measure_speed,
    num_answers,
)
from angelspec.evaluation.results import AnswerGroup, MeasureSettings
from angelspec.evaluation.shortlist import measure_shortlists
from angelspec.evaluation.suites import Suite
from angelspec.ops.verification import Verdict, verify

SETTINGS = MeasureSettings(temperatures=(0.0, 1.0), max_new_tokens=24, batch_size=4, seed=3)


@pytest.fixture(scope="module")
def target():
    return small_target(vocab_size=50, num_layers=3)


@pytest.fixture(scope="module")
def suites():
    prompts = random_prompts(13, vocab_size=50, seed=4)
    first = [Prompt(f"a{i}", "math", tuple(tokens)) for i, tokens in enumerate(prompts[:8])]
    second = [Prompt(f"b{i}", ("chat", "code")[i % 2], tuple(tokens)) for i, tokens in enumerate(prompts[8:])]
    return [Suite("sums", tuple(first)), Suite("talk", tuple(second))]


def _drafter(seed=0):
    return tiny_drafter(
        "dfly", seed=seed, hidden_size=32, target_hidden_size=32, target_num_layers=3, target_layer_ids=(0, 1, 2)
    ).eval()


def _proposers(target):
    return [BlockProposer(_drafter(), target=target, name="dfly"), LookupProposer(max_match=3, num_proposals=7)]


def test_counts_are_those_of_the_plain_answers(target, suites):
    seen = []
    results = measure(target, _proposers(target), suites, settings=SETTINGS, advance=seen.append)
    assert [(r.suite, r.temperature, r.proposer) for r in results] == [
        (suite, temperature, proposer)
        for suite in ("sums", "talk")
        for temperature in (0.0, 1.0)
        for proposer in ("dfly", "prompt lookup")
    ]
    for result in results:
        suite = next(suite for suite in suites if suite.name == result.suite)
        plain = decode_without_cache(
            target, [p.tokens for p in suite.prompts], max_new_tokens=24, temperature=result.temperature, seed=3
        )
        for finished in (True, False):
            chosen = [
                (prompt, answer)
                for prompt, answer in zip(suite.prompts, plain, strict=True)
                if (answer.finish_reason == "stop") == finished
            ]
            group = result.pooled(finished=finished)
            assert group.answers == len(chosen)
            assert group.tokens == sum(len(answer.tokens) for _, answer in chosen)
            assert group.counts.generated_tokens == group.tokens - group.answers
            math = result.pooled(finished=finished, workload="math")
            assert math.answers == sum(prompt.workload == "math" for prompt, _ in chosen)
    assert seen == sorted(seen)
    assert seen[-1] == num_answers(suites, _proposers(target), settings=SETTINGS) == 13 * 2 * 2
    assert {r.pooled(finished=True).answers > 0 for r in results} == {True}, "no answer finished: nothing is tested"


def test_finished_units_are_not_measured_again_and_changed_ones_are(target, suites, tmp_path, monkeypatch):
    calls = []
    inner = acceptance.decode_suites
    monkeypatch.setattr(acceptance, "decode_suites", lambda *a, **k: calls.append(a[1].name) or inner(*a, **k))
    once = measure(target, _proposers(target), suites, settings=SETTINGS, folder=tmp_path)
    assert len(calls) == 8
    again = measure(target, _proposers(target), suites, settings=SETTINGS, folder=tmp_path)
    assert again == once
    assert len(calls) == 8
    (tmp_path / sorted(path.name for path in tmp_path.iterdir())[0]).unlink()  # interrupted before its end
    assert [r.groups for r in measure(target, _proposers(target), suites, settings=SETTINGS, folder=tmp_path)] == [
        r.groups for r in once
    ]
    assert len(calls) == 9

    renamed = [BlockProposer(_drafter(), target=target, name="other name")]
    result = measure(target, renamed, suites[:1], settings=SETTINGS, folder=tmp_path)
    assert (len(calls), result[0].proposer) == (9, "other name")

    changes = [
        ({"settings": SETTINGS.model_copy(update={"seed": 4})}, {}),
        ({"settings": SETTINGS.model_copy(update={"max_new_tokens": 25})}, {}),
        ({"settings": SETTINGS.model_copy(update={"cut": CutPolicy(ratio=0.5)})}, {}),
        ({}, {"seed": 1}),
    ]
    for number, (arguments, drafter) in enumerate(changes, start=1):
        proposer = BlockProposer(_drafter(**drafter), target=target, name="dfly")
        measure(target, [proposer], suites[:1], **({"settings": SETTINGS, "folder": tmp_path} | arguments))
        assert len(calls) == 9 + 2 * number
    prompts = suites[0].prompts[:-1]
    measure(target, _proposers(target)[:1], [Suite("sums", prompts)], settings=SETTINGS, folder=tmp_path)
    assert len(calls) == 9 + 2 * len(changes) + 2


def test_small_suites_share_a_batch_and_keep_their_own_answers(target, suites, monkeypatch):
    calls = []
    inner = acceptance.decode_suites
    monkeypatch.setattr(acceptance, "decode_suites", lambda *a, **k: calls.append(inner(*a, **k)) or calls[-1])
    apart = [measure(target, _proposers(target), [suite], settings=SETTINGS) for suite in suites]
    assert len(calls) == 8
    calls.clear()
    wide = SETTINGS.model_copy(update={"batch_size": 13})
    together = measure(target, _proposers(target), suites, settings=wide)
    assert len(calls) == 4
    expected = [result.groups for part in apart for result in part]
    assert [result.groups for result in together] == expected
    assert sum(result.total_seconds for result in together) == pytest.approx(sum(run.total_seconds for run in calls))
    assert [len(group) for group in batch_groups([*suites, *suites], batch_size=len(suites[0].prompts) + 1)] == [2, 2]


def test_recorded_answers_give_the_same_counts_and_are_recorded_once(target, suites, tmp_path, monkeypatch):
    decoded = measure(target, _proposers(target), suites, settings=SETTINGS)
    calls, inner = [], suite_decoding.record
    monkeypatch.setattr(suite_decoding, "record", lambda *a, **k: calls.append(k["temperature"]) or inner(*a, **k))
    seen = []
    recorded = measure(
        target, _proposers(target), suites, settings=SETTINGS, recorded=True, folder=tmp_path, advance=seen.append
    )
    assert [(r.suite, r.temperature, r.proposer, r.groups) for r in recorded] == [
        (r.suite, r.temperature, r.proposer, r.groups) for r in decoded
    ]
    groups = len(batch_groups(suites, batch_size=SETTINGS.batch_size))
    assert calls == [0.0, 1.0] * groups
    assert seen[-1] == num_answers(suites, _proposers(target), settings=SETTINGS)
    for unit in tmp_path.glob("acceptance-*.json"):
        unit.unlink()  # an interrupted measurement goes on from the answers that it has
    again = measure(target, _proposers(target), suites, settings=SETTINGS, recorded=True, folder=tmp_path)
    assert [r.groups for r in again] == [r.groups for r in decoded]
    assert len(calls) == 2 * groups


def test_a_half_written_unit_is_never_left(target, suites, tmp_path, monkeypatch):
    def interrupted(*arguments, **keywords):
        raise KeyboardInterrupt

    monkeypatch.setattr(acceptance, "decode_suites", interrupted)
    with pytest.raises(KeyboardInterrupt):
        measure(target, _proposers(target), suites, settings=SETTINGS, folder=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_exactness_holds_and_finds_a_broken_acceptance(target, suites, monkeypatch):
    suite = suites[0].first(5)
    results = check_exactness(target, _proposers(target), suite, settings=SETTINGS)
    assert [(r.proposer, r.temperature) for r in results] == [
        ("dfly", 0.0), ("prompt lookup", 0.0), ("dfly", 1.0), ("prompt lookup", 1.0),
    ]  # fmt: skip
    assert all(r.exact and r.first_divergence is None and r.prompts == 5 for r in results)
    assert all(r.dtype == "float32" and r.tokens > 20 for r in results)

    def accept_one_too_many(logits_BQV, **arguments):
        verdict = verify(logits_BQV, **arguments)
        depth = arguments["proposals_BK"].shape[1]
        chosen_BQ = verdict.chosen_BQ.clone()
        chosen_BQ[:, :depth] = arguments["proposals_BK"]
        return Verdict(chosen_BQ, (verdict.accepted_B + 1).clamp_max(depth))

    monkeypatch.setattr(verifiers, "verify", accept_one_too_many)
    (broken,) = check_exactness(
        target, _proposers(target)[:1], suite, settings=SETTINGS.model_copy(update={"temperatures": (0.0,)})
    )
    assert not broken.exact
    assert broken.first_divergence is not None


def test_the_first_divergence_names_position_tokens_and_gap(target, suites):
    suite = suites[0].first(2)
    plain = [
        answer.tokens
        for answer in decode_without_cache(
            target, [p.tokens for p in suite.prompts], max_new_tokens=6, temperature=0.0, seed=0
        )
    ]
    changed = [plain[0], [*plain[1][:2], (plain[1][2] + 1) % 50, *plain[1][3:]]]
    result = compare_answers(target, suite, plain=plain, speculative=changed, proposer="x", temperature=0.0)
    first = result.first_divergence
    assert (result.identical, first.prompt_id, first.position) == (1, "a1", 2)
    assert (first.plain_token, first.speculative_token) == (plain[1][2], changed[1][2])
    prefix = [*suite.prompts[1].tokens, *plain[1][:2]]
    top = target.logits(target.forward(torch.tensor([prefix])).hidden_BTD[0, -1]).topk(2)
    assert top.indices[0] == plain[1][2]
    assert first.top2_gap == pytest.approx(float(top.values[0] - top.values[1]), rel=1e-5)
    shorter = compare_answers(
        target, suite, plain=plain, speculative=[plain[0][:3], plain[1]], proposer="x", temperature=0.0
    )
    assert (shorter.first_divergence.position, shorter.first_divergence.speculative_token) == (3, None)


def test_speed_is_measured_in_turns_on_the_same_tokens(target, suites, tmp_path, monkeypatch):
    order = []
    inner = acceptance.decode_suites
    monkeypatch.setattr(acceptance, "decode_suites", lambda *a, **k: order.append(a[1].name) or inner(*a, **k))
    greedy = SETTINGS.model_copy(update={"temperatures": (0.0,)})
    arguments = {"settings": greedy, "prompts_per_suite": 3, "folder": tmp_path}
    results = measure_speed(target, [*_proposers(target), NoProposer()], suites[:1], **arguments)
    names = ["plain", "dfly", "prompt lookup"]
    assert order == [*names, *names, *names[::-1]]  # unmeasured, there and back
    assert [r.proposer for r in results] == names[1:]
    assert all(r.tokens == r.plain_tokens > 0 and r.tokens_per_second > 0 and r.prompts == 3 for r in results)
    assert measure_speed(target, _proposers(target), suites[:1], **arguments) == results
    assert len(order) == 9


def test_shortlists_give_the_same_answers_and_approach_the_exact_drafts(target, suites):
    seen = []
    results = measure_shortlists(
        target, _drafter(), suites[0], settings=SETTINGS, sizes=(1, 50, None), rounds=1, advance=seen.append
    )
    assert [r.size for r in results] == [1, 50, None]
    assert len({r.tokens for r in results}) == 1
    assert results[1].counts == results[2].counts  # all 50 tokens are candidates
    assert results[0].counts != results[2].counts
    assert all(r.draft_seconds_per_step > 0 for r in results)
    assert seen == [8, 16, 24]


def test_groups_add_up(target, suites):
    prompts = [prompt.tokens for prompt in suites[0].prompts]
    run = decode(
        target, LookupProposer(max_match=3, num_proposals=7), prompts,
        max_new_tokens=40, temperature=0.0, seed=0, batch_size=8,
    )  # fmt: skip
    whole = AnswerGroup.of(run.answers, depth=7)
    assert whole == AnswerGroup.of(run.answers[:3], depth=7) + AnswerGroup.of(run.answers[3:], depth=7)
    assert whole.ngrams == sum(max(0, len(answer.tokens) - 11) for answer in run.answers)
    assert 0 <= whole.repeated_ngrams <= whole.ngrams
    assert AnswerGroup().repeated_share is None


def test_what_cannot_be_told_apart_is_refused(target, suites):
    with pytest.raises(DataError, match="share the name sums"):
        measure(target, _proposers(target), [suites[0], suites[0]], settings=SETTINGS)
    with pytest.raises(DataError, match="two drafters share a name"):
        measure(target, _proposers(target)[:1] * 2, suites, settings=SETTINGS)
    with pytest.raises(DataError, match="holds no prompts"):
        Suite("empty", ())


def test_units_are_plain_json_that_says_what_it_is(target, suites, tmp_path):
    measure(target, _proposers(target)[1:], suites[:1], settings=SETTINGS, folder=tmp_path)
    record = json.loads(sorted(tmp_path.iterdir())[0].read_text())
    assert record["unit"]["proposer"] == {"kind": "lookup", "max_match": 3, "num_proposals": 7}
    assert record["unit"]["target"] == target.digest
