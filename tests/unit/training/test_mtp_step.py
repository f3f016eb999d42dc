"""The MTP step: alignment and gates, leakage, refused and idle rows, gradients of every parameter."""

import time

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from training_builders import CE, DEPTHS, E2E, Rows, mtp_config, pattern_rows, tiny_target

from angelspec.core.objective import Objective
from angelspec.objectives import Budget
from angelspec.training.distributed import Ranks
from angelspec.training.features import MemoryFeatures, OnlineFeatures
from angelspec.training.mtp_step import MtpStep, supervise_depths
from angelspec.training.run import new_drafter
from angelspec.training.steps import IDLE_ROW
from angelspec.training.update import compute_gradients


def mtp_step(mlp="dense", rows=None, *, num_depths=3, **changes):
    target, rows = tiny_target(), rows or pattern_rows(4)
    return MtpStep(
        new_drafter(mtp_config(mlp, num_depths=num_depths), seed=0),
        rows=rows,
        features=OnlineFeatures(target, rows, layer_ids=()),
        embedding_VD=target.embedding_VD,
        head_VD=target.head_VD,
        **changes,
    )


def gradient(step, row_ids, objective=DEPTHS, number=0):
    step.drafter.zero_grad()
    terms = step(row_ids, objective=objective, step=number)
    loss = sum(ratio.numerator / ratio.denominator for ratio in terms.losses.values())
    loss.backward()
    return terms, loss.item(), torch.cat([p.grad.flatten() for p in step.drafter.parameters()])


def test_depth_k_predicts_the_token_after_the_next_k_and_is_judged_one_before_it():
    tokens = torch.arange(100, 112).reshape(2, 6)
    everything = torch.ones(2, 6, dtype=torch.bool)
    document = torch.tensor([[0] * 6, [1] * 6])
    labels, valid, judge = supervise_depths(tokens, everything, document, num_depths=3)
    assert labels[0, 0].tolist() == [102, 103, 104] and labels[1, 1].tolist() == [109, 110, 111]
    assert judge[0, 0].tolist() == [1, 2, 3] and judge[1, 1].tolist() == [8, 9, 10]
    assert valid[0].tolist() == [
        [True] * 3,
        [True] * 3,
        [True, True, False],
        [True, False, False],
        [False] * 3,
        [False] * 3,
    ]
    assert labels.max() < 112 and judge.max() < 12


def test_no_depth_is_supervised_across_a_document_s_end_or_where_its_token_is_not():
    tokens = torch.zeros(1, 10, dtype=torch.long)
    document = torch.tensor([[0, 0, 0, 0, 1, 1, 1, -1, -1, -1]])
    mask = torch.ones(1, 10, dtype=torch.bool)
    mask[0, 2] = False
    valid = supervise_depths(tokens, mask, document, num_depths=3).valid_RTK[0]
    for position in range(10):
        for depth in range(3):
            label = position + 2 + depth
            wanted = label < 7 and document[0, position] == document[0, label] and bool(mask[0, label])
            assert valid[position, depth] == wanted, (position, depth)
    assert valid.any(0).tolist() == [True, True, False]


def test_one_id_in_two_runs_is_two_documents_to_the_gate():
    document = torch.tensor([[0, 0, 1, 0, 0, 0]])
    tokens, mask = torch.zeros(1, 6, dtype=torch.long), torch.ones(1, 6, dtype=torch.bool)
    valid = supervise_depths(tokens, mask, document, num_depths=2).valid_RTK[0]
    assert valid.nonzero().tolist() == [[3, 0]]


def test_the_judge_is_the_target_state_that_predicts_the_label():
    """A teacher that is sure of the data shares with the drafter what the drafter gives the label, depth by depth."""
    step = mtp_step(on_policy=False)
    online = step._features

    class Sure:
        layer_ids = ()

        def fetch(self, row_ids):
            features = online.fetch(row_ids)
            following = step._rows.tokens_RT[list(row_ids)].long().roll(-1, 1)
            sure = (
                torch.nn.functional.one_hot(following, 320).float() * 200 @ torch.linalg.pinv(tiny_target().head_VD).T
            )
            return type(features)(features.taps_RTF, sure, features.finite_R)

    step._features = Sure()
    counts = step([0], objective=Objective(tv=1.0), step=0).counts
    assert (counts.valid_K > 5).all()
    torch.testing.assert_close(counts.alpha_K, torch.stack([share_of_labels(step, depth) for depth in range(3)]))


