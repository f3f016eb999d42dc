"""The drafters of the loop: a trained block drafter, prompt lookup, and none at all.

Legend: B batch rows, T tokens, F width of the tapped target features, K proposals, V vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from angelspec.core.errors import CheckpointError
from angelspec.decoding.proposer import Proposals

if TYPE_CHECKING:
    from angelspec.drafters.block import BlockDrafter
    from angelspec.targets.target import Target


class NoProposer:
    """Plain decoding through the same loop: every step verifies the anchor alone."""

    name = "plain"
    depth = 0
    layer_ids: tuple[int, ...] = ()

    @property
    def identity(self) -> Mapping[str, Any]:
        return {"kind": "none"}

    def start(self, num_rows: int, *, capacity: int) -> None:
        pass

    def reset(self, rows: Tensor) -> None:
        pass

    def observe(
        self, rows: Tensor, *, tokens_BT: Tensor, positions_BT: Tensor, taps_BTF: Tensor, counts_B: Tensor
    ) -> None:
        pass

    def propose(
        self, rows: Tensor, *, histories: Sequence[Sequence[int]], last_token_B: Tensor, position_B: Tensor
    ) -> Proposals:
        empty_B0 = last_token_B.new_empty(len(rows), 0)
        return Proposals(empty_B0, empty_B0.float(), torch.zeros_like(last_token_B))


def copy_match(history: Sequence[int], *, start: int, count: int) -> list[int]:
    """``count`` tokens read from ``history[start:]``, reading on in what was just copied when the end is reached.

    A text that repeats with a period shorter than ``count`` is thereby continued in full.
    """
    copied = list(history[start : start + count])
    while len(copied) < count:
        copied.append(copied[start + len(copied) - len(history)])
    return copied


def lookup_reference(history: Sequence[int], *, max_match: int, num_proposals: int) -> list[int]:
    """Prompt lookup in the words of its definition: the longest suffix, its most recent earlier occurrence."""
    for length in range(min(max_match, len(history) - 1), 0, -1):
        suffix = list(history[-length:])
        for start in range(len(history) - length - 1, -1, -1):
            if list(history[start : start + length]) == suffix:
                return copy_match(history, start=start + length, count=num_proposals)
    return []


class LookupProposer:
    """Prompt lookup: propose what followed the last occurrence of the longest recent suffix.

    Suffixes of up to ``max_match`` tokens are sought in the prompt and the answer so far; without any match nothing is
    proposed. It has no weights, and every trained drafter must beat it.
    """

    layer_ids: tuple[int, ...] = ()

    def __init__(self, *, max_match: int, num_proposals: int, name: str = "prompt lookup") -> None:
        self.name = name
        self.depth = num_proposals
        self.max_match = max_match
        self._seen: dict[int, _SuffixIndex] = {}

    @property
    def identity(self) -> Mapping[str, Any]:
        return {"kind": "lookup", "max_match": self.max_match, "num_proposals": self.depth}

    def start(self, num_rows: int, *, capacity: int) -> None:
        self._seen = {}

    def reset(self, rows: Tensor) -> None:
        for row in rows.tolist():
            self._seen.pop(row, None)

    def observe(
        self, rows: Tensor, *, tokens_BT: Tensor, positions_BT: Tensor, taps_BTF: Tensor, counts_B: Tensor
    ) -> None:
        pass

    def propose(
        self, rows: Tensor, *, histories: Sequence[Sequence[int]], last_token_B: Tensor, position_B: Tensor
    ) -> Proposals:
        tokens_BK = torch.zeros(len(rows), self.depth, dtype=torch.int64)
        confidence_BK = torch.zeros(len(rows), self.depth)
        lengths_B = torch.zeros(len(rows), dtype=torch.int64)
        for index, (row, history) in enumerate(zip(rows.tolist(), histories, strict=True)):
            match = self._seen.setdefault(row, _SuffixIndex(self.max_match)).find(history)
            if match is None:
                continue
            start, length = match
            tokens_BK[index] = torch.tensor(copy_match(history, start=start, count=self.depth))
            # No estimate comes with a match; longer ones are right more often. Only a cut reads this.
            confidence_BK[index] = length / (length + 1)
            lengths_B[index] = self.depth
        device = last_token_B.device
        return Proposals(tokens_BK.to(device), confidence_BK.to(device), lengths_B.to(device))


class _SuffixIndex:
    """Where each n-gram of one growing history ended last, the current end excepted."""

    def __init__(self, max_match: int) -> None:
        self._max_match = max_match
        self._end: dict[tuple[int, ...], int] = {}
        self._indexed = 0

    def find(self, history: Sequence[int]) -> tuple[int, int] | None:
        """(index of the token behind the match, its length) of the longest matching suffix; None without one."""
        for end in range(self._indexed + 1, len(history)):
            for length in range(1, min(self._max_match, end) + 1):
                self._end[tuple(history[end - length : end])] = end
        self._indexed = max(self._indexed, len(history) - 1)
        for length in range(min(self._max_match, len(history) - 1), 0, -1):
            start = self._end.get(tuple(history[-length:]))
            if start is not None:
                return start, length
        return None


class BlockProposer:
    """A trained block drafter beside its target.

    Args:
        drafter: in evaluation mode, on the target's device.
        target: gives embedding and vocabulary head.
        name: shown in tables.
        shortlist: candidates per slot that a sequential head rescores; None: the whole vocabulary (exact).

    Raises:
        CheckpointError: drafter and target do not fit.
    """

    def __init__(self, drafter: BlockDrafter, *, target: Target, name: str, shortlist: int | None = None) -> None:
        conflicts = drafter.config.conflicts_with(target.geometry)
        if conflicts:
            raise CheckpointError(
                f"drafter '{name}' does not fit target {target.name}: {'; '.join(conflicts)}",
                mend="use a drafter trained for this target",
            )
        self.name = name
        self.depth = drafter.config.num_proposals
        self.layer_ids = tuple(drafter.config.target_layer_ids)
        self.drafter, self.target, self.shortlist = drafter, target, shortlist

    @cached_property
    def digest(self) -> str:
        """Content hash of configuration and weights."""
        content = hashlib.sha256(self.drafter.config.model_dump_json().encode())
        for name, tensor in sorted(self.drafter.state_dict().items()):
            content.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            content.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data)
        return content.hexdigest()[:16]

    @property
    def identity(self) -> Mapping[str, Any]:
        # Without a sequential head there is nothing to rescore.
        shortlist = None if self.drafter.config.head == "none" else self.shortlist
        return {"kind": "block", "digest": self.digest, "shortlist": shortlist}

    def start(self, num_rows: int, *, capacity: int) -> None:
        self._context = self.drafter.context_cache(num_rows, capacity=capacity)

    def reset(self, rows: Tensor) -> None:
        self._context.reset(rows)

    def observe(
        self, rows: Tensor, *, tokens_BT: Tensor, positions_BT: Tensor, taps_BTF: Tensor, counts_B: Tensor
    ) -> None:
        self.drafter.extend_context(
            self._context, taps_BTF, counts_B=counts_B, positions_BT=positions_BT, rows=self._whole(rows)
        )

    def propose(
        self, rows: Tensor, *, histories: Sequence[Sequence[int]], last_token_B: Tensor, position_B: Tensor
    ) -> Proposals:
        drafts = self.drafter.draft(
            self._context,
            anchor_tokens_B=last_token_B,
            anchor_positions_B=position_B,
            embedding_VD=self.target.embedding_VD,
            head_VD=self.target.head_VD,
            rows=self._whole(rows),
            shortlist=self.shortlist,
        )
        return Proposals(drafts.tokens_BK, drafts.confidence_BK, torch.full_like(position_B, self.depth))

    def _whole(self, rows: Tensor) -> Tensor | None:
        """None where the rows are all of them in order, which spares a copy of the context."""
        count = self._context.num_rows
        return None if len(rows) == count and rows.tolist() == list(range(count)) else rows
