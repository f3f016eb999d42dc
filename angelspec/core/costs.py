"""Measured seconds of a whole draft-verify step, by batch size and verified slots: what D-cut divides by."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

RATIOS: tuple[float, ...] = (0.25, 0.5, 0.75, 1.0)
"""The grid of keep ratios that D-cut chooses from (arXiv 2607.14647)."""
FALLBACK_RATIO = 0.75
"""The keep ratio where no cost was measured."""
_MAX_BATCH_FACTOR = 2.0
"""A profiled batch further away than this factor says nothing about the one at hand."""


class CostEntry(BaseModel):
    """One measurement."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    batch_size: int = Field(ge=1)
    """Rows of the step."""
    verified_slots: int = Field(ge=1)
    """Slots of the whole batch that the target verified, anchors counted."""
    seconds: float = Field(gt=0, allow_inf_nan=False)
    """Whole step: draft, select, pack and verify."""

    @model_validator(mode="after")
    def _anchors_fit(self) -> Self:
        if self.verified_slots < self.batch_size:
            raise ValueError(f"{self.verified_slots} verified slots do not hold {self.batch_size} anchors")
        return self


class CostTable(BaseModel):
    """Step costs of one target with one drafter on one machine."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    machine: str = ""
    """Hardware and engine in words: a table is worth nothing on another machine."""
    prefix_tokens: int = Field(default=0, ge=0)
    """Context length per row while measuring."""
    entries: tuple[CostEntry, ...] = ()

    @model_validator(mode="after")
    def _no_doubles(self) -> Self:
        keys = [(entry.batch_size, entry.verified_slots) for entry in self.entries]
        doubles = sorted({key for key in keys if keys.count(key) > 1})
        if doubles:
            raise ValueError(f"measured twice (batch size, verified slots): {doubles}; keep the slower one")
        return self

    def seconds(self, batch_size: int, verified_slots: int) -> float | None:
        """Cost of a step, from the nearest bucket.

        The nearest profiled batch size (ties to the larger, within a factor of 2), in it the entry whose slots per
        row are nearest (ties to the larger). Seconds are not scaled: a graph bucket costs what it costs.

        Returns:
            Seconds, or None where no comparable batch was profiled: use ``FALLBACK_RATIO`` then.
        """
        near = [
            entry.batch_size
            for entry in self.entries
            if 1 / _MAX_BATCH_FACTOR <= entry.batch_size / batch_size <= _MAX_BATCH_FACTOR
        ]
        if not near:
            return None
        bucket = min(near, key=lambda size: (abs(size - batch_size), -size))
        width = verified_slots / batch_size
        candidates = [entry for entry in self.entries if entry.batch_size == bucket]
        entry = min(
            candidates,
            key=lambda item: (abs(item.verified_slots / bucket - width), -item.verified_slots),
        )
        return entry.seconds

    @classmethod
    def slowest(cls, tables: Iterable[CostTable]) -> CostTable:
        """The table of a group of ranks: at each measured point the slowest rank, which all others wait for.

        Raises:
            ValueError: no tables, or they were measured at different points.
        """
        tables = list(tables)
        if not tables:
            raise ValueError("no cost tables to join")
        points = [{(e.batch_size, e.verified_slots): e.seconds for e in table.entries} for table in tables]
        if any(set(point) != set(points[0]) for point in points):
            raise ValueError("cost tables of different points cannot be joined; measure every rank alike")
        entries = tuple(
            CostEntry(batch_size=batch, verified_slots=slots, seconds=max(p[batch, slots] for p in points))
            for batch, slots in points[0]
        )
        return cls(machine=tables[0].machine, prefix_tokens=tables[0].prefix_tokens, entries=entries)
