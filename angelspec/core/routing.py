"""Which drafters may serve a request.

In this order: what the request asks for; the bundle's rules for its workload and mode; then load, which is a choice
among plain decoding and every drafter of the request's mode. That choice is made anew every step, by
``ops.step_planner``, from the bundle's measurements and from what it learns about the request. What is to be expected
of each when the request comes, as if the whole batch used it, is said in ``why``:

    rate(d) = max_k B (1 + p_1 + .. + p_k) / (draft_d(B) + verify(B, B (k + 1))),   rate(plain) = B / verify(B, B)

with p the measured acceptance of d on the workload.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from angelspec.core.bundle import AUTO, PLAIN, Bundle
from angelspec.core.errors import RequestError, suggest
from angelspec.core.modes import Mode
from angelspec.core.request_label import RequestLabel
from angelspec.core.step_costs import StepCosts
from angelspec.core.workloads import Workload


@dataclass(frozen=True)
class Route:
    """The decision for one request."""

    drafters: tuple[str, ...]
    """Those that may serve it, the one that is expected to pay most first; empty: plain decoding only."""
    forced: bool
    """Whether every step must be drafted for, pay or not: only where the request itself names a drafter."""
    ratio: float | None
    """Keep ratio of its drafts; None: step by step."""
    why: str
    """Short, for the answer's metadata."""


@dataclass(frozen=True)
class Expectation:
    """What one choice is expected to yield."""

    drafter: str | None
    depth: int
    """Verified proposals per row."""
    tokens_per_second: float


class Routable(Protocol):
    """What routes look at in a drafter, in a bundle or as a server tells of it."""

    @property
    def name(self) -> str: ...

    @property
    def aliases(self) -> tuple[str, ...]: ...


_Drafter = TypeVar("_Drafter", bound=Routable)


def named_by(route: str, drafters: Sequence[_Drafter]) -> list[_Drafter]:
    """Drafters that a route names: the one of this very name, else all of this algorithm or family."""
    return [one for one in drafters if one.name == route] or [one for one in drafters if route in one.aliases]


def choose_route(
    bundle: Bundle,
    label: RequestLabel,
    *,
    workload: Workload,
    mode: Mode | None,
    batch_size: int,
    costs: StepCosts | None = None,
) -> Route:
    """Route one request.

    Args:
        bundle: what is served.
        label: the request's wishes.
        workload: as labelled or classified.
        mode: as labelled or read from the template's arguments; None: one that no drafter is trained for.
        batch_size: rows that would run with it, itself counted.
        costs: of this machine; None: the bundle's.

    Raises:
        RequestError: a route that does not exist, or whose drafter is trained for another mode.
    """
    ratio = bundle.dcut.ratio if label.ratio is None else label.ratio
    if label.route != AUTO:
        return _named(bundle, label.route, mode=mode, ratio=ratio, forced=True, why="asked for by the request")
    for rule in bundle.routes:
        if rule.holds(workload=workload, mode=mode) and rule.route != AUTO:
            named = bundle.drafter(rule.route) if rule.route != PLAIN else None
            if named is not None and named.mode != mode:
                continue  # the rule is for any mode, its drafter for another one
            why = f"the bundle routes {workload} to {rule.route}"
            return _named(bundle, rule.route, mode=mode, ratio=ratio, forced=False, why=why)
        if rule.holds(workload=workload, mode=mode):
            break
    return _by_load(bundle, costs or bundle.costs, workload=workload, mode=mode, batch_size=batch_size, ratio=ratio)


def expectations(
    drafters: Sequence[tuple[str, Sequence[float]]], *, costs: StepCosts, batch_size: int
) -> list[Expectation]:
    """Plain decoding and each drafter at its best depth, best first (ties: plain, then in order); none without costs.

    Args:
        drafters: names with their cumulative acceptance p_1 .. p_D; a drafter whose cost is not known is left out.
        costs: of this machine.
        batch_size: rows, all served alike.
    """
    plain = costs.seconds(batch_size, drafted={}, slots=batch_size)
    if plain is None:
        return []
    found = [Expectation(None, 0, batch_size / plain)]
    for name, cumulative in drafters:
        options = []
        for depth in range(len(cumulative) + 1):
            seconds = costs.seconds(batch_size, drafted={name: batch_size}, slots=batch_size * (depth + 1))
            if seconds is not None:
                options.append(Expectation(name, depth, batch_size * (1 + sum(cumulative[:depth])) / seconds))
        if options:
            found.append(max(options, key=lambda option: option.tokens_per_second))
    return sorted(found, key=lambda option: -option.tokens_per_second)


def _named(bundle: Bundle, route: str, *, mode: Mode | None, ratio: float | None, forced: bool, why: str) -> Route:
    if route == PLAIN:
        return Route((), False, ratio, why)
    known = named_by(route, bundle.drafters)
    if not known:
        allowed = list(dict.fromkeys([AUTO, PLAIN, *(alias for d in bundle.drafters for alias in d.aliases)]))
        raise RequestError(
            f"route '{route}' does not exist{suggest(route, allowed)}", mend=f"use one of: {', '.join(allowed)}"
        )
    fitting = [drafter for drafter in known if drafter.mode == mode]
    if not fitting:
        modes = " and ".join(sorted({drafter.mode for drafter in known}))
        raise RequestError(
            f"route '{route}' is trained for {modes}, but the request runs in {mode or 'another mode'}",
            mend=f"use a route of its mode, or one of: {AUTO}, {PLAIN}",
        )
    return Route(tuple(drafter.name for drafter in fitting), forced, ratio, why)


def _by_load(
    bundle: Bundle,
    costs: StepCosts | None,
    *,
    workload: Workload,
    mode: Mode | None,
    batch_size: int,
    ratio: float | None,
) -> Route:
    drafters = bundle.of_mode(mode)
    names = tuple(drafter.name for drafter in drafters)
    if not drafters:
        return Route((), False, ratio, f"no drafter is trained for {mode or 'this mode'}")
    measured = [(name, bundle.measured[name, workload]) for name in names if (name, workload) in bundle.measured]
    if costs is None:
        return Route(names, False, ratio, "step costs are not measured")
    if not measured:
        return Route(names, False, ratio, "chosen step by step; acceptance is not measured")
    ranking = expectations(measured, costs=costs, batch_size=batch_size)
    if not ranking:
        return Route(names, False, ratio, f"step costs are not measured for {batch_size} rows")
    expected = ", ".join(_shown(option) for option in ranking)
    rows = "1 row" if batch_size == 1 else f"{batch_size} rows"
    why = f"chosen step by step; expected for {workload} at {rows}: {expected}"
    order = [option.drafter for option in ranking if option.drafter is not None]
    return Route((*order, *(name for name in names if name not in order)), False, ratio, why)


def _shown(option: Expectation) -> str:
    return f"{option.drafter or PLAIN} {option.tokens_per_second:.1f} tokens/s"
