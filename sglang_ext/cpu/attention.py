"""Attention of a batch over the paged key-value pool, on plain torch.

Shapes: N tokens of the batch, R rows (requests), B rows of one group, Q queries of a row, T keys of a row, H query
heads, G key-value heads, M = H / G query heads per key-value head, C channels of a head, S slots of the pool.

Every row is a run of queries behind a context that lies in the pool: one query (decoding), a drafted block
(verification, with a width per row), or a stretch of a prompt (prefill behind a cached prefix or an earlier chunk).
What depends on the batch only is built once per step, in :meth:`TorchAttention.init_forward_metadata`; a layer then
does one gather of keys and values and one ``scaled_dot_product_attention`` per group of rows.

- Narrow rows are grouped by similar length and padded to the longest of their group. A padded key repeats the row's
  last slot and is masked: nothing of another request, and nothing that may be NaN, is ever read.
- The M query heads that share a key-value head become rows of queries, ``[B, G, Q * M, C]``. On a CPU that is never
  slower than ``enable_gqa`` and in bfloat16 four to nine times faster for a single query.
- Keys and values are gathered into buffers that live on: fresh ones of some megabytes are unmapped and faulted in
  again at every layer, which cost ten times the copy.
- A wide row runs alone: causal by flag when nothing lies before it, else in blocks of queries under slices of one
  shared band, so that no mask ever grows with the square of the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from angelspec.core.errors import MissingRequirement

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

WIDE = 64
"""Rows with more queries than this run alone."""

BLOCK = 256
"""Queries of a wide row that share one slice of the band."""

SLACK = 256
"""Padded keys that a group may hold: what reading them costs is about what one more group costs."""

NO_WINDOW = -1


# ---------------------------------------------------------------------------------------------------------------------
# The reference


def reference_attention(
    queries_NHC: Tensor,
    keys_SGC: Tensor,
    values_SGC: Tensor,
    slots: Sequence[Tensor],
    widths: Sequence[int],
    *,
    causal: bool,
    scaling: float,
    window: int = NO_WINDOW,
) -> Tensor:
    """What the backend computes, row by row with a plain softmax in float32.

    Args:
        queries_NHC: the rows' queries, one row after another.
        keys_SGC, values_SGC: the pool of one layer.
        slots: per row, int64 [T]: the slots of its tokens in order; its queries are the last ones.
        widths: queries of each row.
        causal: query i sees what lies before it and itself; else every query sees the whole row.
        scaling: factor of the scores.
        window: a causal query sees itself and this many tokens before it; negative for all.

    Returns:
        [N, H, C], in the queries' dtype.
    """
    outputs, start = [], 0
    for slot_T, width in zip(slots, widths, strict=True):
        query_QHC = queries_NHC[start : start + width].float()
        start += width
        repeats = query_QHC.shape[1] // keys_SGC.shape[1]
        key_THC = keys_SGC[slot_T].float().repeat_interleave(repeats, dim=1)
        value_THC = values_SGC[slot_T].float().repeat_interleave(repeats, dim=1)
        scores_HQT = torch.einsum("qhc,thc->hqt", query_QHC, key_THC) * scaling
        if causal:
            key_position_T = torch.arange(slot_T.shape[0])
            position_Q1 = key_position_T[-width:].unsqueeze(1)
            visible_QT = key_position_T <= position_Q1
            if window >= 0:
                visible_QT &= key_position_T >= position_Q1 - window
            scores_HQT = scores_HQT.masked_fill(~visible_QT, float("-inf"))
        outputs.append(torch.einsum("hqt,thc->qhc", scores_HQT.softmax(-1), value_THC))
    return torch.cat(outputs).to(queries_NHC.dtype)


# ---------------------------------------------------------------------------------------------------------------------
# The plan of a step


def group_rows(lengths: Sequence[int], slack: int = SLACK) -> list[list[int]]:
    """Part rows into groups whose padding to the longest row stays within ``slack`` keys.

    Returns:
        row numbers, ascending within each group.
    """
    groups: list[list[int]] = []
    longest = waste = 0
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        waste += longest - lengths[row]
        if not groups or waste > slack:
            groups.append([])
            longest, waste = lengths[row], 0
        groups[-1].append(row)
    return [sorted(group) for group in groups]


@dataclass
class Group:
    """Narrow rows that are computed together."""

    rows: int
    width: int
    """Queries per row, of the widest."""
    length: int
    """Keys per row, of the longest."""
    slot_K: Tensor
    """int64 [B * T]: slot of every key; a row's padding repeats its last slot."""
    first_slot: int | None
    """The only row's first slot, where its slots follow one another; then keys are a view."""
    context_B: Tensor
    """int64: keys before a row's first query."""
    width_B: Tensor
    """int64: queries of a row."""
    even: bool
    """All rows are as wide and as long as the widest and the longest."""
    token_K: Tensor | None
    """int64 [B * Q]: token that asks each query, a row's padding repeating its last one; None: the batch's tokens in
    order."""
    kept_N: Tensor | None
    """int64: queries that are not padding; None: all."""
    token_N: Tensor | None
    """int64: the tokens of those queries; None: the batch's tokens in order."""
    masks: dict[tuple[bool, int, int, torch.dtype], Tensor | None] = field(default_factory=dict)

    def mask(self, *, causal: bool, window: int, heads: int, dtype: torch.dtype) -> Tensor | None:
        """What to add to the scores, [B, 1, Q * M or 1, T] with M = ``heads``, or None if all is visible."""
        key = (causal, window, heads, dtype)
        if key not in self.masks:
            self.masks[key] = self._build_mask(*key)
        return self.masks[key]

    def _build_mask(self, causal: bool, window: int, heads: int, dtype: torch.dtype) -> Tensor | None:
        if self.even and (not causal or (self.width == 1 and not 0 <= window < self.length)):
            return None
        key_T = torch.arange(self.length)
        # a padded query repeats the row's last one
        step_BQ = torch.arange(self.width).minimum(self.width_B.unsqueeze(1) - 1)
        position_BQ1 = (self.context_B.unsqueeze(1) + step_BQ).unsqueeze(2)
        if causal:
            visible_BQT = key_T <= position_BQ1
            if window >= 0:
                visible_BQT &= key_T >= position_BQ1 - window
        else:
            visible_BQT = (key_T < (self.context_B + self.width_B).unsqueeze(1)).unsqueeze(1)
        mask_BQT = torch.zeros(visible_BQT.shape, dtype=dtype).masked_fill_(~visible_BQT, float("-inf"))
        if mask_BQT.shape[1] > 1:
            mask_BQT = mask_BQT.repeat_interleave(heads, dim=1)
        return mask_BQT.unsqueeze(1)


