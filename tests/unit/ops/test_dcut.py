"""D-cut against its definition (arXiv 2607.14647)."""

import math

import pytest
import torch

from angelspec.ops.dcut import FALLBACK_RATIO, RATIOS, choose_cut, cut, cut_reference, slot_budget, survivals


def test_survival_is_the_running_product_and_missing_proposals_are_marked():
    survival_BK = survivals(
        torch.tensor([[0.5, 0.5, 1.0], [1.5, -0.1, 0.9], [torch.nan, 1.0, 1.0]]), lengths_B=torch.tensor([2, 3, 3])
    )
    assert survival_BK.tolist() == [[0.5, 0.25, -1.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]]


def test_budget_counts_anchors_and_never_falls_below_them():
    assert slot_budget(0.25, batch_size=4, offered=4 * 8) == 8
    assert slot_budget(0.25, batch_size=1, offered=8) == 2
    assert slot_budget(0.25, batch_size=3, offered=9) == 3  # ceil(2.25) = 3 anchors
    assert slot_budget(0.1, batch_size=10, offered=30) == 10
    assert slot_budget(0.1, batch_size=10, offered=300) == 30  # not 31 by a rounding error
    assert slot_budget(1.0, batch_size=5, offered=40) == 40
    assert slot_budget(0.5, batch_size=3, offered=8 + 4 + 1) == 7  # a block row, an MTP row and a plain one


def test_a_worked_example():
    survival_BK = torch.tensor([[0.9, 0.8, 0.1], [0.5, 0.4, 0.3]])
    decision = cut(survival_BK, ratio=0.5)  # K = 4 slots: two anchors, 0.9 and 0.8
    assert decision.kept_B.tolist() == [2, 0]
    assert decision.expected_tokens == pytest.approx(2 + 0.9 + 0.8)
    assert cut(survival_BK, ratio=1.0).kept_B.tolist() == [3, 3]


def test_ties_go_to_the_shallower_position():
    ones_BK = torch.ones(3, 4)
    assert cut(ones_BK, ratio=7 / 15).kept_B.tolist() == [2, 1, 1]  # 7 slots: 3 anchors, 3 of depth 1, 1 of depth 2


@pytest.mark.parametrize("ratio", [*RATIOS, 0.1, 0.6])
@pytest.mark.parametrize("ties", [False, True])
def test_equals_the_reference_and_keeps_prefixes(ratio, ties):
    generator = torch.Generator().manual_seed(2)
    for batch in (1, 2, 5, 16):
        confidence_BK = torch.rand(batch, 7, generator=generator)
        if ties:
            confidence_BK = (confidence_BK * 3).ceil() / 3
            confidence_BK[0] = 1.0
        lengths_B = torch.randint(8, (batch,), generator=generator)
        survival_BK = survivals(confidence_BK, lengths_B=lengths_B)
        kept_B = cut(survival_BK, ratio=ratio).kept_B
        assert kept_B.tolist() == cut_reference(survival_BK.tolist(), ratio=ratio, depths=[7] * batch)
        assert (kept_B <= lengths_B).all()
        if ratio == 1.0:
            assert torch.equal(kept_B, lengths_B)
        best_dropped = max(
            (float(s[k]) for s, k, n in zip(survival_BK, kept_B, lengths_B, strict=True) if k < n), default=0
        )
        worst_kept = min((float(s[k - 1]) for s, k in zip(survival_BK, kept_B, strict=True) if k > 0), default=1)
        assert worst_kept >= best_dropped


def test_auto_takes_the_largest_expected_tokens_per_second():
    survival_BK = torch.tensor([[0.5, 0.0, 0.0], [0.5, 0.0, 0.0]])
    # rho .25: 2 slots U=2; .5: 4 slots U=3; .75: 6 slots U=3; 1: 8 slots U=3
    flat = choose_cut(survival_BK, seconds=lambda batch, slots: 1.0)
    assert (flat.ratio, flat.expected_tokens) == (1.0, 3.0)  # equal rates: nothing is gained by cutting
    steep = choose_cut(survival_BK, seconds=lambda batch, slots: float(slots))
    assert steep.ratio == 0.25
    affine = choose_cut(survival_BK, seconds=lambda batch, slots: 4.0 + slots)
    assert (affine.ratio, affine.kept_B.tolist()) == (0.5, [1, 1])


