"""One optimiser update from any number of micro-batches and ranks: sums first, one division, then the step.

Every loss term is a numerator and a denominator. The update is that of ``sum over terms of (all numerators) / (all
denominators)`` over all micro-batches of all ranks. With one distinct denominator the micro-batches' numerators are
differentiated as they come and the gradient is divided once at the end; with several the denominators are needed
first, and with several micro-batches they come from a forward pass without gradients.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from angelspec.objectives.terms import Ratio, SlotCounts, sum_counts
from angelspec.training.distributed import Ranks


@dataclass(frozen=True, kw_only=True)
class StepTerms:
    """What one micro-batch contributes: the same for every drafter family."""

    losses: Mapping[str, Ratio]
    """Named, undivided loss terms; terms with the same denominator hold the same tensor object."""
    counts: SlotCounts
    num_positions: int
    """Supervised positions in the loss."""
    num_refused_rows: int = 0
    """Rows left out because their features are not finite."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Seconds by part (target, backbone, head), and the moment ``HEAD_DONE`` once ``backward`` has left the head; empty
    where it is not measured."""


HEAD_DONE = "head_done"
"""Key of ``StepTerms.seconds``: reading of ``time.perf_counter`` when the gradient reached the head's input."""

TermsOf = Callable[[Sequence[int]], StepTerms]
"""Rows of one micro-batch to its terms."""


@dataclass(frozen=True, kw_only=True)
class Gradients:
    """The summed result of all micro-batches and ranks; the gradients themselves lie in the parameters."""

    numerators: dict[str, float]
    denominators: dict[str, float]
    counts: SlotCounts | None
    num_positions: int
    num_refused_rows: int
    norm: float
    """Global norm of the gradient, before clipping."""
    seconds: dict[str, float]

    @property
    def is_empty(self) -> bool:
        """Whether no row of the step supervised anything."""
        return not any(self.denominators.values())

    @property
    def is_finite(self) -> bool:
        """Whether loss and gradient may be applied."""
        return isfinite(self.norm) and all(map(isfinite, self.numerators.values()))


def now(device: torch.device | None) -> float:
    """Seconds of ``time.perf_counter`` when a GPU's queue is empty; None does not wait."""
    if device is not None and device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def compute_gradients(
    micro_batches: Sequence[Sequence[int]],
    terms_of: TermsOf,
    *,
    model: nn.Module,
    ranks: Ranks,
    clip_norm: float | None = None,
) -> Gradients:
    """Leave the gradient of the whole step in the parameters and return the summed terms.

    Args:
        micro_batches: row ids; every rank must give the same number of micro-batches.
        terms_of: forward pass of one micro-batch.
        clip_norm: gradients are scaled down so that their global norm is at most this; None: as they are.
    """
    first = terms_of(micro_batches[0])
    names = list(first.losses)
    seconds: dict[str, float] = {}
    groups = _denominator_groups(first.losses)
    scales = dict.fromkeys(names, 1.0)
    divide_first = len(groups) > 1
    if divide_first:
        denominators = {name: first.losses[name].denominator.detach().double() for name in names}
        if len(micro_batches) > 1:
            with torch.no_grad():
                for rows in micro_batches[1:]:
                    terms = terms_of(rows)
                    _add_seconds(seconds, terms.seconds, started=0.0, ended=0.0)
                    for name, ratio in terms.losses.items():
                        denominators[name] = denominators[name] + ratio.denominator.double()
        totals = ranks.sum(torch.stack([denominators[name] for name in names])).tolist()
        scales = {name: 1.0 / total if total else 0.0 for name, total in zip(names, totals, strict=True)}

    parts: list[StepTerms] = []
    for number, rows in enumerate(micro_batches):
        terms = first if number == 0 else terms_of(rows)
        first = None
        device = next(iter(terms.losses.values())).numerator.device if terms.seconds else None
        started = now(device)
        loss = torch.stack([terms.losses[name].numerator * scales[name] for name in names]).sum()
        loss.backward()
        _add_seconds(seconds, terms.seconds, started=started, ended=now(device))
        detached = {name: Ratio(*(value.detach() for value in ratio)) for name, ratio in terms.losses.items()}
        parts.append(
            StepTerms(
                losses=detached,
                counts=terms.counts,
                num_positions=terms.num_positions,
                num_refused_rows=terms.num_refused_rows,
            )
        )
        del terms, loss

    numerators, denominators, counts, positions, refused = _reduce(parts, names, ranks)
    parameters = [p for p in model.parameters() if p.requires_grad]
    ranks.sum_gradients(parameters)
    divisor = 1.0 if divide_first else denominators[names[0]] or 1.0
    norm = gradient_norm(parameters) / divisor
    factor = min(1.0, clip_norm / norm) if clip_norm is not None and norm > 0 else 1.0
    if factor != divisor:  # one pass divides and clips
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(factor / divisor)
    return Gradients(
        numerators=numerators,
        denominators=denominators,
        counts=counts,
        num_positions=positions,
        num_refused_rows=refused,
        norm=norm,
        seconds=seconds,
    )


