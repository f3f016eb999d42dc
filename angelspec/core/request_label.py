"""What a request may say about itself, and what it is told in return.

A label is a few keys of the request's ``custom_params``:

    {"workload": "code", "mode": "no-think", "route": "dfly", "dcut": 0.5}

each optional. ``workload`` and ``mode`` say what is otherwise recognised (by the classifier, by the chat template's
arguments). ``route`` is ``auto``, ``ar`` (plain decoding) or a drafter, by name, algorithm or family; a drafter that is
named drafts every step. ``dcut`` is ``auto``, ``off`` (verify all that is drafted) or a keep ratio.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from angelspec.core.acceptance import AcceptanceCounts
from angelspec.core.bundle import AUTO, PLAIN
from angelspec.core.errors import RequestError, suggest
from angelspec.core.modes import MODES, Mode
from angelspec.core.workloads import WORKLOADS, Workload

LABEL_KEYS: tuple[str, ...] = ("workload", "mode", "route", "dcut")


@dataclass(frozen=True)
class RequestLabel:
    """A request's own wishes; None or ``auto`` where it has none."""

    workload: Workload | None = None
    mode: Mode | None = None
    route: str = AUTO
    ratio: float | None = None
    """A keep ratio for its drafts, 1 for ``off``; None: the bundle's."""


def parse_label(custom_params: Mapping[str, Any] | None, *, foreign_keys: bool = False) -> RequestLabel:
    """Read the label of a request.

    Args:
        custom_params: the request's; None: it has none.
        foreign_keys: whether other parts of the engine read ``custom_params`` too, so that keys which are not ours
            and do not look like a misspelt one of ours are left alone.

    Raises:
        RequestError: an unknown key or a value that is not allowed, by name. Whether a route exists is known only
            to ``routing.choose_route``.
    """
    if custom_params is None:
        return RequestLabel()
    if not isinstance(custom_params, Mapping):
        raise RequestError(f"custom_params is {_kind(custom_params)}", mend="send an object of labels, or nothing")
    for key in custom_params:
        meant = suggest(str(key), LABEL_KEYS)
        if key not in LABEL_KEYS and (meant or not foreign_keys):
            raise RequestError(
                f"custom_params.{key}: unknown label{meant}", mend=f"use one of: {', '.join(LABEL_KEYS)}"
            )
    return RequestLabel(
        workload=_one_of("workload", custom_params.get("workload"), WORKLOADS),
        mode=_one_of("mode", custom_params.get("mode"), MODES),
        route=_route(custom_params.get("route")),
        ratio=_ratio(custom_params.get("dcut")),
    )


def _one_of(key: str, value: Any, allowed: Iterable[str]) -> Any:
    if value is None or value == AUTO:
        return None
    if value not in tuple(allowed):
        meant = suggest(value, allowed) if isinstance(value, str) else ""
        raise RequestError(
            f"custom_params.{key}: {value!r} is not allowed{meant}", mend=f"use one of: {', '.join(allowed)}, {AUTO}"
        )
    return value


def _route(value: Any) -> str:
    if value is None:
        return AUTO
    if not isinstance(value, str) or not value:
        raise RequestError(f"custom_params.route is {_kind(value)}", mend="give auto, ar or a drafter's name")
    return value


def _ratio(value: Any) -> float | None:
    if value is None or value == AUTO:
        return None
    if value == "off":
        return 1.0
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= 1:
        return float(value)
    raise RequestError(
        f"custom_params.dcut: {value!r} is not allowed", mend="give auto, off or a keep ratio above 0 and at most 1"
    )


def _kind(value: Any) -> str:
    return f"{value!r}, of type {type(value).__name__}"


# ------------------------------------------------------------------------------------------------- answer


class RequestMetadata(BaseModel):
    """What the answer says about how it was made (``meta_info.angelspec``)."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    route: str
    """The drafter that most of its steps used, or ``ar``."""
    why: str
    """Why it was routed as it was."""
    workload: Workload
    mode: Mode | None
    """None: a mode that no drafter can be trained for."""
    steps_by_route: dict[str, int] = Field(default_factory=dict)
    """Verify steps by drafter, plain ones under ``ar``."""
    verify_steps: int = Field(ge=0)
    generated_tokens: int = Field(ge=0)
    """Tokens committed by its verify steps, bonus tokens included."""
    drafted_tokens: int = Field(ge=0)
    """Proposals that were drafted."""
    proposed_tokens: int = Field(ge=0)
    """Of these, those that were verified."""
    accepted_length: float | None
    """Committed tokens per verify step, plain steps included; None: it had no step."""
    kept_ratio: float | None
    """Verified slots over drafted slots, anchors counted; None: it had no step."""
    speculative_share: float | None
    """Share of its steps that were drafted for; None: it had no step."""

    @property
    def counts(self) -> AcceptanceCounts:
        """The common counters: figures of several requests are those of their pooled counts."""
        return AcceptanceCounts(
            generated_tokens=self.generated_tokens,
            verify_steps=self.verify_steps,
            proposed_tokens=self.proposed_tokens,
            drafted_tokens=self.drafted_tokens,
        )

    @property
    def speculative_steps(self) -> int:
        """Verify steps that were drafted for."""
        return self.verify_steps - self.steps_by_route.get(PLAIN, 0)


@dataclass
class RequestRecord:
    """Counts one request's steps; ``metadata`` puts them into words and ratios."""

    why: str
    workload: Workload
    mode: Mode | None
    steps: dict[str, int] = field(default_factory=dict)
    committed: int = 0
    drafted: int = 0
    verified: int = 0

    def add(self, route: str, *, committed: int, drafted: int = 0, verified: int = 0) -> None:
        """Count a step: tokens committed (bonus included), proposals drafted, proposals verified."""
        self.steps[route] = self.steps.get(route, 0) + 1
        self.committed += committed
        self.drafted += drafted
        self.verified += verified

    def extend(self, tokens: int) -> None:
        """Count further tokens of the step that was counted last."""
        self.committed += tokens

    @property
    def counts(self) -> AcceptanceCounts:
        """The same in the common counters."""
        return AcceptanceCounts(
            generated_tokens=self.committed,
            verify_steps=sum(self.steps.values()),
            proposed_tokens=self.verified,
            drafted_tokens=self.drafted,
        )

    @property
    def metadata(self) -> RequestMetadata:
        """What the answer says of the steps so far."""
        counts = self.counts
        steps = counts.verify_steps
        return RequestMetadata(
            route=max(sorted(self.steps), key=lambda name: self.steps[name], default=PLAIN),
            why=self.why,
            workload=self.workload,
            mode=self.mode,
            steps_by_route=dict(sorted(self.steps.items())),
            verify_steps=steps,
            generated_tokens=counts.generated_tokens,
            drafted_tokens=counts.drafted_tokens,
            proposed_tokens=counts.proposed_tokens,
            accepted_length=counts.mean_accepted_length,
            kept_ratio=counts.kept_ratio,
            speculative_share=1 - self.steps.get(PLAIN, 0) / steps if steps else None,
        )
