import pytest
import torch
from torch import nn

from angelspec.objectives.terms import Ratio, SlotCounts
from angelspec.training.distributed import Ranks
from angelspec.training.update import StepTerms, compute_gradients

X = torch.randn(12, 5, generator=torch.Generator().manual_seed(0))


def terms_of(model, *, names=("token",), shared=False):
    """Loss terms whose denominators depend on the rows, and differ between terms unless shared."""

    def call(rows):
        value_N = model(X[list(rows)]).pow(2).sum(1)
        weights = {"token": 1.0 + X[list(rows), 0].abs(), "other": torch.ones(len(rows))}
        denominator = weights["token"].sum()
        losses = {
            name: Ratio((weights[name] * value_N).sum(), denominator if shared else weights[name].sum())
            for name in names
        }
        zero = torch.zeros(2, dtype=torch.float64)
        counts = SlotCounts(valid_K=zero + len(rows), correct_K=zero, accepted_K=zero, ce_K=zero, alpha_K=None)
        return StepTerms(losses=losses, counts=counts, num_positions=2 * len(rows))

    return call


def gradients(micro_batches, *, clip_norm=None, **settings):
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    result = compute_gradients(
        micro_batches, terms_of(model, **settings), model=model, ranks=Ranks(), clip_norm=clip_norm
    )
    return result, [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("names", [("token",), ("token", "other")])
@pytest.mark.parametrize("shared", [False, True])
def test_micro_batches_give_the_update_of_the_whole(names, shared):
    whole, expected = gradients([range(12)], names=names, shared=shared)
    parts, found = gradients([range(3), range(3, 4), range(4, 12)], names=names, shared=shared)
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(a, b)
    assert parts.numerators == pytest.approx(whole.numerators)
    assert parts.denominators == pytest.approx(whole.denominators)
    assert parts.norm == pytest.approx(whole.norm)
    assert parts.num_positions == 24 and parts.counts.valid_K.tolist() == [12, 12]


def test_the_update_is_not_the_mean_of_the_micro_batches_means():
    _, exact = gradients([range(12)])
    _, first = gradients([range(3)])
    _, second = gradients([range(3, 12)])
    mean = [(a + b) / 2 for a, b in zip(first, second, strict=True)]
    assert not torch.allclose(exact[0], mean[0], rtol=1e-3)


def test_matches_autograd_of_the_divided_loss():
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    terms = terms_of(model, names=("token", "other"))(range(12))
    sum(ratio.numerator / ratio.denominator for ratio in terms.losses.values()).backward()
    _, found = gradients([range(6), range(6, 12)], names=("token", "other"))
    for parameter, gradient in zip(model.parameters(), found, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def test_non_finite_and_empty_steps_are_told_apart():
    torch.manual_seed(0)
    model = nn.Linear(5, 3)

    def broken(rows, call=terms_of(model)):
        terms = call(rows)
        losses = {"token": Ratio(terms.losses["token"].numerator * float("nan"), terms.losses["token"].denominator)}
        return StepTerms(losses=losses, counts=terms.counts, num_positions=0)

    result = compute_gradients([range(2)], broken, model=model, ranks=Ranks())
    assert not result.is_finite and not result.is_empty

    model.zero_grad()

    def empty(rows, call=terms_of(model)):
        terms = call(rows)
        losses = {"token": Ratio(terms.losses["token"].numerator * 0, terms.losses["token"].denominator * 0)}
        return StepTerms(losses=losses, counts=terms.counts, num_positions=0)

    result = compute_gradients([range(2)], empty, model=model, ranks=Ranks())
    assert result.is_empty and result.is_finite and result.norm == 0.0


def test_clipping_scales_all_gradients_together():
    whole, unclipped = gradients([range(12)])
    assert gradient_norm_of(unclipped) == pytest.approx(whole.norm)
    for limit in (whole.norm * 2, whole.norm / 4):
        for micro_batches in ([range(12)], [range(5), range(5, 12)]):
            for names in (("token",), ("token", "other")):
                reference, before = gradients(micro_batches, names=names)
                result, clipped = gradients(micro_batches, names=names, clip_norm=limit)
                assert result.norm == pytest.approx(reference.norm), "the norm is that before clipping"
                assert gradient_norm_of(clipped) == pytest.approx(min(limit, reference.norm))
                for a, b in zip(before, clipped, strict=True):
                    torch.testing.assert_close(a * min(1.0, limit / reference.norm), b)


def gradient_norm_of(tensors):
    return sum(float(t.pow(2).sum()) for t in tensors) ** 0.5
