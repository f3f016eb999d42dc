"""What a drafter's confidence is worth: the chance that a proposal is accepted, given its confidence and position.

    logit P(accepted | those before it were) = slope * logit(confidence) + common + position_k + request

``slope`` starts at 1, the other terms at 0: before anything is known, a confidence of 0.9 means 0.9. ``common`` is
learnt at every position, so that one which was always cut is judged by those that were not, and is not stuck with what
was believed at first. ``request`` is how much easier or harder than its peers one request is. All of them are learnt
from verified proposals alone, by one damped Newton step of logistic regression per outcome: an outcome moves each term
in proportion to how little is known about it. What is known is counted as Fisher information, and capped so that the
past fades. How much requests differ is learnt as well, from those that ended: where they do not, one request's luck
moves little.

Pure arithmetic in a fixed order: ranks that see the same outcomes hold equal numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

_SUREST = 0.99
"""A confidence further out, either way, is taken for this."""
_FARTHEST = math.log(_SUREST / (1 - _SUREST))
_SLOPE_INFORMATION, _SLOPE_MOST = 4.0, 800.0
_COMMON_INFORMATION, _COMMON_MOST = 2.0, 400.0
_POSITION_INFORMATION, _POSITION_MOST = 4.0, 200.0
"""Information at the start and at most. An outcome at p carries p (1 - p): 0.25 where it is wide open."""
_REQUEST_MOST = 12.0
"""Information about one request from its own outcomes: at most so much, the older giving way."""
_SPREAD, _SPREAD_WEIGHT, _SPREAD_LEAST, _SPREAD_FADES = 0.5, 8.0, 0.01, 0.95
"""Variance of requests' effects before any was seen, what that weighs, the least variance, and what is left of all
that was seen before a request ended."""
_LARGEST, _STEEPEST = 20.0, 10.0
"""No stored logit, and no stored slope, is larger."""
_CENTRE = 1 / 16
"""Share of a finished request's effect that passes to its peers' terms, so that effects stay centred on 0."""
_LONGEST_STEP = 2.0
"""Logits that one outcome may move a prediction by."""


def _within(value: float, most: float) -> float:
    return max(-most, min(most, value))


def evidence(confidences: Sequence[float]) -> list[float]:
    """logit of each confidence, kept in bounds; NaN counts as 0."""
    return [
        _FARTHEST if c >= _SUREST else math.log(c / (1 - c)) if c > 1 - _SUREST else -_FARTHEST for c in confidences
    ]


class Calibration(BaseModel):
    """What was learnt about one drafter's confidences, as it is stored in a bundle."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    slope: float = Field(default=1.0, ge=-_STEEPEST, le=_STEEPEST)
    """0: the confidence says nothing; 1: it means what it says, up to the positions' terms."""
    slope_information: float = Field(default=_SLOPE_INFORMATION, gt=0, allow_inf_nan=False)
    """How well the slope is known."""
    position_logits: tuple[float, ...] = ()
    """Added by position, from the first, the common term included; positions that are not named add 0."""
    position_information: tuple[float, ...] = ()
    """How well each of them is known."""
    spread: float = Field(default=_SPREAD, gt=0, allow_inf_nan=False)
    """Variance of requests' effects."""
    outcomes: int = Field(default=0, ge=0)
    """Verified proposals that it was learnt from."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len(self.position_logits) != len(self.position_information):
            raise ValueError("position_logits and position_information need one number per position each")
        if not all(abs(x) <= _LARGEST for x in self.position_logits):
            raise ValueError(f"position_logits must lie in -{_LARGEST:g}..{_LARGEST:g}")
        if not all(0 < x < math.inf for x in self.position_information):
            raise ValueError("position_information must be positive")
        return self


@dataclass
class RequestEffect:
    """How much easier (above 0) or harder one request is for one drafter, in logits."""

    value: float = 0.0
    information: float = 0.0
    """From its own outcomes."""
    surprise: float = 0.0
    """Sum of its first outcomes less what its peers' would have been expected to be."""
    variance: float = 0.0
    """The square that ``surprise`` would have on average if the request were like its peers."""


