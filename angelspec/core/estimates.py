"""How far a request's drafts get, estimated online: what decides whether to draft for it at all.

For every request and drafter the estimate is the mean survival S_k, the chance that proposal k is committed, averaged
over the request's last drafts as their calibrated confidences put it (``core.calibration``). The calibration learns
where a proposal was really verified, and there only; what one outcome teaches about the request moves S_k at once.
Because a draft's worth enters by its calibrated confidences whether or not it was verified, cutting weak proposals
neither hides their weakness nor counts as their rejection, and depth neither creeps up nor collapses.

A new request starts from what its peers of the same workload showed in their first drafts; they start from the
acceptance measured in the bundle. How soon a request's own drafts outweigh its peers follows from how much drafts vary
within a request and between requests, which is learnt, too. A request that decodes plainly learns nothing, so

- ``ProbeBudget`` pays for drafting it now and then, from a fixed small share of all tokens, and is repaid when a probe
  pays off: probing costs at most that share, and recovers from a wrong estimate as fast as drafts turn out good;
- a change of drafter needs an advantage (``SWITCH_DISCOUNT``), so that requests near the break-even do not flutter.

Everything is O(depth) per row and step, without clocks or randomness: ranks that see the same outcomes decide alike.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from angelspec.core.calibration import AcceptanceModel, Calibration, RequestEffect
from angelspec.core.workloads import Workload

SWITCH_DISCOUNT = 0.02
"""Share of the expected tokens that a request forgoes on a drafter other than the one it uses now."""
PROBE_SHARE = 0.005
"""Share of all tokens that probes may cost."""
_PROBE_RESERVE, _PROBE_RESERVE_LEAST = 1.5, 6.0
"""The most that is saved up for probes: in tokens per row of the batch, but no less than so many tokens, so that even
a dear probe of a single row comes about."""
_ROW_MEMORY = 24.0
"""How many of its own drafts a request remembers."""
_LEAST_WEIGHT, _MOST_WEIGHT = 1.0, 32.0
"""What its peers showed weighs for a request as much as at least, and at most, so many of its own drafts."""
_WITHIN, _BETWEEN, _VARIANCE_MEMORY = 0.5, 0.25, 64.0
"""Variances of a draft's expected tokens, within a request and between requests, before any was seen, and how many
drafts are remembered."""
_PEER_DRAFTS, _PEER_GUESS, _PEER_MEMORY = 8.0, 2.0, 32.0
"""The same for a workload, in first drafts of requests: where it was measured, where it was not, at most."""
_PEER_STEPS = 8
"""The n-th draft of a request tells its peers 1/n of what the first one does, up to this one: a request that is worth
drafting for makes many, and must not outweigh those that are not."""
_UNKNOWN_ACCEPTANCE = 0.6
"""Conditional acceptance of a drafter that was never measured on a workload."""


@dataclass
class _Mean:
    """A running mean of survivals."""

    survivals: list[float]
    weight: float

    def add(self, survivals: Sequence[float], *, most: float, weight: float = 1.0) -> None:
        self.weight = min(self.weight + weight, most)
        share = weight / self.weight
        self.survivals = [s + share * (x - s) for s, x in zip(self.survivals, survivals, strict=True)]


@dataclass
class _Peers(_Mean):
    """A workload's requests with one drafter."""

    within: float = _WITHIN
    between: float = _BETWEEN

    def compare(self, own: _Mean, survivals: Sequence[float]) -> None:
        """Learn how drafts vary from one more draft of a request that had some before.

        The product of what two drafts of one request are above the mean is the variance between requests on average.
        """
        draft, before, peers = sum(survivals), sum(own.survivals), sum(self.survivals)
        within = (draft - before) ** 2 * own.weight / (own.weight + 1)
        self.within += (within - self.within) / _VARIANCE_MEMORY
        self.between += ((draft - peers) * (before - peers) - self.between) / _VARIANCE_MEMORY

    @property
    def own_drafts(self) -> float:
        """The number of a request's own drafts that say as much about it as its peers do."""
        if self.between * _MOST_WEIGHT <= self.within:
            return _MOST_WEIGHT
        return max(self.within / self.between, _LEAST_WEIGHT)


def _shifted(survivals: Sequence[float], logits: float) -> list[float]:
    """Survivals with every conditional acceptance moved by so many logits."""
    if not logits:
        return list(survivals)
    odds, before, product, shifted = math.exp(logits), 1.0, 1.0, []
    for survival in survivals:
        chance = 1.0 if survival >= before > 0 else survival / before if before > 0 else 0.0
        product *= chance * odds / (1 - chance + chance * odds)
        before = survival
        shifted.append(product)
    return shifted


@dataclass
class _Track:
    """One request with one drafter."""

    own: _Mean
    """Over its own drafts."""
    effect: RequestEffect = field(default_factory=RequestEffect)
    drafted_steps: int = 0
    idle_steps: int = 0
    """Steps of the request since this drafter was last asked."""


@dataclass
class _Request:
    workload: Workload
    tracks: dict[str, _Track]
    current: str | None = None
    """The drafter of its last step; None: it decoded plainly, or had no step yet."""
    steps: int = 0


