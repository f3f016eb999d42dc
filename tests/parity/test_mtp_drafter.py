"""The training pass of MTP against the slow reference: values, and gradients of every weight, at every depth."""

import pytest
import torch
from mtp_builders import MOE, tiny_mtp, tiny_mtp_rows

from angelspec.drafters.mtp_reference import unroll_reference

DEPTHS = 3
VARIANTS = {
    "dense": {},
    "dense without norms of queries and keys": {"qk_norm": False},
    "moe": {"mlp": "moe"},
    "moe by softmax, nothing shared": {
        "mlp": "moe",
        "moe": MOE.model_copy(
            update={
                "router_score": "softmax", "normalise_routes": False, "selection_bias": False, "num_shared_experts": 0,
                "experts_per_token": 3,
            }
        ),
    },
}  # fmt: skip


def on_policy(rows):
    return lambda depth, hidden: (hidden @ rows.head_VD.T).argmax(-1)


def teacher_forced(rows):
    return lambda depth, hidden: rows.teacher_tokens(depth)


def unrolled(drafter, rows, kind, *, sizes=None):
    """Outputs of every depth by the drafter's own pass."""
    unroll = drafter(rows.hidden_RTD, **rows.inputs())
    asked = rows.asked_RT.flatten()
    pieces = [unroll] if sizes is None else unroll.split(sizes)
    places = asked.nonzero().flatten().split([len(piece.hidden_ND) for piece in pieces])
    outputs = [[] for _ in range(DEPTHS)]
    for piece, place in zip(pieces, places, strict=True):
        hidden = piece.hidden_ND
        outputs[0].append(hidden)
        for depth in range(1, DEPTHS):
            tokens = (hidden @ rows.head_VD.T).argmax(-1)
            if kind is teacher_forced:
                tokens = rows.teacher_tokens(depth)[place]
            hidden = piece.advance(tokens)
            outputs[depth].append(hidden)
        assert piece.depth == DEPTHS - 1
    return [torch.cat(parts) for parts in outputs]


def referred(drafter, rows, kind):
    return unroll_reference(
        drafter, rows.hidden_RTD, **rows.inputs(), next_tokens=kind(rows), num_depths=DEPTHS
    )  # fmt: skip


def gradients(drafter, outputs, *, seed=9):
    generator = torch.Generator().manual_seed(seed)
    loss = sum((item * torch.randn(item.shape, generator=generator)).sum() for item in outputs)
    return torch.autograd.grad(loss, list(drafter.parameters()))


