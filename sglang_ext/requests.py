"""The requests that the engine is serving: how each was routed, and what came of its steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from angelspec.core.bundle import Bundle
from angelspec.core.classifier import classify_text
from angelspec.core.errors import RequestError
from angelspec.core.modes import MODES, Mode, mode_family
from angelspec.core.request_label import RequestLabel, RequestRecord, parse_label
from angelspec.core.routing import Route, choose_route
from angelspec.core.step_costs import StepCosts
from angelspec.core.workloads import WORKLOADS, Workload
from sglang_ext.penalties import RowPenalties, is_penalised

RESOLVED_KEY = "angelspec"
"""Key of ``custom_params`` under which the HTTP process hands its findings to the scheduler."""
_KEEP_IDLE, _LOOK_EVERY = 4096, 32
"""Requests that were not seen for so many steps are forgotten, and how often it is looked for them."""


@dataclass(eq=False)
class ServedRequest:
    """One request."""

    rid: str
    req: Any
    """SGLang's request: a client may use an id again."""
    route: Route
    workload: Workload
    mode: Mode | None
    states_of: tuple[str, ...]
    """Drafters whose entries are kept up to date: all of its mode, so that it can change its drafter."""
    plain_because: str | None
    """Why no step of it is drafted for, whatever its route; None: nothing forbids it."""
    record: RequestRecord
    last_step: int = 0
    slot: int = -1
    """Of the request pool, since its last prefill."""
    prefilled_to: int = 0
    """Where its last prefill ended."""
    length: int = 0
    """Tokens that stand before its newest one, as the device knows them too: known here without asking it."""
    anchor: Tensor | None = None
    """Its newest token, that has no states yet, [1] on the device."""
    penalties: RowPenalties | None = None
    """Only where it has any, from its first step of decoding on."""
    already_put_out: tuple[int, ...] = ()
    """Tokens before its last prefill (it was retracted), for the penalties; only where it has any."""
    broken_drafts: int = 0
    """Drafts that were not finite."""


def plain_reason(sampling_params: Any, *, has_grammar: bool, has_processor: bool) -> str | None:
    """Why a request's steps verify one token each; None: they need not.

    What depends on the tokens before (penalties, a minimum length, a grammar, a processor) is settled per step by the
    engine, for the next token alone.
    """
    if has_grammar:
        return "structured output is decoded one token a step"
    if has_processor:
        return "a custom logit processor is applied one token a step"
    if is_penalised(sampling_params):
        return "penalties and minimum lengths are applied one token a step"
    return None


def read_label(custom_params: Mapping[str, Any] | None, *, bundle: Bundle) -> dict[str, Any]:
    """A request's label, completed: as the HTTP process left it, else from ``custom_params`` alone.

    Raises:
        RequestError: the label is wrong.
    """
    resolved = (custom_params or {}).get(RESOLVED_KEY)
    if isinstance(resolved, Mapping):
        return dict(resolved)
    own = {key: value for key, value in (custom_params or {}).items() if key != "__req__"}
    label = parse_label(own or None, foreign_keys=True)
    return complete_label(label, bundle=bundle)


def complete_label(
    label: RequestLabel,
    *,
    bundle: Bundle,
    prompt: str | None = None,
    workload: Workload | None = None,
    mode: Mode | None = None,
    mode_known: bool = False,
) -> dict[str, Any]:
    """What the scheduler is told of a request: flat, of JSON's scalars.

    Args:
        label: the request's own wishes, which come first.
        bundle: for the default mode.
        prompt: its text, to classify where neither label nor caller says what it is.
        workload: as classified by the caller.
        mode: as read by the caller from the template's arguments.
        mode_known: whether ``mode`` None means a mode that no drafter is trained for, rather than not known.
    """
    workload = label.workload or workload or (classify_text(prompt).workload if prompt else "chat")
    if label.mode is not None or not mode_known:
        mode = label.mode or mode or mode_family(bundle.target.mode_family).default
    return {"workload": workload, "mode": mode or "", "route": label.route, "dcut": label.ratio or 0.0}


class RequestBook:
    """All requests that the scheduler has shown to the worker and not yet finished."""

    def __init__(self, bundle: Bundle) -> None:
        self._bundle = bundle
        self._by_rid: dict[str, ServedRequest] = {}
        self._step = 0

    def __len__(self) -> int:
        return len(self._by_rid)

    def __iter__(self) -> Iterator[ServedRequest]:
        return iter(self._by_rid.values())

    def get(self, rid: str) -> ServedRequest | None:
        """The request; None: it is not known (any more)."""
        return self._by_rid.get(rid)

    def rows(self, reqs: Sequence[Any], *, costs: StepCosts | None) -> tuple[list[ServedRequest], list[ServedRequest]]:
        """The requests of a batch in order, and those among them that are new."""
        self._step += 1
        rows, new = [], []
        for req in reqs:
            known = self._by_rid.get(req.rid)
            if known is None or known.req is not req:
                known = self._by_rid[req.rid] = self._open(req, batch_size=len(reqs), costs=costs)
                new.append(known)
            known.last_step = self._step
            rows.append(known)
        return rows, new

    def finish(self, rid: str) -> ServedRequest | None:
        """Forget a request; returns it if it was known."""
        return self._by_rid.pop(rid, None)

    def forget_idle(self, *, now: bool = False) -> list[ServedRequest]:
        """Now and then, or at once, forget the requests that have ended unannounced (with their first token), or were
        not seen for long."""
        if not now and self._step % _LOOK_EVERY:
            return []
        idle = [
            known
            for known in self._by_rid.values()
            if self._step - known.last_step > (_KEEP_IDLE if not known.req.finished() else -1 if now else 0)
        ]
        for known in idle:
            del self._by_rid[known.rid]
        return idle

    def _open(self, req: Any, *, batch_size: int, costs: StepCosts | None) -> ServedRequest:
        params = req.sampling_params
        try:
            label = read_label(params.custom_params, bundle=self._bundle)
            workload = label["workload"] if label["workload"] in WORKLOADS else "chat"
            mode = label["mode"] if label["mode"] in MODES else None
            wishes = RequestLabel(route=label["route"], ratio=label["dcut"] or None)
            route = choose_route(self._bundle, wishes, workload=workload, mode=mode, batch_size=batch_size, costs=costs)
        except RequestError as error:  # the HTTP process refuses these; what comes from elsewhere is served plainly
            workload, mode, route = "chat", None, Route((), False, None, f"plain: {error}")
        reason = plain_reason(
            params, has_grammar=req.grammar is not None, has_processor=req.custom_logit_processor is not None
        )
        # of plain requests, too: others of the mode may find their prefix in the cache
        states_of = tuple(drafter.name for drafter in self._bundle.of_mode(mode))
        why = route.why if reason is None else reason
        return ServedRequest(
            rid=req.rid,
            req=req,
            route=route,
            workload=workload,
            mode=mode,
            states_of=states_of,
            plain_because=reason,
            record=RequestRecord(why=why, workload=workload, mode=mode),
        )
