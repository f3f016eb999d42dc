"""Hy3: SGLang 0.5.23 serves it, but its model does not hand out the outputs of chosen layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.layers.aux_hidden_states import AuxHiddenStateList
from sglang.srt.models import hunyuan_v3
from torch import Tensor, nn


class HYV3ForCausalLM(hunyuan_v3.HYV3ForCausalLM):
    """The same model, that captures layer outputs (the residual stream after a layer) where it is told to."""

    _captured: frozenset[int] = frozenset()

    def set_dflash_layers_to_capture(self, layer_ids: Sequence[int]) -> None:
        """Capture the outputs of these zero-based layers.

        Raises:
            ValueError: a layer that does not exist.
        """
        layers = len(self.model.layers)
        if not all(0 <= layer < layers for layer in layer_ids):
            raise ValueError(f"layers to capture {list(layer_ids)} must lie in 0..{layers - 1}")
        self._captured = frozenset(layer_ids)

    def get_input_embeddings(self) -> nn.Module:
        """The embedding, which the drafters share."""
        return self.model.embed_tokens

    @torch.no_grad()
    def forward(
        self, input_ids: Tensor, positions: Tensor, forward_batch: Any, input_embeds: Tensor | None = None
    ) -> Any:
        if not self._captured:
            return super().forward(input_ids, positions, forward_batch, input_embeds)
        states = self.model.embed_tokens(input_ids) if input_embeds is None else input_embeds
        residual, captured = None, AuxHiddenStateList()
        for index, layer in enumerate(self.model.layers):
            states, residual = layer(positions, states, forward_batch, residual)
            if index in self._captured:
                captured.capture(states + residual, owned=True)
        states, _ = self.model.norm(states, residual)
        return self.logits_processor(input_ids, states, self.lm_head, forward_batch, captured)


EntryClass = HYV3ForCausalLM
