"""What both drafter families share: a configuration, a product precision, rotated positions, seeded weights.

Shapes: E rotated pairs; ``...`` stands for any leading axes.
"""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor, nn

from angelspec.core.drafter_config import BlockDrafterConfig, MtpDrafterConfig
from angelspec.drafters.layers import Rotation
from angelspec.ops.rope import inverse_frequencies, rotation

INITIAL_STD = 0.02
"""Standard deviation of fresh matrices."""


class DrafterModule(nn.Module):
    """A drafter without embedding and vocabulary head: the target's are passed in, frozen.

    Args:
        config: shape and variants.
        matmul_dtype: precision of the matrix products of projections and MLPs; parameters, norms, softmaxes and the
            residual stream keep the parameters' dtype. None: the parameters' dtype everywhere. May be set later.
    """

    def __init__(
        self, config: BlockDrafterConfig | MtpDrafterConfig, *, matmul_dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.config = config
        self.matmul_dtype = matmul_dtype
        # no buffer: a module's cast to bfloat16 must not reach the frequencies
        self._rope_frequencies_E, self._rope_factor = inverse_frequencies(
            config.rope, head_dim=config.head_dim, max_position_embeddings=config.max_position_embeddings
        )

    @property
    def dtype(self) -> torch.dtype:
        """Of the norms, and so of the residual stream."""
        raise NotImplementedError

    @property
    def num_parameters(self) -> int:
        """Trainable numbers."""
        return sum(parameter.numel() for parameter in self.parameters())

    @torch.no_grad()
    def initialise(self, *, seed: int) -> Self:
        """Fresh weights, the same for a seed on every device: matrices normal, norms one, and what a family sets
        otherwise (see its ``fixed_start``)."""
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            value = self.fixed_start(name, parameter.shape)
            if value is None:
                value = torch.randn(parameter.shape, generator=generator) * INITIAL_STD
            parameter.copy_(value)
        for buffer in self.buffers():
            buffer.zero_()
        return self

    def fixed_start(self, name: str, shape: torch.Size) -> Tensor | None:
        """First value of a parameter that is not drawn; None: it is."""
        return torch.ones(shape) if name.endswith("norm.weight") else None

    def rotation(self, positions: Tensor) -> Rotation:
        """Cosine and sine [..., 1, E] of integer positions [...], ready for [..., heads, C]."""
        if self._rope_frequencies_E.device != positions.device:  # once: a copy to a GPU waits for what it is doing
            self._rope_frequencies_E = self._rope_frequencies_E.to(positions.device)
        cos, sin = rotation(positions, self._rope_frequencies_E, factor=self._rope_factor)
        return cos.to(self.dtype).unsqueeze(-2), sin.to(self.dtype).unsqueeze(-2)
