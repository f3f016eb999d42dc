"""Planted faults of acceptance: ``FAULTS``, each of which turns the right outcome of a step into a wrong one.

Inside a real engine ``ANGELSPEC_FAULT`` names one. SGLang loads this module as a plugin of its own, which puts itself
around the worker's drafting, drawing and accepting.

Shapes: B rows, W slots of a row, K = W - 1 proposals, N verified slots of all rows, V vocabulary.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Step:
    """What the faults look at: what was drafted and verified, and by which probabilities."""

    draft_BK: Tensor
    kept_B: Tensor
    """Verified proposals."""
    row_N: Tensor
    offset_N: Tensor
    """Of each slot within its row."""
    target_NV: Tensor
    """The target's probability of every token at every verified slot."""
    drafter_BKV: Tensor
    """The drafter's, at every proposal."""

    def by_slot(self, value_N: Tensor) -> Tensor:
        """[N, ..] as [B, W, ..], with zeros where nothing was verified."""
        batch, depth = self.draft_BK.shape
        value_BW = value_N.new_zeros(batch, depth + 1, *value_N.shape[1:])
        value_BW[self.row_N, self.offset_N] = value_N
        return value_BW

    def first(self, agrees_BK: Tensor) -> Tensor:
        """How many verified proposals of each row agree before the first that does not."""
        inside_BK = torch.arange(agrees_BK.shape[1]) < self.kept_B[:, None]
        return (agrees_BK & inside_BK).long().cumprod(1).sum(1)


def _always(outcome: Any, step: Step) -> Any:
    """Whatever is verified is accepted."""
    return _accept_first(outcome, step, step.kept_B)


def _argmax(outcome: Any, step: Step) -> Any:
    """A draft is accepted if it is the likeliest token, whatever the temperature."""
    best_BW = step.by_slot(step.target_NV.argmax(-1))
    return _accept_first(outcome, step, step.first(best_BW[:, :-1] == step.draft_BK))


def _keeps_the_rejected(outcome: Any, step: Step) -> Any:
    """What replaces a rejected draft is drawn from all tokens, the rejected one among them."""
    again_BW = step.by_slot(torch.multinomial(step.target_NV, 1).squeeze(1))
    return _replace_rejected(outcome, step, again_BW.gather(1, outcome.correct_B[:, None]).squeeze(1))


def _softmax_declared(outcome: Any, step: Step) -> Any:
    """Argmax drafts are treated as if each had been drawn by its drafter's probabilities q: accepted with p / q, and
    replaced by a token drawn from what p has more than q."""
    target_BKV = step.by_slot(step.target_NV)[:, :-1]
    drafted_BK1 = step.draft_BK[..., None]
    p_BK, q_BK = (law.gather(2, drafted_BK1).squeeze(2) for law in (target_BKV, step.drafter_BKV))
    outcome = _accept_first(outcome, step, step.first(torch.rand(p_BK.shape) * q_BK < p_BK))
    rows = torch.arange(len(p_BK))
    place_B = outcome.correct_B.clamp(max=p_BK.shape[1] - 1)
    more_BV = (target_BKV - step.drafter_BKV)[rows, place_B].clamp(min=0) + 1e-30
    return _replace_rejected(outcome, step, torch.multinomial(more_BV, 1).squeeze(1))


def _one_past_the_width(outcome: Any, step: Step) -> Any:
    """A row that accepted all it verified commits the next draft, too, unseen."""
    depth = step.draft_BK.shape[1]
    more_B = (outcome.correct_B == step.kept_B) & (step.kept_B < depth)
    tokens_BW = outcome.tokens_BW.clone()
    place_B = outcome.correct_B.clamp(max=depth - 1)
    unseen_B = step.draft_BK.gather(1, place_B[:, None]).squeeze(1)
    rows = more_B.nonzero().squeeze(1)
    tokens_BW[rows, place_B[rows]] = unseen_B[rows]
    tokens_BW[rows, place_B[rows] + 1] = outcome.bonus_B[rows]
    return outcome._replace(tokens_BW=tokens_BW, correct_B=outcome.correct_B + more_B)


