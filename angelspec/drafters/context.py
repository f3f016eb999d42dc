"""How target features become the context of each draft layer: shared projection, per-layer fusion, or their sum.

Shapes: L draft layers, J taps, D hidden (of target and drafter alike where taps are mixed), F = J * D; ``...`` stands
for any leading axes.
"""

from __future__ import annotations

import torch
from torch import Tensor


def distance_prior(num_layers: int, num_taps: int) -> Tensor:
    """Initial fusion logits [L, J]: -2 |tap - the tap at the same relative depth as the layer| (DFlare)."""
    nearest = [round(layer * (num_taps - 1) / max(num_layers - 1, 1)) for layer in range(num_layers)]
    taps_J = torch.arange(num_taps, dtype=torch.float32)
    return -2.0 * (taps_J[None, :] - torch.tensor(nearest, dtype=torch.float32)[:, None]).abs()


def mix_taps(taps: Tensor, logits_LJ: Tensor) -> Tensor:
    """Each draft layer's own mixture of the raw target states, weighted by a softmax in float32.

    Args:
        taps: [..., F], the taps' states side by side in layer order.
        logits_LJ: fusion logits.

    Returns:
        [L, ..., D] in the dtype of ``taps``.
    """
    weight_LJ = torch.softmax(logits_LJ.float(), dim=-1).to(taps.dtype)
    return torch.einsum("lj,...jd->l...d", weight_LJ, taps.unflatten(-1, (logits_LJ.shape[1], -1)))
