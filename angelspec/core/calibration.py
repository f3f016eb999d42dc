"""What a drafter's confidence is worth: the chance that a proposal is accepted, given its confidence and position.

    logit P(accepted | the proposals before it were) = knots(confidence) + position_k + request

``knots`` is linear between fixed confidences and starts at the identity (a confidence of 0.9 means 0.9), ``position_k``
starts at 0, and ``request`` is how much easier or harder than its peers one request is. All of them are learnt from
verified proposals alone, each outcome moving every term in proportion to how little is known about it (one Newton step
of logistic regression per outcome). What is known is counted as Fisher information and capped, so that the past fades.
How much requests differ is learnt as well, from those that ended: where they do not, one request's luck moves little.

Pure arithmetic in a fixed order: ranks that see the same outcomes hold equal numbers.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

KNOTS: tuple[float, ...] = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.97, 1.0)
"""Confidences between which the calibration is linear."""
_SURE = 0.99
"""No prediction before any outcome is surer than this, either way."""
_KNOT_INFORMATION, _KNOT_MOST = 2.0, 200.0
_POSITION_INFORMATION, _POSITION_MOST = 5.0, 200.0
"""Information at the start and at most. An outcome at p carries p (1 - p): 0.25 where it is wide open."""
_REQUEST_MOST = 12.0
"""Information about one request from its own outcomes: at most so much, the older giving way."""
_SPREAD, _SPREAD_WEIGHT, _SPREAD_MEMORY = 0.7, 8.0, 64.0
"""Variance of requests' effects before any was seen, what it weighs and what is remembered, in requests."""


def logit(probability: float) -> float:
    """log(p / (1 - p)), p kept away from 0 and 1."""
    p = min(max(probability, 1e-3), 1 - 1e-3)
    return math.log(p / (1 - p))


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else 1 - 1 / (1 + math.exp(x))


def _identity() -> tuple[float, ...]:
    return tuple(logit(min(max(knot, 1 - _SURE), _SURE)) for knot in KNOTS)


class Calibration(BaseModel):
    """What was learnt about one drafter, as it is stored in a bundle."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    logits: tuple[float, ...] = _identity()
    """By knot of ``KNOTS``."""
    information: tuple[float, ...] = (_KNOT_INFORMATION,) * len(KNOTS)
    """How well each is known."""
    position_logits: tuple[float, ...] = ()
    """Added by position, from the first; positions that are not named add 0."""
    outcomes: int = Field(default=0, ge=0)
    """Verified proposals that it was learnt from."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not len(self.logits) == len(self.information) == len(KNOTS):
            raise ValueError(f"logits and information need one number for each of the confidences {list(KNOTS)}")
        if not all(math.isfinite(x) for x in (*self.logits, *self.position_logits)):
            raise ValueError("logits must be finite")
        if not all(0 < x < math.inf for x in self.information):
            raise ValueError("information must be positive")
        return self


@dataclass
class RequestEffect:
    """How much easier (above 0) or harder one request is for one drafter, in logits."""

    value: float = 0.0
    information: float = 0.0
    """From its own outcomes."""


class AcceptanceModel:
    """The running calibration of one drafter."""

    def __init__(self, depth: int, start: Calibration | None = None) -> None:
        start = Calibration() if start is None else start
        self._knots = list(start.logits)
        self._knot_information = list(start.information)
        self._positions = [*start.position_logits[:depth], *[0.0] * (depth - len(start.position_logits))]
        self._position_information = [_POSITION_INFORMATION] * depth
        self._outcomes = start.outcomes
        self._spread, self._spread_weight = _SPREAD, _SPREAD_WEIGHT

    def predict(self, confidences: Sequence[float], request: RequestEffect) -> list[float]:
        """Acceptance of each proposal given that those before it were accepted."""
        return [sigmoid(self._logit(k, c) + request.value) for k, c in enumerate(confidences)]

    def learn(self, confidences: Sequence[float], request: RequestEffect, *, verified: int, accepted: int) -> None:
        """Learn from one row's step: ``accepted`` of its first ``verified`` proposals; what was cut says nothing."""
        for k in range(min(accepted + 1, verified)):
            self._learn(k, confidences[k], request, hit=k < accepted)

    def ended(self, request: RequestEffect) -> None:
        """Learn from a finished request how much requests differ (one step of expectation maximisation)."""
        if request.information:
            seen = request.value**2 + 1 / (1 / self._spread + request.information)
            self._spread_weight = min(self._spread_weight + 1, _SPREAD_MEMORY)
            self._spread += (seen - self._spread) / self._spread_weight

    def stored(self) -> Calibration:
        """What has been learnt so far."""
        return Calibration(
            logits=tuple(self._knots), information=tuple(self._knot_information),
            position_logits=tuple(self._positions), outcomes=self._outcomes,
        )  # fmt: skip

    def _logit(self, k: int, confidence: float) -> float:
        left, share = _place(confidence)
        return self._knots[left] * (1 - share) + self._knots[left + 1] * share + self._positions[k]

    def _learn(self, k: int, confidence: float, request: RequestEffect, *, hit: bool) -> None:
        left, share = _place(confidence)
        p = sigmoid(self._logit(k, confidence) + request.value)
        error, worth = hit - p, max(p * (1 - p), 0.01)
        for index, weight in ((left, 1 - share), (left + 1, share)):
            known = min(self._knot_information[index] + weight * weight * worth, _KNOT_MOST)
            self._knot_information[index] = known
            self._knots[index] += weight * error / known
        known = min(self._position_information[k] + worth, _POSITION_MOST)
        self._position_information[k] = known
        self._positions[k] += error / known
        self._forget(request, room_for=worth)
        request.information += worth
        request.value += error / (1 / self._spread + request.information)
        self._outcomes += 1

    def _forget(self, request: RequestEffect, *, room_for: float) -> None:
        """Let a request's older outcomes give way; what they said goes with them."""
        kept = min((_REQUEST_MOST - room_for) / request.information, 1.0) if request.information else 1.0
        before, after = request.information, kept * request.information
        request.information = after
        if kept < 1:
            request.value *= (after / (1 / self._spread + after)) / (before / (1 / self._spread + before))


def _place(confidence: float) -> tuple[int, float]:
    """The knot below a confidence and the share of the way to the next one; NaN counts as 0."""
    c = min(max(confidence, 0.0), 1.0) if confidence == confidence else 0.0
    left = min(bisect_right(KNOTS, c) - 1, len(KNOTS) - 2)
    return left, (c - KNOTS[left]) / (KNOTS[left + 1] - KNOTS[left])
