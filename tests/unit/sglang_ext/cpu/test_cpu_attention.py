"""The CPU attention backend equals its reference on random layouts."""

import random
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("sglang")

from sglang.srt.layers.radix_attention import AttentionType  # noqa: E402
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool  # noqa: E402
from sglang.srt.model_executor.forward_batch_info import ForwardMode  # noqa: E402

from angelspec.core.errors import MissingRequirement  # noqa: E402
from sglang_ext.cpu.attention import TorchAttention  # noqa: E402
from sglang_ext.cpu.attention_plan import Band, Group, group_rows  # noqa: E402
from sglang_ext.cpu.attention_reference import reference_attention  # noqa: E402

LONGEST = 700
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


class World:
    """A backend over a pool whose slots are shuffled in pages, with rows of random content."""

    def __init__(self, seed, *, dtype=torch.float32, rows=5, page=1, heads=6, kv_heads=2, channels=16, pool_dtype=None):
        self.random = random.Random(seed)
        torch.manual_seed(seed)
        self.heads, self.kv_heads, self.channels, self.dtype = heads, kv_heads, channels, dtype
        pages = rows * (LONGEST // page + 1)
        order = torch.randperm(pages)
        self.table = torch.zeros(rows + 3, LONGEST, dtype=torch.int32)
        self.pool_row = torch.tensor(self.random.sample(range(rows + 3), rows))
        for at, row in enumerate(self.pool_row.tolist()):
            mine = order[at * (LONGEST // page + 1) :][: LONGEST // page + 1] + 1
            self.table[row] = (mine.unsqueeze(1) * page + torch.arange(page)).flatten()[:LONGEST].int()
        slots = (pages + 2) * page
        self.keys = torch.randn(slots, kv_heads, channels).to(pool_dtype or dtype)
        self.values = torch.randn(slots, kv_heads, channels).to(pool_dtype or dtype)
        pool = object.__new__(MHATokenToKVPool)
        pool.dtype = self.keys.dtype
        pool.get_key_buffer, pool.get_value_buffer = lambda layer: self.keys, lambda layer: self.values
        pool.set_kv_buffer = self.write
        self.written = []
        self.backend = TorchAttention(
            SimpleNamespace(
                device="cpu", token_to_kv_pool=pool, req_to_token_pool=SimpleNamespace(req_to_token=self.table)
            )
        )

    def write(self, layer, locations, keys, values):
        self.written.append(locations)
        self.keys[locations] = keys.view(-1, self.kv_heads, self.channels).to(self.keys.dtype)
        self.values[locations] = values.view(-1, self.kv_heads, self.channels).to(self.values.dtype)

    def layer(self, kind=AttentionType.DECODER, window=-1, **changes):
        layer = SimpleNamespace(
            layer_id=0,
            tp_q_head_num=self.heads,
            tp_k_head_num=self.kv_heads,
            qk_head_dim=self.channels,
            v_head_dim=self.channels,
            scaling=0.31,
            sliding_window_size=window,
            attn_type=kind,
            is_cross_attention=False,
            logit_cap=0.0,
        )
        return SimpleNamespace(**{**vars(layer), **changes})

    def batch(self, mode, contexts, widths, *, ragged=True, padding=0, **extra):
        rows = self.pool_row[: len(contexts)]
        before, width = torch.tensor(contexts), torch.tensor(widths)
        locations = torch.cat(
            [self.table[row, c : c + w] for row, c, w in zip(rows.tolist(), contexts, widths, strict=True)]
        ).long()
        batch = SimpleNamespace(
            forward_mode=mode,
            req_pool_indices=rows,
            out_cache_loc=torch.cat([locations, torch.zeros(padding, dtype=torch.long)]),
            spec_info=None,
        )
        if mode == ForwardMode.DECODE:
            batch.seq_lens = before + 1
        elif mode == ForwardMode.TARGET_VERIFY:
            batch.seq_lens = before
            layout = SimpleNamespace(verify_lens=width.int(), verify_lens_cpu=extra.get("lens_cpu"))
            batch.spec_info = SimpleNamespace(
                draft_token_num=widths[0], ragged_verify_layout=layout if ragged else None
            )
        else:
            batch.seq_lens = before + width
            batch.extend_prefix_lens, batch.extend_seq_lens = before, width
        return batch

    def check(self, mode, contexts, widths, *, padding=0, **layer_changes):
        ragged = layer_changes.pop("ragged", True)
        batch = self.batch(mode, contexts, widths, padding=padding, ragged=ragged)
        layer = self.layer(**layer_changes)
        tokens = sum(widths)
        q = torch.randn(tokens + padding, self.heads * self.channels).to(self.dtype)
        k, v = (torch.randn(tokens + padding, self.kv_heads * self.channels).to(self.dtype) for _ in range(2))
        self.backend.init_forward_metadata(batch)
        got = self.backend.forward(q, k, v, layer, batch)
        slots = [
            self.table[row, : c + w].long()
            for row, c, w in zip(batch.req_pool_indices.tolist(), contexts, widths, strict=True)
        ]
        want = reference_attention(
            q[:tokens].view(tokens, self.heads, self.channels),
            self.keys,
            self.values,
            slots,
            widths,
            causal=layer.attn_type == AttentionType.DECODER,
            scaling=layer.scaling,
            window=layer.sliding_window_size,
        )
        assert got.shape == q.shape and got.dtype == self.dtype
        torch.testing.assert_close(
            got[:tokens].float(), want.flatten(1).float(), rtol=TOLERANCE[self.dtype], atol=TOLERANCE[self.dtype]
        )
        assert torch.equal(got[tokens:], torch.zeros_like(got[tokens:]))
        assert torch.equal(self.written[-1], batch.out_cache_loc)


@pytest.mark.parametrize("kind", [AttentionType.DECODER, AttentionType.ENCODER_ONLY])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("page", [1, 16])
def test_random_layouts(kind, dtype, page):
    for seed in range(6):
        world = World(seed, dtype=dtype, page=page)
        draw = world.random
        rows = draw.randint(1, 5)
        contexts = [draw.choice([draw.randint(0, 12), draw.randint(0, 500)]) for _ in range(rows)]
        world.check(ForwardMode.DECODE, contexts, [1] * rows, kind=kind)
        world.check(ForwardMode.TARGET_VERIFY, contexts, [draw.randint(1, 8) for _ in range(rows)], kind=kind)
        world.check(ForwardMode.TARGET_VERIFY, contexts, [8] * rows, kind=kind, ragged=False)
        widths = [draw.choice([1, 3, 40, 64, 65, 150]) for _ in range(rows)]
        world.check(ForwardMode.EXTEND, contexts, widths, kind=kind, padding=draw.randint(0, 3))


@pytest.mark.parametrize("mode", [ForwardMode.EXTEND, ForwardMode.MIXED])
def test_wide_rows_in_blocks_behind_a_context(mode):
    # blocks of 256 queries: a context, a second block, and a row of one query between them
    World(0).check(mode, [0, 90, 33, 5], [300, 600, 1, 520])


@pytest.mark.parametrize("window", [0, 3, 100])
@pytest.mark.parametrize("heads", [2, 6])
def test_sliding_window(window, heads):
    world = World(1, heads=heads)
    world.check(ForwardMode.DECODE, [0, 40, 300], [1, 1, 1], window=window)
    world.check(ForwardMode.DECODE, [40, 40], [1, 1], window=window)
    world.check(ForwardMode.TARGET_VERIFY, [0, 40, 300], [8, 2, 5], window=window)
    world.check(ForwardMode.EXTEND, [0, 40, 300], [350, 70, 9], window=window)


def test_one_row_with_neighbouring_slots_is_read_in_place():
    world = World(2)
    world.table[world.pool_row[0]] = torch.arange(10, 10 + LONGEST)
    world.check(ForwardMode.DECODE, [77], [1])
    assert world.backend.forward_metadata.groups[0].first_slot == 10
    world.table[world.pool_row[0], 5] = 900
    world.check(ForwardMode.DECODE, [77], [1])
    assert world.backend.forward_metadata.groups[0].first_slot is None


def test_padding_packed_rows_and_widths_from_the_host():
    world = World(3)
    world.check(ForwardMode.TARGET_VERIFY, [50, 3, 400], [4, 8, 1], padding=3)
    batch = world.batch(ForwardMode.TARGET_VERIFY, [50, 3], [4, 8], lens_cpu=[4, 8])
    batch.spec_info.ragged_verify_layout.verify_lens = None
    world.backend.init_forward_metadata(batch)
    assert world.backend.forward_metadata.tokens == 12


def test_another_row_or_stale_slot_never_matters():
    # NaN everywhere but in the slots of the batch's own tokens
    world = World(4)
    mine = torch.cat(
        [world.table[row, :length] for row, length in zip(world.pool_row.tolist(), (9, 300), strict=False)]
    )
    stale = torch.ones(world.keys.shape[0], dtype=torch.bool)
    stale[mine.long()] = False
    world.keys[stale] = world.values[stale] = float("nan")
    world.check(ForwardMode.TARGET_VERIFY, [5, 100], [4, 8])
    assert len(world.backend.forward_metadata.groups) == 1
    world.check(ForwardMode.EXTEND, [5, 8], [4, 100])


def test_pool_in_another_dtype():
    World(5, pool_dtype=torch.bfloat16).check(ForwardMode.TARGET_VERIFY, [50, 3], [4, 8])


def test_groups_bound_their_padding_and_keep_every_row():
    draw = random.Random(0)
    for _ in range(50):
        lengths = [draw.randint(1, 3000) for _ in range(draw.randint(1, 20))]
        groups = group_rows(lengths, slack=400)
        assert sorted(row for group in groups for row in group) == list(range(len(lengths)))
        for group in groups:
            mine = [lengths[row] for row in group]
            assert max(mine) * len(mine) - sum(mine) <= 400
            assert group == sorted(group)
    assert group_rows([100, 100, 100]) == [[0, 1, 2]]


def test_masks_are_built_once_per_step(monkeypatch):
    world = World(6)
    built = []
    original = Group._build_mask
    monkeypatch.setattr(Group, "_build_mask", lambda group, *key: built.append(key) or original(group, *key))
    batch = world.batch(ForwardMode.TARGET_VERIFY, [5, 9], [2, 3])
    world.backend.init_forward_metadata(batch)
    q = torch.randn(5, world.heads * world.channels)
    for _ in range(4):
        world.backend.forward(q, None, None, world.layer(), batch, save_kv_cache=False)
        world.backend.forward(q, None, None, world.layer(AttentionType.ENCODER_ONLY), batch, save_kv_cache=False)
    assert len(built) == 2 and not world.written


def test_band_grows_with_the_context():
    band = Band()
    for context, width in ((3, 4), (100, 256), (5000, 7), (0, 1)):
        mask = band.mask(context, width, -1, torch.float32)[0, 0]
        want = torch.arange(context + width) <= torch.arange(context, context + width).unsqueeze(1)
        assert torch.equal(mask == 0, want)


@pytest.mark.parametrize(
    "changes", [{"logit_cap": 30.0}, {"is_cross_attention": True}, {"kind": AttentionType.DECODER_BIDIRECTIONAL}]
)
def test_what_it_lacks_is_refused(changes):
    with pytest.raises(MissingRequirement, match="attention lacks"):
        World(7).check(ForwardMode.DECODE, [5], [1], **changes)


def test_unknown_arguments_and_pools_are_refused():
    world = World(8)
    batch = world.batch(ForwardMode.DECODE, [5], [1])
    world.backend.init_forward_metadata(batch)
    q = torch.randn(1, world.heads * world.channels)
    with pytest.raises(MissingRequirement, match="sinks"):
        world.backend.forward(q, None, None, world.layer(), batch, save_kv_cache=False, sinks=torch.ones(6))
    runner = SimpleNamespace(device="cpu", token_to_kv_pool=object(), req_to_token_pool=None)
    with pytest.raises(MissingRequirement, match="pool of kind object"):
        TorchAttention(runner)
