"""What the stages of one process share: the loaded target, loaded once per precision."""

from __future__ import annotations

from typing import TYPE_CHECKING

from angelspec.core.recipe import Recipe

if TYPE_CHECKING:
    from angelspec.targets.target import Target


class Session:
    """Lazily loaded, shared, heavy things of one run."""

    def __init__(self, recipe: Recipe, *, device: str = "cpu") -> None:
        self.recipe = recipe
        self.device = device
        self._targets: dict[str, Target] = {}

    def target(self, dtype: str) -> Target:
        """The recipe's target in ``float32`` or ``bfloat16``."""
        if dtype not in self._targets:
            import torch

            from angelspec.targets.target import load_target

            self._targets[dtype] = load_target(
                self.recipe.target, dtype=getattr(torch, dtype), device=self.device
            )
        return self._targets[dtype]

    def release(self) -> None:
        """Forget the loaded targets."""
        self._targets.clear()
