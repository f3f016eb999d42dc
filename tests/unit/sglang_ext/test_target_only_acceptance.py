"""The law of what is committed equals the target's, whatever is drafted and however it is cut; planted faults show.

A target over three tokens gives probabilities by the last two tokens. Answers of four tokens are drawn by the
draft-verify loop around ``accept`` and compared with the exact law by a chi-square test.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

from sglang_ext.accept import Accepted, accept, draw
from tests.fault_plugin import FAULTS, Step

TOKENS, LENGTH, ANSWERS = 3, 4, 6000
TABLE = torch.softmax(
    torch.randn(TOKENS, TOKENS, TOKENS, generator=torch.Generator().manual_seed(3)).double() * 1.2, dim=-1
)
Accept = Callable[..., Accepted]


def law() -> dict[tuple[int, ...], float]:
    """Exact probability of every answer after the prompt (0, 0)."""
    exact = {}
    for answer in itertools.product(range(TOKENS), repeat=LENGTH):
        history, probability = [0, 0], 1.0
        for token in answer:
            probability *= float(TABLE[history[-2], history[-1], token])
            history.append(token)
        exact[answer] = probability
    return exact


def multinomial(logits_NV: Tensor, generator: torch.Generator) -> Tensor:
    return torch.multinomial(torch.softmax(logits_NV, -1), 1, generator=generator).squeeze(1)


def sample(
    accept: Accept, *, draft: str, cut: str, draw_slots: Callable[[Tensor, torch.Generator], Tensor] = multinomial
) -> Counter[tuple[int, ...]]:
    """Answers of many rows, decoded together; the first token of each is drawn plainly, as prefill does."""
    generator = torch.Generator().manual_seed(11)
    history = torch.zeros(ANSWERS, 2 + LENGTH + 8, dtype=torch.int64)
    first = torch.multinomial(TABLE[0, 0].expand(ANSWERS, -1), 1, generator=generator).squeeze(1)
    history[:, 2] = first
    length = torch.full((ANSWERS,), 3)
    while int(length.min()) < 2 + LENGTH:
        rows = (length < 2 + LENGTH).nonzero().squeeze(1)
        batch, depth = len(rows), 3
        draft_BK = torch.zeros(batch, depth, dtype=torch.int64)
        two, one = history[rows, length[rows] - 2], history[rows, length[rows] - 1]
        for k in range(depth):
            guess = TABLE[two, one].argmax(-1) if draft == "argmax" else torch.full_like(one, k % TOKENS)
            draft_BK[:, k] = guess
            two, one = one, guess
        if cut == "full":
            kept_B = torch.full((batch,), depth)
        else:  # by what was drafted: deterministic drafts allow any rule
            kept_B = (draft_BK.sum(1) + length[rows]) % (depth + 1)
        block_BW = torch.cat([history[rows, length[rows] - 1][:, None], draft_BK], dim=1)
        row_N = torch.repeat_interleave(torch.arange(batch), kept_B + 1)
        offset_N = torch.cat([torch.arange(int(k) + 1) for k in kept_B])
        token_N = block_BW[row_N, offset_N]
        before_N = torch.where(
            offset_N == 0, history[rows, length[rows] - 2][row_N], block_BW[row_N, (offset_N - 1).clamp(min=0)]
        )
        drawn_N = draw_slots(TABLE[before_N, token_N].log(), generator)
        outcome = accept(drawn_N, draft_BK, row_N=row_N, offset_N=offset_N, kept_B=kept_B)
        for row, tokens, count in zip(
            rows.tolist(), outcome.tokens_BW.tolist(), (outcome.correct_B + 1).tolist(), strict=True
        ):
            begin = int(length[row])
            history[row, begin : begin + count] = torch.tensor(tokens[:count])
            length[row] += count
    return Counter(map(tuple, history[:, 2 : 2 + LENGTH].tolist()))


def p_value(counts: Counter[tuple[int, ...]]) -> float:
    exact = law()
    return float(
        chisquare(
            [counts[answer] for answer in exact], [ANSWERS * probability for probability in exact.values()]
        ).pvalue
    )


@pytest.mark.parametrize("cut", ["full", "by what was drafted"])
@pytest.mark.parametrize("draft", ["argmax", "filler"])
def test_the_law_is_the_target_s(draft: str, cut: str) -> None:
    assert p_value(sample(accept, draft=draft, cut=cut)) > 1e-3


class Faulty:
    """Draws and accepts as it should, but for a fault."""

    def __init__(self, fault: str) -> None:
        self._fault = FAULTS[fault]

    def draw(self, logits_NV: Tensor, generator: torch.Generator) -> Tensor:
        self._target_NV = logits_NV.exp()
        return multinomial(logits_NV, generator)

    def accept(self, drawn_N: Tensor, draft_BK: Tensor, *, row_N: Tensor, offset_N: Tensor, kept_B: Tensor) -> Accepted:
        outcome = accept(drawn_N, draft_BK, row_N=row_N, offset_N=offset_N, kept_B=kept_B)
        step = Step(draft_BK, kept_B, row_N, offset_N, self._target_NV, drafter_BKV=torch.zeros(0))
        sharper_NV = (2 * self._target_NV.log()).softmax(-1)  # a drafter that is right about the argmax, and too sure
        return self._fault(outcome, replace(step, drafter_BKV=step.by_slot(sharper_NV)[:, :-1]))


@pytest.mark.parametrize("fault", list(FAULTS))
def test_a_planted_fault_shows(fault: str) -> None:
    torch.manual_seed(5)
    faulty = Faulty(fault)
    assert p_value(sample(faulty.accept, draft="argmax", cut="by what was drafted", draw_slots=faulty.draw)) < 1e-6


def test_acceptance_stops_at_the_first_difference_and_at_the_width() -> None:
    draft_BK = torch.tensor([[5, 6, 7], [5, 6, 7], [5, 6, 7]])
    kept_B = torch.tensor([3, 1, 0])
    row_N = torch.tensor([0, 0, 0, 0, 1, 1, 2])
    offset_N = torch.tensor([0, 1, 2, 3, 0, 1, 0])
    drawn_N = torch.tensor([5, 9, 7, 8, 5, 6, 5])
    outcome = accept(drawn_N, draft_BK, row_N=row_N, offset_N=offset_N, kept_B=kept_B)
    assert outcome.correct_B.tolist() == [1, 1, 0]
    assert outcome.bonus_B.tolist() == [9, 6, 5]
    assert outcome.tokens_BW[0].tolist() == [5, 9, 7, 8]


def test_greedy_batches_take_the_argmax_without_a_sampler() -> None:
    logits_NV = torch.tensor([[0.0, 2.0, 1.0], [3.0, 2.0, 1.0]])
    for info in (None, SimpleNamespace(is_all_greedy=True)):
        drawn = draw(None, logits_NV, info, row_N=torch.tensor([0, 0]), position_N=torch.tensor([4, 5]))
        assert drawn.tolist() == [1, 0]


def test_seeded_rows_draw_at_every_slot_what_plain_decoding_draws() -> None:
    """SGLang honours seeds where inference is deterministic: a token depends on its row's seed and its position."""
    SamplingBatchInfo = pytest.importorskip("sglang.srt.sampling.sampling_batch_info").SamplingBatchInfo

    def sampler(output: SimpleNamespace, info: SimpleNamespace, *more: object) -> Tensor:
        law = torch.softmax(output.next_token_logits / info.temperatures, -1)
        drawn = []
        for row, (seed, position) in enumerate(zip(info.sampling_seed.tolist(), more[-1].tolist(), strict=True)):
            generator = torch.Generator().manual_seed(1000 * seed + position)
            drawn.append(torch.multinomial(law[row], 1, generator=generator))
        return torch.cat(drawn)

    rows, slots, words = 3, 4, 50
    logits_BWV = torch.randn(rows, slots, words, generator=torch.Generator().manual_seed(5))
    start_B, seed_B = torch.tensor([7, 7, 30]), torch.tensor([1, 2, 1])
    info = SamplingBatchInfo(
        temperatures=torch.tensor([[0.7], [1.0], [1.3]]), top_ps=torch.ones(rows), top_ks=torch.full((rows,), 1 << 30),
        min_ps=torch.zeros(rows), is_all_greedy=False, is_any_greedy=False, need_top_p_sampling=False,
        need_top_k_sampling=False, need_min_p_sampling=False, vocab_size=words, sampling_seed=seed_B, device="cpu",
    )  # fmt: skip

    def plain(slot: int) -> Tensor:
        output = SimpleNamespace(next_token_logits=logits_BWV[:, slot])
        return sampler(output, info, start_B + slot)

    truth_BW = torch.stack([plain(slot) for slot in range(slots)], dim=1)
    row_N, offset_N = torch.tensor([0, 0, 0, 0, 1, 2, 2]), torch.tensor([0, 1, 2, 3, 0, 0, 1])
    drawn_N = draw(sampler, logits_BWV[row_N, offset_N], info, row_N=row_N, position_N=start_B[row_N] + offset_N)
    assert drawn_N.tolist() == truth_BW[row_N, offset_N].tolist()
    other = replace(info, sampling_seed=seed_B + 1)
    assert (
        draw(sampler, logits_BWV[row_N, offset_N], other, row_N=row_N, position_N=start_B[row_N] + offset_N).tolist()
        != drawn_N.tolist()
    )
