"""End-to-end total variation: one minus the expected accepted share of a whole draft.

A draft's j-th token is kept only if all before it are, so its chance is prod_{i <= j} alpha_i. The loss of a block is 1
- sum_j m_j prod_{i <= j} alpha_i / sum_j m_j, where a masked slot has m = 0 and counts as alpha = 1 (AngelSpec, arXiv
2607.25852). For MTP the slots are the depths of one position, and only positions that are valid at all depths count.

Shapes: A blocks (anchors, or positions of MTP), K slots (or depths).
"""

from __future__ import annotations

import torch
from torch import Tensor

from angelspec.objectives.terms import Ratio


def end_to_end_tv(alpha_AK: Tensor, *, mask_AK: Tensor) -> Ratio:
    """Return the sum of the block losses over the blocks with a valid slot, and the number of those blocks.

    The gradient through ``alpha_AK`` is exact and finite where some alpha is 0; values under the mask are ignored,
    even non-finite ones.
    """
    kept_AK = prefix_products(torch.where(mask_AK, alpha_AK, 1.0))
    valid_AK = mask_AK.to(alpha_AK.dtype)
    num_slots_A = valid_AK.sum(-1)
    live_A = (num_slots_A > 0).to(alpha_AK.dtype)
    loss_A = live_A - (kept_AK * valid_AK).sum(-1) / num_slots_A.clamp(min=1)
    return Ratio(loss_A.sum(), live_A.sum())


def prefix_products(values_AK: Tensor) -> Tensor:
    """Return prod_{i <= k} of each row, [A,K].

    Written as K products: unlike ``cumprod``, whose backward inspects the values for zeros, it costs no
    synchronisation with an accelerator.
    """
    running, products = None, []
    for value_A in values_AK.unbind(-1):
        running = value_A if running is None else running * value_A
        products.append(running)
    return torch.stack(products, -1) if products else values_AK
