"""What the stages of one process share: the loaded target and its features, made once."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from angelspec.core.errors import MissingRequirement
from angelspec.core.recipe import Recipe

if TYPE_CHECKING:
    from angelspec.targets.target import Target
    from angelspec.training.distributed import Ranks
    from angelspec.training.features import FeatureSource


DEVICE_VARIABLE = "ANGELSPEC_DEVICE"
"""Environment variable that names the device to run on, such as ``cpu`` or ``cuda:1``."""


def best_device() -> str:
    """What ``ANGELSPEC_DEVICE`` says, else the GPU of this process (``LOCAL_RANK``), else the CPU.

    Raises:
        MissingRequirement: the variable names a device that is not here.
    """
    import torch

    if wanted := os.environ.get(DEVICE_VARIABLE):
        try:
            torch.empty(0, device=wanted)
        except (RuntimeError, AssertionError) as error:
            raise MissingRequirement(
                f"{DEVICE_VARIABLE} is '{wanted}', which can't be used here: {str(error).splitlines()[0]}",
                mend="unset it, or name cpu or one of this machine's GPUs, such as cuda:0",
            ) from None
        return wanted
    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if torch.cuda.is_available() else "cpu"


class Session:
    """Lazily loaded, shared, heavy things of one run.

    Args:
        recipe: what is run.
        device: where; None: the best that there is.
    """

    def __init__(self, recipe: Recipe, *, device: str | None = None) -> None:
        self.recipe = recipe
        self.device = device or best_device()
        self._targets: dict[str, Target] = {}
        self._features: tuple[str, Mapping[str, FeatureSource]] | None = None
        self._ranks: Ranks | None = None

    @property
    def ranks(self) -> Ranks:
        """This process among those that a launcher (torchrun) started for the run."""
        if self._ranks is None:
            from angelspec.training.distributed import connect

            self._ranks = connect(self.device)
        return self._ranks

    def target(self, dtype: str) -> Target:
        """The recipe's target in ``float32`` or ``bfloat16``."""
        if dtype not in self._targets:
            import torch

            from angelspec.targets.target import load_target

            self._targets[dtype] = load_target(self.recipe.target, dtype=getattr(torch, dtype), device=self.device)
        return self._targets[dtype]

    def features(self, *, key: str, make: Callable[[], Mapping[str, FeatureSource]]) -> Mapping[str, FeatureSource]:
        """Feature sources by part of the rows; only the newest are kept, since they can be large."""
        if self._features is None or self._features[0] != key:
            self._features = None
            self._features = (key, make())
        return self._features[1]

    def release_features(self) -> None:
        """Forget the feature sources: training is over and they may fill much of the memory."""
        self._features = None
