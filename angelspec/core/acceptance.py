"""The one definition of every acceptance metric.

A *verify step* is one target forward that checks some proposals and commits 1 + (accepted proposals) tokens.
All rates are pooled: sums over steps are divided once (B30: a mean of per-request means is another number).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Self

from pydantic import BaseModel, ConfigDict, Field


class AcceptanceCounts(BaseModel):
    """Additive counters of speculative decoding; add two with ``+``, divide only through the properties."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    generated_tokens: int = 0
    """Tokens committed by verify steps, bonus tokens included; the token sampled by prefill is not one."""
    verify_steps: int = 0
    """Target forwards that verified at least zero proposals."""
    proposed_tokens: int = 0
    """Proposals that were verified (after a cut)."""
    drafted_tokens: int = 0
    """Proposals that were drafted (before a cut)."""
    full_depth_steps: int = 0
    """Steps whose every drafted proposal was verified, the only ones p_k is defined on."""
    accepted_through: tuple[int, ...] = Field(default=())
    """Over full-depth steps, how often proposals 1..k were all accepted, by k-1."""

    def __add__(self, other: Self) -> Self:
        depth = max(len(self.accepted_through), len(other.accepted_through))
        padded = [c.accepted_through + (0,) * (depth - len(c.accepted_through)) for c in (self, other)]
        return type(self)(
            generated_tokens=self.generated_tokens + other.generated_tokens,
            verify_steps=self.verify_steps + other.verify_steps,
            proposed_tokens=self.proposed_tokens + other.proposed_tokens,
            drafted_tokens=self.drafted_tokens + other.drafted_tokens,
            full_depth_steps=self.full_depth_steps + other.full_depth_steps,
            accepted_through=tuple(a + b for a, b in zip(*padded, strict=True)),
        )

    @property
    def mean_accepted_length(self) -> float | None:
        """MAL: tokens committed per verify step, bonus included, pooled; None without steps."""
        return self.generated_tokens / self.verify_steps if self.verify_steps else None

    @property
    def cumulative_acceptance(self) -> tuple[float, ...]:
        """p_k: probability that proposals 1..k are all accepted, over full-depth steps."""
        if not self.full_depth_steps:
            return ()
        return tuple(count / self.full_depth_steps for count in self.accepted_through)

    @property
    def kept_ratio(self) -> float | None:
        """Verified slots over drafted slots, anchors counted: the keep ratio of D-cut."""
        drafted = self.drafted_tokens + self.verify_steps
        return (self.proposed_tokens + self.verify_steps) / drafted if drafted else None


def count_steps(
    accepted: Sequence[int],
    proposed: Sequence[int],
    drafted: Sequence[int],
    *,
    depth: int,
    committed: Sequence[int] | None = None,
) -> AcceptanceCounts:
    """Count one request's verify steps.

    Args:
        accepted: per step, accepted proposals (bonus excluded).
        proposed: per step, proposals verified.
        drafted: per step, proposals drafted before any cut.
        depth: the drafter's full number of proposals; p_k counts only steps that verified that many.
        committed: per step, tokens committed where a stop token or a length limit cut the step short;
            accepted + 1 where omitted.

    Raises:
        ValueError: the sequences differ in length or a step accepts more than it proposed.
    """
    committed = [count + 1 for count in accepted] if committed is None else committed
    if not len(accepted) == len(proposed) == len(drafted) == len(committed):
        raise ValueError("accepted, proposed, drafted and committed need one entry per verify step")
    through = [0] * depth
    full = 0
    for hit, asked, offered in zip(accepted, proposed, drafted, strict=True):
        if not 0 <= hit <= asked <= offered <= depth:
            raise ValueError(
                f"a step accepted {hit} of {asked} verified of {offered} drafted proposals (depth {depth})"
            )
        if asked == depth:
            full += 1
            for position in range(hit):
                through[position] += 1
    return AcceptanceCounts(
        generated_tokens=sum(committed),
        verify_steps=len(accepted),
        proposed_tokens=sum(proposed),
        drafted_tokens=sum(drafted),
        full_depth_steps=full,
        accepted_through=tuple(through),
    )


def pool(counts: Iterable[AcceptanceCounts]) -> AcceptanceCounts:
    """Sum counters."""
    total = AcceptanceCounts()
    for item in counts:
        total = total + item
    return total


def repeated_ngram_share(tokens: Sequence[int], *, n: int = 12) -> float:
    """Share of an answer's n-grams that occurred earlier in it: how much it loops (0 for short answers)."""
    total = len(tokens) - n + 1
    if total <= 0:
        return 0.0
    distinct = len({tuple(tokens[i : i + n]) for i in range(total)})
    return 1.0 - distinct / total
