"""The slot cache: per-row lengths, rollback, gathering, growth and compaction change nothing of what a row sees."""

import pytest
import torch
from target_builders import FAMILIES, tiny_target


def tokens(rows, length, seed=0):
    return torch.randint(0, 256, (rows, length), generator=torch.Generator().manual_seed(seed))


def hidden(target, row):
    """States of one row alone, without a cache."""
    return target.forward(row[None]).hidden_BTD[0]


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_different_lengths(family):
    target = tiny_target(family)
    text = tokens(3, 90)
    cache = target.new_cache(rows=3, capacity=100)
    lengths = torch.tensor([5, 61, 17])
    prompt = text[:, :61]
    first = target.forward(prompt, cache=cache).hidden_BTD
    cache.commit(lengths)
    for row, length in enumerate(lengths.tolist()):
        close(first[row, :length], hidden(target, text[row, :length]))
    # three new tokens behind each row's own length; the widest row crosses a chunk
    new = torch.stack([text[row, length : length + 4] for row, length in enumerate(lengths.tolist())])
    second = target.forward(new, cache=cache).hidden_BTD
    cache.commit(4)
    assert cache.lengths.tolist() == [9, 65, 21]
    assert cache.width == 128
    for row, length in enumerate(lengths.tolist()):
        close(second[row], hidden(target, text[row, : length + 4])[length:])


def test_rollback_forgets():
    target = tiny_target("llama")
    text, other = tokens(2, 30), tokens(2, 30, seed=1)
    cache = target.new_cache(rows=2, capacity=64)
    target.forward(text[:, :20], cache=cache)
    cache.commit(20)
    target.forward(other[:, :8], cache=cache)
    cache.commit(torch.tensor([1, 8]))
    cache.lengths[:] = torch.tensor([20, 18])
    states = target.forward(torch.stack([text[0, 20:23], text[1, 18:21]]), cache=cache).hidden_BTD
    close(states[0], hidden(target, text[0, :23])[20:])
    close(states[1], hidden(target, text[1, :21])[18:])


@pytest.mark.parametrize("rows", [[1, 2], [2, 0], [3, 1, 0]])
def test_selected_rows(rows):
    """Consecutive rows (a view) and any others (gathered), written back to their own slots."""
    target = tiny_target("qwen3")
    text = tokens(4, 20)
    cache = target.new_cache(rows=4, capacity=64)
    target.forward(text[:, :9], cache=cache)
    cache.commit(torch.tensor([9, 7, 8, 5]))
    before = cache.lengths.clone()
    cache.select(torch.tensor(rows))
    new = torch.stack([text[row, before[row] : before[row] + 2] for row in rows])
    states = target.forward(new, cache=cache).hidden_BTD
    cache.commit(2)
    for index, row in enumerate(rows):
        length = int(before[row])
        close(states[index], hidden(target, text[row, : length + 2])[length:])
        assert cache.lengths[row] == length + 2
    cache.select(None)
    after = cache.lengths.tolist()
    states = target.forward(torch.stack([text[row, n : n + 1] for row, n in enumerate(after)]), cache=cache).hidden_BTD
    for row, length in enumerate(after):
        close(states[row], hidden(target, text[row, : length + 1])[length:])


def test_new_rows_beside_old_ones():
    """Prefill of a freed row does not look at what lay in it."""
    target = tiny_target("llama")
    text = tokens(3, 40)
    cache = target.new_cache(rows=2, capacity=64)
    target.forward(text[:2, :30], cache=cache)
    cache.commit(30)
    cache.lengths[0] = 0
    cache.select(torch.tensor([0]))
    states = target.forward(text[2:, :6], cache=cache).hidden_BTD
    cache.commit(6)
    close(states[0], hidden(target, text[2, :6]))
    cache.select(None)
    states = target.forward(torch.stack([text[2, 6:7], text[1, 30:31]]), cache=cache).hidden_BTD
    close(states[0], hidden(target, text[2, :7])[6:])
    close(states[1], hidden(target, text[1, :31])[30:])


def test_compaction_and_narrowing():
    target = tiny_target("llama")
    text = tokens(4, 400)
    cache = target.new_cache(rows=4, capacity=420)
    target.forward(text[:, :390], cache=cache)
    cache.commit(torch.tensor([390, 12, 300, 20]))
    wide = cache.num_bytes
    cache.compact(torch.tensor([3, 1]))
    assert cache.lengths.tolist() == [20, 12]
    assert cache.width == 64
    assert cache.num_bytes < wide / 10
    states = target.forward(torch.stack([text[3, 20:22], text[1, 12:14]]), cache=cache).hidden_BTD
    close(states[0], hidden(target, text[3, :22])[20:])
    close(states[1], hidden(target, text[1, :14])[12:])


def test_storage_shrinks_behind_a_long_row():
    target = tiny_target("llama")
    text = tokens(2, 400)
    cache = target.new_cache(rows=2, capacity=400)
    target.forward(text[:, :390], cache=cache)
    cache.commit(torch.tensor([390, 10]))
    cache.lengths[0] = 0
    states = target.forward(torch.stack([text[0, :1], text[1, 10:11]]), cache=cache).hidden_BTD
    assert cache.width == 64
    close(states[1], hidden(target, text[1, :11])[10:])


def test_shared_prefix_is_copied():
    target = tiny_target("hy3")
    text = tokens(2, 80)
    text[1, :70] = text[0, :70]
    prefix = target.new_cache(rows=1, capacity=70)
    target.forward(text[:1, :70], cache=prefix)
    prefix.commit(70)
    cache = target.new_cache(rows=3, capacity=100)
    cache.copy_from(prefix, row=0, targets=torch.tensor([2, 0]))
    assert cache.lengths.tolist() == [70, 0, 70]
    cache.select(torch.tensor([2, 0]))
    states = target.forward(text[:, 70:80], cache=cache).hidden_BTD
    for row in range(2):
        close(states[row], hidden(target, text[row, :80])[70:])


def test_refuses_to_overflow_or_repeat():
    target = tiny_target("llama")
    cache = target.new_cache(rows=2, capacity=10)
    target.forward(tokens(2, 8), cache=cache)
    cache.commit(8)
    with pytest.raises(ValueError, match="capacity 10"):
        target.forward(tokens(2, 3), cache=cache)
    with pytest.raises(ValueError, match="repeat"):
        cache.select(torch.tensor([1, 1]))
