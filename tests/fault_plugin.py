"""Planted faults of acceptance, inside a real engine: ``ANGELSPEC_FAULT`` names one of ``FAULTS``.

SGLang loads this module as a plugin of its own, which puts itself around the worker's drawing and accepting.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_probability: list[Tensor] = []
"""The target's probability of every token at every slot of the step, without the filters of a request."""


def _always(outcome: Any, drawn_N: Tensor, draft_BK: Tensor, kept_B: Tensor, **_: Tensor) -> Any:
    """Whatever is verified is accepted."""
    return _accept_first(outcome, draft_BK, kept_B)


def _argmax(outcome: Any, drawn_N: Tensor, draft_BK: Tensor, kept_B: Tensor, row_N: Tensor, offset_N: Tensor) -> Any:
    """A draft is accepted if it is the likeliest token, whatever the temperature."""
    best_BW = torch.zeros_like(outcome.tokens_BW)
    best_BW[row_N, offset_N] = _probability[-1].argmax(-1)
    agrees_BK = (best_BW[:, :-1] == draft_BK) & (torch.arange(draft_BK.shape[1]) < kept_B[:, None])
    return _accept_first(outcome, draft_BK, agrees_BK.long().cumprod(1).sum(1))


def _keeps_the_rejected(
    outcome: Any, drawn_N: Tensor, draft_BK: Tensor, kept_B: Tensor, row_N: Tensor, offset_N: Tensor
) -> Any:
    """What replaces a rejected draft is drawn from all tokens, the rejected one among them."""
    again_BW = outcome.tokens_BW.clone()
    again_BW[row_N, offset_N] = torch.multinomial(_probability[-1], 1).squeeze(1)
    rejected_B = outcome.correct_B < kept_B
    bonus_B = torch.where(rejected_B, again_BW.gather(1, outcome.correct_B[:, None]).squeeze(1), outcome.bonus_B)
    tokens_BW = outcome.tokens_BW.scatter(1, outcome.correct_B[:, None], bonus_B[:, None])
    return outcome._replace(tokens_BW=tokens_BW, bonus_B=bonus_B)


def _softmax_declared(
    outcome: Any, drawn_N: Tensor, draft_BK: Tensor, kept_B: Tensor, row_N: Tensor, offset_N: Tensor
) -> Any:
    """Argmax drafts are accepted with p / q, as if each had been drawn with a probability q of 0.5."""
    chance_BW = torch.zeros(outcome.tokens_BW.shape)
    draft_BW = torch.nn.functional.pad(draft_BK, (0, 1))
    chance_BW[row_N, offset_N] = _probability[-1].gather(1, draft_BW[row_N, offset_N][:, None]).squeeze(1)
    agrees_BK = torch.rand(draft_BK.shape) < 2 * chance_BW[:, :-1]
    agrees_BK &= torch.arange(draft_BK.shape[1]) < kept_B[:, None]
    return _accept_first(outcome, draft_BK, agrees_BK.long().cumprod(1).sum(1))


def _one_past_the_width(outcome: Any, drawn_N: Tensor, draft_BK: Tensor, kept_B: Tensor, **_: Tensor) -> Any:
    """A row that accepted all it verified commits the next draft, too, unseen."""
    more_B = (outcome.correct_B == kept_B) & (kept_B < draft_BK.shape[1])
    tokens_BW = outcome.tokens_BW.clone()
    place_B = outcome.correct_B.clamp(max=draft_BK.shape[1] - 1)
    unseen_B = draft_BK.gather(1, place_B[:, None]).squeeze(1)
    rows = more_B.nonzero().squeeze(1)
    tokens_BW[rows, place_B[rows]] = unseen_B[rows]
    tokens_BW[rows, place_B[rows] + 1] = outcome.bonus_B[rows]
    return outcome._replace(tokens_BW=tokens_BW, correct_B=outcome.correct_B + more_B)


FAULTS: dict[str, Callable[..., Any]] = {
    "always accept": _always,
    "argmax acceptance": _argmax,
    "the rejected draft stays": _keeps_the_rejected,
    "argmax drafts declared with their softmax": _softmax_declared,
    "one past the width": _one_past_the_width,
}


def register() -> None:
    """Entry point."""
    if "ANGELSPEC_FAULT" not in os.environ or "ANGELSPEC_BUNDLE" not in os.environ:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang_ext.worker.draw", _draw, HookType.AROUND)
    HookRegistry.register("sglang_ext.worker.accept", _accept, HookType.AROUND)


def _draw(original: Any, sampler: Any, logits_NV: Tensor, info: Any, *, row_N: Tensor, position_N: Tensor) -> Tensor:
    scaled_NV = logits_NV if info is None else logits_NV / info.temperatures[row_N].clamp(min=1e-6)
    _probability[:] = [scaled_NV.float().softmax(-1)]
    return original(sampler, logits_NV, info, row_N=row_N, position_N=position_N)


def _accept(original: Any, drawn_N: Tensor, draft_BK: Tensor, *, kept_B: Tensor, **slots: Tensor) -> Any:
    outcome = original(drawn_N, draft_BK, kept_B=kept_B, **slots)
    return FAULTS[os.environ["ANGELSPEC_FAULT"]](outcome, drawn_N, draft_BK, kept_B=kept_B, **slots)


def _accept_first(outcome: Any, draft_BK: Tensor, correct_B: Tensor) -> Any:
    """Commit so many drafts of each row, and the target's token after them."""
    accepted_BK = torch.arange(draft_BK.shape[1]) < correct_B[:, None]
    tokens_BW = outcome.tokens_BW.clone()
    tokens_BW[:, :-1] = torch.where(accepted_BK, draft_BK, tokens_BW[:, :-1])
    return outcome._replace(
        tokens_BW=tokens_BW, correct_B=correct_B, bonus_B=tokens_BW.gather(1, correct_B[:, None]).squeeze(1)
    )
