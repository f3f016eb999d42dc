"""How much each slot of a block, or each depth of MTP, weighs in the per-token loss terms.

Shapes: A anchors (blocks, or positions of MTP), K supervised slots (or depths), slot k = 1..K.
"""

from __future__ import annotations

import torch
from torch import Tensor

from angelspec.core.objective import Objective


def uniform(mask_AK: Tensor, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return 1 on valid slots and 0 elsewhere, [A,K]."""
    return mask_AK.to(dtype)


def position_decay(slots: Tensor, *, gamma: float) -> Tensor:
    """Return w_k = exp(-max(k - 1, 0) / gamma) for one-based slot indices of any shape (DFlash, DSpark)."""
    return torch.exp(-(slots - 1).clamp(min=0) / gamma)


def d_pace(ce_AK: Tensor, *, mask_AK: Tensor, rho: float) -> Tensor:
    """Return the D-PACE weights, [A,K], detached: each slot weighs what it can add to the accepted prefix.

    With s = exp(-CE) and s' = (1 - rho) s + rho: w_k = sum_{m >= k} prod_{r <= m} s'_r (AngelSpec, arXiv
    2607.25852). Products and sums run over valid slots only: a masked slot is neither a factor nor a summand and
    weighs 0, whatever its CE holds.
    """
    probability = torch.exp(-ce_AK.detach())
    lifted = torch.where(mask_AK, (1 - rho) * probability + rho, 1.0)
    survival = torch.where(mask_AK, lifted.cumprod(-1), 0.0)
    return torch.where(mask_AK, survival.flip(-1).cumsum(-1).flip(-1), 0.0)


def slot_weights(objective: Objective, *, ce_AK: Tensor, mask_AK: Tensor) -> Tensor:
    """Return the objective's weight of every slot, [A,K], detached and 0 where the slot is not valid.

    Raises:
        ValueError: the objective states weights for another number of slots.
    """
    if objective.slot_weights is not None:
        if len(objective.slot_weights) != mask_AK.shape[-1]:
            raise ValueError(
                f"slot_weights has {len(objective.slot_weights)} weights for {mask_AK.shape[-1]} proposals"
            )
        return torch.tensor(objective.slot_weights, dtype=ce_AK.dtype, device=ce_AK.device) * mask_AK
    match objective.position_weights:
        case "uniform":
            return uniform(mask_AK, dtype=ce_AK.dtype)
        case "decay":
            slots_K = torch.arange(1, mask_AK.shape[-1] + 1, device=ce_AK.device, dtype=ce_AK.dtype)
            return position_decay(slots_K, gamma=objective.decay_gamma) * mask_AK
        case "d-pace":
            return d_pace(ce_AK, mask_AK=mask_AK, rho=objective.d_pace_rho)
