"""The frugal unrolled attention against the dense reference: outputs, gradients, and what it holds in memory."""

import pytest
import torch

import angelspec.ops.unrolled_attention as module
from angelspec.ops.masks import dense_unrolled_mask
from angelspec.ops.unrolled_attention import (
    causal_attention,
    plan_unrolled,
    unrolled_attention,
    unrolled_attention_reference,
)
from angelspec.ops.unrolled_flex import flex_causal_attention, range_block_mask

LAYOUTS = {
    "one document": [[0] * 40],
    "documents of all lengths": [[0] * 3 + [1] * 17 + [2] * 4 + [3] * 16, [4] * 39 + [-1]],
    "padding and a document nobody asks in": [[0] * 20, [-1] * 20, [1] * 2 + [2] * 18],
}
HEADS, KV_HEADS, CHANNELS = 6, 2, 5


def case(layout, *, depth, share, seed=0):
    generator = torch.Generator().manual_seed(seed)
    document = torch.tensor(LAYOUTS[layout])
    asked = (torch.rand(document.shape, generator=generator) < share) & (document >= 0) & (document != 1)
    count = int(asked.sum())

    def normal(*shape):
        return torch.randn(*shape, CHANNELS, generator=generator, requires_grad=True)

    inputs = [normal(count, HEADS), normal(document.numel(), KV_HEADS), normal(document.numel(), KV_HEADS)]
    inputs += [normal(count, depth, KV_HEADS), normal(count, depth, KV_HEADS)] if depth else []
    return document, asked, inputs


def frugal(plan, query, key, value, diagonal_key=None, diagonal_value=None):
    return unrolled_attention(
        query,
        key_PGC=key[plan.visible_P],
        value_PGC=value[plan.visible_P],
        diagonal_key_NKGC=diagonal_key,
        diagonal_value_NKGC=diagonal_value,
        plan=plan,
    )


def dense(document, asked, query, key, value, *diagonal):
    depth = diagonal[0].shape[1] if diagonal else 0
    mask = dense_unrolled_mask(document, asked, num_depths=depth)
    none = key.new_zeros(len(query), 0, KV_HEADS, CHANNELS)
    return unrolled_attention_reference(query, key, value, *(diagonal or (none, none)), mask)


