"""Chain acceptance: by hand, against a loop, and by law."""

import pytest
import torch

pytest.importorskip("sglang")

from sglang_ext.cpu.accept import sample_chain  # noqa: E402


def run(candidates, target, draft, coins, final, **options):
    batch, width = candidates.shape
    predicts = torch.full((batch * width,), -7, dtype=torch.int32)
    index = torch.full((batch, width), -7, dtype=torch.int32)
    count = torch.full((batch,), -7, dtype=torch.int32)
    slots = torch.arange(batch * width).view(batch, width)
    sample_chain(
        predicts, index, count, candidates, slots, None, None, coins, final, target, draft, 1.0, 1.0, True, **options
    )
    return predicts, index, count


def by_loop(candidates, target, draft, coins, final):
    """Accepted drafts and the token behind them, one request at a time."""
    out = []
    for b in range(candidates.shape[0]):
        n = 0
        while n < candidates.shape[1] - 1:
            token = int(candidates[b, n + 1])
            p, q = float(target[b, n, token]), float(draft[b, n, token])
            if not (0 < q <= 1 and float(coins[b, n]) * q < p):
                break
            n += 1
        weight = target[b, n].double()
        if n < candidates.shape[1] - 1:
            q = draft[b, n].double()
            weight = (weight - torch.where((q >= 0) & (q <= 1), q, 0)).clamp(min=0)
        mass = weight.cumsum(0)
        token = int((mass <= float(final[b]) * mass[-1]).sum().clamp(max=len(mass) - 1))
        out.append((n, token))
    return out


def random_case(seed, batch=7, width=4, vocab=3, one_hot=False):
    torch.manual_seed(seed)
    target = torch.randn(batch, width, vocab).mul(2).softmax(-1)
    draft = torch.randn(batch, width - 1, vocab).mul(2).softmax(-1)
    candidates = torch.cat([torch.zeros(batch, 1), torch.multinomial(draft.flatten(0, 1), 1).view(batch, -1)], 1).long()
    if one_hot:
        draft = torch.nn.functional.one_hot(candidates[:, 1:], vocab).float()
    return candidates, target, draft, torch.rand(batch, width), torch.rand(batch)


@pytest.mark.parametrize("one_hot", [False, True])
def test_equals_the_loop(one_hot):
    counts = set()
    for seed in range(40):
        case = random_case(seed, one_hot=one_hot)
        predicts, index, count = run(*case)
        for b, (n, token) in enumerate(by_loop(*case)):
            width = case[0].shape[1]
            counts.add(n)
            assert int(count[b]) == n
            assert index[b, : n + 1].tolist() == list(range(b * width, b * width + n + 1))
            assert predicts[b * width : b * width + n].tolist() == case[0][b, 1 : n + 1].tolist()
            assert int(predicts[b * width + n]) == token
            # nothing behind the drawn token is touched
            assert (predicts[b * width + n + 1 : (b + 1) * width] == -7).all()
    assert counts == {0, 1, 2, 3}


def test_law_of_the_first_two_tokens():
    # one request many times over, drafts really drawn from q: the pair must follow p
    torch.manual_seed(0)
    samples, vocab = 60000, 3
    target = torch.tensor([[0.2, 0.5, 0.3], [0.6, 0.1, 0.3], [0.1, 0.1, 0.8]])
    draft = torch.tensor([[0.6, 0.2, 0.2], [0.1, 0.8, 0.1]])
    drafted = torch.stack([torch.multinomial(row, samples, replacement=True) for row in draft], 1)
    candidates = torch.cat([torch.zeros(samples, 1, dtype=torch.long), drafted], 1)
    predicts, _, count = run(
        candidates,
        target.expand(samples, -1, -1),
        draft.expand(samples, -1, -1),
        torch.rand(samples, 2),
        torch.rand(samples),
    )
    tokens = predicts.view(samples, -1)
    first = torch.bincount(tokens[:, 0].long(), minlength=vocab) / samples
    torch.testing.assert_close(first, target[0], rtol=0, atol=0.01)
    second = torch.bincount(tokens[count > 0, 1].long(), minlength=vocab) / (count > 0).sum()
    torch.testing.assert_close(second, target[1], rtol=0, atol=0.012)


def test_draft_laws_that_are_none_accept_nothing_and_take_nothing():
    candidates, target, draft, coins, final = random_case(3)
    for bad in (float("nan"), float("inf"), -0.5, 2.0):
        draft = torch.full_like(draft, bad)
        predicts, _, count = run(candidates, target, draft, coins * 0, final)
        assert (count == 0).all()
        want = torch.searchsorted(
            target[:, 0].cumsum(-1), final[:, None] * target[:, 0].sum(-1, keepdim=True), right=True
        )
        assert predicts.view(7, -1)[:, 0].tolist() == want.squeeze(1).tolist()


def test_block_verification_is_refused():
    with pytest.raises(NotImplementedError, match="block verification"):
        run(*random_case(0), block_verification=True)
