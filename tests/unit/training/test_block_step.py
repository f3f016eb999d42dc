import time

import pytest
import torch
from training_builders import CE, E2E, LK, pattern_rows, tiny_config, tiny_target

from angelspec.core.objective import Objective
from angelspec.ops.anchors import Anchors
from angelspec.training.block_step import BlockStep, supervise
from angelspec.training.distributed import Ranks
from angelspec.training.features import OnlineFeatures
from angelspec.training.run import new_drafter
from angelspec.training.steps import IDLE_ROW, row_generator
from angelspec.training.update import compute_gradients


def block_step(name="dfly", rows=None, **changes):
    target, rows = tiny_target(), rows or pattern_rows(4)
    config = tiny_config(name)
    return BlockStep(
        new_drafter(config, seed=0),
        rows=rows,
        features=OnlineFeatures(target, rows, layer_ids=config.target_layer_ids),
        embedding_VD=target.embedding_VD,
        head_VD=target.head_VD,
        **{"anchors_per_row": 6, "seed": 0, **changes},
    )


def gradient(step, row_ids, objective=CE, number=0):
    step.drafter.zero_grad()
    terms = step(row_ids, objective=objective, step=number)
    loss = sum(ratio.numerator / ratio.denominator for ratio in terms.losses.values())
    loss.backward()
    return terms, loss.item(), torch.cat([p.grad.flatten() for p in step.drafter.parameters()])


def test_slot_k_predicts_the_token_k_after_the_anchor_and_is_judged_one_before_it():
    tokens = torch.arange(100, 120).reshape(2, 10)
    mask = torch.ones(2, 10, dtype=torch.bool)
    mask[1, 5] = False
    found = supervise(tokens, mask, Anchors(torch.tensor([0, 1]), torch.tensor([2, 4])), block_size=4)
    assert found.labels_AK.tolist() == [[103, 104, 105], [115, 116, 117]]
    assert found.valid_AK.tolist() == [[True] * 3, [False, True, True]]
    assert found.judge_AK.tolist() == [[2, 3, 4], [14, 15, 16]]