class Estimates:
    """Acceptance estimates of all running requests.

    Args:
        depths: proposals per draft, by drafter.
        measured: cumulative acceptance p_k by (drafter, workload), from the bundle.
        calibrations: what was learnt about confidences, by drafter, from the bundle.
    """

    def __init__(
        self,
        depths: Mapping[str, int],
        *,
        measured: Mapping[tuple[str, Workload], Sequence[float]] | None = None,
        calibrations: Mapping[str, Calibration] | None = None,
    ) -> None:
        self._depths = dict(depths)
        self._models = {
            name: AcceptanceModel(depth, (calibrations or {}).get(name)) for name, depth in self._depths.items()
        }
        self._measured = {key: list(values) for key, values in (measured or {}).items()}
        self._peers: dict[tuple[str, Workload], _Peers] = {}
        self._requests: dict[str, _Request] = {}

    # ------------------------------------------------------------------------------------------- requests

    def open(self, request: str, *, workload: Workload, drafters: Sequence[str]) -> None:
        """Begin with a request that any of ``drafters`` may serve."""
        tracks = {name: _Track(_Mean([0.0] * self._depths[name], 0.0)) for name in drafters}
        self._requests[request] = _Request(workload, tracks)

    def close(self, request: str) -> None:
        """Forget a request (finished or aborted); one that is not known is ignored."""
        known = self._requests.pop(request, None)
        for name, track in known.tracks.items() if known else ():
            self._models[name].ended(track.effect)

    def survivals(self, request: str, drafter: str) -> list[float]:
        """Estimated S_1 .. S_D of the request's next draft, discounted where it would change its drafter."""
        known = self._requests[request]
        track = known.tracks[drafter]
        peers = self._peer(drafter, known.workload)
        share = track.own.weight / (track.own.weight + peers.own_drafts)
        like_peers = _shifted(peers.survivals, track.effect.value)
        survivals = [p + share * (own - p) for p, own in zip(like_peers, track.own.survivals, strict=True)]
        if known.steps and known.current != drafter:
            return [(1 - SWITCH_DISCOUNT) * s for s in survivals]
        return survivals

    def last_drafted(self, request: str, drafter: str) -> tuple[bool, int]:
        """Whether this drafter never drafted for the request, and how many steps were made without it since."""
        track = self._requests[request].tracks[drafter]
        return track.drafted_steps == 0, track.idle_steps

    # ---------------------------------------------------------------------------------------------- steps

    def acceptance(self, request: str, drafter: str, evidence: Sequence[float]) -> list[float]:
        """Calibrated acceptance of each drafted proposal, given that those before it are accepted.

        Args:
            evidence: of the draft's confidences, from ``calibration.evidence``.
        """
        return self._models[drafter].predict(evidence, self._requests[request].tracks[drafter].effect)

    def observe_plain(self, request: str) -> None:
        """The request made a step without a draft."""
        if known := self._requests.get(request):
            self._advance(known, None)

    def observe(self, request: str, drafter: str, evidence: Sequence[float], *, verified: int, accepted: int) -> None:
        """The request made a step with a draft.

        Args:
            evidence: of the draft's confidences, from ``calibration.evidence``.
            verified: how many of them the target saw.
            accepted: how many of those it accepted.
        """
        known = self._requests.get(request)
        if known is None:
            return
        track, model = known.tracks[drafter], self._models[drafter]
        before = track.effect.value
        model.learn(evidence, track.effect, verified=verified, accepted=accepted)
        track.own.survivals = _shifted(track.own.survivals, track.effect.value - before)
        chances = model.predict(evidence, track.effect)
        chances += [0.0] * (self._depths[drafter] - len(chances))
        survivals = list(itertools.accumulate(chances, lambda a, b: a * b))
        track.drafted_steps += 1
        if track.drafted_steps <= _PEER_STEPS:
            peers = self._peer(drafter, known.workload)
            if track.own.weight:
                peers.compare(track.own, survivals)
            peers.add(survivals, most=_PEER_MEMORY, weight=1 / track.drafted_steps)
        track.own.add(survivals, most=_ROW_MEMORY)
        self._advance(known, drafter)

    def calibration(self, drafter: str) -> Calibration:
        """What has been learnt about a drafter's confidences, for the bundle."""
        return self._models[drafter].stored()

    # --------------------------------------------------------------------------------------------- inside

    def _advance(self, known: _Request, drafter: str | None) -> None:
        known.steps += 1
        known.current = drafter
        for name, track in known.tracks.items():
            track.idle_steps = 0 if name == drafter else track.idle_steps + 1

    def _peer(self, drafter: str, workload: Workload) -> _Peers:
        key = (drafter, workload)
        if key not in self._peers:
            depth = self._depths[drafter]
            measured = self._measured.get(key, [])[:depth]
            last = measured[-1] if measured else 1.0
            tail = [last * _UNKNOWN_ACCEPTANCE**k for k in range(1, depth - len(measured) + 1)]
            self._peers[key] = _Peers([*measured, *tail], _PEER_DRAFTS if measured else _PEER_GUESS)
        return self._peers[key]


class ProbeBudget:
    """Tokens that may be spent on drafting for requests that would rather decode plainly."""

    def __init__(self, *, share: float = PROBE_SHARE) -> None:
        self._share = share
        self._tokens = float("inf")

    def earn(self, expected_tokens: float, *, batch_size: int) -> None:
        """Once per step."""
        most = max(_PROBE_RESERVE * batch_size, _PROBE_RESERVE_LEAST)
        self._tokens = min(self._tokens + self._share * expected_tokens, most)

    def affords(self, tokens: float) -> bool:
        """Whether probes that are expected to cost so many tokens may be made."""
        return self._tokens >= tokens

    def spend(self, tokens: float) -> None:
        """Pay for a probe when it is made, and the rest (or be repaid, below 0) when it is known what it brought."""
        self._tokens -= tokens