def share_of_labels(step, depth):
    """Sum over depth's positions of q(label), from a teacher-forced unroll done here."""
    rows, target = step._rows, tiny_target()
    labels, valid, _ = supervise_depths(
        rows.tokens_RT[:1].long(), rows.loss_mask_RT[:1], rows.document_RT[:1], num_depths=3
    )
    asked = valid.any(2)
    with torch.no_grad():
        unroll = step.drafter(
            step._features.fetch([0]).hidden_RTD, tokens_RT=rows.tokens_RT[:1].long(),
            document_RT=rows.document_RT[:1], position_RT=rows.position_RT[:1], asked_RT=asked,
            embedding_VD=target.embedding_VD,
        )  # fmt: skip
        hidden = unroll.hidden_ND
        for k in range(depth):
            hidden = unroll.advance(labels[asked][:, k])
        chance = (hidden @ target.head_VD.T).softmax(1).gather(1, labels[asked][:, depth, None])[:, 0]
    return chance[valid[asked][:, depth]].double().sum()


@pytest.mark.parametrize("objective", [CE, DEPTHS, E2E], ids=["ce", "lk", "e2e"])
@pytest.mark.parametrize("mlp", ["dense", "moe"])
def test_every_parameter_gets_a_gradient(mlp, objective):
    step = mtp_step(mlp)
    gradient(step, [0, 1], objective)
    silent = [n for n, p in step.drafter.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    assert not silent


def test_on_policy_feeds_what_the_depth_before_proposed_and_teacher_forcing_the_data():
    step, forced = mtp_step(), mtp_step(on_policy=False)
    fed = []
    original = type(step.drafter).deepen

    def spy(self, hidden, *, embedded_ND, position_N, attend):
        fed.append(embedded_ND)
        return original(self, hidden, embedded_ND=embedded_ND, position_N=position_N, attend=attend)

    type(step.drafter).deepen = spy
    try:
        step([0], objective=CE, step=0)
        forced([0], objective=CE, step=0)
    finally:
        type(step.drafter).deepen = original
    embedding = tiny_target().embedding_VD
    labels, valid, _ = supervise_depths(
        step._rows.tokens_RT[:1].long(), step._rows.loss_mask_RT[:1], step._rows.document_RT[:1], num_depths=3
    )
    asked = valid.any(2)
    assert torch.equal(fed[2], embedding[labels[asked][:, 0]]) and torch.equal(fed[3], embedding[labels[asked][:, 1]])
    needed = valid[asked][:, 1:].any(1)
    drafted = torch.cdist(fed[0][needed], embedding).argmin(1)
    assert not torch.equal(drafted, labels[asked][needed, 0]), "an untrained drafter proposes something else"


def test_labels_never_come_from_the_rollout():
    """A drafter whose every proposal is one fixed token is still compared with the data."""
    step = mtp_step()
    with torch.no_grad():
        step.drafter.final_layernorm.weight.zero_()  # all logits equal: token 0 is proposed everywhere
    terms = step([0, 1], objective=CE, step=0)
    assert terms.counts.correct_K.eq(0).all()
    torch.testing.assert_close(terms.counts.ce_K / terms.counts.valid_K, torch.full((3,), 320.0).double().log())


def test_a_row_costs_the_same_in_any_pieces_and_any_company():
    whole, small = (
        mtp_step(),
        mtp_step(budget=Budget(buffer_bytes=7 * 320 * 4, tile_columns=64, product_columns=64, min_rows=1)),
    )
    terms, loss, expected = gradient(whole, [0, 1])
    again, same, found = gradient(small, [0, 1])
    assert same == pytest.approx(loss, rel=1e-5) and again.num_positions == terms.num_positions > 100
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-6)
    apart = compute_gradients(
        [[1], [0]], lambda rows: small(rows, objective=DEPTHS, step=0), model=small.drafter, ranks=Ranks()
    )
    assert apart.numerators["token"] / apart.denominators["token"] == pytest.approx(loss, rel=1e-5)


