"""The target's answers recorded once, so that many drafters are measured on them without a target forward each.

Target-only acceptance never changes an answer: token t is the target's choice behind the tokens before it, whatever was
proposed. What a drafter commits in a verify step therefore follows from the plain answer alone, and so do the states
that it sees. ``decode_recorded`` runs the loop of ``speculative.decode`` with the same steps and counters, and looks up
what that one computes; ``decode`` is its reference.

Legend: B rows of a forward, T tokens, Q verified slots, F width of tapped features, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from angelspec.decoding.answers import Decoded, DecodeRun, Stopwatch
from angelspec.decoding.proposer import NoProposer, Proposer
from angelspec.decoding.speculative import CutPolicy, Loop, decode
from angelspec.decoding.verifiers import Request
from angelspec.ops.verification import Verdict, count_accepted

if TYPE_CHECKING:
    from angelspec.targets.target import Target, TargetStates

_UNKNOWN = -1
"""The choice behind a recording's end; no proposal equals it."""
_TOKENS_PER_FORWARD = 4096


@dataclass(frozen=True)
class Recording:
    """Prompts, the target's answers to them, and what it would have said next."""

    prompts: list[list[int]]
    answers: list[Decoded]
    """Of plain decoding."""
    beyond: list[list[int]]
    """Tokens behind an answer that was cut at the limit, any stop token ignored: the last verify step looks past the
    limit. Empty behind a stop token."""
    max_new_tokens: int
    stop_token_ids: tuple[int, ...]

    def sequence(self, index: int) -> list[int]:
        """Prompt, answer and what lies beyond."""
        return [*self.prompts[index], *self.answers[index].tokens, *self.beyond[index]]


def record(
    target: Target,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    depth: int,
    temperature: float,
    seed: int,
    batch_size: int,
    stop_token_ids: Sequence[int] | None = None,
    row_ids: Sequence[int] | None = None,
    progress: Callable[[int], None] | None = None,
) -> Recording:
    """Answer prompts with the target alone.

    Args:
        depth: most proposals of the drafters that will be measured.

    Others as for ``speculative.decode``.
    """
    stop = tuple(target.stop_token_ids if stop_token_ids is None else stop_token_ids)
    row_ids = list(range(len(prompts)) if row_ids is None else row_ids)
    settings = {"temperature": temperature, "seed": seed, "batch_size": batch_size}
    answers = decode(
        target, NoProposer(), prompts, max_new_tokens=max_new_tokens, stop_token_ids=stop, row_ids=row_ids,
        progress=progress, **settings,
    ).answers  # fmt: skip
    beyond: list[list[int]] = [[] for _ in prompts]
    cut = [index for index, answer in enumerate(answers) if answer.finish_reason == "length"]
    if cut and depth:
        # a verify step looks past the target's positions, too, where an answer ends at the last of them
        further = decode(
            target, NoProposer(), [[*prompts[index], *answers[index].tokens] for index in cut], max_new_tokens=depth,
            stop_token_ids=(), row_ids=[row_ids[index] for index in cut], past_positions=True, **settings,
        ).answers  # fmt: skip
        for index, answer in zip(cut, further, strict=True):
            beyond[index] = answer.tokens
    return Recording([list(prompt) for prompt in prompts], answers, beyond, max_new_tokens, stop)


