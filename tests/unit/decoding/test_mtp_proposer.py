"""MTP in the loop: what it is shown and when, and that it drafts as if it had seen the whole history at once."""

from types import SimpleNamespace

import pytest
import torch
from decoding_builders import random_prompts, small_target
from drafter_builders import tiny_drafter
from mtp_builders import fitting_mtp, tiny_mtp_config

from angelspec.core.errors import CheckpointError
from angelspec.decoding.block_proposer import BlockProposer
from angelspec.decoding.mtp_proposer import MtpProposer
from angelspec.decoding.plain import decode_without_cache
from angelspec.decoding.proposer import Observed
from angelspec.decoding.proposers import drafter_proposer
from angelspec.decoding.speculative import CutPolicy, decode


@pytest.fixture(scope="module")
def target():
    return small_target(vocab_size=50, num_layers=3)


class RecordingDrafter:
    """Stands in for an MTP drafter: remembers per row what it was extended by, and drafts what a script says."""

    def __init__(self, config, script):
        self.config, self.script = config, script
        self.widths = []

    def context_cache(self, rows, *, capacity):
        self.rows = [[] for _ in range(rows)]

        def reset(rows):
            for row in rows.tolist():
                self.rows[row] = []

        return SimpleNamespace(num_rows=rows, reset=reset)

    def extend(self, cache, hidden_BTD, next_tokens_BT, *, counts_B, rows=None, embedding_VD):
        assert hidden_BTD.shape[:2] == next_tokens_BT.shape
        assert int(counts_B.min()) >= 1
        self.widths.append(next_tokens_BT.shape[1])
        numbers = range(cache.num_rows) if rows is None else rows.tolist()
        for index, row in enumerate(numbers):
            count = int(counts_B[index])
            self.rows[row] += zip(hidden_BTD[index, :count], next_tokens_BT[index, :count].tolist(), strict=True)
        return torch.stack([self.rows[row][-1][0] for row in numbers])

    def draft(self, cache, hidden_BD, *, num_depths, embedding_VD, head_VD, rows=None):
        numbers = range(cache.num_rows) if rows is None else rows.tolist()
        torch.testing.assert_close(hidden_BD, torch.stack([self.rows[row][-1][0] for row in numbers]))
        tokens_BK = torch.tensor([self.script([token for _, token in self.rows[row]])[:num_depths] for row in numbers])
        return SimpleNamespace(tokens_BK=tokens_BK, confidence_BK=torch.full(tokens_BK.shape, 0.5))


def _script(target, prompts, *, wrong_every):
    """Knows the greedy answers by everything behind the first token, and errs at every n-th position."""
    answers = decode_without_cache(target, prompts, max_new_tokens=20, temperature=0.0, seed=0)
    whole = [prompt + answer.tokens for prompt, answer in zip(prompts, answers, strict=True)]

    def script(behind_the_first):
        known = len(behind_the_first)
        future = next(tokens for tokens in whole if tokens[1 : 1 + known] == behind_the_first)[1 + known :] + [0] * 8
        return [(token + 1) % 50 if (known + i) % wrong_every == 0 else token for i, token in enumerate(future)]

    return script, [answer.tokens for answer in answers]


@pytest.mark.parametrize("longest", [3, 9])  # shorter than a window of depth 3; longer: extended when observed
def test_the_drafter_is_shown_every_state_once_with_the_token_behind_it(target, longest):
    prompts = random_prompts(7, vocab_size=50, seed=2, longest=longest)
    script, expected = _script(target, prompts, wrong_every=4)
    drafter = RecordingDrafter(tiny_mtp_config(hidden_size=32, target_hidden_size=32, target_num_layers=3), script)
    proposer = MtpProposer(drafter, target=target, name="mtp")
    inner, accepted_whole_windows = proposer.propose, 0

    def checked(rows, *, histories, last_token_B, position_B):
        nonlocal accepted_whole_windows
        proposals = inner(rows, histories=histories, last_token_B=last_token_B, position_B=position_B)
        for row, history in zip(rows.tolist(), histories, strict=True):
            assert [token for _, token in drafter.rows[row]] == list(history)[1:]
            true_TD = target.forward(torch.tensor([history[:-1]])).hidden_BTD[0]
            shown_TD = torch.stack([hidden for hidden, _ in drafter.rows[row]])
            torch.testing.assert_close(shown_TD, true_TD, atol=1e-4, rtol=1e-4)
        accepted_whole_windows += drafter.widths[-1] == 4
        assert drafter.widths[-1] <= 4
        return proposals

    proposer.propose = checked
    run = decode(target, proposer, prompts, max_new_tokens=20, temperature=0.0, seed=0, batch_size=3)
    assert [answer.tokens for answer in run.answers] == expected
    assert accepted_whole_windows > 3, "no window was accepted whole: the test tests too little"


def test_an_observation_between_proposals_that_never_came_is_refused(target):
    drafter = RecordingDrafter(tiny_mtp_config(hidden_size=32, target_hidden_size=32, target_num_layers=3), None)
    proposer = MtpProposer(drafter, target=target, name="mtp")
    proposer.start(1, capacity=9)
    window = Observed(
        tokens_BT=torch.tensor([[3, 4]]),
        positions_BT=torch.tensor([[0, 1]]),
        taps_BTF=torch.zeros(1, 2, 0),
        hidden_BTD=torch.zeros(1, 2, 32),
        counts_B=torch.tensor([2]),
    )
    rows = torch.tensor([0])
    proposer.reset(rows)
    proposer.observe(rows, window)
    with pytest.raises(ValueError, match="between two observations"):
        proposer.observe(rows, window)
    proposer.reset(rows)
    proposer.observe(rows, window)