class AcceptanceModel:
    """The running calibration of one drafter."""

    def __init__(self, depth: int, start: Calibration | None = None) -> None:
        start = Calibration() if start is None else start
        missing = depth - len(start.position_logits)
        self._slope, self._slope_information = start.slope, start.slope_information
        self._common, self._common_information = 0.0, _COMMON_INFORMATION
        self._positions = [*start.position_logits[:depth], *[0.0] * missing]
        self._position_information = [*start.position_information[:depth], *[_POSITION_INFORMATION] * missing]
        self._spread, self._spread_weight = start.spread, _SPREAD_WEIGHT
        self._excess = self._spread * self._spread_weight
        self._outcomes = start.outcomes

    def predict(self, evidence: Sequence[float], request: RequestEffect) -> list[float]:
        """Acceptance of each proposal given that those before it were accepted.

        Args:
            evidence: of the confidences of one draft, from the function of that name.
        """
        slope, same, exp = self._slope, self._common + request.value, math.exp
        return [1 / (1 + exp(-slope * x - place - same)) for x, place in zip(evidence, self._positions, strict=False)]

    def learn(self, evidence: Sequence[float], request: RequestEffect, *, verified: int, accepted: int) -> None:
        """Learn from one row's step: ``accepted`` of its first ``verified`` proposals; what was cut says nothing."""
        for k in range(min(accepted + 1, verified)):
            self._learn(k, evidence[k], request, hit=k < accepted)

    def ended(self, request: RequestEffect) -> None:
        """Learn from a finished request how much requests differ.

        With effects of variance s, the square of a sum of residuals of variance v is v + s v^2 on average, and stays
        so if drafting stops when luck is bad (the difference is a martingale). So s is the ratio of two sums.
        """
        if request.variance:
            self._excess = self._excess * _SPREAD_FADES + request.surprise**2 - request.variance
            self._spread_weight = self._spread_weight * _SPREAD_FADES + request.variance**2
            self._spread = max(self._excess / self._spread_weight, _SPREAD_LEAST)
            self._common += _CENTRE * request.value

    def stored(self) -> Calibration:
        """What has been learnt so far."""
        return Calibration(
            slope=_within(self._slope, _STEEPEST),
            slope_information=self._slope_information,
            position_logits=tuple(_within(self._common + position, _LARGEST) for position in self._positions),
            position_information=tuple(self._position_information),
            spread=self._spread,
            outcomes=self._outcomes,
        )

    def _learn(self, k: int, evidence: float, request: RequestEffect, *, hit: bool) -> None:
        peers = self._slope * evidence + self._common + self._positions[k]
        chance, like_peers = 1 / (1 + math.exp(-peers - request.value)), 1 / (1 + math.exp(-peers))
        error, worth = hit - chance, max(chance * (1 - chance), 0.01)
        if request.variance < _REQUEST_MOST:
            request.surprise += hit - like_peers
            request.variance += like_peers * (1 - like_peers)
        self._forget(request, room_for=worth)
        request.information += worth
        self._slope_information = min(self._slope_information + evidence * evidence * worth, _SLOPE_MOST)
        self._position_information[k] = min(self._position_information[k] + worth, _POSITION_MOST)
        self._common_information = min(self._common_information + worth, _COMMON_MOST)
        by_slope = evidence / self._slope_information
        by_common = 1 / self._common_information
        by_position = 1 / self._position_information[k]
        by_request = 1 / (1 / self._spread + request.information)
        whole = abs(error) * (evidence * by_slope + by_common + by_position + by_request)
        error *= min(1.0, _LONGEST_STEP / whole) if whole else 1.0
        self._slope += error * by_slope
        self._common += error * by_common
        self._positions[k] += error * by_position
        request.value += error * by_request
        self._outcomes += 1

    def _forget(self, request: RequestEffect, *, room_for: float) -> None:
        """Let a request's older outcomes give way; what they said goes with them."""
        before = request.information
        if before + room_for > _REQUEST_MOST:
            after = _REQUEST_MOST - room_for
            request.value *= (after / (1 / self._spread + after)) / (before / (1 / self._spread + before))
            request.information = after
