"""Drafting against training: the same states, the same choices; the cache against recomputing everything."""

import pytest
import torch
from drafter_builders import COMBINATIONS, tiny_drafter

from angelspec.ops.anchors import Anchors

ANSWER = 17
"""Tokens of the sequence that is drafted along."""


def sequence(config, *, seed=0, rows=3):
    generator = torch.Generator().manual_seed(seed)
    features = len(config.target_layer_ids) * config.target_hidden_size
    return (
        torch.randn(rows, ANSWER, features, generator=generator),
        torch.randint(0, config.vocab_size - 1, (rows, ANSWER), generator=generator),
        torch.randn(config.vocab_size, config.hidden_size, generator=generator),
        torch.randn(config.vocab_size, config.hidden_size, generator=generator),
    )


def strong_head(name, **changes):
    """A drafter whose head changes what is chosen."""
    drafter = tiny_drafter(name, **changes)
    last = drafter.markov_head.markov_w2 if name == "dspark" else drafter.hidden_correction.down_proj
    with torch.no_grad():
        last.weight.mul_(20)
    return drafter


def train_states(drafter, taps_RTF, tokens_RT, embedding_VD, position):
    """The training pass with one anchor per row at ``position``."""
    rows = tokens_RT.shape[0]
    return drafter(
        taps_RTF,
        document_RT=torch.zeros_like(tokens_RT),
        position_RT=torch.arange(tokens_RT.shape[1]).expand_as(tokens_RT),
        tokens_RT=tokens_RT,
        anchors=Anchors(torch.arange(rows), torch.full((rows,), position)),
        embedding_VD=embedding_VD,
    )


def logits_of(drafter, states, head_VD):
    logits = states.corrected_AKD @ head_VD.T
    return logits if states.markov_AKR is None else logits + drafter.markov_head.bias(states.markov_AKR)


@pytest.mark.parametrize("num_layers", [1, 3])
@pytest.mark.parametrize("name", COMBINATIONS)
def test_teacher_forced_drafting_equals_the_training_pass(name, num_layers):
    drafter = tiny_drafter(name, num_layers=num_layers)
    taps, tokens, embedding, head = sequence(drafter.config)
    for position in (0, 1, 9):
        trained = train_states(drafter, taps, tokens, embedding, position)
        cache = drafter.context_cache(3, capacity=ANSWER)
        drafter.extend_context(cache, taps[:, :position])
        hidden = drafter.draft_states(
            cache, anchor_tokens_B=tokens[:, position], anchor_positions_B=torch.full((3,), position),
            embedding_VD=embedding,
        )  # fmt: skip
        torch.testing.assert_close(hidden, trained.hidden_AKD, rtol=1e-5, atol=1e-5)
        for slot in range(3):
            drafted = drafter.apply_heads(hidden[:, slot], tokens[:, position + slot], embedding)
            ours, theirs = logits_of(drafter, drafted, head), logits_of(drafter, trained, head)[:, slot]
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
            if drafter.config.confidence_head:
                torch.testing.assert_close(drafted.confidence_AK, trained.confidence_AK[:, slot])


def draft_by_recomputing(drafter, taps, tokens, embedding, head, position):
    """No cache, no state kept: the training pass again for every slot, on a row that ends in what was drafted."""
    tokens = tokens.clone()
    confidences = []
    for slot in range(drafter.config.block_size - 1):
        logits = logits_of(drafter, train_states(drafter, taps, tokens, embedding, position), head)[:, slot]
        tokens[:, position + slot + 1] = logits.argmax(-1)
        confidences.append(logits.softmax(-1).max(-1).values)
    return tokens[:, position + 1 : position + drafter.config.block_size], torch.stack(confidences, dim=1)


@pytest.mark.parametrize("name", COMBINATIONS)
def test_drafting_from_the_cache_equals_recomputing_everything(name):
    drafter = tiny_drafter(name)
    taps, tokens, embedding, head = sequence(drafter.config, seed=1)
    cache = drafter.context_cache(3, capacity=ANSWER)
    committed = torch.zeros(3, dtype=torch.long)
    for counts in ([5, 1, 3], [0, 4, 1], [2, 2, 4]):
        # rows of different lengths grow by different amounts, padded with features that must not be read
        counts = torch.tensor(counts)
        width = int(counts.max())
        new = torch.full((3, width, taps.shape[2]), float("nan"))
        for row in range(3):
            new[row, : counts[row]] = taps[row, committed[row] : committed[row] + counts[row]]
        drafter.extend_context(cache, new, counts_B=counts, positions_BT=committed[:, None] + torch.arange(width))
        committed += counts
        drafts = drafter.draft(
            cache, anchor_tokens_B=tokens.gather(1, committed[:, None])[:, 0], anchor_positions_B=committed,
            embedding_VD=embedding, head_VD=head,
        )  # fmt: skip
        for row in range(3):
            single = slice(row, row + 1)
            expected, confidence = draft_by_recomputing(
                drafter, taps[single], tokens[single], embedding, head, int(committed[row])
            )
            assert drafts.tokens_BK[single].tolist() == expected.tolist()
            if not drafter.config.confidence_head:
                torch.testing.assert_close(drafts.confidence_BK[single], confidence, rtol=1e-4, atol=1e-5)
    assert len(set(drafts.tokens_BK.flatten().tolist())) > 1