def _drafts_of_the_whole_history(drafter, target, history):
    """The slow truth: the training pass over everything that is committed, then depth after depth."""
    hidden_1TD = target.forward(torch.tensor([history[:-1]])).hidden_BTD
    tokens_1T = torch.tensor([history])
    length = len(history)
    asked_1T = torch.zeros(1, length, dtype=torch.bool)
    asked_1T[0, length - 2] = True
    unroll = drafter(
        torch.cat([hidden_1TD, torch.full_like(hidden_1TD[:, :1], 1e3)], dim=1),  # the anchor has no state: not read
        tokens_RT=tokens_1T,
        document_RT=torch.zeros_like(tokens_1T),
        position_RT=torch.arange(length).unsqueeze(0),
        asked_RT=asked_1T,
        embedding_VD=target.embedding_VD,
    )
    tokens, confidences, hidden_ND = [], [], unroll.hidden_ND
    for depth in range(drafter.config.num_depths):
        probability_V = torch.softmax(target.logits(hidden_ND)[0], dim=-1)
        confidence, token = probability_V.max(dim=-1)
        tokens.append(int(token))
        confidences.append(float(confidence))
        if depth + 1 < drafter.config.num_depths:
            hidden_ND = unroll.advance(torch.tensor([tokens[-1]]))
    return tokens, confidences


@pytest.mark.parametrize("mlp", ["dense", "moe"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_proposals_are_those_of_the_whole_history_at_every_step(target, mlp, temperature):
    """Rows come, are rolled back, end and are given to other prompts meanwhile."""
    drafter = fitting_mtp(target.geometry, mlp)
    proposer = MtpProposer(drafter, target=target, name=mlp)
    inner, calls, drafted = proposer.propose, 0, set()

    def checked(rows, *, histories, last_token_B, position_B):
        nonlocal calls
        proposals = inner(rows, histories=histories, last_token_B=last_token_B, position_B=position_B)
        assert proposals.lengths_B.tolist() == [3] * len(rows)
        for index, history in enumerate(histories):
            tokens, confidences = _drafts_of_the_whole_history(drafter, target, list(history))
            assert proposals.tokens_BK[index].tolist() == tokens
            torch.testing.assert_close(proposals.confidence_BK[index].tolist(), confidences, atol=1e-4, rtol=1e-3)
            drafted.add(tuple(tokens))
            calls += 1
        return proposals

    proposer.propose = checked
    prompts = random_prompts(5, vocab_size=50, seed=6)
    arguments = {"max_new_tokens": 9, "temperature": temperature, "seed": 4}
    run = decode(target, proposer, prompts, batch_size=2, **arguments)
    plain = decode_without_cache(target, prompts, **arguments)
    assert [answer.tokens for answer in run.answers] == [answer.tokens for answer in plain]
    assert calls >= 12
    assert len(drafted) > 8, "the drafter says the same whatever it sees: the test tests nothing"


def test_a_cut_shortens_windows_and_changes_no_draft(target):
    drafter = fitting_mtp(target.geometry)
    prompts = random_prompts(4, vocab_size=50, seed=8)
    arguments = {"max_new_tokens": 12, "temperature": 0.0, "seed": 0, "batch_size": 3}
    proposer = MtpProposer(drafter, target=target, name="mtp")
    whole = decode(target, proposer, prompts, **arguments)
    cut = decode(target, proposer, prompts, cut=CutPolicy(ratio=0.5), **arguments)
    assert [answer.tokens for answer in cut.answers] == [answer.tokens for answer in whole.answers]
    assert sum(map(sum, (a.proposed for a in cut.answers))) < sum(map(sum, (a.drafted for a in cut.answers)))


def test_the_family_decides_the_proposer(target):
    mtp = drafter_proposer(fitting_mtp(target.geometry), target=target, name="m", shortlist=4)
    assert (type(mtp), mtp.depth, mtp.layer_ids) == (MtpProposer, 3, ())
    block = tiny_drafter(
        "dfly", hidden_size=32, target_hidden_size=32, target_num_layers=3, target_layer_ids=(0, 1, 2)
    ).eval()
    proposer = drafter_proposer(block, target=target, name="b", shortlist=4)
    assert (type(proposer), proposer.shortlist) == (BlockProposer, 4)


def test_identity_follows_weights_and_depths(target):
    def identity(**changes):
        return dict(MtpProposer(fitting_mtp(target.geometry, **changes), target=target, name="x").identity)

    assert identity() == identity()
    assert identity()["kind"] == "mtp"
    assert identity() != identity(seed=1)
    assert identity() != identity(num_depths=2)


def test_a_drafter_of_another_target_is_refused(target):
    foreign = fitting_mtp(target.geometry, vocab_size=40)
    with pytest.raises(CheckpointError, match="vocab_size is 40 but the target has 50"):
        MtpProposer(foreign, target=target, name="foreign")