def test_logits_of_all_positions_are_never_held():
    """Neither the drafter's nor the target's: the largest tensor is one piece of either."""

    class Largest(TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            found = function(*args, **(kwargs or {}))
            for item in found if isinstance(found, (tuple, list)) else (found,):
                if isinstance(item, torch.Tensor) and item.untyped_storage().data_ptr() not in given:
                    self.numel = max(self.numel, item.numel())
            return found

    budget = Budget(buffer_bytes=8 * 320 * 4, tile_columns=64, product_columns=64, min_rows=1)
    step = mtp_step(budget=budget, rows=pattern_rows(4, row_length=96))
    step._features = MemoryFeatures(tiny_target(), step._rows, layer_ids=(), dtype=torch.float32)
    target = tiny_target()
    given = {tensor.untyped_storage().data_ptr() for tensor in (target.head_VD, target.embedding_VD)}
    with Largest() as seen:
        terms = step([0, 1, 2, 3], objective=DEPTHS, step=0)
        sum(ratio.numerator for ratio in terms.losses.values()).backward()
    positions = terms.num_positions / 3
    assert positions > 250
    states = positions * 2 * 96 * 1.2  # gate and up of the MLP, and unsupervised positions that are seen
    assert seen.numel <= max(states, (8 + 3) * 320)
    assert seen.numel < positions * 320 / 1.5


@pytest.mark.parametrize("mlp", ["dense", "moe"])
def test_recomputed_depths_give_the_same_gradient_and_hold_less(mlp):
    held, found = {}, {}
    for recompute in (False, True):
        step, kept = mtp_step(mlp, recompute=recompute), []
        step.drafter.zero_grad()
        with torch.autograd.graph.saved_tensors_hooks(lambda t, kept=kept: kept.append(t.numel()) or t, lambda t: t):
            terms = step([0, 1], objective=DEPTHS, step=0)
        sum(ratio.numerator / ratio.denominator for ratio in terms.losses.values()).backward()
        held[recompute] = sum(kept)
        found[recompute] = torch.cat([p.grad.flatten() for p in step.drafter.parameters()])
    assert torch.equal(found[True], found[False])
    assert held[True] < 0.6 * held[False]


@pytest.mark.parametrize("on_policy", [True, False])
def test_zero_leakage_between_packed_documents(on_policy):
    """Altering one document changes no gradient of a step that supervises only its neighbours, at any depth."""
    rows = pattern_rows(1, row_length=64)
    documents = rows.document_RT[0]
    rows.loss_mask_RT &= documents == 1
    assert rows.loss_mask_RT.any() and documents.max() >= 2
    _, loss, before = gradient(mtp_step(rows=rows, on_policy=on_policy), [0])
    others = documents != 1
    rows.tokens_RT[0, others] = (rows.tokens_RT[0, others] + 5) % 97
    _, same, after = gradient(mtp_step(rows=rows, on_policy=on_policy), [0])
    assert loss == same and torch.equal(before, after)
    rows.tokens_RT[0, (documents == 1).nonzero()[0]] += 1
    assert gradient(mtp_step(rows=rows, on_policy=on_policy), [0])[1] != loss


@pytest.mark.parametrize(("length", "trainable"), [(2, []), (3, [0]), (5, [0])])
def test_rows_too_short_for_the_first_depth_are_left_out(length, trainable):
    rows = pattern_rows(1, row_length=16)
    rows.document_RT[0] = torch.where(torch.arange(16) < length, 0, -1)
    rows.loss_mask_RT[0] = torch.arange(16) < length
    step = mtp_step(rows=rows)
    assert step.trainable_rows() == trainable
    if trainable:
        terms, _, _ = gradient(step, [0], CE)
        assert terms.counts.valid_K.tolist() == [max(0, length - 2 - depth) for depth in range(3)]


def test_an_idle_row_supervises_nothing_and_costs_no_nan():
    step = mtp_step()
    step.drafter.zero_grad()
    terms = step([IDLE_ROW], objective=DEPTHS, step=0)
    sum(ratio.numerator for ratio in terms.losses.values()).backward()
    assert terms.num_positions == 0 and terms.num_refused_rows == 0
    assert all(ratio.denominator == 0 for ratio in terms.losses.values())
    assert all(p.grad is None or not p.grad.any() for p in step.drafter.parameters())


def test_refused_rows_are_counted_and_give_no_gradient():
    step = mtp_step()
    _, _, alone = gradient(step, [1])
    fetch = step._features.fetch

    class Broken:
        layer_ids = ()

        def fetch(self, row_ids):
            features = fetch(row_ids)
            finite_R = torch.tensor([row != 0 for row in row_ids])
            hidden = features.hidden_RTD.masked_fill(~finite_R[:, None, None], float("nan"))
            return type(features)(features.taps_RTF, hidden, finite_R)

    step._features = Broken()
    terms, _, together = gradient(step, [0, 1])
    assert terms.num_refused_rows == 1
    torch.testing.assert_close(together, alone)


def test_a_non_finite_state_shows_in_the_gradient():
    step = mtp_step()
    with torch.no_grad():
        step.drafter.eh_proj.weight[0, 0] = float("nan")
    result = compute_gradients(
        [[0]], lambda rows: step(rows, objective=DEPTHS, step=0), model=step.drafter, ranks=Ranks()
    )
    assert not result.is_finite


def test_one_depth_alone_is_a_drafter_too():
    terms, _, _ = gradient(mtp_step(num_depths=1), [0], CE)
    assert terms.counts.valid_K.shape == (1,)


def test_the_parts_of_a_step_s_time_add_up():
    step = mtp_step(timed=True)
    objective = Objective(ce=1.0, end_to_end_tv=1.0)
    started = time.perf_counter()
    seconds = compute_gradients(
        [[0], [1], [2]], lambda rows: step(rows, objective=objective, step=0), model=step.drafter, ranks=Ranks()
    ).seconds
    assert set(seconds) == {"target", "backbone", "head"} and min(seconds.values()) > 0
    assert sum(seconds.values()) < time.perf_counter() - started


def test_rows_are_taken_in_any_order():
    step = mtp_step(rows=Rows(**{k: v[[2, 0, 1]] for k, v in vars(pattern_rows(3)).items()}))
    other = mtp_step(rows=pattern_rows(3))
    assert gradient(step, [0, 1])[1] == pytest.approx(gradient(other, [2, 0])[1], rel=1e-5)
