"""Nothing flows where it must not when depths are unrolled: between packed documents, or from a position's future.

What may flow into depth k at position j: the target's states of its document up to j, its tokens up to j + 1, and the
tokens that the depths 1..k are given (on-policy: functions of the former; teacher-forced: the data's, up to j + 1 + k).
"""

import dataclasses

import pytest
import torch
from mtp_builders import tiny_mtp, tiny_mtp_rows

DEPTHS = 3
LENGTHS = ((7, 9, 6), (8, 12))


def outputs(drafter, rows, *, forced):
    unroll = drafter(rows.hidden_RTD, **rows.inputs())
    place = rows.asked_RT.flatten().nonzero().flatten()
    found = [unroll.hidden_ND]
    for depth in range(1, DEPTHS):
        tokens = rows.teacher_tokens(depth)[place] if forced else (found[-1] @ rows.head_VD.T).argmax(-1)
        found.append(unroll.advance(tokens))
    return found


def supervised(rows, depth):
    """Asking positions whose label at this depth lies in their document (positions j..j + depth + 2)."""
    inside = torch.zeros_like(rows.asked_RT)
    ahead = depth + 2
    inside[:, :-ahead] = rows.document_RT[:, ahead:] == rows.document_RT[:, :-ahead]
    return inside[rows.asked_RT]


def gradients(drafter, found, chosen):
    drafter.zero_grad()
    sum(item[mask].square().sum() for item, mask in zip(found, chosen, strict=True)).backward()
    return [parameter.grad.clone() for parameter in drafter.parameters()]


