"""A seeded world in which a serving policy is tried: given step costs, and requests whose drafts come true by chance.

A closed loop of fixed concurrency: a request that is done is replaced by the next. Request n is the same for every
policy (its length, its acceptance, its confidences), only the order of events differs. Throughput is the sum of
*expected* tokens over the sum of seconds, which is far less noisy than counting the tokens that chance granted; what
the policy learns from is what chance granted. What a fixed depth makes of the very tokens that a policy served follows
without chance (``Outcome.fixed_rate``), so that a comparison does not hang on who happened to be served.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from angelspec.core.step_costs import DraftPoint, StepCosts, VerifyPoint
from angelspec.core.workloads import Workload

Draft = tuple[list[float], list[float]]
"""Confidences, and the true chance of each proposal given those before it."""
BATCHES = (1, 2, 4, 8, 16, 32, 64)


def costs(
    *,
    plain: Callable[[int], float],
    slot: Callable[[int], float],
    draft: dict[str, Callable[[int], float]],
    depth: int = 7,
) -> StepCosts:
    """Tables of a world: seconds of a plain step, of each further slot, and of drafting, by batch size."""
    return StepCosts(
        drafting={
            name: tuple(DraftPoint(rows=rows, seconds=seconds(rows)) for rows in BATCHES)
            for name, seconds in draft.items()
        },
        verification=tuple(
            VerifyPoint(batch_size=batch, slots=batch * width, seconds=plain(batch) + slot(batch) * batch * (width - 1))
            for batch in BATCHES
            for width in range(1, depth + 2)
        ),
    )


def cpu_costs() -> StepCosts:
    """Two cores with SmolLM2 in fp32, as measured: plain 78 ms at 1 row and 192 at 8, a full verification of 8 slots
    per row 1.7 and 2.05 times that, drafting 30 and 60 ms."""
    return costs(
        plain=lambda b: 0.0617 + 0.0163 * b,
        slot=lambda b: 0.00353 + 0.00427 / b,
        draft={"dfly": lambda b: 0.0257 + 0.0043 * b, "mtp": lambda b: 0.018 + 0.002 * b},
    )


def cheap_costs() -> StepCosts:
    """A target that is bound by reading its weights: slots and drafts cost next to nothing."""
    return costs(
        plain=lambda b: 0.010 + 0.00002 * b,
        slot=lambda b: 0.00001,
        draft={"dfly": lambda b: 0.0005 + 0.00001 * b, "mtp": lambda b: 0.0004 + 0.00001 * b},
    )


def dear_costs() -> StepCosts:
    """A target that is bound by arithmetic: a slot costs most of what a row costs, and drafting nearly a plain step."""
    return costs(
        plain=lambda b: 0.040 + 0.016 * b,
        slot=lambda b: 0.012,
        draft={"dfly": lambda b: 0.030 + 0.010 * b, "mtp": lambda b: 0.020 + 0.006 * b},
    )


TABLES = {"cheap": cheap_costs, "cpu": cpu_costs, "dear": dear_costs}


@dataclass
class Request:
    """One request of the world."""

    number: int
    length: int
    """Tokens of its answer."""
    drafts: dict[str, Callable[[random.Random], Draft]]
    """By drafter: what it would propose next."""
    chances: tuple[float, ...] = ()
    """Of each proposal given those before it, where they are the same at every step and for every drafter."""
    workload: Workload = "chat"
    done: int = 0
    chance: random.Random = field(default_factory=random.Random)

    @property
    def name(self) -> str:
        return f"r{self.number}"


Maker = Callable[[random.Random, int], Request]


def requests_of(
    probability: Callable[[random.Random], Sequence[float]] | float,
    *,
    confidence: str = "noise",
    depths: dict[str, int] | None = None,
    length: int = 150,
) -> Maker:
    """Requests whose every proposal is right with a given chance, independent of the others.

    Args:
        probability: of all positions, or drawn per request, by position.
        confidence: ``exact`` (the chance itself), ``noise`` (uniform, says nothing), ``sure`` (always 0.97), or
            ``steps`` (half of the steps are easy, half hard, the confidences know it, and the mean is ``probability``).
        depths: by drafter.
        length: mean tokens of an answer.
    """

    def make(rng: random.Random, number: int) -> Request:
        chances = [probability] * 7 if isinstance(probability, float) else list(probability(rng))

        def draft(depth: int) -> Callable[[random.Random], Draft]:
            def propose(step: random.Random) -> Draft:
                true = chances[:depth]
                if confidence == "steps":
                    spread = min(true[0], 1 - true[0], 0.4)
                    easy = spread if step.random() < 0.5 else -spread
                    true = [p + easy for p in true]
                if confidence == "noise":
                    return [step.random() for _ in true], true
                if confidence == "sure":
                    return [0.97] * depth, true
                return list(true), true

            return propose

        drafts = {name: draft(depth) for name, depth in (depths or {"dfly": 7}).items()}
        constant = () if confidence == "steps" else tuple(chances)
        return Request(number, max(16, round(rng.expovariate(1 / length))), drafts, constant)

    return make


@dataclass
class Outcome:
    """What a policy made of a world."""

    tokens: float = 0.0
    seconds: float = 0.0
    steps: int = 0
    drafted_rows: int = 0
    rows: int = 0
    kept: int = 0
    tokens_by_chances: Counter[tuple[float, ...]] = field(default_factory=Counter)
    """Of ``Request.chances``."""

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds

    def fixed_rate(self, depth: int, *, batch: int, table: StepCosts, drafter: str = "dfly") -> float:
        """Tokens per second if every request had been served the same tokens at a fixed depth (0: plain decoding).

        A request that commits e tokens per step needs t / e steps for t tokens, and ``batch`` rows run at a time.
        """
        steps = 0.0
        for chances, tokens in self.tokens_by_chances.items():
            assert len(chances) >= depth, "this world's requests have no constant chances"
            steps += tokens / (1 + sum(itertools.accumulate(chances[:depth], lambda a, b: a * b)))
        drafted = {drafter: batch} if depth else {}
        return self.tokens / (steps / batch * table.seconds(batch, drafted=drafted, slots=batch * (depth + 1)))


def simulate(
    policy,
    *,
    make: Maker,
    batch: int,
    table: StepCosts,
    tokens: int,
    seed: int = 0,
    warm_up: int = 0,
) -> Outcome:
    """Run a policy (``FixedDepth`` or ``Planned``) until so many tokens are expected after the warm-up's."""
    outcome, warm = Outcome(), 0.0
    running: list[Request] = []
    number = 0
    cached: dict[tuple, float] = {}
    while outcome.tokens < tokens:
        while len(running) < batch:
            request = make(random.Random(f"{seed}:{number}"), number)
            request.chance = random.Random(f"{seed}:{number}:steps")
            if number < batch:
                request.done = random.Random(f"{seed}:{number}:age").randrange(request.length)  # not all end together
            running.append(request)
            policy.open(request)
            number += 1
        drafters = policy.draft(running)
        drafts = [
            request.drafts[name](request.chance) if name is not None else ([], [])
            for request, name in zip(running, drafters, strict=True)
        ]
        kept = policy.verify([confidences for confidences, _ in drafts])
        counts: dict[str, int] = {}
        for name in drafters:
            if name is not None:
                counts[name] = counts.get(name, 0) + 1
        key = (tuple(sorted(counts.items())), batch + sum(kept))
        if key not in cached:
            cached[key] = table.seconds(batch, drafted=counts, slots=batch + sum(kept))
        accepted, expected = [], []
        for request, (_, true), number_kept in zip(running, drafts, kept, strict=True):
            hits, survival, tokens_of_row, alive = 0, 1.0, 1.0, True
            for chance in true[:number_kept]:
                survival *= chance
                tokens_of_row += survival
                alive = alive and request.chance.random() < chance
                hits += alive
            expected.append(tokens_of_row)
            accepted.append(hits)
            request.done += hits + 1
        policy.observe(accepted)
        if warm < warm_up:
            warm += sum(expected)
        else:
            outcome.tokens += sum(expected)
            outcome.seconds += cached[key]
            outcome.steps += 1
            outcome.rows += batch
            outcome.drafted_rows += sum(counts.values())
            outcome.kept += sum(kept)
            for request, tokens_of_row in zip(running, expected, strict=True):
                outcome.tokens_by_chances[request.chances] += tokens_of_row
        for request in [request for request in running if request.done >= request.length]:
            running.remove(request)
            policy.close(request)
    return outcome