@dataclass
class WideRow:
    """A row that is computed alone."""

    first_token: int
    width: int
    context: int
    slot_T: Tensor
    """int64: slot of every key."""


@dataclass
class Plan:
    """What all layers of one step share."""

    tokens: int
    """Queries of all rows; the batch may carry more, which are padding."""
    groups: list[Group]
    wide: list[WideRow]


def plan_step(req_to_token: Tensor, row_R: Tensor, contexts: Sequence[int], widths: Sequence[int]) -> Plan:
    """Lay out one step.

    Args:
        req_to_token: int32, the slot of every token of every request.
        row_R: the requests' rows of that table.
        contexts: keys before each row's first query.
        widths: queries of each row.
    """
    starts = [0, *accumulate(widths)]
    row_R = row_R.long()
    wide = [
        WideRow(
            first_token=starts[row],
            width=width,
            context=contexts[row],
            slot_T=req_to_token[row_R[row], : contexts[row] + width].long(),
        )
        for row, width in enumerate(widths)
        if width > WIDE
    ]
    narrow = [row for row, width in enumerate(widths) if 0 < width <= WIDE]
    lengths = [contexts[row] + widths[row] for row in narrow]
    groups = [
        _plan_group(req_to_token, row_R, [narrow[index] for index in group], contexts, widths, starts)
        for group in group_rows(lengths)
    ]
    return Plan(starts[-1], groups, wide)


