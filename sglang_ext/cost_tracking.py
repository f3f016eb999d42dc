"""Keeps the costs of a step true while the engine serves.

What was profiled at start-up are forwards on an idle engine with one context length. Served steps differ: contexts
grow, other processes take their share of the machine, and the scheduler, sampling and results cost time too. So each
part is scaled by what it really took, and the rest of a step is added by batch size:

    seconds = sum_d scale_d draft_d(n_d) + scale_v verify(B, T) + rest(B)

Steps without drafts (T = B) have a scale of their own: what makes wide steps slower than profiled, such as attention
over long contexts, need not make those slower, and it is them that drafting must beat. Scales are running means of log
ratios, the rest is a running mean per batch size; both forget.
"""

from __future__ import annotations

import math

from angelspec.core.step_costs import DraftPoint, StepCosts, VerifyPoint
from sglang_ext.clock import TimedStep

_SHARE = 1 / 24
"""Weight of a new step; until so many were seen, all weigh alike."""
_FARTHEST = math.log(6.0)
"""A single step counts for no more than this ratio, either way: a pause is no cost."""
_DRIFT = 0.03
"""Relative change of a scale that is worth new tables."""


class _Mean:
    def __init__(self) -> None:
        self.value, self.count = 0.0, 0.0

    def add(self, value: float, *, weight: float = 1.0) -> None:
        self.count += weight
        self.value += weight * max(_SHARE, 1 / max(self.count, 1.0)) * (value - self.value)


class CostTracker:
    """Costs that follow served steps.

    Args:
        profiled: measured at start-up.
    """

    def __init__(self, profiled: StepCosts) -> None:
        self._profiled = profiled
        self._plain, self._wide = _Mean(), _Mean()
        self._draft: dict[str, _Mean] = {name: _Mean() for name in profiled.drafting}
        self._rest: dict[int, _Mean] = {}
        self._given = self._state()

    def observe(self, step: TimedStep) -> None:
        """Learn from a served step."""
        costs, batch_size, slots = self._profiled, step.batch_size, step.slots
        draft_seconds, verify_seconds, rest_seconds = step.times.draft, step.times.verify, step.rest_seconds
        expected = costs.verify_seconds(batch_size, slots)
        if expected:
            scale = self._plain if slots == batch_size else self._wide
            scale.add(_bounded(math.log(verify_seconds / expected)))
        shares = {name: costs.draft_seconds(name, rows) or 0.0 for name, rows in step.drafted.items()}
        expected = sum(shares.values())
        if expected and draft_seconds > 0 and shares.keys() <= self._draft.keys():
            ratio = _bounded(math.log(draft_seconds / expected))
            for name, share in shares.items():  # which of several took longer is not known: all did, by their shares
                self._draft[name].add(ratio, weight=share / expected)
        if rest_seconds is not None:
            self._rest.setdefault(batch_size, _Mean()).add(min(rest_seconds, verify_seconds))

    def drifted(self) -> bool:
        """Whether the costs given last are no longer true."""
        now = self._state()
        return any(abs(new - old) > _DRIFT for new, old in zip(now, self._given, strict=True))

    def current(self) -> StepCosts:
        """The profiled costs, made true."""
        self._given = self._state()
        costs = self._profiled
        plain, wide = (math.exp(value) for value in self._verify_scales())
        return costs.model_copy(
            update={
                "drafting": {
                    name: tuple(
                        DraftPoint(rows=point.rows, seconds=point.seconds * math.exp(self._draft[name].value))
                        for point in points
                    )
                    for name, points in costs.drafting.items()
                },
                "verification": tuple(
                    VerifyPoint(
                        batch_size=point.batch_size,
                        slots=point.slots,
                        seconds=point.seconds * (plain if point.slots == point.batch_size else wide)
                        + self._rest_of(point.batch_size),
                    )
                    for point in costs.verification
                ),
            }
        )

    def _verify_scales(self) -> tuple[float, float]:
        """Log scales of steps without drafts and of wider ones; a kind that was not seen takes the other's."""
        if not self._plain.count:
            return self._wide.value, self._wide.value
        return self._plain.value, self._wide.value if self._wide.count else self._plain.value

    def _rest_of(self, batch_size: int) -> float:
        """Of the nearest batch size that was seen; 0: none was."""
        seen = [size for size, mean in self._rest.items() if mean.count]
        return self._rest[min(seen, key=lambda size: abs(size - batch_size))].value if seen else 0.0

    def _state(self) -> list[float]:
        plain = self._profiled.verify_seconds(1, 1) or 1.0
        return [
            *self._verify_scales(),
            *(mean.value for mean in self._draft.values()),
            self._rest_of(1) / plain,
            self._rest_of(1 << 30) / plain,
        ]


def _bounded(log_ratio: float) -> float:
    return max(-_FARTHEST, min(_FARTHEST, log_ratio))