@torch.inference_mode()
def record_states(target: Target, recording: Recording, *, layer_ids: Sequence[int]) -> list[TargetStates]:
    """The target's states of every recorded sequence, as one row each.

    Args:
        layer_ids: layers to tap; see ``Target.forward``.
    """
    lengths = [len(recording.sequence(index)) for index in range(len(recording.prompts))]
    found: dict[int, TargetStates] = {}
    waiting = sorted(range(len(lengths)), key=lengths.__getitem__)
    while waiting:
        width = lengths[waiting[-1]]
        batch = [waiting.pop() for _ in range(min(len(waiting), max(1, _TOKENS_PER_FORWARD // width)))]
        tokens_BT = torch.zeros(len(batch), width, dtype=torch.int64)
        for row, index in enumerate(batch):
            tokens_BT[row, : lengths[index]] = torch.tensor(recording.sequence(index))
        states = target.forward(tokens_BT.to(target.device), layer_ids=layer_ids)
        for row, index in enumerate(batch):
            own = slice(row, row + 1), slice(lengths[index])
            found[index] = type(states)(states.taps_BTF[own].clone(), states.hidden_BTD[own].clone())
    return [found[index] for index in range(len(lengths))]


def decode_recorded(
    proposer: Proposer,
    recording: Recording,
    states: Sequence[TargetStates],
    *,
    batch_size: int,
    cut: CutPolicy | None = None,
    progress: Callable[[int], None] | None = None,
) -> DecodeRun:
    """What ``speculative.decode`` gives with this proposer; its seconds know no verification.

    Args:
        proposer: drafts; started anew.
        recording: made with at least the proposer's depth.
        states: of ``record_states`` with the proposer's layers.
        batch_size: rows drafted together.
        cut: shortens each step's proposals; None verifies all.
        progress: called with the number of finished answers.
    """
    if not recording.prompts:
        return DecodeRun([], Stopwatch("cpu").seconds, 0.0)
    verifier = RecordedVerifier(recording, states)
    requests = [Request(index, index, list(prompt)) for index, prompt in enumerate(recording.prompts)]
    loop = Loop(
        verifier,
        proposer,
        num_rows=min(batch_size, len(requests)),
        capacity=max(map(len, recording.prompts)) + recording.max_new_tokens + proposer.depth,
        max_new_tokens=recording.max_new_tokens,
        cut=cut,
        stop_token_ids=frozenset(recording.stop_token_ids),
    )
    return loop.run(requests, progress=progress)


class RecordedVerifier:
    """Looks up what ``TargetVerifier`` computes; a request's index is its prompt's."""

    def __init__(self, recording: Recording, states: Sequence[TargetStates]) -> None:
        self.device = states[0].hidden_BTD.device
        self._sequences = [recording.sequence(index) for index in range(len(recording.prompts))]
        self._states = states

    def start(self, num_rows: int, *, capacity: int) -> None:
        pass

    def prefill(
        self, rows: Tensor, requests: Sequence[Request], *, tokens_BT: Tensor, lengths_B: Tensor, watch: Stopwatch
    ) -> tuple[TargetStates, list[int]]:
        with watch.span("prefill"):
            first_tokens = [self._sequences[request.index][len(request.tokens)] for request in requests]
            return self._window(requests, [0] * len(requests), width=tokens_BT.shape[1]), first_tokens

    def verify(
        self, rows: Tensor, requests: Sequence[Request], *, tokens_BQ: Tensor, lengths_B: Tensor, watch: Stopwatch
    ) -> tuple[TargetStates, Verdict]:
        width = tokens_BQ.shape[1]
        with watch.span("verify"):
            choices = []
            for request in requests:
                first = len(request.tokens)
                known = self._sequences[request.index][first : first + width]
                choices.append([*known, *[_UNKNOWN] * (width - len(known))])
            chosen_BQ = torch.tensor(choices, device=self.device)
            verdict = Verdict(chosen_BQ, count_accepted(tokens_BQ[:, 1:], lengths_B, chosen_BQ))
            states = self._window(requests, [len(request.tokens) - 1 for request in requests], width=width)
        return states, verdict

    def commit(self, counts_B: Tensor) -> None:
        pass

    def release(self, row: int) -> None:
        pass

    def _window(self, requests: Sequence[Request], starts: Sequence[int], *, width: int) -> TargetStates:
        """States of ``width`` positions from each request's start; the last known one again behind a recording's end,
        where nothing is committed."""
        kind, taps, hidden = type(self._states[0]), [], []
        for request, start in zip(requests, starts, strict=True):
            own = self._states[request.index]
            index_Q = torch.arange(start, start + width, device=self.device).clamp(max=own.hidden_BTD.shape[1] - 1)
            taps.append(own.taps_BTF[0, index_Q])
            hidden.append(own.hidden_BTD[0, index_Q])
        return kind(torch.stack(taps), torch.stack(hidden))