def _plan_group(
    req_to_token: Tensor,
    row_R: Tensor,
    rows: list[int],
    contexts: Sequence[int],
    widths: Sequence[int],
    starts: Sequence[int],
) -> Group:
    whole = len(rows) == len(widths)
    row_widths, row_contexts = [widths[row] for row in rows], [contexts[row] for row in rows]
    row_lengths = [context + width for context, width in zip(row_contexts, row_widths, strict=True)]
    width, length = max(row_widths), max(row_lengths)
    width_B, context_B = torch.tensor(row_widths), torch.tensor(row_contexts)
    even_widths, even_lengths = min(row_widths) == width, min(row_lengths) == length

    slot_BT = req_to_token[row_R if whole else row_R[rows], :length].long()
    if not even_lengths:
        slot_BT = slot_BT.gather(1, torch.arange(length).minimum((context_B + width_B).unsqueeze(1) - 1))
    first_slot = None
    if len(rows) == 1 and bool((slot_BT[0, 1:] - slot_BT[0, :-1] == 1).all()):
        first_slot = int(slot_BT[0, 0])

    token_K = kept_N = token_N = None
    if not (whole and even_widths):
        step_Q = torch.arange(width)
        start_B1 = torch.tensor([starts[row] for row in rows]).unsqueeze(1)
        token_K = (start_B1 + step_Q.minimum(width_B.unsqueeze(1) - 1)).flatten()
        if even_widths:
            token_N = token_K
        else:
            kept_N = (step_Q < width_B.unsqueeze(1)).flatten().nonzero().squeeze(1)
            token_N = token_K[kept_N]
    return Group(
        rows=len(rows),
        width=width,
        length=length,
        slot_K=slot_BT.flatten(),
        first_slot=first_slot,
        context_B=context_B,
        width_B=width_B,
        even=even_widths and even_lengths,
        token_K=token_K,
        kept_N=kept_N,
        token_N=token_N,
    )


# ---------------------------------------------------------------------------------------------------------------------
# The work of a layer


