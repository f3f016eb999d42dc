"""Held-out acceptance of MTP: what a server would draft at the same anchors, from a real cache."""

import pytest
import torch
from training_builders import mtp_config, pattern_rows, tiny_target

from angelspec.core.errors import TrainingError
from angelspec.training.features import OnlineFeatures
from angelspec.training.mtp_held_out import MtpHeldOut
from angelspec.training.run import new_drafter


def measure(drafter, rows, **settings):
    target = tiny_target()
    return MtpHeldOut(
        drafter,
        rows=rows,
        features=OnlineFeatures(target, rows, layer_ids=()),
        embedding_VD=target.embedding_VD,
        head_VD=target.head_VD,
        **{"num_anchors": 40, "seed": 3, **settings},
    )


def shaken(mlp="dense", scale=0.3):
    drafter = new_drafter(mtp_config(mlp), seed=0)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * scale)
    return drafter


def drafted(drafter, tokens, anchor):
    """Proposals of the decoding path: the cache extended by everything before the anchor."""
    target = tiny_target()
    states = target.forward(tokens[None], layer_ids=())
    cache = drafter.context_cache(1, capacity=64)
    hidden = drafter.extend(
        cache, states.hidden_BTD[:, :anchor], tokens[None, 1 : anchor + 1], embedding_VD=target.embedding_VD
    )
    return drafter.draft(
        cache, hidden, num_depths=3, embedding_VD=target.embedding_VD, head_VD=target.head_VD
    ).tokens_BK[0]


@pytest.mark.parametrize("mlp", ["dense", "moe"])
def test_counts_are_those_of_really_drafting_at_every_anchor(mlp):
    """The data is made of what the drafter drafts, up to one depth: exactly so many proposals are right."""
    drafter, rows, anchor = shaken(mlp), pattern_rows(3, row_length=64), 8
    check = measure(drafter, rows)
    check._anchors = {0: torch.tensor([anchor])}
    inside = rows.document_RT[0] == rows.document_RT[0, 0]
    drafts = drafted(drafter, rows.tokens_RT[0].long()[inside], anchor)
    for wanted in range(4):
        answer = drafts.clone()
        if wanted < 3:
            answer[wanted] = (answer[wanted] + 1) % 256
        rows.tokens_RT[0, anchor + 1 : anchor + 4] = answer.int()
        found = check().counts
        assert list(found.accepted_through) == [int(wanted > depth) for depth in range(3)]
        assert found.generated_tokens == 1 + wanted and found.verify_steps == 1


def test_a_draft_that_missed_changes_nothing_of_its_neighbours():
    """Anchors of one document are drafted side by side; each counts as it does alone."""
    drafter, rows = shaken(scale=0.05), pattern_rows(3, row_length=64)
    together = measure(drafter, rows)
    alone = torch.zeros(3, dtype=torch.long)
    anchors = dict(together._anchors)
    for row, positions in anchors.items():
        for position in positions:
            together._anchors = {row: position[None]}
            alone += torch.tensor(together().counts.accepted_through)
    together._anchors = anchors
    assert list(together().counts.accepted_through) == alone.tolist()


def test_anchors_are_supervised_with_all_proposals_and_follow_a_state():
    rows = pattern_rows(6, prompt=0)  # first tokens are supervised, and still no anchors
    check = measure(shaken(), rows)
    assert check.num_anchors == 40
    for row, positions in check._anchors.items():
        for position in positions.tolist():
            assert rows.loss_mask_RT[row, position : position + 4].all()
            assert rows.document_RT[row, position - 1 : position + 4].unique().numel() == 1


def test_rows_without_an_anchor_are_an_error():
    rows = pattern_rows(1)
    rows.loss_mask_RT[:] = False
    with pytest.raises(TrainingError, match="held-out rows hold no anchor"):
        measure(shaken(), rows)
