"""Small operators of SGLang in fewer kernels than its plain torch forms.

Decoding a small model on a CPU spends as much on calling kernels as within them: 61 norms and 30 rotations per step.

Shapes: N tokens, H heads, C channels of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def rms_norm(
    norm,
    x: Tensor,
    residual: Tensor | None = None,
    post_residual_addition: Tensor | None = None,
    quant_linear=None,
) -> Tensor | tuple[Tensor, Tensor]:
    """``RMSNorm.forward_native`` of SGLang, its unusual variants excepted, which still take that road."""
    unusual = (
        norm.variance_size_override is not None
        or norm.cast_x_before_out_mul
        or norm.fp32_residual
        or norm.override_orig_dtype is not None
        or post_residual_addition is not None
        or x.dtype == torch.float16
        or norm.weight.dtype != x.dtype
    )
    if unusual:
        return norm.forward_native(x, residual, post_residual_addition, quant_linear)
    dtype = x.dtype
    # the sum is normalised before it is rounded to the model's dtype
    sum_ = x.float() if residual is None else x.float() + residual.float()
    normed = F.rms_norm(sum_, sum_.shape[-1:], norm.weight.float(), norm.variance_epsilon).to(dtype)
    return normed if residual is None else (normed, sum_.to(dtype))


def rotate(
    rope,
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    offsets: Tensor | None = None,
    fused_set_kv_buffer_arg=None,
) -> tuple[Tensor, Tensor]:
    """``RotaryEmbedding.forward_native`` of SGLang for halves of whole heads; other layouts still take that road."""
    usual = (
        rope.is_neox_style
        and rope.rotary_dim == rope.head_size
        and offsets is None
        and fused_set_kv_buffer_arg is None
        and query.dim() == 2
        and key.dim() == 2
    )
    if not usual:
        return rope.forward_native(positions, query, key, offsets, fused_set_kv_buffer_arg)
    turn_NC = rope.cos_sin_cache.index_select(0, positions.flatten()).to(query.dtype)
    both = _neighbours(query, key)
    if both is None:
        return _rotate_heads(query, turn_NC), _rotate_heads(key, turn_NC)
    turned = _rotate_heads(both, turn_NC)
    return turned[:, : query.shape[1]], turned[:, query.shape[1] :]


def _neighbours(query: Tensor, key: Tensor) -> Tensor | None:
    """Both as one tensor, if they are neighbouring columns of one matrix, as after a fused projection."""
    together = (
        query.stride() == key.stride()
        and query.stride(1) == 1
        and key.data_ptr() == query.data_ptr() + query.shape[1] * query.element_size()
        and query.untyped_storage().data_ptr() == key.untyped_storage().data_ptr()
    )
    if not together:
        return None
    return query.as_strided((query.shape[0], query.shape[1] + key.shape[1]), query.stride())


def _rotate_heads(x: Tensor, turn_NC: Tensor) -> Tensor:
    """Rotate the two halves of every head of ``x`` [N, H * C]; the first half of ``turn_NC`` are cosines."""
    tokens, channels = turn_NC.shape
    half = channels // 2
    heads = x.view(tokens, -1, 2, half)
    cosine, sine = turn_NC[:, None, None, :half], turn_NC[:, None, half:]
    turned = heads * cosine
    turned[:, :, 0].addcmul_(heads[:, :, 1], sine, value=-1)
    turned[:, :, 1].addcmul_(heads[:, :, 0], sine)
    return turned.view(tokens, -1)


def register(key: str) -> None:
    """Make SGLang dispatch to the functions above on the platform with this dispatch key."""
    from sglang.kernels.fused_op import BaseFusedOp
    from sglang.srt.layers.layernorm import RMSNorm
    from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding

    BaseFusedOp.register_oot_forward(RMSNorm, rms_norm, key)
    BaseFusedOp.register_oot_forward(RotaryEmbedding, rotate, key)