class Scratch:
    """Flat buffers that grow and stay."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype], Tensor] = {}

    def take(self, name: str, dtype: torch.dtype, *shape: int) -> Tensor:
        """A tensor of this shape with undefined content, valid until the next of this name is taken."""
        size = torch.Size(shape).numel()
        buffer = self._buffers.get((name, dtype))
        if buffer is None or buffer.numel() < size:
            # made in inference mode it could not be written outside of it
            with torch.inference_mode(False):
                buffer = self._buffers[name, dtype] = torch.empty(size + size // 4, dtype=dtype)
        return buffer[:size].view(shape)


class Band:
    """Causal masks of blocks of queries behind contexts of any length: slices of one table."""

    def __init__(self) -> None:
        self._tables: dict[tuple[int, torch.dtype], Tensor] = {}

    def mask(self, context: int, width: int, window: int, dtype: torch.dtype) -> Tensor:
        """What to add to the scores of ``width`` (at most BLOCK) queries with ``context`` keys before the first.

        Returns:
            [1, 1, width, context + width]
        """
        table = self._tables.get((window, dtype))
        if table is None or table.shape[1] < context + BLOCK:
            room = context + context // 2
            distance = torch.arange(BLOCK).unsqueeze(1) - (torch.arange(room + BLOCK) - room)
            visible = distance >= 0
            if window >= 0:
                visible &= distance <= window
            table = torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, float("-inf"))
            self._tables[window, dtype] = table
        room = table.shape[1] - BLOCK
        return table[None, None, :width, room - context : room + width]


class TorchAttention(AttentionBackend):
    """SGLang's attention backend ``torch_native`` of the CPU platform.

    Decoding, prefill behind a cached prefix or an earlier chunk, and verification with one width for all rows or one
    per row. Layers of type ``ENCODER_ONLY`` see the whole block of their row. Sliding windows are honoured.

    Raises:
        MissingRequirement: the model needs what this backend lacks; it never computes something else instead.
    """

    supports_ragged_verify_graph = False
    needs_cpu_seq_lens = False

    def __init__(self, model_runner: ModelRunner) -> None:
        super().__init__()
        pool = model_runner.token_to_kv_pool
        if not isinstance(pool, MHATokenToKVPool):
            raise MissingRequirement(
                f"the CPU platform cannot read a key-value pool of kind {type(pool).__name__}",
                mend="serve a model with plain multi-head or grouped-query attention",
            )
        if pool.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise MissingRequirement(
                f"the CPU platform cannot read keys and values in {pool.dtype}",
                mend="leave out --kv-cache-dtype",
            )
        self.device = model_runner.device
        self.req_to_token_pool = model_runner.req_to_token_pool
        self.token_to_kv_pool = pool
        self._scratch, self._band = Scratch(), Band()

    def support_triton(self) -> bool:
        """SGLang asks whether its Triton kernels may be used."""
        return False

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Lay out the step: see :func:`plan_step`."""
        mode = forward_batch.forward_mode
        if mode.is_idle():
            self.forward_metadata = None
            return
        if mode.is_decode():
            contexts = (forward_batch.seq_lens - 1).tolist()
            widths = [1] * len(contexts)
        elif mode.is_target_verify():
            contexts = forward_batch.seq_lens.tolist()
            spec = forward_batch.spec_info
            layout = getattr(spec, "ragged_verify_layout", None)
            if layout is None:
                widths = [int(spec.draft_token_num)] * len(contexts)
            else:
                widths = layout.verify_lens_cpu or layout.verify_lens.tolist()
        else:
            contexts = forward_batch.extend_prefix_lens.tolist()
            widths = forward_batch.extend_seq_lens.tolist()
        self.forward_metadata = plan_step(
            self.req_to_token_pool.req_to_token, forward_batch.req_pool_indices, contexts, list(widths)
        )

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """There are no graphs; SGLang asks all the same."""
        return 1

    def forward_decode(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **kwargs,
    ) -> Tensor:
        """One query per row; the same work as :meth:`forward_extend`."""
        return self.forward_extend(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **kwargs,
    ) -> Tensor:
        """Write the tokens' keys and values and attend.

        Returns:
            [N, H * C]; zero for tokens beyond the plan, which pad the batch.
        """
        _refuse_unknown(layer, kwargs)
        if save_kv_cache and k is not None:
            self.token_to_kv_pool.set_kv_buffer(layer, forward_batch.out_cache_loc, k, v)
        plan = self.forward_metadata
        query_NHC = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        key_SGC = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        value_SGC = self.token_to_kv_pool.get_value_buffer(layer.layer_id)
        causal = layer.attn_type == AttentionType.DECODER
        window = layer.sliding_window_size if causal and layer.sliding_window_size is not None else NO_WINDOW

        if len(plan.groups) == 1 and not plan.wide and query_NHC.shape[0] == plan.tokens:
            group = plan.groups[0]
            if group.token_K is None:
                return self._attend_group(group, query_NHC, key_SGC, value_SGC, layer.scaling, causal, window)
        output_ND = q.new_zeros(query_NHC.shape[0], layer.tp_q_head_num * layer.v_head_dim)
        for group in plan.groups:
            query_KHC = query_NHC[: plan.tokens] if group.token_K is None else query_NHC.index_select(0, group.token_K)
            result_KD = self._attend_group(group, query_KHC, key_SGC, value_SGC, layer.scaling, causal, window)
            if group.kept_N is not None:
                result_KD = result_KD.index_select(0, group.kept_N)
            if group.token_N is None:
                output_ND[: plan.tokens] = result_KD
            else:
                output_ND.index_copy_(0, group.token_N, result_KD)
        for row in plan.wide:
            query_QHC = query_NHC[row.first_token : row.first_token + row.width]
            result_QD = self._attend_wide(row, query_QHC, key_SGC, value_SGC, layer.scaling, causal, window)
            output_ND[row.first_token : row.first_token + row.width] = result_QD
        return output_ND

    def _gather(self, name: str, pool_SGC: Tensor, slot_K: Tensor, rows: int, dtype: torch.dtype) -> Tensor:
        """Rows of the pool as [B, G, T, C]."""
        slots, heads, channels = pool_SGC.shape
        flat = self._scratch.take(name, pool_SGC.dtype, slot_K.shape[0], heads * channels)
        torch.index_select(pool_SGC.view(slots, heads * channels), 0, slot_K, out=flat)
        return flat.view(rows, -1, heads, channels).transpose(1, 2).to(dtype)

    def _attend_group(
        self,
        group: Group,
        query_KHC: Tensor,
        key_SGC: Tensor,
        value_SGC: Tensor,
        scaling: float,
        causal: bool,
        window: int,
    ) -> Tensor:
        """[B * Q, H * C] of the group's queries, padding included."""
        rows, width, kv_heads = group.rows, group.width, key_SGC.shape[1]
        heads = query_KHC.shape[1] // kv_heads
        dtype = query_KHC.dtype
        if group.first_slot is None:
            key_BGTC = self._gather("key", key_SGC, group.slot_K, rows, dtype)
            value_BGTC = self._gather("value", value_SGC, group.slot_K, rows, dtype)
        else:
            span = slice(group.first_slot, group.first_slot + group.length)
            key_BGTC = key_SGC[span].transpose(0, 1).unsqueeze(0).to(dtype)
            value_BGTC = value_SGC[span].transpose(0, 1).unsqueeze(0).to(dtype)
        query = query_KHC.reshape(rows, width, kv_heads, heads, -1).transpose(1, 2)
        output = scaled_dot_product_attention(
            query.reshape(rows, kv_heads, width * heads, -1),
            key_BGTC,
            value_BGTC,
            attn_mask=group.mask(causal=causal, window=window, heads=heads, dtype=dtype),
            scale=scaling,
        )
        return output.view(rows, kv_heads, width, heads, -1).transpose(1, 2).reshape(rows * width, -1)

    def _attend_wide(
        self,
        row: WideRow,
        query_QHC: Tensor,
        key_SGC: Tensor,
        value_SGC: Tensor,
        scaling: float,
        causal: bool,
        window: int,
    ) -> Tensor:
        """[Q, H * C] of one row's queries."""
        dtype = query_QHC.dtype
        key_1GTC = self._gather("key", key_SGC, row.slot_T, 1, dtype)
        value_1GTC = self._gather("value", value_SGC, row.slot_T, 1, dtype)
        query_1HQC = query_QHC.transpose(0, 1).unsqueeze(0)
        gqa = query_QHC.shape[1] != key_SGC.shape[1]
        free = not causal or (row.context == 0 and window < 0)
        blocks = [(0, row.width)] if free else [(at, min(at + BLOCK, row.width)) for at in range(0, row.width, BLOCK)]
        results = []
        for start, end in blocks:
            context, visible = row.context + start, row.context + end
            results.append(
                scaled_dot_product_attention(
                    query_1HQC[:, :, start:end],
                    key_1GTC[:, :, :visible],
                    value_1GTC[:, :, :visible],
                    attn_mask=None if free else self._band.mask(context, end - start, window, dtype),
                    is_causal=free and causal,
                    scale=scaling,
                    enable_gqa=gqa,
                )
            )
        output_1HQC = results[0] if len(results) == 1 else torch.cat(results, dim=2)
        return output_1HQC.squeeze(0).transpose(0, 1).reshape(row.width, -1)


def _refuse_unknown(layer: RadixAttention, kwargs: dict[str, object]) -> None:
    """Stop at whatever would change the result and is not computed here."""
    given = [name for name, value in kwargs.items() if value is not None]
    if layer.logit_cap:
        given.append("logit_cap")
    if layer.is_cross_attention:
        given.append("cross attention")
    if layer.attn_type not in (AttentionType.DECODER, AttentionType.ENCODER_ONLY):
        given.append(f"attention of type {layer.attn_type.value}")
    if given:
        raise MissingRequirement(
            f"the CPU platform's attention lacks: {', '.join(given)}",
            mend="serve this model on a GPU",
        )