@pytest.mark.parametrize(("group", "tile"), [(1, 4096), (3, 4096), (64, 4096), (1, 16), (3, 3), (64, 16)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_equals_dense_in_output_and_gradient(layout, group, tile, monkeypatch):
    monkeypatch.setattr(module, "TILE_KEYS", tile)
    for depth, share in [(0, 1.0), (1, 0.4), (3, 0.7)]:
        document, asked, inputs = case(layout, depth=depth, share=share)
        plan = plan_unrolled(document, asked, group_queries=group)
        upstream = torch.randn(len(inputs[0]), HEADS, CHANNELS)
        results = []
        for out in (frugal(plan, *inputs), dense(document, asked, *inputs)):
            results.append((out.detach(), *torch.autograd.grad(out, inputs, upstream)))
        for fast, slow in zip(*results, strict=True):
            torch.testing.assert_close(fast, slow, rtol=1e-5, atol=1e-5)


def test_the_gradient_of_the_logsumexp_is_right_too():
    document, asked, inputs = case("documents of all lengths", depth=0, share=0.5)
    plan = plan_unrolled(document, asked, group_queries=4)
    inputs = [item.detach().double().requires_grad_(True) for item in inputs]

    def attend(query, key, value):
        return causal_attention(query, key[plan.visible_P], value[plan.visible_P], plan)

    assert torch.autograd.gradcheck(attend, inputs, fast_mode=True)


def test_large_scores_stay_finite():
    document, asked, inputs = case("one document", depth=2, share=1.0)
    inputs = [(100 * item).detach().requires_grad_(True) for item in inputs]
    out = frugal(plan_unrolled(document, asked), *inputs)
    torch.testing.assert_close(out, dense(document, asked, *inputs), rtol=1e-4, atol=1e-3)
    gradients = torch.autograd.grad(out.sum(), inputs)
    assert all(torch.isfinite(item).all() for item in gradients)


def test_only_what_is_asked_for_is_read():
    document = torch.tensor([[0] * 6 + [1] * 5 + [-1], [2] * 12])
    asked = torch.zeros_like(document, dtype=torch.bool)
    asked[0, 8] = asked[0, 9] = asked[1, 3] = True
    plan = plan_unrolled(document, asked)
    assert plan.visible_P.tolist() == [6, 7, 8, 9, 12, 13, 14, 15]
    assert plan.own_N.tolist() == [2, 3, 7] and plan.start_N.tolist() == [0, 0, 4]


def test_nobody_asks():
    document = torch.zeros(2, 5, dtype=torch.long)
    document[1] = 1
    plan = plan_unrolled(document, torch.zeros_like(document, dtype=torch.bool))
    empty = torch.zeros(0, HEADS, CHANNELS, requires_grad=True)
    out = frugal(plan, empty, torch.randn(10, KV_HEADS, CHANNELS), torch.randn(10, KV_HEADS, CHANNELS))
    assert out.shape == (0, HEADS, CHANNELS)
    out.sum().backward()


class OnGpu(torch.Tensor):
    """Passes for a GPU's tensor."""

    is_cuda = property(lambda self: True)


@pytest.mark.parametrize("asked", [False, True])
def test_flex_attention_is_spared_queries_of_length_zero(asked, monkeypatch):
    """On a GPU too, where an idle rank's rows, or rows that were all refused, ask nothing."""
    called = []

    def flex(query, key, value, **bounds):
        called.append(query.shape[0])
        return torch.zeros_like(query), query.new_zeros(query.shape[:2])

    monkeypatch.setattr("angelspec.ops.unrolled_flex.flex_causal_attention", flex)
    plan = plan_unrolled(torch.zeros(1, 5, dtype=torch.long), torch.full((1, 5), asked))
    shapes = [(plan.count, HEADS, CHANNELS), *[(len(plan.visible_P), KV_HEADS, CHANNELS)] * 2]
    inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]
    mixed, total = causal_attention(*(item.as_subclass(OnGpu) for item in inputs), plan)
    assert mixed.shape == (plan.count, HEADS, CHANNELS) and total.shape == (plan.count, HEADS)
    assert called == [5] * asked
    if not asked:
        gradients = torch.autograd.grad(mixed.sum() + total.sum(), inputs)
        assert [item.shape for item in gradients] == [item.shape for item in inputs]


def test_the_plan_refuses_padding_and_torn_documents_and_foreign_tensors():
    document = torch.tensor([[0, 0, 1, 0, -1]])
    asked = torch.tensor([[True, False, False, False, False]])
    with pytest.raises(ValueError, match="two separate runs"):
        plan_unrolled(document, asked)
    document[0, 3] = 1
    with pytest.raises(ValueError, match="padding"):
        plan_unrolled(document, torch.ones_like(asked))
    plan = plan_unrolled(document, asked)
    with pytest.raises(ValueError, match="the plan holds 1 and 1"):
        frugal(plan, torch.randn(2, HEADS, CHANNELS), *torch.randn(2, 5, KV_HEADS, CHANNELS))


@pytest.mark.parametrize("sizes", [[0, 5, 0, 9, 1, 0], [15]])
def test_a_split_plan_is_the_same_attention(sizes):
    document, asked, inputs = case("documents of all lengths", depth=1, share=1.0)
    asked[:, ::3] = False
    query, key, value, *diagonal = (item.detach() for item in inputs)
    count = int(asked.sum())
    sizes = [*sizes, count - sum(sizes)]
    query, diagonal = query[:count], [item[:count] for item in diagonal]
    plan = plan_unrolled(document, asked, group_queries=4)
    expected = frugal(plan, query, key, value, *diagonal)
    key, value = key[plan.visible_P], value[plan.visible_P]
    found = [
        unrolled_attention(
            asking, key_PGC=key[seen], value_PGC=value[seen], diagonal_key_NKGC=own_key,
            diagonal_value_NKGC=own_value, plan=piece,
        )
        for (piece, seen), asking, own_key, own_value in zip(
            plan.split(sizes), query.split(sizes), *(item.split(sizes) for item in diagonal), strict=True
        )
    ]  # fmt: skip
    torch.testing.assert_close(torch.cat(found), expected, rtol=1e-5, atol=1e-6)


def test_scores_of_all_pairs_are_never_held():
    """The largest tensor grows with the length, not with its square."""
    largest = {}
    for length in (160, 320):  # whole groups
        document = torch.zeros(1, length, dtype=torch.long)
        asked = torch.ones_like(document, dtype=torch.bool)
        shapes = [(length, 2, 4), (length, 2, 4), (length, 2, 4), (length, 1, 2, 4), (length, 1, 2, 4)]
        inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]
        plan = plan_unrolled(document, asked)
        with Largest() as seen:
            frugal(plan, *inputs).sum().backward()
        largest[length] = seen.numel
    assert largest[320] <= 2.2 * largest[160]
    assert largest[320] < 320 * 320 / 4


