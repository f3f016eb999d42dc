"""Unrolled training equals step-by-step decoding with a real cache, depth by depth, to float32 rounding."""

import pytest
import torch
from mtp_builders import tiny_mtp, tiny_mtp_rows

DEPTHS = 3
LENGTHS = ((17,), (12,), (9,))


def sequences(drafter, *, seed=0):
    return tiny_mtp_rows(drafter.config, lengths=LENGTHS, row_length=18, seed=seed)


def trained(drafter, rows):
    """Each depth's output [R, T, D] by the on-policy unroll, its proposal and the proposal's probability [R, T]."""
    unroll = drafter(rows.hidden_RTD, **rows.inputs())
    hidden, tokens, found = unroll.hidden_ND, None, []
    for _ in range(DEPTHS):
        if tokens is not None:
            hidden = unroll.advance(tokens)
        probability, tokens = (hidden @ rows.head_VD.T).softmax(-1).max(-1)
        found.append([spread(rows, item) for item in (hidden, tokens, probability)])
    return found


def spread(rows, item_N):
    whole = item_N.new_zeros(*rows.asked_RT.shape, *item_N.shape[1:])
    whole[rows.asked_RT] = item_N.detach()
    return whole


def draft(drafter, cache, hidden, rows, *, which=None, num_depths=DEPTHS):
    return list(
        drafter.draft_states(
            cache, hidden, num_depths=num_depths, embedding_VD=rows.embedding_VD, head_VD=rows.head_VD, rows=which
        )
    )


@pytest.mark.parametrize("mlp", ["dense", "moe"])
def test_step_by_step_equals_unrolled(mlp):
    """Every row one token at a time, a draft from every position."""
    drafter = tiny_mtp(mlp)
    rows = sequences(drafter)
    expected = trained(drafter, rows)
    cache = drafter.context_cache(3, capacity=18)
    for position in range(11):
        which = (torch.tensor(LENGTHS)[:, 0] > position + 1).nonzero().flatten()
        hidden = drafter.extend(
            cache, rows.hidden_RTD[which, position : position + 1], rows.tokens_RT[which, position + 1 : position + 2],
            counts_B=torch.ones_like(which), rows=which, embedding_VD=rows.embedding_VD,
        )  # fmt: skip
        for depth, found in enumerate(draft(drafter, cache, hidden, rows, which=which)):
            states, tokens, probability = (item[which, position] for item in expected[depth])
            torch.testing.assert_close(found[0], states, rtol=1e-4, atol=1e-5)
            assert torch.equal(found[1], tokens)
            torch.testing.assert_close(found[2], probability, rtol=1e-4, atol=1e-6)
    assert len({tuple(expected[depth][1][rows.asked_RT].tolist()) for depth in range(DEPTHS)}) == DEPTHS


@pytest.mark.parametrize("mlp", ["dense", "moe"])
@pytest.mark.parametrize("widths", [[9, 1, 4], [1, 3, 3, 3], [12]])
def test_windows_as_a_server_has_them(mlp, widths):
    """A prompt at once, then windows of accepted tokens, every row its own: a draft leaves nothing behind."""
    drafter = tiny_mtp(mlp)
    rows = sequences(drafter, seed=3)
    expected = trained(drafter, rows)
    cache = drafter.context_cache(3, capacity=18)
    length_B = torch.zeros(3, dtype=torch.long)
    for number, width in enumerate(widths):
        counts = torch.tensor([width, max(width - 1, 1), max(width - 2, 1)])
        counts = torch.minimum(counts, torch.tensor(LENGTHS)[:, 0] - 1 - length_B)
        which = (counts > 0).nonzero().flatten()
        counts = counts[which]
        index = (length_B[which, None] + torch.arange(width)).clamp(max=16)
        hidden = drafter.extend(
            cache, rows.hidden_RTD[which[:, None], index], rows.tokens_RT[which[:, None], index + 1],
            counts_B=counts, rows=None if number == 0 else which, embedding_VD=rows.embedding_VD,
        )  # fmt: skip
        length_B[which] += counts
        assert torch.equal(cache.lengths, length_B)
        for depth, (states, tokens, _) in enumerate(draft(drafter, cache, hidden, rows, which=which)):
            torch.testing.assert_close(states, expected[depth][0][which, length_B[which] - 1], rtol=1e-4, atol=1e-5)
            assert torch.equal(tokens, expected[depth][1][which, length_B[which] - 1])
        assert torch.equal(cache.lengths, length_B)


