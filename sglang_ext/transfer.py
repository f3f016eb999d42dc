"""Lists of the host on the engine's device, without waiting for what the device is doing."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def on_device(values: Sequence[int] | Sequence[Sequence[int]], device: torch.device | str) -> Tensor:
    """Integers as an int64 tensor on ``device``.

    A copy from ordinary memory to a GPU waits for all work that was queued before it; one from pinned memory does not.
    """
    tensor = torch.tensor(values, dtype=torch.int64)
    if torch.device(device).type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