def test_the_judge_is_the_target_state_that_predicts_the_label():
    """A teacher that is sure of the data shares with the drafter what the drafter gives the label, slot by slot."""
    step = block_step(anchors_per_row=1)
    online = step._features

    class Sure:
        layer_ids = online.layer_ids

        def fetch(self, row_ids):
            features = online.fetch(row_ids)
            following = step._rows.tokens_RT[list(row_ids)].long().roll(-1, 1)
            wanted = torch.nn.functional.one_hot(following, 320).float() * 200
            sure = wanted @ torch.linalg.pinv(tiny_target().head_VD).T
            return type(features)(features.taps_RTF, sure, features.finite_R)

    step._features = Sure()
    counts = step([0], objective=Objective(tv=1.0), step=0).counts
    assert counts.valid_K.tolist() == [1, 1, 1]
    torch.testing.assert_close(counts.alpha_K, (-counts.ce_K).exp(), rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("objective", [CE, LK, E2E], ids=["ce", "lk", "e2e"])
@pytest.mark.parametrize("name", ["dfly", "dspark"])
def test_every_parameter_gets_a_gradient(name, objective):
    objective = objective.model_copy(update={"confidence": 1.0}) if name == "dspark" else objective
    step = block_step(name)
    with torch.no_grad():  # heads start as the identity, which hides their inner weights
        for parameter in step.drafter.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.1)
    gradient(step, [0, 1], objective)
    silent = [n for n, p in step.drafter.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    assert not silent


def test_a_row_draws_the_same_anchors_in_any_company():
    step = block_step()
    rows = step._rows

    def anchors(row_ids, number=3):
        drawn = step.draw_anchors(row_ids, rows.loss_mask_RT[row_ids], rows.document_RT[row_ids], step=number)
        return {row: drawn.position_A[drawn.row_A == i].tolist() for i, row in enumerate(row_ids)}

    assert anchors([0, 1, 2]) == {**anchors([2, 0]), **anchors([1])}
    assert anchors([0]) != anchors([0], number=4)
    assert row_generator(1, step=0, row=0).initial_seed() != row_generator(2, step=0, row=0).initial_seed()


def test_zero_leakage_between_packed_documents():
    """Altering one document changes no gradient of a step that supervises only its neighbours."""
    rows = pattern_rows(1, row_length=64)
    documents = rows.document_RT[0]
    rows.loss_mask_RT &= documents == documents[0]
    _, loss, before = gradient(block_step(rows=rows), [0])
    others = documents != documents[0]
    rows.tokens_RT[0, others] = (rows.tokens_RT[0, others] + 5) % 97
    _, same, after = gradient(block_step(rows=rows), [0])
    assert loss == same and torch.equal(before, after)
    rows.tokens_RT[0, 0] += 1
    assert gradient(block_step(rows=rows), [0])[1] != loss


def test_tokens_after_an_anchor_change_nothing_of_its_drafts():
    step = block_step("dflash")
    rows = step._rows
    call = {
        "document_RT": rows.document_RT[:1],
        "position_RT": rows.position_RT[:1],
        "embedding_VD": tiny_target().embedding_VD,
    }

    def states(tokens_RT):
        taps = (
            tiny_target()
            .forward(tokens_RT.long(), positions_BT=rows.position_RT[:1].long(), layer_ids=(1, 2, 3))
            .taps_BTF
        )
        anchors = Anchors(torch.tensor([0, 0]), torch.tensor([5, 8]))
        return step.drafter(taps, tokens_RT=tokens_RT, anchors=anchors, **call).hidden_AKD.detach()

    original = states(rows.tokens_RT[:1])
    changed = rows.tokens_RT[:1].clone()
    changed[0, 6:] = 65
    assert torch.equal(original[0], states(changed)[0])
    changed[0, 4] = 65
    assert not torch.equal(original[0], states(changed)[0])


@pytest.mark.parametrize(("length", "trainable"), [(3, []), (4, [0]), (5, [0])])
def test_rows_too_short_for_a_block_are_left_out(length, trainable):
    rows = pattern_rows(1, row_length=16)
    rows.document_RT[0] = torch.where(torch.arange(16) < length, 0, -1)
    rows.loss_mask_RT[0] = torch.arange(16) < length
    assert block_step(rows=rows).trainable_rows() == trainable


def test_an_idle_row_supervises_nothing_and_costs_no_nan():
    step = block_step()
    step.drafter.zero_grad()
    terms = step([IDLE_ROW], objective=LK, step=0)
    sum(ratio.numerator for ratio in terms.losses.values()).backward()
    assert terms.num_positions == 0 and terms.num_refused_rows == 0
    assert all(ratio.denominator == 0 for ratio in terms.losses.values())
    assert all(p.grad is None or not p.grad.any() for p in step.drafter.parameters())


def test_refused_rows_are_counted_and_give_no_gradient():
    step = block_step()
    _, _, alone = gradient(step, [1])
    fetch = step._features.fetch

    class Broken:
        layer_ids = step._features.layer_ids

        def fetch(self, row_ids):
            features = fetch(row_ids)
            finite_R = torch.tensor([row != 0 for row in row_ids])
            return type(features)(
                features.taps_RTF * finite_R[:, None, None], features.hidden_RTD * finite_R[:, None, None], finite_R
            )

    step._features = Broken()
    terms, _, together = gradient(step, [0, 1])
    assert terms.num_refused_rows == 1
    torch.testing.assert_close(together, alone)


@pytest.mark.parametrize("name", ["dfly", "dspark"])
def test_the_parts_of_a_step_s_time_add_up(name):
    """Also with several denominators and micro-batches, where the forward pass runs twice."""
    objective = Objective(ce=1.0, end_to_end_tv=1.0, confidence=float(name == "dspark"), position_weights="d-pace")
    step = block_step(name, timed=True)
    started = time.perf_counter()
    seconds = compute_gradients(
        [[0], [1], [2]],
        lambda rows: step(rows, objective=objective, step=0),
        model=step.drafter,
        ranks=Ranks(),
    ).seconds
    assert set(seconds) == {"target", "backbone", "head"} and min(seconds.values()) > 0
    assert sum(seconds.values()) < time.perf_counter() - started