def test_an_unknown_cost_falls_back():
    decision = choose_cut(torch.rand(2, 7).cumprod(1), seconds=lambda batch, slots: None)
    assert decision.ratio == FALLBACK_RATIO
    assert choose_cut(torch.zeros(2, 7), seconds=lambda batch, slots: 1e-3 * slots).ratio == 0.25


def test_a_ratio_out_of_range_is_refused():
    for ratio in (0.0, -1.0, 1.1):
        with pytest.raises(ValueError, match="keep ratio"):
            cut(torch.ones(1, 1), ratio=ratio)


@pytest.mark.parametrize("ratio", [*RATIOS, 0.1])
@pytest.mark.parametrize("with_owed", [False, True])
def test_mixed_depths_equal_the_reference(ratio, with_owed):
    """Block rows, MTP rows and plain rows in one batch, some of them owed proposals."""
    generator = torch.Generator().manual_seed(5)
    for batch in (1, 3, 8, 17):
        depths_B = torch.tensor([7, 3, 0])[torch.randint(3, (batch,), generator=generator)]
        lengths_B = torch.minimum(depths_B, torch.randint(8, (batch,), generator=generator))
        owed_B = torch.randint(3, (batch,), generator=generator) if with_owed else None
        survival_BK = survivals(torch.rand(batch, 7, generator=generator), lengths_B=lengths_B)
        decision = cut(survival_BK, ratio=ratio, depths_B=depths_B, owed_B=owed_B)
        owed = owed_B.tolist() if with_owed else None
        kept = cut_reference(survival_BK.tolist(), ratio=ratio, depths=depths_B.tolist(), owed=owed)
        assert decision.kept_B.tolist() == kept
        expected = batch + sum(float(s[:n].double().sum()) for s, n in zip(survival_BK, kept, strict=True))
        assert decision.expected_tokens == pytest.approx(expected)
        if not with_owed:
            existing = int(lengths_B.sum())
            slots = max(batch, math.ceil(round(ratio * int((depths_B + 1).sum()), 9)))
            assert sum(kept) == min(slots - batch, existing)
        else:
            assert all(k >= min(o, n) for k, o, n in zip(kept, owed, lengths_B.tolist(), strict=True))


def test_plain_rows_buy_no_slots():
    survival_BK = survivals(torch.full((4, 7), 0.9), lengths_B=torch.tensor([7, 0, 0, 0]))
    alone = cut(survival_BK, ratio=0.5, depths_B=torch.tensor([7, 0, 0, 0]))
    assert alone.kept_B.tolist() == [2, 0, 0, 0]  # ceil(11 / 2) slots, four of them anchors
    assert cut(survival_BK, ratio=0.25, depths_B=torch.tensor([7, 0, 0, 0])).kept_B.tolist() == [0, 0, 0, 0]


def test_every_number_of_slots_may_be_tried():
    survival_BK = torch.tensor([[0.8, 0.5, 0.1]])
    decision = choose_cut(survival_BK, seconds=lambda batch, slots: 1.0 + 0.3 * slots, ratios=None)
    assert decision.kept_B.tolist() == [2] and decision.ratio == pytest.approx(3 / 4)  # no ratio of the paper's grid
    owed = choose_cut(survival_BK, seconds=lambda batch, slots: float(slots), ratios=None, owed_B=torch.tensor([1]))
    assert owed.kept_B.tolist() == [1]
    nothing = choose_cut(torch.zeros(2, 0), seconds=lambda batch, slots: 1.0, ratios=None)
    assert nothing.kept_B.tolist() == [0, 0] and nothing.expected_tokens == 2
