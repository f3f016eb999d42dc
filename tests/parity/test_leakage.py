"""Nothing flows where it must not: between packed documents, between blocks, from a block's future into it.

What may flow into a block: its document's features strictly before the anchor, its anchor token, and, only through the
teacher-forced correction or Markov head, the tokens before each of its slots.
"""

import dataclasses

import pytest
import torch
from drafter_builders import COMBINATIONS, tiny_drafter, tiny_rows

from angelspec.ops.anchors import Anchors

TEACHER_FORCED = {
    "dflash": (),
    "dflare": (),
    "dspark": ("markov_AKR", "confidence_AK"),
    "dfly": ("corrected_AKD",),
}
"""Outputs that read the token before each slot."""


def run(drafter, rows):
    states = drafter(rows.taps_RTF, **rows.inputs())
    return {field.name: getattr(states, field.name) for field in dataclasses.fields(states)}


def gradients(drafter, rows, blocks):
    """Gradient of every weight when only the given blocks enter the loss."""
    drafter.zero_grad()
    outputs = [value for value in run(drafter, rows).values() if value is not None]
    sum(value[blocks].square().sum() for value in outputs).backward()
    return [parameter.grad.clone() if parameter.grad is not None else None for parameter in drafter.parameters()]


@pytest.mark.parametrize("name", COMBINATIONS)
def test_a_packed_document_changes_nothing_of_its_neighbours(name):
    drafter = tiny_drafter(name)
    rows = tiny_rows(drafter.config, lengths=((7, 9, 6), (8, 12)), anchors=20)
    document_A = rows.document_RT[rows.anchors.row_A, rows.anchors.position_A]
    before = run(drafter, rows)
    for document in range(5):
        others = document_A != document
        assert others.any() and not others.all()
        gradients_before = gradients(drafter, rows, others)
        inside = rows.document_RT == document
        changed = dataclasses.replace(
            rows,
            taps_RTF=torch.where(inside[..., None], 100 * torch.randn_like(rows.taps_RTF), rows.taps_RTF),
            tokens_RT=torch.where(inside, (rows.tokens_RT + 7) % 40, rows.tokens_RT),
        )
        after = run(drafter, changed)
        for key, value in before.items():
            if value is not None:
                assert torch.equal(value[others], after[key][others]), key
                assert not torch.allclose(value[~others], after[key][~others]), key
        for ours, theirs in zip(gradients_before, gradients(drafter, changed, others), strict=True):
            assert (ours is None) == (theirs is None)
            # sums over all tokens: equal but for the order in which zeros are added
            assert ours is None or torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", COMBINATIONS)
def test_tokens_and_features_from_the_anchor_on(name):
    drafter = tiny_drafter(name)
    rows = tiny_rows(drafter.config, lengths=((24,),), anchors=20)
    block = drafter.config.block_size
    position_A = rows.anchors.position_A
    before = run(drafter, rows)
    for point in range(4, 20):
        # features at and after the point: blocks anchored at or before it can't see them
        taps = rows.taps_RTF.clone()
        taps[:, point:] = 100 * torch.randn_like(taps[:, point:])
        after = run(drafter, dataclasses.replace(rows, taps_RTF=taps))
        blind = position_A <= point
        for key, value in before.items():
            if value is not None:
                assert torch.equal(value[blind], after[key][blind]), (key, point)
        assert point + 1 > int(position_A.max()) or not torch.allclose(
            before["hidden_AKD"][~blind], after["hidden_AKD"][~blind]
        )
        # one token: it is the anchor of at most one block, and the previous token of one slot of those around it
        tokens = rows.tokens_RT.clone()
        tokens[:, point] = (tokens[:, point] + 1) % 40
        after = run(drafter, dataclasses.replace(rows, tokens_RT=tokens))
        anchored = position_A == point
        assert torch.equal(before["hidden_AKD"][~anchored], after["hidden_AKD"][~anchored])
        slot_of = point - position_A  # the slot (0-based proposal) whose previous token it is
        for key, value in before.items():
            if value is None:
                continue
            for index in (~anchored).nonzero()[:, 0].tolist():
                same = [torch.equal(value[index, slot], after[key][index, slot]) for slot in range(block - 1)]
                reads = key in TEACHER_FORCED[name]
                assert same == [not (reads and slot == int(slot_of[index])) for slot in range(block - 1)], (key, point)


def test_other_blocks_change_nothing():
    drafter = tiny_drafter("dfly")
    rows = tiny_rows(drafter.config, anchors=20)
    before = run(drafter, rows)["corrected_AKD"]
    for index in range(0, rows.anchors.count, 3):
        alone = Anchors(rows.anchors.row_A[[index]], rows.anchors.position_A[[index]])
        after = run(drafter, dataclasses.replace(rows, anchors=alone))["corrected_AKD"]
        torch.testing.assert_close(after[0], before[index], rtol=1e-5, atol=1e-5)


def test_padding_changes_nothing():
    drafter = tiny_drafter("dfly")
    rows = tiny_rows(drafter.config)
    before = run(drafter, rows)["corrected_AKD"]
    taps = torch.where((rows.document_RT < 0)[..., None], torch.tensor(1e4), rows.taps_RTF)
    assert torch.equal(run(drafter, dataclasses.replace(rows, taps_RTF=taps))["corrected_AKD"], before)
