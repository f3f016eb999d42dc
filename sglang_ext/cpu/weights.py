"""Linear layers with their weights laid out for oneDNN.

SGLang multiplies by the weight as it was loaded. In oneDNN's blocked layout the same product of 2 to 64 rows takes
half to three quarters of the time in float32 and bfloat16 (the head of SmolLM2 at 8 rows: 9 ms for 21), and it is not
slower for hundreds. One or two rows are padded to four, which oneDNN multiplies faster than the one or two (all layers
of SmolLM2 in float32: 38 ms for 45 at one row, 37 for 52 at two). The plain weight stays where it is: embeddings,
shared heads and loaders read it.
"""

from __future__ import annotations

import logging

import psutil
import torch
from sglang.srt.layers.quantization.unquant import UnquantizedEmbeddingMethod, UnquantizedLinearMethod
from torch import Tensor, nn
from torch.nn import functional as F

logger = logging.getLogger(__name__)

SHARE = 0.25
"""The packed copies may take this share of the memory that is free after loading."""

FEW, PADDED = 3, 4
"""Fewer rows than the first are padded to the second."""


def _pack(weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None)


def _multiply(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    rows = x.shape[0]
    if 0 < rows < FEW and x.dim() == 2:
        return _multiply(F.pad(x, (0, 0, 0, PADDED - rows)), packed, bias)[:rows]
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")


class PackedLinearMethod(UnquantizedLinearMethod):
    """``x @ weight.T + bias`` by the packed copy of a layer's weight."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.packed = _pack(weight)

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """See the class."""
        return _multiply(x, self.packed, bias)


class PackedHeadMethod(UnquantizedEmbeddingMethod):
    """The vocabulary head by the packed copy of its weight; a tied embedding still reads the plain one."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.packed = _pack(weight)

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """See the class."""
        return _multiply(x, self.packed, bias)


def pack_weights(model: nn.Module) -> int:
    """Give every unquantised linear layer and the head of ``model`` a packed copy of its weight.

    Nothing is packed if the copies would take more than :data:`SHARE` of the free memory. A packed model refuses new
    weights while it serves: the copies would go on serving the old ones.

    Returns:
        bytes of the copies.
    """
    layers = [
        (module, PackedLinearMethod)
        for module in model.modules()
        if type(getattr(module, "quant_method", None)) is UnquantizedLinearMethod
    ]
    head = getattr(model, "lm_head", None)
    if type(getattr(head, "quant_method", None)) is UnquantizedEmbeddingMethod:
        layers.append((head, PackedHeadMethod))
    layers = [(layer, method) for layer, method in layers if layer.weight.dtype in (torch.float32, torch.bfloat16)]
    size = sum(layer.weight.nbytes for layer, _ in layers)
    if not torch.backends.mkldnn.is_available() or size > SHARE * psutil.virtual_memory().available:
        logger.info("angelspec: linear layers keep their plain weights (copies would take %.2f GiB)", size / 2**30)
        return 0
    for layer, method in layers:
        layer.quant_method = method(layer.weight)
        # SGLang looks for this on every module before it loads new weights, and answers with it
        layer._derived_weight_cache_error = (
            "Online weight updates are not supported: the CPU platform of angelspec keeps packed copies of the weights."
        )
    logger.info("angelspec: %d linear layers packed for oneDNN, %.2f GiB", len(layers), size / 2**30)
    return size
