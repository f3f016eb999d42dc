"""Who says what the target would say, for the rows in flight: the target itself, or its answers (``recording``).

Legend: B rows of a forward, T tokens of a prompt, Q verified slots, K proposals (Q = K + 1), D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from angelspec.decoding.answers import Decoded, Stopwatch
from angelspec.ops.sampling import sample_tokens, stream_keys
from angelspec.ops.verification import Verdict, verify

if TYPE_CHECKING:
    from angelspec.targets.target import Target, TargetStates


@dataclass
class Request:
    """One prompt on its way."""

    index: int
    row_id: int
    tokens: list[int]
    """Prompt and answer so far."""
    answer: Decoded = field(default_factory=Decoded)


class Verifier(Protocol):
    """Knows the target's states and choices. Its calls are, per row: one ``prefill``, then ``verify`` and ``commit`` in
    turns until ``release``."""

    device: torch.device

    def start(self, num_rows: int, *, capacity: int) -> None:
        """Forget everything and hold ``num_rows`` empty rows of up to ``capacity`` tokens each."""
        ...

    def prefill(
        self, rows: Tensor, requests: Sequence[Request], *, tokens_BT: Tensor, lengths_B: Tensor, watch: Stopwatch
    ) -> tuple[TargetStates, list[int]]:
        """States of whole prompts and the token behind each.

        Args:
            rows: int64 [B], distinct and empty.
            requests: theirs.
            tokens_BT: int64, the prompts; behind ``lengths_B`` padding.
            lengths_B: int64.
            watch: takes the time.
        """
        ...

    def verify(
        self, rows: Tensor, requests: Sequence[Request], *, tokens_BQ: Tensor, lengths_B: Tensor, watch: Stopwatch
    ) -> tuple[TargetStates, Verdict]:
        """States behind each row's cached tokens, and what of the proposals the target accepts.

        Args:
            rows: int64 [B], distinct.
            requests: theirs.
            tokens_BQ: int64, each row's anchor and its proposals; behind the proposals padding of any tokens.
            lengths_B: int64, proposals per row.
            watch: takes the time.
        """
        ...

    def commit(self, counts_B: Tensor) -> None:
        """Keep the first ``counts_B`` tokens of the last ``verify`` (int64 [B])."""
        ...

    def release(self, row: int) -> None:
        """Empty a row whose request ended."""
        ...


class TargetVerifier:
    """One target forward per step, over a cache of the committed tokens.

    Args:
        target: the frozen model.
        layer_ids: whose states the drafter reads.
        temperature: 0 takes the target's argmax, else its samples are drawn at this temperature.
        seed: of the random streams; see ``ops.sampling.stream_keys``.
    """

    def __init__(self, target: Target, *, layer_ids: Sequence[int], temperature: float, seed: int) -> None:
        self.device = torch.device(target.device)
        self._target, self._layer_ids = target, tuple(layer_ids)
        self._temperature, self._seed = temperature, seed

    def start(self, num_rows: int, *, capacity: int) -> None:
        self._cache = self._target.new_cache(rows=num_rows, capacity=capacity)

    def prefill(
        self, rows: Tensor, requests: Sequence[Request], *, tokens_BT: Tensor, lengths_B: Tensor, watch: Stopwatch
    ) -> tuple[TargetStates, list[int]]:
        with watch.span("prefill"):
            states = self._forward(rows, tokens_BT)
            self._cache.commit(lengths_B)
            last_BD = states.hidden_BTD[torch.arange(len(rows), device=rows.device), lengths_B - 1]
            logits_BV = self._target.logits(last_BD)
        with watch.span("sample"):
            key_B = self._keys(requests, lengths_B.unsqueeze(1)).squeeze(1)
            first_tokens = sample_tokens(logits_BV, temperature=self._temperature, key_N=key_B).tolist()
        return states, first_tokens

    def verify(
        self, rows: Tensor, requests: Sequence[Request], *, tokens_BQ: Tensor, lengths_B: Tensor, watch: Stopwatch
    ) -> tuple[TargetStates, Verdict]:
        with watch.span("verify"):
            states = self._forward(rows, tokens_BQ)
            logits_BQV = self._target.logits(states.hidden_BTD)
        with watch.span("sample"):
            anchor_B1 = torch.tensor([[len(request.tokens) - 1] for request in requests], device=self.device)
            chosen_positions_BQ = anchor_B1 + 1 + torch.arange(tokens_BQ.shape[1], device=self.device)
            verdict = verify(
                logits_BQV,
                proposals_BK=tokens_BQ[:, 1:],
                lengths_B=lengths_B,
                temperature=self._temperature,
                key_BQ=self._keys(requests, chosen_positions_BQ),
            )
        return states, verdict

    def commit(self, counts_B: Tensor) -> None:
        self._cache.commit(counts_B)

    def release(self, row: int) -> None:
        self._cache.lengths[row] = 0

    def _forward(self, rows: Tensor, tokens_BT: Tensor) -> TargetStates:
        """Target states of new tokens behind each row's cached ones."""
        self._cache.select(rows)
        return self._target.forward(tokens_BT, cache=self._cache, layer_ids=self._layer_ids)

    def _keys(self, requests: Sequence[Request], positions_BQ: Tensor) -> Tensor:
        row_ids_B1 = torch.tensor([[request.row_id] for request in requests], device=self.device)
        return stream_keys(row_ids_B1, positions_BQ, seed=self._seed)
