"""Losslessness: speculative decoding gives the target's own tokens (B28), and samples of its own distribution (B29)."""

import pytest
import scipy.stats
import torch
from decoding_builders import ScriptedProposer, random_prompts, small_target
from drafter_builders import tiny_drafter
from mtp_builders import fitting_mtp

from angelspec.core.recipe import TargetSection
from angelspec.decoding import verifiers
from angelspec.decoding.block_proposer import BlockProposer
from angelspec.decoding.lookup import LookupProposer
from angelspec.decoding.mtp_proposer import MtpProposer
from angelspec.decoding.plain import decode_plain, decode_without_cache
from angelspec.decoding.proposer import NoProposer
from angelspec.decoding.speculative import CutPolicy, decode
from angelspec.ops.verification import Verdict, verify
from angelspec.targets.target import load_target

VOCABULARY = 32


@pytest.fixture(scope="module")
def target():
    return small_target(vocab_size=VOCABULARY)


@pytest.fixture(scope="module")
def truth(target):
    """200 prompts and their plain answers, by temperature."""
    prompts = random_prompts(200, vocab_size=VOCABULARY, seed=11)
    answers = {
        temperature: decode_without_cache(target, prompts, max_new_tokens=22, temperature=temperature, seed=5)
        for temperature in (0.0, 1.0)
    }
    return prompts, answers


def _unrelated(depth):
    """Drafts by another model that reads nothing but the token before."""
    model = small_target(vocab_size=VOCABULARY, seed=1, num_layers=1)
    hidden_BTD = model.forward(torch.arange(VOCABULARY).unsqueeze(1)).hidden_BTD
    following = model.logits(hidden_BTD[:, -1]).argmax(-1).tolist()

    def script(history):
        tokens = [history[-1]]
        for _ in range(depth):
            tokens.append(following[tokens[-1]])
        return tokens[1:]

    return script


def _often_right(prompts, answers, depth):
    """Drafts the true answer, with an error now and then, and goes on behind its end."""
    whole = {tuple(prompt): answer.tokens for prompt, answer in zip(prompts, answers, strict=True)}
    longest = max(map(len, whole))

    def script(history):
        for length in range(1, longest + 1):
            answer = whole.get(tuple(history[:length]))
            if answer is not None and history[length:] == answer[: len(history) - length]:
                future = [*answer[len(history) - length :], *range(2, 2 + depth)][:depth]
                return [
                    (token + 1) % VOCABULARY if (len(history) + i) % 5 == 0 else token for i, token in enumerate(future)
                ]
        raise AssertionError("the history is no prefix of the plain answer")

    return script


@pytest.mark.parametrize("depth", range(1, 9))
def test_b28_token_identical_at_every_depth(target, truth, depth):
    prompts, answers = truth
    scripts = {"unrelated": _unrelated(depth), "often right": _often_right(prompts, answers[0.0], depth)}
    accepted = {}
    for number, (name, script) in enumerate(scripts.items()):
        chosen = range(number, 200, 2)  # each draft on half of the prompts
        run = decode(
            target, ScriptedProposer(script, depth=depth), [prompts[i] for i in chosen],
            max_new_tokens=22, temperature=0.0, seed=5, batch_size=25,
        )  # fmt: skip
        accepted[name] = sum(sum(answer.accepted) for answer in run.answers)
        for i, answer in zip(chosen, run.answers, strict=True):
            assert answer.tokens == answers[0.0][i].tokens, f"{name}: prompt {i}"
            assert answer.finish_reason == answers[0.0][i].finish_reason
            assert 1 not in answer.tokens[:-1], "nothing may follow the stop token"
            assert len(answer.tokens) == 22 or answer.tokens[-1] == 1
    assert accepted["often right"] > 500, "nothing was accepted: the test tests nothing"
    assert accepted["unrelated"] > 5
    assert any(answer.finish_reason == "stop" for answer in answers[0.0])


@pytest.mark.parametrize("cut", [None, CutPolicy(ratio=0.5)])
def test_equal_samples_at_temperature_one(target, truth, cut):
    """The same seed draws the same tokens with and without drafting: stronger than an equal distribution."""
    prompts, answers = truth
    script = _often_right(prompts, answers[1.0], 5)
    run = decode(
        target, ScriptedProposer(script, depth=5), prompts,
        max_new_tokens=22, temperature=1.0, seed=5, batch_size=40, cut=cut,
    )  # fmt: skip
    assert [answer.tokens for answer in run.answers] == [answer.tokens for answer in answers[1.0]]
    assert sum(sum(answer.accepted) for answer in run.answers) > 100


def test_the_two_truths_agree(target, truth):
    prompts, answers = truth
    for temperature in (0.0, 1.0):
        plain = decode_plain(target, prompts[:12], max_new_tokens=22, temperature=temperature, seed=5)
        assert [answer.tokens for answer in plain] == [answer.tokens for answer in answers[temperature][:12]]


