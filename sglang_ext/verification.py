"""One target forward over the anchors and kept proposals of a whole batch, and what is done to its logits.

Shapes: B batch rows, W slots of a row, N verified slots of all rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn import functional as F

from sglang_ext import compat
from sglang_ext.profiling import padded_slots
from sglang_ext.requests import ServedRequest
from sglang_ext.transfer import on_device


class Window(NamedTuple):
    """The verified slots of a batch, row by row: what SGLang's executor reads of its own window."""

    verify_ids: Tensor
    positions: Tensor
    verify_cache_loc: Tensor
    window_index: Tensor


class Packed(NamedTuple):
    """The slots that are to be verified."""

    window: Window
    """N slots, and behind them what pads a captured graph."""
    row_N: Tensor
    """Batch row of each slot."""
    offset_N: Tensor
    """Slot within its row, 0 for the anchor's."""
    position_N: Tensor
    """Of each slot's token in its sequence."""
    layout: Any
    """SGLang's, with the slots of each row."""


def pack(runner: Any, window: Any, block_BW: Tensor, kept: Sequence[int]) -> Packed:
    """Each row's anchor and its first ``kept`` proposals, side by side.

    Args:
        runner: SGLang's runner of the target.
        window: SGLang's places of W slots per row.
        block_BW: anchors and proposals.
        kept: proposals per row.
    """
    device, width = block_BW.device, block_BW.shape[1]
    widths = [number + 1 for number in kept]
    total = sum(widths)
    padded = padded_slots(runner, total, batch_size=len(widths))
    # assembled here: SGLang's own way from a list copies it so that the device is waited for
    layout = compat.RaggedVerifyLayout._assemble_device(
        verify_lens=on_device(widths, device),
        graph_num_tokens=padded,
        verify_lens_cpu=widths,
        total_verify_tokens=total,
    )
    rows = [row for row, wide in enumerate(widths) for _ in range(wide)]
    row_N, offset_N = on_device([rows, [slot for wide in widths for slot in range(wide)]], device)
    packed = Window(
        verify_ids=block_BW[row_N, offset_N],
        positions=window.positions_2d[row_N, offset_N],
        verify_cache_loc=window.verify_cache_loc_2d[row_N, offset_N],
        window_index=row_N * width + offset_N,
    )
    position_N = packed.positions
    if padded > total:  # a captured graph has more slots; what stands in them is read by nobody
        more = (0, padded - total)
        packed = Window(*(F.pad(item, more) for item in packed[:3]), F.pad(packed.window_index, more, value=-1))
    return Packed(packed, row_N, offset_N, position_N, layout)


def verify(executor: Any, batch: Any, packed: Packed, plan: Any) -> tuple[Any, bool]:
    """Run the target over packed slots.

    Args:
        executor: SGLang's, of ragged verification.
        batch: SGLang's.
        packed: what is verified.
        plan: SGLang's, of the places of their keys and values.

    Returns:
        SGLang's output, with logits and states of N slots, and whether a CUDA graph ran.
    """
    forward = executor._run_ragged(
        batch=batch,
        layout=packed.layout,
        ragged_window=packed.window,
        sampling_info=batch.sampling_info,
        kv_loc_plan=plan,
    )
    output, total = forward.logits_output, packed.row_N.shape[0]
    if packed.window.verify_ids.shape[0] > total:
        for name in ("next_token_logits", "hidden_states", "last_hidden_states"):
            setattr(output, name, getattr(output, name)[:total])
    return output, forward.can_run_cuda_graph


def adjust_logits(
    batch: Any, rows: Sequence[ServedRequest], logits_NV: Tensor, row_N: Tensor, block_BW: Tensor,
    *, kept: Sequence[int], tree: Any, barrier: Any,
) -> None:  # fmt: skip
    """Penalties, grammars and biases in the order of plain decoding; logits are changed in place.

    All but biases depend on the tokens before, so rows that have them verify one slot, and theirs is the first.

    Args:
        batch: SGLang's.
        rows: its requests.
        logits_NV: of the packed slots.
        row_N: batch row of each slot.
        block_BW: anchors and proposals.
        kept: verified proposals by row.
        tree: SGLang's, of the anchors; None: no row has a grammar.
        barrier: SGLang's, after which the grammars have seen the tokens before.
    """
    info = batch.sampling_info
    if info is None:
        return
    if tree is not None or any(known.penalties is not None for known in rows):
        _adjust_first(batch, rows, logits_NV, block_BW, kept=kept, tree=tree, barrier=barrier)
    if info.logit_bias is not None:
        logits_NV += info.logit_bias[row_N].to(logits_NV.dtype)


def _adjust_first(
    batch: Any, rows: Sequence[ServedRequest], logits_NV: Tensor, block_BW: Tensor,
    *, kept: Sequence[int], tree: Any, barrier: Any,
) -> None:  # fmt: skip
    """Penalties and grammars of every row's first slot."""
    first_B = on_device([0, *accumulate(number + 1 for number in kept)][:-1], logits_NV.device)
    logits_BV = logits_NV[first_B]
    for row, known in enumerate(rows):
        if known.penalties is not None:
            known.penalties.apply(block_BW[row, :1], logits_BV[row : row + 1])
    if tree is not None:
        mask = compat.build_grammar_vocab_mask(
            reqs=batch.reqs,
            tree=tree,
            sampling_info=batch.sampling_info,
            device=logits_BV.device,
            barrier=barrier,
        )
        if mask is not None:
            mask.apply(logits_BV)
    logits_NV[first_B] = logits_BV


def add_logprobs(batch: Any, output: Any, tokens_BW: Tensor, row_N: Tensor, offset_N: Tensor) -> None:
    """Log-probabilities of the committed tokens, where SGLang looks for them: W slots per row."""
    packed_NV, width = output.next_token_logits, tokens_BW.shape[1]
    strided = packed_NV.new_zeros(tokens_BW.numel(), packed_NV.shape[1])
    strided[row_N * width + offset_N] = packed_NV
    output.next_token_logits = strided
    compat.compute_spec_logprobs(batch, output, tokens_BW.reshape(-1), chain_stride=width)