class FixedDepth:
    """Drafts for every row and verifies the first ``depth`` proposals; 0 is plain decoding."""

    def __init__(self, depth: int, drafter: str = "dfly") -> None:
        self._depth, self._drafter = depth, drafter

    def open(self, request: Request) -> None: ...

    def close(self, request: Request) -> None: ...

    def observe(self, accepted: Sequence[int]) -> None: ...

    def draft(self, running: Sequence[Request]) -> list[str | None]:
        return [self._drafter if self._depth else None] * len(running)

    def verify(self, confidences: Sequence[Sequence[float]]) -> list[int]:
        return [min(self._depth, len(row)) for row in confidences]


class Planned:
    """The planner under test."""

    def __init__(self, planner) -> None:
        self.planner = planner
        self.step = None

    def open(self, request: Request) -> None:
        self.planner.open(request.name, workload=request.workload, drafters=tuple(request.drafts))

    def close(self, request: Request) -> None:
        self.planner.close(request.name)

    def draft(self, running: Sequence[Request]) -> Sequence[str | None]:
        self.step = self.planner.begin([request.name for request in running])
        return self.step.drafters

    def verify(self, confidences: Sequence[Sequence[float]]) -> Sequence[int]:
        self.step = self.planner.cut(self.step, confidences)
        return self.step.kept

    def observe(self, accepted: Sequence[int]) -> None:
        self.planner.observe(self.step, accepted)