def test_draft_gives_tokens_and_their_probability():
    drafter = tiny_mtp()
    rows = sequences(drafter)
    cache = drafter.context_cache(3, capacity=18)
    hidden = drafter.extend(cache, rows.hidden_RTD[:, :5], rows.tokens_RT[:, 1:6], embedding_VD=rows.embedding_VD)
    steps = draft(drafter, cache, hidden, rows)
    drafts = drafter.draft(cache, hidden, num_depths=DEPTHS, embedding_VD=rows.embedding_VD, head_VD=rows.head_VD)
    assert torch.equal(drafts.tokens_BK, torch.stack([step[1] for step in steps], dim=1))
    assert torch.equal(drafts.confidence_BK, torch.stack([step[2] for step in steps], dim=1))
    assert drafts.tokens_BK.dtype == torch.int64 and drafts.confidence_BK.dtype == torch.float32
    for depth in range(1, DEPTHS):
        short = drafter.draft(cache, hidden, num_depths=depth, embedding_VD=rows.embedding_VD, head_VD=rows.head_VD)
        assert torch.equal(short.tokens_BK, drafts.tokens_BK[:, :depth])


def test_rows_are_chosen_dropped_and_reused():
    drafter = tiny_mtp("moe")
    rows = sequences(drafter)
    counts = torch.tensor([4, 7, 2])

    def fill(cache, sources, which):
        return drafter.extend(
            cache, rows.hidden_RTD[sources, :7], rows.tokens_RT[sources, 1:8], counts_B=counts[sources],
            rows=torch.tensor(which), embedding_VD=rows.embedding_VD,
        )  # fmt: skip

    def tokens(cache, hidden, which=None):
        return torch.stack([step[1] for step in draft(drafter, cache, hidden, rows, which=which)], dim=1)

    cache = drafter.context_cache(3, capacity=10)
    hidden = fill(cache, [0, 1, 2], [0, 1, 2])
    expected = tokens(cache, hidden)
    assert torch.equal(tokens(cache, hidden[[2, 0]], torch.tensor([2, 0])), expected[[2, 0]])
    cache.reset(torch.tensor([1]))
    again = fill(cache, [0], [1])
    torch.testing.assert_close(again, hidden[:1], rtol=1e-5, atol=1e-6)
    found = tokens(cache, torch.cat([hidden[2:], again]), torch.tensor([2, 1]))
    assert torch.equal(found, expected[[2, 0]])


def test_refuses_gaps_overflow_idle_rows_and_too_many_depths():
    drafter = tiny_mtp()
    rows = sequences(drafter)
    cache = drafter.context_cache(3, capacity=6)
    given = {"embedding_VD": rows.embedding_VD}
    with pytest.raises(ValueError, match="gap"):
        drafter.extend(
            cache, rows.hidden_RTD[:, :2], rows.tokens_RT[:, 1:3], positions_BT=torch.tensor([[1, 2]] * 3), **given
        )
    with pytest.raises(ValueError, match="capacity is 6"):
        drafter.extend(cache, rows.hidden_RTD[:, :7], rows.tokens_RT[:, 1:8], **given)
    with pytest.raises(ValueError, match="at least one"):
        drafter.extend(cache, rows.hidden_RTD[:, :2], rows.tokens_RT[:, 1:3], counts_B=torch.tensor([1, 0, 2]), **given)
    hidden = drafter.extend(cache, rows.hidden_RTD[:, :6], rows.tokens_RT[:, 1:7], **given)
    assert len(draft(drafter, cache, hidden, rows)) == DEPTHS
    for number in (0, 4):
        with pytest.raises(ValueError, match="1 to 3"):
            draft(drafter, cache, hidden, rows, num_depths=number)
    deep = drafter.context_cache(3, capacity=6, num_depths=5)
    hidden = drafter.extend(deep, rows.hidden_RTD[:, :6], rows.tokens_RT[:, 1:7], **given)
    assert len(draft(drafter, deep, hidden, rows, num_depths=5)) == 5


def test_a_long_prompt_costs_no_scores_among_its_tokens():
    drafter = tiny_mtp()
    rows = tiny_mtp_rows(drafter.config, lengths=((300,),), row_length=300)
    cache = drafter.context_cache(1, capacity=300)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            out = function(*args, **(kwargs or {}))
            for item in out if isinstance(out, (tuple, list)) else (out,):
                largest = max(largest, item.numel() if isinstance(item, torch.Tensor) else 0)
            return out

    with Watch():
        drafter.extend(cache, rows.hidden_RTD[:, :299], rows.tokens_RT[:, 1:], embedding_VD=rows.embedding_VD)
    assert largest <= 300 * 2 * drafter.config.hidden_size


def test_bfloat16_drafts():
    for mlp in ("dense", "moe"):
        drafter = tiny_mtp(mlp).to(torch.bfloat16)
        rows = sequences(drafter)
        embedding, head = rows.embedding_VD.bfloat16(), rows.head_VD.bfloat16()
        cache = drafter.context_cache(3, capacity=9)
        hidden = drafter.extend(
            cache, rows.hidden_RTD[:, :5].bfloat16(), rows.tokens_RT[:, 1:6], embedding_VD=embedding
        )
        assert hidden.dtype == torch.bfloat16
        drafts = drafter.draft(cache, hidden, num_depths=3, embedding_VD=embedding, head_VD=head)
        assert drafts.tokens_BK.shape == (3, 3) and drafts.confidence_BK.dtype == torch.float32
