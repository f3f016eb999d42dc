import pytest
import torch
from training_builders import pattern_rows, tiny_config, tiny_target

from angelspec.core.errors import TrainingError
from angelspec.training.block_held_out import BlockHeldOut
from angelspec.training.features import OnlineFeatures
from angelspec.training.run import new_drafter


def measure(drafter, rows, **settings):
    target = tiny_target()
    return BlockHeldOut(
        drafter,
        rows=rows,
        features=OnlineFeatures(target, rows, layer_ids=drafter.config.target_layer_ids),
        embedding_VD=target.embedding_VD,
        head_VD=target.head_VD,
        **{"num_anchors": 40, "seed": 3, **settings},
    )


def shaken(name, scale=0.3):
    drafter = new_drafter(tiny_config(name), seed=0)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * scale)
    return drafter


@pytest.mark.parametrize("name", ["dfly", "dspark", "dflash", "dflare"])
def test_counts_are_those_of_really_drafting_at_every_anchor(name):
    """The data is made of what the drafter drafts, up to one slot: exactly so many proposals are right."""
    drafter, target = shaken(name), tiny_target()
    rows = pattern_rows(3, row_length=64)
    check = measure(drafter, rows)
    row, anchor = 0, 8
    check._anchors = {row: torch.tensor([anchor])}
    tokens = rows.tokens_RT[row].long()
    inside = rows.document_RT[row] == rows.document_RT[row, 0]
    states = target.forward(tokens[inside][None], layer_ids=drafter.config.target_layer_ids)
    cache = drafter.context_cache(1, capacity=64)
    drafter.extend_context(cache, states.taps_BTF[:, :anchor])
    drafts = drafter.draft(
        cache,
        anchor_tokens_B=tokens[anchor : anchor + 1],
        anchor_positions_B=torch.tensor([anchor]),
        embedding_VD=target.embedding_VD,
        head_VD=target.head_VD,
    ).tokens_BK[0]
    for wanted in range(4):
        answer = drafts.clone()
        if wanted < 3:
            answer[wanted] = (answer[wanted] + 1) % 256
        rows.tokens_RT[row, anchor + 1 : anchor + 4] = answer.int()
        found = check().counts
        assert list(found.accepted_through) == [int(wanted > slot) for slot in range(3)]
        assert found.generated_tokens == 1 + wanted and found.verify_steps == 1


def test_anchors_are_fixed_spread_over_rows_and_wholly_supervised():
    rows = pattern_rows(6)
    check = measure(shaken("dflash"), rows)
    again = measure(shaken("dflash"), rows)
    assert check.num_anchors == 40 == sum(map(len, check._anchors.values()))
    assert {k: v.tolist() for k, v in check._anchors.items()} == {k: v.tolist() for k, v in again._anchors.items()}
    sizes = [len(v) for v in check._anchors.values()]
    assert max(sizes) - min(sizes) <= 1 and len(sizes) == 6
    for row, positions in check._anchors.items():
        assert len(positions.unique()) == len(positions)
        for position in positions.tolist():
            assert rows.loss_mask_RT[row, position : position + 4].all()
            assert rows.document_RT[row, position : position + 4].unique().numel() == 1
    other = measure(shaken("dflash"), rows, seed=4)
    assert any(v.tolist() != other._anchors[k].tolist() for k, v in check._anchors.items())


def test_fewer_anchors_than_asked_are_all_used_and_none_is_an_error():
    rows = pattern_rows(1)
    assert 0 < measure(shaken("dflash"), rows, num_anchors=10_000).num_anchors < 48
    rows.loss_mask_RT[:] = False
    with pytest.raises(TrainingError, match="held-out rows hold no anchor"):
        measure(shaken("dflash"), rows)


def test_the_record_is_one_plus_the_mean_of_accepted_proposals():
    record = measure(shaken("dflash"), pattern_rows(3))().record()
    assert record["anchors"] == 40 and len(record["per_position"]) == 3
    assert record["accepted_length"] == pytest.approx(1 + sum(record["per_position"]))
    assert record["per_position"] == sorted(record["per_position"], reverse=True)