def _accept_first(outcome: Any, step: Step, correct_B: Tensor) -> Any:
    """Commit so many drafts of each row, and the target's token after them."""
    accepted_BK = torch.arange(step.draft_BK.shape[1]) < correct_B[:, None]
    tokens_BW = outcome.tokens_BW.clone()
    tokens_BW[:, :-1] = torch.where(accepted_BK, step.draft_BK, tokens_BW[:, :-1])
    return outcome._replace(
        tokens_BW=tokens_BW, correct_B=correct_B, bonus_B=tokens_BW.gather(1, correct_B[:, None]).squeeze(1)
    )


def _replace_rejected(outcome: Any, step: Step, instead_B: Tensor) -> Any:
    """Another token in the place of each row's rejected draft, if it has one."""
    bonus_B = torch.where(outcome.correct_B < step.kept_B, instead_B, outcome.bonus_B)
    tokens_BW = outcome.tokens_BW.scatter(1, outcome.correct_B[:, None], bonus_B[:, None])
    return outcome._replace(tokens_BW=tokens_BW, bonus_B=bonus_B)


FAULTS: dict[str, Callable[[Any, Step], Any]] = {
    "always accept": _always,
    "argmax acceptance": _argmax,
    "the rejected draft stays": _keeps_the_rejected,
    "argmax drafts declared with their softmax": _softmax_declared,
    "one past the width": _one_past_the_width,
}

# ------------------------------------------------------------------------------------------------ in an engine

_target: list[Tensor] = []
"""``Step.target_NV`` of the step."""
_logits: list[Tensor] = []
"""Of the draft that is being made, by proposal."""
_drafter: dict[int, Tensor] = {}
"""[K, V] by row of the step."""


def register() -> None:
    """Entry point."""
    if "ANGELSPEC_FAULT" not in os.environ or "ANGELSPEC_BUNDLE" not in os.environ:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    around = {
        "sglang_ext.worker.AngelSpecWorker._begin": _begin,
        "sglang_ext.worker.AngelSpecWorker._draft": _draft,
        "angelspec.drafters.drafting.best_tokens": _best_tokens,
        "sglang_ext.models.served.best_tokens": _best_tokens,
        "sglang_ext.worker.draw": _draw,
        "sglang_ext.worker.accept": _accept,
    }
    for name, hook in around.items():
        HookRegistry.register(name, hook, HookType.AROUND)


def _begin(original: Any, *args: Any) -> Any:
    _drafter.clear()
    return original(*args)


def _best_tokens(original: Any, logits_BV: Tensor) -> Any:
    if not _logits or _logits[-1] is not logits_BV:  # two hooks may lie around one call
        _logits.append(logits_BV)
    return original(logits_BV)


def _draft(original: Any, worker: Any, name: str, indices: list[int], *rest: Any) -> None:
    _logits.clear()
    original(worker, name, indices, *rest)
    law_BKV = torch.stack(_logits, dim=1).softmax(-1)
    assert law_BKV.shape[1] == worker.plan.bundle.depths[name], "drafters choose from the whole vocabulary here"
    _drafter.update(zip(indices, law_BKV, strict=True))


def _draw(original: Any, sampler: Any, logits_NV: Tensor, info: Any, *, row_N: Tensor, position_N: Tensor) -> Tensor:
    kept_NV = logits_NV
    if info is not None:  # of the filters top-k alone
        kept_NV = logits_NV / info.temperatures[row_N]
        ranks_NV = kept_NV.argsort(dim=-1, descending=True).argsort(dim=-1)
        kept_NV = kept_NV.masked_fill(ranks_NV >= info.top_ks[row_N, None], -torch.inf)
    _target[:] = [kept_NV.float().softmax(-1)]
    return original(sampler, logits_NV, info, row_N=row_N, position_N=position_N)


def _accept(original: Any, drawn_N: Tensor, draft_BK: Tensor, *, kept_B: Tensor, **slots: Tensor) -> Any:
    outcome = original(drawn_N, draft_BK, kept_B=kept_B, **slots)
    (target_NV,) = _target
    drafter_BKV = target_NV.new_zeros(*draft_BK.shape, target_NV.shape[-1])
    for row, law_KV in _drafter.items():
        drafter_BKV[row, : len(law_KV)] = law_KV
    step = Step(draft_BK, kept_B, **slots, target_NV=target_NV, drafter_BKV=drafter_BKV)
    return FAULTS[os.environ["ANGELSPEC_FAULT"]](outcome, step)