def test_tiles_bound_the_scores(monkeypatch):
    monkeypatch.setattr(module, "TILE_KEYS", 64)
    document = torch.zeros(1, 2000, dtype=torch.long)
    asked = torch.zeros_like(document, dtype=torch.bool)
    asked[0, -40:] = True
    inputs = [torch.randn(count, 2, 1, requires_grad=True) for count in (40, 2000, 2000)]
    plan = plan_unrolled(document, asked)
    with Largest() as seen:
        frugal(plan, *inputs).sum().backward()
    assert seen.numel <= 2 * 64 * module.GROUP_QUERIES


class Largest(torch.utils._python_dispatch.TorchDispatchMode):
    """Numbers in the largest tensor that any operation returns."""

    numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for item in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(item, torch.Tensor):
                self.numel = max(self.numel, item.numel())
        return out


def test_flex_attention_computes_the_same():
    """Its plain form, which a CPU can run; a GPU compiles the same call."""
    generator = torch.Generator().manual_seed(3)
    document = torch.tensor([[0] * 80 + [1] * 30 + [2] * 50, [3] * 150 + [-1] * 10])
    asked = (torch.rand(document.shape, generator=generator) < 0.6) & (document >= 0)
    plan = plan_unrolled(document, asked)
    query = torch.randn(plan.count, 2, 4, generator=generator)
    key, value = torch.randn(2, plan.visible_P.shape[0], 1, 4, generator=generator)
    expected = causal_attention(query, key, value, plan)
    found = flex_causal_attention(query, key, value, start_N=plan.start_N, own_N=plan.own_N)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_flex_blocks_cover_what_is_seen_and_full_ones_are_full():
    generator = torch.Generator().manual_seed(4)
    document = torch.tensor([[0] * 500 + [1] * 200 + [2] * 324])
    asked = torch.rand(document.shape, generator=generator) < 0.6
    plan = plan_unrolled(document, asked)
    num_keys = plan.visible_P.shape[0]
    mask = range_block_mask(plan.start_N, plan.own_N, num_keys=num_keys)
    key = torch.arange(num_keys)
    sees = (key >= plan.start_N[:, None]) & (key <= plan.own_N[:, None])
    partial = listed(mask.kv_num_blocks, mask.kv_indices)
    full = listed(mask.full_kv_num_blocks, mask.full_kv_indices)
    assert full and not partial & full
    for row in range(-(-plan.count // 128)):
        for column in range(-(-num_keys // 128)):
            block = sees[row * 128 : (row + 1) * 128, column * 128 : (column + 1) * 128]
            if (row, column) in full:
                assert block.all()
            elif (row, column) not in partial:
                assert not block.any()


def listed(counts, indices):
    rows = zip(counts[0, 0].tolist(), indices[0, 0].tolist(), strict=True)
    return {(row, column) for row, (count, columns) in enumerate(rows) for column in columns[:count]}