@pytest.mark.parametrize("forced", [False, True])
@pytest.mark.parametrize("mlp", ["dense", "moe"])
def test_a_packed_document_changes_nothing_of_its_neighbours(mlp, forced):
    drafter = tiny_mtp(mlp)
    rows = tiny_mtp_rows(drafter.config, lengths=LENGTHS, asked=0.9)
    document_N = rows.document_RT[rows.asked_RT]
    before = outputs(drafter, rows, forced=forced)
    for document in range(5):
        inside = rows.document_RT == document
        changed = dataclasses.replace(
            rows,
            hidden_RTD=torch.where(inside[..., None], 100 * torch.randn_like(rows.hidden_RTD), rows.hidden_RTD),
            tokens_RT=torch.where(inside, (rows.tokens_RT + 7) % 50, rows.tokens_RT),
        )
        others = [(document_N != document) & supervised(rows, depth) for depth in range(DEPTHS)]
        gradients_before = gradients(drafter, outputs(drafter, rows, forced=forced), others)
        after = outputs(drafter, changed, forced=forced)
        for old, new, mask in zip(before, after, others, strict=True):
            assert mask.any()
            # a mixture of experts multiplies the tokens of all documents together: other shapes, other rounding
            torch.testing.assert_close(new[mask], old[mask], rtol=0, atol=1e-5 if mlp == "moe" else 0)
            assert not torch.allclose(new[document_N == document], old[document_N == document])
        for old, new in zip(gradients_before, gradients(drafter, after, others), strict=True):
            torch.testing.assert_close(new, old, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("forced", [False, True])
def test_a_documents_place_in_its_row_changes_nothing(forced):
    """Positions restart with each document, the zeroed embedding at position 0 included."""
    drafter = tiny_mtp()
    rows = tiny_mtp_rows(drafter.config, lengths=((7, 9, 6),))
    whole = outputs(drafter, rows, forced=forced)
    document_N = rows.document_RT[rows.asked_RT]
    for document in range(3):
        places = (rows.document_RT[0] == document).nonzero().flatten()
        alone = dataclasses.replace(
            rows,
            hidden_RTD=rows.hidden_RTD[:, places], tokens_RT=rows.tokens_RT[:, places],
            document_RT=rows.document_RT[:, places], position_RT=rows.position_RT[:, places],
            asked_RT=rows.asked_RT[:, places],
        )  # fmt: skip
        for depth, (together, apart) in enumerate(zip(whole, outputs(drafter, alone, forced=forced), strict=True)):
            mask = supervised(alone, depth)
            torch.testing.assert_close(together[document_N == document][mask], apart[mask], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mlp", ["dense", "moe"])
@pytest.mark.parametrize("forced", [False, True])
def test_the_future_of_a_position_changes_nothing(forced, mlp):
    drafter = tiny_mtp(mlp)
    rows = tiny_mtp_rows(drafter.config, lengths=((20,),))
    position_N = rows.position_RT[rows.asked_RT]
    before = outputs(drafter, rows, forced=forced)
    for asked in (0, 4, 11):
        for depth in range(DEPTHS):
            known = asked + 1 + (depth if forced else 0)  # the last token that may be read
            changed = dataclasses.replace(rows, hidden_RTD=rows.hidden_RTD.clone(), tokens_RT=rows.tokens_RT.clone())
            changed.hidden_RTD[:, asked + 1 :] = 100 * torch.randn_like(changed.hidden_RTD[:, asked + 1 :])
            changed.tokens_RT[:, known + 1 :] = (changed.tokens_RT[:, known + 1 :] + 7) % 50
            after = outputs(drafter, changed, forced=forced)
            own = position_N == asked
            torch.testing.assert_close(after[depth][own], before[depth][own], rtol=0, atol=1e-5)
            later = position_N > asked
            assert not torch.allclose(after[depth][later], before[depth][later])
            # the window's own edge does count: the last known state and, teacher-forced, the last known token
            changed.hidden_RTD[:, asked] += 1
            assert not torch.allclose(outputs(drafter, changed, forced=forced)[depth][own], before[depth][own])
            if forced and asked + depth:  # the first position embeds nothing
                changed = dataclasses.replace(rows, tokens_RT=rows.tokens_RT.clone())
                changed.tokens_RT[:, known] = (changed.tokens_RT[:, known] + 7) % 50
                after = outputs(drafter, changed, forced=forced)
                assert not torch.allclose(after[depth][own], before[depth][own])


def test_on_policy_depths_read_their_own_proposals_and_no_data():
    """Data tokens behind j + 1 reach no on-policy output; a proposal reaches every deeper depth."""
    drafter = tiny_mtp()
    rows = tiny_mtp_rows(drafter.config, lengths=((20,),))
    unroll, other = (drafter(rows.hidden_RTD, **rows.inputs()) for _ in range(2))
    tokens = (unroll.hidden_ND @ rows.head_VD.T).argmax(-1)
    changed = tokens.clone()
    changed[5] = (changed[5] + 1) % 50
    first, first_changed = unroll.advance(tokens), other.advance(changed)
    same = torch.arange(len(tokens)) != 5
    assert torch.equal(first[same], first_changed[same]) and not torch.allclose(first[5], first_changed[5])
    second, second_changed = unroll.advance(tokens), other.advance(tokens)
    assert torch.equal(second[same], second_changed[same]) and not torch.allclose(second[5], second_changed[5])


def test_the_first_position_embeds_nothing():
    """At a document's first position the embedding is zero, as servers have it; only for depth 0."""
    drafter = tiny_mtp()
    rows = tiny_mtp_rows(drafter.config, lengths=((6, 8),))
    changed = dataclasses.replace(rows, tokens_RT=rows.tokens_RT.clone())
    for first in (0, 6):
        changed.tokens_RT[0, first + 1] = (changed.tokens_RT[0, first + 1] + 1) % 50
    starts = (rows.position_RT == 0)[rows.asked_RT]
    given = torch.arange(len(starts)) % 50
    unroll, other = (drafter(item.hidden_RTD, **item.inputs()) for item in (rows, changed))
    assert torch.equal(unroll.hidden_ND[starts], other.hidden_ND[starts])
    deeper, deeper_changed = unroll.advance(given), other.advance((given + 1) % 50)
    assert not torch.allclose(deeper[starts], deeper_changed[starts])