@pytest.mark.parametrize("name", ["dspark", "dfly"])
def test_a_shortlist_of_everything_is_exact_and_a_short_one_stays_inside(name):
    drafter = strong_head(name, confidence_head=False)
    taps, tokens, embedding, head = sequence(drafter.config, seed=2, rows=8)
    hidden = train_states(drafter, taps, tokens, embedding, 6).hidden_AKD
    arguments = {"anchor_tokens_B": tokens[:, 6], "embedding_VD": embedding, "head_VD": head}
    exact = drafter.choose(hidden, **arguments)
    whole = drafter.choose(hidden, shortlist=drafter.config.vocab_size, **arguments)
    assert torch.equal(exact.tokens_BK, whole.tokens_BK)
    torch.testing.assert_close(exact.confidence_BK, whole.confidence_BK, rtol=1e-4, atol=1e-5)
    top = (hidden @ head.T).topk(3, dim=-1).indices
    short = drafter.choose(hidden, shortlist=3, **arguments)
    assert (short.tokens_BK[..., None] == top).any(-1).all()
    assert not torch.equal(short.tokens_BK, exact.tokens_BK)
    assert ((short.confidence_BK >= 0) & (short.confidence_BK <= 1)).all()


@pytest.mark.parametrize("name", ["dspark", "dfly"])
def test_a_slot_depends_on_the_token_chosen_before_it(name):
    drafter = strong_head(name)
    taps, tokens, embedding, head = sequence(drafter.config)
    hidden = train_states(drafter, taps, tokens, embedding, 6).hidden_AKD
    drafts = [
        drafter.choose(hidden, anchor_tokens_B=torch.full((3,), anchor), embedding_VD=embedding, head_VD=head).tokens_BK
        for anchor in range(6)
    ]
    assert any(not torch.equal(drafts[0][:, 0], other[:, 0]) for other in drafts[1:])
    assert any(not torch.equal(drafts[0][:, 1:], other[:, 1:]) for other in drafts[1:])


def test_rows_are_chosen_dropped_and_reused():
    drafter = tiny_drafter("dfly")
    taps, tokens, embedding, head = sequence(drafter.config)
    lengths = torch.tensor([4, 7, 2])

    def fill(cache, order):
        for row, source in enumerate(order):
            drafter.extend_context(cache, taps[[source], : lengths[source]], rows=torch.tensor([row]))

    def draft(cache, sources, rows=None):
        where = lengths[sources]
        return drafter.draft(
            cache, anchor_tokens_B=tokens[sources, where], anchor_positions_B=where, embedding_VD=embedding,
            head_VD=head, rows=rows,
        ).tokens_BK  # fmt: skip

    cache = drafter.context_cache(3, capacity=10)
    fill(cache, [0, 1, 2])
    expected = draft(cache, torch.tensor([0, 1, 2]))
    assert torch.equal(draft(cache, torch.tensor([2, 0]), torch.tensor([2, 0])), expected[[2, 0]])
    cache.reset(torch.tensor([1]))
    drafter.extend_context(cache, taps[[0], :4], rows=torch.tensor([1]))
    assert torch.equal(draft(cache, torch.tensor([2, 0]), torch.tensor([2, 1])), expected[[2, 0]])


def test_refuses_gaps_and_overflow():
    drafter = tiny_drafter("dflash")
    taps, tokens, embedding, head = sequence(drafter.config)
    cache = drafter.context_cache(3, capacity=6)
    with pytest.raises(ValueError, match="gap"):
        drafter.extend_context(cache, taps[:, :2], positions_BT=torch.tensor([[1, 2]] * 3))
    with pytest.raises(ValueError, match="capacity is 6"):
        drafter.extend_context(cache, taps[:, :7])
    drafter.extend_context(cache, taps[:, :2])
    with pytest.raises(ValueError, match="must follow contexts"):
        drafter.draft(
            cache, anchor_tokens_B=tokens[:, 3], anchor_positions_B=torch.full((3,), 3), embedding_VD=embedding,
            head_VD=head,
        )  # fmt: skip


def test_bfloat16_drafts():
    drafter = tiny_drafter("dfly").to(torch.bfloat16)
    taps, tokens, embedding, head = (
        item.bfloat16() if item.is_floating_point() else item for item in sequence(drafter.config)
    )
    cache = drafter.context_cache(3, capacity=6)
    drafter.extend_context(cache, taps[:, :4])
    drafts = drafter.draft(
        cache, anchor_tokens_B=tokens[:, 4], anchor_positions_B=torch.full((3,), 4), embedding_VD=embedding,
        head_VD=head, shortlist=4,
    )  # fmt: skip
    assert drafts.tokens_BK.shape == (3, 3) and drafts.confidence_BK.dtype == torch.float32
