"""Ranks of one engine: what must be equal on all of them comes from the first.

Drafters are small, so under tensor parallelism every rank holds them whole, with the target's embedding and head,
beside its shard of the target, and drafts the same tokens. What could differ from rank to rank is taken from the first:
costs, which are timings, and drafts and drawn tokens, whose last bits may round differently.

Shapes: V vocabulary, D hidden.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor

from angelspec.core.errors import AngelspecError

T = TypeVar("T")
_PLAIN = (torch.float32, torch.bfloat16, torch.float16)


class QuantisedError(AngelspecError):
    """A tensor of the target that drafters share, in a form that they can't read."""


class Ranks:
    """The tensor-parallel ranks that this process is one of.

    Args:
        group: SGLang's coordinator of the group.
    """

    def __init__(self, group: Any) -> None:
        self._group = group

    @property
    def several(self) -> bool:
        """Whether there is more than this one."""
        return self._group.world_size > 1

    @property
    def is_first(self) -> bool:
        return self._group.rank_in_group == 0

    def agree(self, value: T) -> T:
        """The first rank's value, on every rank; all must ask, in the same order."""
        return self._group.broadcast_object(value, src=0)

    def sync(self, tensor: Tensor) -> Tensor:
        """Overwrite a tensor by the first rank's; all must ask, with tensors of one shape."""
        return self._group.broadcast(tensor, src=0) if self.several else tensor

    def whole(self, shard_VD: Tensor, *, rows: int, columns: int, name: str) -> Tensor:
        """The first ``rows`` of a matrix whose rows lie in turn on the ranks, padded at the end; a view on one rank.

        Raises:
            QuantisedError: the shard is no plain matrix.
        """
        if shard_VD.dtype not in _PLAIN or shard_VD.dim() != 2 or shard_VD.shape[1] != columns:
            raise QuantisedError(
                f"the target's {name} is stored as {shard_VD.dtype} of shape {list(shard_VD.shape)}, which drafters "
                "can't read",
                mend=f"serve a target whose {name} is not quantised",
            )
        if not self.several:
            return shard_VD[:rows]
        return self._group.all_gather(shard_VD.detach().contiguous(), dim=0)[:rows].contiguous()
