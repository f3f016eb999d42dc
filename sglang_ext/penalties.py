"""Penalties and minimum lengths of one request, by SGLang's own penalizers.

SGLang feeds its penalizers when it prepares a plain decode step; for speculative algorithms it does not, and with
overlap it feeds them one token late. A request that has any of them verifies one slot per step, so its newest output
token is the anchor: feeding that gives what plain decoding without overlap gives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from sglang_ext import compat
from sglang_ext.transfer import on_device


def is_penalised(sampling_params: Any) -> bool:
    """Whether logits depend on the request's output so far."""
    return bool(
        sampling_params.frequency_penalty
        or sampling_params.presence_penalty
        or sampling_params.repetition_penalty != 1.0
        or sampling_params.min_new_tokens
    )


@dataclass(eq=False)
class _Batch:
    """What a penalizer reads of a batch."""

    reqs: list[Any]
    device: str


class RowPenalties:
    """The penalizers of one request.

    Args:
        req: SGLang's request.
        already_put_out: its tokens before the last prefill, which are fed at once.
        vocab_size: of the logits.
        device: of the logits.
    """

    def __init__(self, req: Any, *, already_put_out: Sequence[int], vocab_size: int, device: str) -> None:
        self._batch = _Batch([req], device)  # the orchestrator holds it by a weak reference
        self._orchestrator = compat.BatchedPenalizerOrchestrator(
            vocab_size=vocab_size,
            batch=self._batch,
            penalizers={
                compat.BatchedFrequencyPenalizer,
                compat.BatchedMinNewTokensPenalizer,
                compat.BatchedPresencePenalizer,
                compat.BatchedRepetitionPenalizer,
            },
        )
        for token_1 in on_device(list(already_put_out), device).split(1) if already_put_out else ():
            self._orchestrator.cumulate_output_tokens(token_1)

    def apply(self, anchor_1: Tensor, logits_1V: Tensor) -> None:
        """Feed the newest output token and penalise the logits of the next, in place."""
        self._orchestrator.cumulate_output_tokens(anchor_1)
        # with ``repeat`` what is added comes before what scales, as in plain decoding with overlap; without it the
        # order is that of a set of classes, which differs from process to process
        self._orchestrator.apply(logits_1V, repeat=1)