@pytest.mark.parametrize("family", ["llama", "qwen3", "hy3"])
def test_real_drafters_on_real_architectures(family):
    section = TargetSection(source=f"random:{family}", mode_family={"llama": "smollm2"}.get(family, family))
    target = load_target(section, dtype=torch.float32)
    geometry = target.geometry
    message = [{"role": "user", "content": "Say hello. Say hello."}]
    prompts = [
        target.render(message, mode=mode, add_generation_prompt=True)[: -1 - cut or None]
        for cut, mode in enumerate(target.mode_family.modes * 2)
    ]
    drafter = tiny_drafter(
        "dfly", hidden_size=geometry.hidden_size, target_hidden_size=geometry.hidden_size,
        vocab_size=geometry.vocab_size, target_num_layers=geometry.num_layers, target_layer_ids=(1, 3, 4),
        mask_token_id=geometry.vocab_size - 1, max_position_embeddings=512,
    ).eval()  # fmt: skip
    proposers = [
        BlockProposer(drafter, target=target, name="exact"),
        BlockProposer(drafter, target=target, name="shortlist", shortlist=8),
        MtpProposer(fitting_mtp(geometry), target=target, name="mtp"),
        MtpProposer(fitting_mtp(geometry, "moe", num_depths=5), target=target, name="mtp of experts"),
        LookupProposer(max_match=3, num_proposals=7),
        NoProposer(),
    ]
    for temperature in (0.0, 0.8):
        plain = decode_without_cache(target, prompts, max_new_tokens=17, temperature=temperature, seed=2)
        for proposer in proposers:
            run = decode(target, proposer, prompts, max_new_tokens=17, temperature=temperature, seed=2, batch_size=3)
            assert [a.tokens for a in run.answers] == [a.tokens for a in plain], proposer.name


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("cut", [None, CutPolicy(ratio=0.5)])
def test_mtp_gives_the_plain_tokens(target, truth, temperature, cut):
    prompts, answers = truth
    proposer = MtpProposer(fitting_mtp(target.geometry), target=target, name="mtp")
    run = decode(
        target, proposer, prompts, max_new_tokens=22, temperature=temperature, seed=5, batch_size=30, cut=cut
    )  # fmt: skip
    assert [answer.tokens for answer in run.answers] == [answer.tokens for answer in answers[temperature]]
    assert sum(sum(answer.accepted) for answer in run.answers) > 20, "nothing was accepted: the test tests nothing"


# ---- B29


def _always_accept(logits_BQV, **arguments):
    verdict = verify(logits_BQV, **arguments)
    chosen_BQ = verdict.chosen_BQ.clone()
    proposals_BK, lengths_B = arguments["proposals_BK"], arguments["lengths_B"]
    depth = proposals_BK.shape[1]
    offered_BK = torch.arange(depth) < lengths_B.unsqueeze(1)
    chosen_BQ[:, :depth] = torch.where(offered_BK, proposals_BK, chosen_BQ[:, :depth])
    return Verdict(chosen_BQ, lengths_B)


def _p_value(target, temperature, *, proposer=None, draws=20_000):
    """Chi-square of the first two tokens behind the prefill's one, against the target's own joint distribution.

    Without a proposer the target's most likely second token is drafted.
    """
    prompt = [2, 5]
    vocabulary = target.geometry.vocab_size

    def conditional(rows):
        hidden_BTD = target.forward(torch.tensor(rows)).hidden_BTD
        return torch.softmax(target.logits(hidden_BTD[:, -1]).double() / temperature, -1)

    first_V = conditional([prompt])[0]
    second_VV = conditional([[*prompt, a] for a in range(vocabulary)])
    joint = first_V.unsqueeze(1) * second_VV
    script = {(*prompt, a): int(second_VV[a].argmax()) for a in range(vocabulary)}
    if proposer is None:
        proposer = ScriptedProposer(lambda history: [script.get(tuple(history), 3)] * 2, depth=2)
    run = decode(
        target, proposer, [prompt] * draws,
        max_new_tokens=2, temperature=temperature, seed=17, batch_size=draws, stop_token_ids=[],
    )  # fmt: skip
    assert sum(sum(answer.accepted) > 0 for answer in run.answers) > draws / 100, "nothing was accepted"
    pairs = torch.tensor([answer.tokens for answer in run.answers])
    observed = torch.bincount(pairs[:, 0] * vocabulary + pairs[:, 1], minlength=vocabulary**2).double()
    expected = joint.flatten() * draws
    rare = expected < 5  # pooled into one cell
    observed = torch.cat([observed[~rare], observed[rare].sum().unsqueeze(0)])
    expected = torch.cat([expected[~rare], expected[rare].sum().unsqueeze(0)])
    keep = expected > 0
    statistic = ((observed - expected)[keep] ** 2 / expected[keep]).sum()
    assert int(keep.sum()) > 15, "the distribution is nearly a point: the test tests nothing"
    return scipy.stats.chi2.sf(float(statistic), int(keep.sum()) - 1)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_b29_the_joint_distribution_is_the_targets(monkeypatch, temperature):
    target = small_target(vocab_size=8, sharpness=0.7, num_layers=1)
    assert _p_value(target, temperature) > 1e-3
    monkeypatch.setattr(verifiers, "verify", _always_accept)
    assert _p_value(target, temperature) < 1e-6


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_mtp_keeps_the_joint_distribution(monkeypatch, temperature):
    target = small_target(vocab_size=8, sharpness=0.7, num_layers=1)
    proposer = MtpProposer(fitting_mtp(target.geometry), target=target, name="mtp")
    assert _p_value(target, temperature, proposer=proposer) > 1e-3
    monkeypatch.setattr(verifiers, "verify", _always_accept)
    assert _p_value(target, temperature, proposer=proposer) < 1e-6
