"""The key-value pool of the CPU platform: SGLang's, without the Triton kernel that it warms up."""

from __future__ import annotations

from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from torch import Tensor


class TorchKVPool(MHATokenToKVPool):
    """Slots of keys and values in ordinary memory; rows are written by ``index_copy_``."""

    def _init_kv_copy_and_warmup(self) -> None:
        # without it SGLang moves slots by plain indexing
        self._kv_copy_config = None

    def _store_kv_layer(self, layer_idx: int, loc: Tensor, cache_k: Tensor, cache_v: Tensor) -> None:
        keys, values = self.k_buffer[layer_idx], self.v_buffer[layer_idx]
        loc = loc.long()
        keys.index_copy_(0, loc, cache_k.view(-1, *keys.shape[1:]))
        values.index_copy_(0, loc, cache_v.view(-1, *values.shape[1:]))
