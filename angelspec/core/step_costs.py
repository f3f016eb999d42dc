"""What a mixed step costs, as a sum of measured parts: drafting by each drafter, and one verification.

    seconds(B, n, T) = sum over drafters d with n_d > 0 of draft_d(n_d) + verify(B, T)

B rows run, n_d of them are drafted for by drafter d, and the target verifies T slots in all, anchors counted
(B <= T). ``verify(B, B)`` is plain decoding. The parts are profiled apart because a table of whole steps would need
every mixture of drafters, batch size and width.

Between profiled points the parts are linear: drafting in its rows, verification in its slots per row and then in the
batch size. Where the engine pads slots to tiers (CUDA graphs), a step costs what its tier costs.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from angelspec.core.fingerprint import fingerprint

_STRICT = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)
REACH = 2.0
"""A batch larger than the largest profiled one by more than this factor has no known cost."""


class DraftPoint(BaseModel):
    """One measurement of one drafter."""

    model_config = _STRICT

    rows: int = Field(ge=1)
    """Rows drafted for together."""
    seconds: float = Field(ge=0, allow_inf_nan=False)
    """Drafting to the full depth, and bringing the drafter's own state up to date for these rows."""


class VerifyPoint(BaseModel):
    """One measurement of the target."""

    model_config = _STRICT

    batch_size: int = Field(ge=1)
    """Rows of the step."""
    slots: int = Field(ge=1)
    """Slots of the whole batch, anchors counted."""
    seconds: float = Field(gt=0, allow_inf_nan=False)
    """Verification with all that a step without a drafter needs (sampling, commit, scheduling)."""

    @model_validator(mode="after")
    def _anchors_fit(self) -> Self:
        if self.slots < self.batch_size:
            raise ValueError(f"{self.slots} slots do not hold {self.batch_size} anchors")
        return self


class MeasuredFor(BaseModel):
    """What costs hold for: on anything else they must be measured again."""

    model_config = _STRICT

    hardware: str
    """Processor or accelerator, number, threads."""
    engine: str
    """Engine and version."""
    target: str
    """Digest of the target."""
    drafters: dict[str, str] = Field(default_factory=dict)
    """Digest by drafter name."""
    flags: dict[str, str | int | float | bool | None] = Field(default_factory=dict)
    """Engine flags that change a step's time: precision, attention backend, parallelism, graphs."""

    @property
    def fingerprint(self) -> str:
        """Name of this combination, for caches."""
        return fingerprint(self.model_dump())

    def differences(self, other: MeasuredFor) -> list[str]:
        """Facts on which two combinations differ, one clause each (empty: the costs hold)."""
        ours, theirs = _flat(self.model_dump()), _flat(other.model_dump())
        return [
            f"{key} was {ours.get(key, 'absent')}, is {theirs.get(key, 'absent')}"
            for key in sorted(ours.keys() | theirs.keys())
            if ours.get(key) != theirs.get(key)
        ]