@pytest.mark.parametrize("kind", [on_policy, teacher_forced])
@pytest.mark.parametrize("name", VARIANTS)
def test_fast_equals_reference(name, kind):
    drafter = tiny_mtp(**VARIANTS[name])
    for asked in (1.0, 0.5):
        rows = tiny_mtp_rows(drafter.config, asked=asked)
        fast, slow = unrolled(drafter, rows, kind), referred(drafter, rows, kind)
        for ours, theirs in zip(fast, slow, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
        for ours, theirs in zip(gradients(drafter, fast), gradients(drafter, slow), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("mlp", ["dense", "moe"])
def test_pieces_are_the_whole(mlp):
    drafter = tiny_mtp(mlp)
    rows = tiny_mtp_rows(drafter.config, asked=0.8)
    count = int(rows.asked_RT.sum())
    whole = unrolled(drafter, rows, teacher_forced)
    pieces = unrolled(drafter, rows, teacher_forced, sizes=[0, 5, count - 8, 0, 3])
    for ours, theirs in zip(pieces, whole, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(gradients(drafter, pieces), gradients(drafter, whole), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mlp", ["dense", "moe"])
def test_every_weight_learns_and_the_target_gets_no_gradient(mlp):
    drafter = tiny_mtp(mlp)
    rows = tiny_mtp_rows(drafter.config)
    rows.hidden_RTD.requires_grad_(True)
    rows.embedding_VD.requires_grad_(True)
    sum(item.square().sum() for item in unrolled(drafter, rows, on_policy)).backward()
    assert [key for key, value in drafter.named_parameters() if value.grad is None or not value.grad.any()] == []
    assert rows.hidden_RTD.grad is None and rows.embedding_VD.grad is None
    if mlp == "moe":
        assert not drafter.midlayer.mlp.expert_bias.requires_grad


def test_a_deep_loss_reaches_the_first_depth():
    """Gradients flow through the recurrence and through the keys of every depth before."""
    drafter = tiny_mtp()
    rows = tiny_mtp_rows(drafter.config)
    unroll = drafter(rows.hidden_RTD, **rows.inputs())
    tokens = rows.teacher_tokens(1)[rows.asked_RT.flatten()]
    first = unroll.advance(tokens)
    second = unroll.advance(tokens)
    first_alone, zeroth = torch.autograd.grad(second.square().sum(), [first, unroll.hidden_ND], retain_graph=True)
    assert first_alone.any() and zeroth.any()
    key_weight = drafter.midlayer.self_attn.k_proj.weight
    assert torch.autograd.grad(second.square().sum(), key_weight)[0].any()


def test_nobody_asks_and_every_weight_still_has_a_gradient():
    """A rank without supervised tokens takes part in every collective."""
    for mlp in ("dense", "moe"):
        drafter = tiny_mtp(mlp)
        rows = tiny_mtp_rows(drafter.config, asked=0.0)
        outputs = unrolled(drafter, rows, on_policy, sizes=[0])
        assert [item.shape for item in outputs] == [(0, 20)] * DEPTHS
        sum(item.sum() for item in outputs).backward()
        for name, parameter in drafter.named_parameters():
            assert parameter.grad is not None and not parameter.grad.any(), name


def test_rows_that_do_not_ask_are_not_read():
    drafter = tiny_mtp("moe")
    rows = tiny_mtp_rows(drafter.config)
    rows.asked_RT[1] = False
    rows.asked_RT[0, 18:] = False
    rows.hidden_RTD[1] = float("nan")
    rows.hidden_RTD[0, 18:] = float("inf")
    outputs = unrolled(drafter, rows, on_policy)
    assert all(torch.isfinite(item).all() for item in outputs)
    assert all(torch.isfinite(item).all() for item in gradients(drafter, outputs))


def test_what_cannot_be_asked_is_refused():
    drafter = tiny_mtp()
    for row, column, message in [(0, 12, "last"), (0, 22, "padding"), (1, 23, "padding")]:
        rows = tiny_mtp_rows(drafter.config)
        rows.asked_RT[row, column] = True
        with pytest.raises(ValueError, match=message):
            drafter(rows.hidden_RTD, **rows.inputs())
    unroll = drafter(tiny_mtp_rows(drafter.config).hidden_RTD, **tiny_mtp_rows(drafter.config).inputs())
    unroll.advance(torch.zeros(len(unroll.hidden_ND), dtype=torch.long))
    with pytest.raises(ValueError, match="before the first advance"):
        unroll.split([len(unroll.hidden_ND)])


@pytest.mark.parametrize("mlp", ["dense", "moe"])
def test_bfloat16_products_stay_near_float32(mlp):
    drafter = tiny_mtp(mlp)
    rows = tiny_mtp_rows(drafter.config)
    exact = unrolled(drafter, rows, teacher_forced)
    drafter.matmul_dtype = torch.bfloat16
    rough = unrolled(drafter, rows, teacher_forced)
    for ours, theirs in zip(rough, exact, strict=True):
        assert ours.dtype == torch.float32 and not torch.equal(ours, theirs)
        # at deeper depths a token may change its expert
        assert (ours - theirs).norm() < (0.1 if mlp == "dense" else 0.5) * theirs.norm()
    sum(item.sum() for item in rough).backward()
    assert all(parameter.grad.dtype == torch.float32 for parameter in drafter.parameters())


@pytest.mark.parametrize("mlp", ["dense", "moe"])
def test_memory_grows_with_the_length_and_not_with_its_square(mlp):
    """The largest tensor of a whole pass, backward included: no scores of all pairs, no logits."""
    largest = {}
    for length in (160, 320):
        drafter = tiny_mtp(mlp, vocab_size=5000)
        rows = tiny_mtp_rows(drafter.config, lengths=((length,),), row_length=length)
        tokens = rows.teacher_tokens(1)[rows.asked_RT.flatten()]
        with Largest() as seen:
            unroll = drafter(rows.hidden_RTD, **rows.inputs())
            outputs = [unroll.hidden_ND, *(unroll.advance(tokens) for _ in range(DEPTHS - 1))]
            sum(item.sum() for item in outputs).backward()
        largest[length] = seen.numel
    assert largest[320] <= 2.2 * largest[160]
    assert largest[320] < 320 * 320 / 2


class Largest(torch.utils._python_dispatch.TorchDispatchMode):
    """Numbers in the largest tensor that any operation made; views of older tensors don't count."""

    numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for item in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(item, torch.Tensor) and not function.is_view:
                self.numel = max(self.numel, item.numel())
        return out
