"""Learning rates as pure functions of (step, total): nothing to save, nothing to rebuild wrongly on resume."""

from __future__ import annotations

import math
from typing import Literal

Schedule = Literal["cosine", "linear", "wsd"]


def learning_rate_factor(
    step: int,
    *,
    total: int,
    schedule: Schedule,
    warmup_fraction: float,
    decay_fraction: float = 0.2,
    floor: float = 0.0,
) -> float:
    """What the peak learning rate is multiplied by in one update.

    Warm-up rises linearly from 1/w in update 0 to 1 in update w - 1, w = ceil(warmup_fraction * total). Then
    ``cosine`` and ``linear`` fall to ``floor``, reached in the last update; ``wsd`` stays at 1 and falls linearly
    to ``floor`` over the last ``decay_fraction`` of all updates.

    Args:
        step: the update, zero-based.
        total: updates of the stage.
        floor: the smallest factor, min / peak learning rate.

    Raises:
        ValueError: step outside 0..total-1, or an unknown schedule.
    """
    if not 0 <= step < total:
        raise ValueError(f"step {step} lies outside 0..{total - 1}")
    warmup = math.ceil(warmup_fraction * total)
    if step < warmup:
        return (step + 1) / warmup
    if schedule == "wsd":
        falling = min(max(1, round(decay_fraction * total)), total - warmup)
        share = max(0.0, (step - (total - falling) + 1) / falling)
        return 1.0 - (1.0 - floor) * share
    share = (step - warmup + 1) / (total - warmup)
    if schedule == "linear":
        return 1.0 - (1.0 - floor) * share
    if schedule == "cosine":
        return floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * share))
    raise ValueError(f"unknown schedule '{schedule}'; use cosine, linear or wsd")
