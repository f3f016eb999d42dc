"""The frugal attention against the dense reference: outputs, gradients, and what it holds in memory."""

import pytest
import torch

import angelspec.ops.block_attention as block_attention_module
from angelspec.ops.anchors import Anchors, sample_anchors
from angelspec.ops.block_attention import block_attention, block_attention_reference, plan_attention
from angelspec.ops.masks import dense_block_mask

LAYOUTS = {
    "one document": [[0] * 40],
    "documents of all lengths": [[0] * 3 + [1] * 17 + [2] * 4 + [3] * 16, [4] * 39 + [-1]],
    "documents of one block": [[0] * 4 + [1] * 4 + [2] * 4 + [3] * 4 + [-1] * 4],
    "a row without anchors between": [[0] * 20, [-1] * 20, [1] * 2 + [2] * 18],
}


def case(layout, *, queries, num_anchors, seed=0):
    generator = torch.Generator().manual_seed(seed)
    document = torch.tensor(LAYOUTS[layout])
    anchors = sample_anchors(document >= 0, document, block_size=4, num_anchors=num_anchors, generator=generator)
    rows, tokens = document.shape

    def normal(*shape):
        return torch.randn(*shape, generator=generator, requires_grad=True)

    inputs = [
        normal(anchors.count, queries, 6, 5), normal(rows, tokens, 2, 5), normal(rows, tokens, 2, 5),
        normal(anchors.count, 4, 2, 5), normal(anchors.count, 4, 2, 5),
    ]  # fmt: skip
    return document, anchors, inputs


def frugal(document, anchors, inputs, group_anchors):
    query, context_key, context_value, block_key, block_value = inputs
    return block_attention(
        query,
        context_key_RTGC=context_key,
        context_value_RTGC=context_value,
        block_key_AKGC=block_key,
        block_value_AKGC=block_value,
        plan=plan_attention(document, anchors, group_anchors=group_anchors),
    )


@pytest.mark.parametrize("kept", [0, 10**9])
@pytest.mark.parametrize("group_anchors", [1, 3, 64])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_equals_dense_in_output_and_gradient(layout, group_anchors, kept, monkeypatch):
    monkeypatch.setattr(block_attention_module, "KEPT_WEIGHTS", kept)
    for queries, num_anchors in [(4, 50), (3, 5)]:
        document, anchors, inputs = case(layout, queries=queries, num_anchors=num_anchors)
        mask = dense_block_mask(document, anchors, block_size=4).unflatten(0, (-1, 4))[:, 4 - queries :].flatten(0, 1)
        upstream = torch.randn(anchors.count, queries, 6, 5)
        results = []
        for out in (frugal(document, anchors, inputs, group_anchors), block_attention_reference(*inputs, mask)):
            results.append((out.detach(), *torch.autograd.grad(out, inputs, upstream)))
        for fast, slow in zip(*results, strict=True):
            torch.testing.assert_close(fast, slow, rtol=1e-5, atol=1e-5)


def test_an_anchor_without_context_is_finite_and_sees_only_itself():
    document = torch.zeros(1, 8, dtype=torch.long)
    anchors = Anchors(torch.tensor([0]), torch.tensor([0]))
    inputs = [torch.randn(1, 4, 2, 3, requires_grad=True) for _ in range(5)]
    inputs[1], inputs[2] = (torch.full((1, 8, 2, 3), float("nan"), requires_grad=True) for _ in range(2))
    out = frugal(document, anchors, inputs, 4)
    out.sum().backward()
    assert torch.isfinite(out).all() and all(torch.isfinite(item.grad).all() for item in inputs)


def test_reference_gives_zeros_where_nothing_is_visible():
    inputs = [torch.randn(1, 2, 2, 3, requires_grad=True) for _ in range(5)]
    mask = torch.zeros(2, 4, dtype=torch.bool)
    mask[1, 0] = True
    out = block_attention_reference(*inputs, mask)
    out.sum().backward()
    assert (out[0, 0] == 0).all() and (out[0, 1] != 0).any()
    assert all(torch.isfinite(item.grad).all() for item in inputs)


def test_the_plan_reads_no_more_than_its_anchors_see():
    document = torch.tensor([[0] * 10 + [1] * 22])
    position = torch.tensor([2, 5, 20, 24, 28])
    groups = plan_attention(document, Anchors(torch.zeros(5, dtype=torch.long), position), group_anchors=2).groups
    assert [(group.low, group.high) for group in groups] == [(0, 5), (10, 24), (10, 28)]


def test_the_plan_refuses_unordered_anchors():
    document = torch.zeros(1, 12, dtype=torch.long)
    for position in ([4, 2], [3, 3]):
        with pytest.raises(ValueError, match="ordered"):
            plan_attention(document, Anchors(torch.zeros(2, dtype=torch.long), torch.tensor(position)))


def test_scores_of_all_pairs_are_never_held(monkeypatch):
    monkeypatch.setattr(block_attention_module, "KEPT_WEIGHTS", 0)
    document = torch.zeros(1, 400, dtype=torch.long)
    anchors = sample_anchors(document >= 0, document, block_size=4, num_anchors=300)
    shapes = [
        (anchors.count, 4, 2, 4),
        (1, 400, 2, 4),
        (1, 400, 2, 4),
        (anchors.count, 4, 2, 4),
        (anchors.count, 4, 2, 4),
    ]
    inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            out = function(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                largest = max(largest, out.numel())
            return out

    with Watch():
        frugal(document, anchors, inputs, 8).sum().backward()
    assert largest < 2 * anchors.count * 4 * 400 / 10
