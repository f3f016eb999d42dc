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

from typing import TYPE_CHECKING

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from angelspec.core.errors import MissingRequirement
from sglang_ext.cpu.attention_plan import BLOCK, NO_WINDOW, Band, Group, WideRow, plan_step

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner


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