class StepCosts(BaseModel):
    """Measured parts of a step."""

    model_config = _STRICT

    measured_for: MeasuredFor | None = None
    """None: made by hand or for a test; trusted as it is."""
    prefix_tokens: int = Field(default=0, ge=0)
    """Context length per row while measuring."""
    drafting: dict[str, tuple[DraftPoint, ...]] = Field(default_factory=dict)
    """By drafter name."""
    verification: tuple[VerifyPoint, ...] = ()
    tiers: tuple[int, ...] = ()
    """Slot counts that the engine pads a verification to, ascending; empty: it does not pad."""
    tiers_up_to: int | None = None
    """Rows of the largest batch that it pads; None: any."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        places = {f"drafting.{name}": [p.rows for p in points] for name, points in self.drafting.items()}
        places["verification"] = [(p.batch_size, p.slots) for p in self.verification]
        for place, keys in places.items():
            doubles = sorted({key for key in keys if keys.count(key) > 1})
            if doubles:
                raise ValueError(f"{place}: measured twice: {doubles}; keep the slower one")
        for name, points in self.drafting.items():
            if not points:
                raise ValueError(f"drafting.{name}: no points; leave the drafter out or measure it")
        for batch_size in {p.batch_size for p in self.verification}:
            if not any(p.slots == batch_size for p in self.verification if p.batch_size == batch_size):
                raise ValueError(f"verification: batch size {batch_size} lacks its plain step ({batch_size} slots)")
        if list(self.tiers) != sorted(set(self.tiers)):
            raise ValueError("tiers must be ascending without doubles")
        return self

    # -------------------------------------------------------------------------------------------- lookup

    def draft_seconds(self, drafter: str, rows: int) -> float | None:
        """Drafting for ``rows`` rows; 0 for none, None where nothing comparable was profiled."""
        if rows == 0:
            return 0.0
        points = sorted((p.rows, p.seconds) for p in self.drafting.get(drafter, ()))
        if not points or rows > REACH * points[-1][0]:
            return None
        return _linear(points, rows)

    def drafting_seconds(self, drafted: Mapping[str, int]) -> float | None:
        """Everything but verification, for rows by drafter; 0 for none, None where nothing comparable was profiled."""
        parts = [self.draft_seconds(name, rows) for name, rows in drafted.items()]
        return None if None in parts else sum(part for part in parts if part is not None)

    def verify_seconds(self, batch_size: int, slots: int) -> float | None:
        """Verification of ``slots`` slots over ``batch_size`` rows, None where nothing comparable was profiled."""
        curve = self.verify_curve(batch_size, (slots,))
        return None if curve is None else curve[0]

    def verify_curve(self, batch_size: int, slots: Iterable[int]) -> list[float] | None:
        """The same for many numbers of slots at once."""
        by_batch: dict[int, list[tuple[float, float]]] = {}
        for p in sorted(self.verification, key=lambda p: (p.batch_size, p.slots)):
            by_batch.setdefault(p.batch_size, []).append((p.slots / p.batch_size, p.seconds))
        sizes = list(by_batch)
        if not sizes or batch_size > REACH * sizes[-1]:
            return None
        index = min(max(bisect_left(sizes, batch_size), 1), max(len(sizes) - 1, 1))
        near = sizes[index - 1 : index + 1]  # the two that enclose it, or the last two beyond the end
        return [
            _linear([(size, _linear(by_batch[size], padded / batch_size)) for size in near], batch_size)
            for padded in (self._padded(number, batch_size) for number in slots)
        ]

    def _padded(self, slots: int, batch_size: int) -> int:
        if slots == batch_size:  # profiled as it runs, in its tier, and followed by a scale of its own
            return slots
        if self.tiers_up_to is not None and batch_size > self.tiers_up_to:
            return slots
        index = bisect_left(self.tiers, slots)
        return self.tiers[index] if index < len(self.tiers) else slots

    def seconds(self, batch_size: int, *, drafted: Mapping[str, int], slots: int) -> float | None:
        """A whole step, None where a part is not known.

        Args:
            drafted: rows by drafter.
            slots: verified slots of the batch, anchors counted.
        """
        drafting, verify = self.drafting_seconds(drafted), self.verify_seconds(batch_size, slots)
        return None if drafting is None or verify is None else drafting + verify


def _linear(points: Sequence[tuple[float, float]], x: float) -> float:
    """Through sorted points; before the first its value, beyond the last its last slope, if that rises."""
    if x <= points[0][0] or len(points) == 1:
        return points[0][1]
    index = min(bisect_left(points, (x,)), len(points) - 1)
    (x0, y0), (x1, y1) = points[index - 1], points[index]
    slope = (y1 - y0) / (x1 - x0)
    return y1 + max(slope, 0.0) * (x - x1) if x > x1 else y0 + slope * (x - x0)


def _flat(record: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in record.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