def gradient_norm(parameters: Sequence[nn.Parameter]) -> float:
    """Euclidean norm of all gradients together, shards included."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not gradients:
        return 0.0
    on_cpu = gradients[0].device.type == "cpu"  # where the fused norm of many tensors runs on one thread
    norm = torch.nn.utils.get_total_norm(gradients, foreach=False if on_cpu else None)
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


def _add_seconds(total: dict[str, float], measured: Mapping[str, float], *, started: float, ended: float) -> None:
    """Add a micro-batch's times; its backward pass, ``started`` to ``ended``, is shared out to head and backbone."""
    if not measured:
        return
    left_head = measured.get(HEAD_DONE, started)
    for key, value in {
        "target": measured["target"],
        "backbone": measured["backbone"] + ended - left_head,
        "head": measured["head"] + left_head - started,
    }.items():
        total[key] = total.get(key, 0.0) + value


def _denominator_groups(losses: Mapping[str, Ratio]) -> list[list[str]]:
    groups: dict[int, list[str]] = {}
    for name, ratio in losses.items():
        groups.setdefault(id(ratio.denominator), []).append(name)
    return list(groups.values())


def _reduce(
    parts: Sequence[StepTerms], names: Sequence[str], ranks: Ranks
) -> tuple[dict[str, float], dict[str, float], SlotCounts, int, int]:
    """Add everything up over micro-batches and ranks through one vector, and so one transfer."""
    counts = sum_counts([part.counts for part in parts])
    columns = [counts.valid_K, counts.correct_K, counts.accepted_K, counts.ce_K]
    if counts.alpha_K is not None:
        columns.append(counts.alpha_K)
    device = counts.valid_K.device
    scalars = [
        torch.stack([part.losses[name][index].double() for part in parts]).sum().reshape(1)
        for index in (0, 1)
        for name in names
    ]
    plain = [sum(p.num_positions for p in parts), sum(p.num_refused_rows for p in parts)]
    vector = torch.cat(
        [*scalars, torch.tensor(plain, dtype=torch.float64, device=device), *(c.double() for c in columns)]
    )
    values = ranks.sum(vector).cpu()
    n = len(names)
    numerators = dict(zip(names, values[:n].tolist(), strict=True))
    denominators = dict(zip(names, values[n : 2 * n].tolist(), strict=True))
    positions, refused = (int(v) for v in values[2 * n : 2 * n + 2].tolist())
    slots = values[2 * n + 2 :].reshape(len(columns), -1)
    return (
        numerators,
        denominators,
        SlotCounts(
            valid_K=slots[0],
            correct_K=slots[1],
            accepted_K=slots[2],
            ce_K=slots[3],
            alpha_K=slots[4] if len(columns) > 4 else None,
        ),
        positions,
        refused,
    )
