"""The draft-verify loop, batched and readable: propose, cut, verify in one target forward, commit.

Row b has committed tokens c_0 .. c_n, of which the last, the anchor, has no target state yet. A step

1. lets the proposer draft x_1 .. x_K behind the anchor, and D-cut shorten the rows;
2. runs the target over [c_n, x_1, .., x_K] at positions n .. n + K, on top of the cached states of c_0 .. c_{n-1};
3. lets the target choose its own token behind each slot, and accepts x_j while it equals that choice;
4. commits the accepted proposals and the bonus token, rolls the cache back to what was committed, and hands the
   states of the anchor and of the accepted proposals to the proposer.

Legend: B rows of a forward, T tokens, Q verified slots, K proposals.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from angelspec.core.errors import DataError
from angelspec.core.step_costs import StepCosts
from angelspec.decoding.answers import DecodeRun, Stopwatch, accept_tokens
from angelspec.decoding.proposer import Observed, Proposals, Proposer
from angelspec.decoding.verifiers import Request, TargetVerifier, Verifier
from angelspec.ops.dcut import Cut, choose_cut, cut, survivals

if TYPE_CHECKING:
    from angelspec.targets.target import Target, TargetStates


class CutPolicy(BaseModel):
    """How D-cut chooses its keep ratio."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    ratio: float | None = Field(default=None, gt=0, le=1)
    """A fixed keep ratio; None: the best of the grid by measured costs."""
    costs: StepCosts = StepCosts()
    """For ``ratio=None``; where they say nothing the fallback ratio holds."""
    drafter: str | None = None
    """Whose drafting costs count; None: none do, and the cut looks at verification alone."""

    def decide(self, proposals: Proposals) -> Cut:
        """Which proposals of a batch to verify."""
        survival_BK = survivals(proposals.confidence_BK, lengths_B=proposals.lengths_B)
        if self.ratio is not None:
            return cut(survival_BK, ratio=self.ratio)
        drafted = {} if self.drafter is None else {self.drafter: len(survival_BK)}
        return choose_cut(
            survival_BK, seconds=lambda rows, slots: self.costs.seconds(rows, drafted=drafted, slots=slots)
        )


def decode(
    target: Target,
    proposer: Proposer,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    batch_size: int,
    cut: CutPolicy | None = None,
    stop_token_ids: Sequence[int] | None = None,
    row_ids: Sequence[int] | None = None,
    past_positions: bool = False,
    progress: Callable[[int], None] | None = None,
) -> DecodeRun:
    """Answer prompts by speculative decoding; the answers are those of ``decode_plain``.

    Args:
        target: the frozen model.
        proposer: drafts; started anew.
        prompts: token ids, each of at least one token.
        max_new_tokens: longest answer.
        temperature: 0 takes the target's argmax, else its samples are drawn at this temperature.
        seed: of the random streams; see ``ops.sampling.stream_keys``.
        batch_size: rows decoded together; a finished row is given to the next prompt.
        cut: shortens each step's proposals; None verifies all.
        stop_token_ids: tokens that end an answer; None: the target's.
        row_ids: each prompt's random stream; None: its index.
        past_positions: whether answers may outgrow the target's positions, as the proposals of a last step do.
        progress: called with the number of finished answers.

    Raises:
        ValueError: an empty prompt, or nothing to generate.
        DataError: prompt and answer may outgrow the target's positions, and ``past_positions`` is False.
    """
    if not all(prompts):
        raise ValueError(f"prompt {next(i for i, p in enumerate(prompts) if not p)} is empty")
    if max_new_tokens < 1 or batch_size < 1:
        raise ValueError("max_new_tokens and batch_size must be at least 1")
    if not past_positions:
        require_room(target, prompts, max_new_tokens=max_new_tokens)
    if not prompts:
        return DecodeRun([], Stopwatch(target.device).seconds, 0.0)
    row_ids = range(len(prompts)) if row_ids is None else row_ids
    requests = [
        Request(index, row_id, list(prompt))
        for index, (row_id, prompt) in enumerate(zip(row_ids, prompts, strict=True))
    ]
    verifier = TargetVerifier(target, layer_ids=proposer.layer_ids, temperature=temperature, seed=seed)
    loop = Loop(
        verifier,
        proposer,
        num_rows=min(batch_size, len(prompts)),
        capacity=max(map(len, prompts)) + max_new_tokens + proposer.depth,
        max_new_tokens=max_new_tokens,
        cut=cut,
        stop_token_ids=frozenset(target.stop_token_ids if stop_token_ids is None else stop_token_ids),
    )
    return loop.run(requests, progress=progress)


def require_room(target: Target, prompts: Sequence[Sequence[int]], *, max_new_tokens: int) -> None:
    """Refuse prompts that with an answer of ``max_new_tokens`` could outgrow the target's positions.

    Raises:
        DataError: the longest one could.
    """
    longest, positions = max(map(len, prompts), default=0), target.geometry.max_position_embeddings
    if longest + max_new_tokens > positions:
        raise DataError(
            f"a prompt of {longest} tokens and an answer of {max_new_tokens} exceed the {positions} positions of "
            f"{target.name}",
            mend="shorten the prompts (data.max_prompt_tokens) or the answers (evaluation.max_new_tokens)",
        )


class Loop:
    """The rows in flight.

    Args:
        verifier: knows what the target says; started anew.
        proposer: drafts; started anew.
        num_rows: requests in flight at once.
        capacity: tokens that a row can hold.
        max_new_tokens: longest answer.
        cut: shortens each step's proposals; None verifies all.
        stop_token_ids: tokens that end an answer.
    """

    def __init__(
        self,
        verifier: Verifier,
        proposer: Proposer,
        *,
        num_rows: int,
        capacity: int,
        max_new_tokens: int,
        cut: CutPolicy | None,
        stop_token_ids: frozenset[int],
    ) -> None:
        self.watch = Stopwatch(verifier.device)
        self.running: dict[int, Request] = {}
        self._verifier, self._proposer, self._cut = verifier, proposer, cut
        self._max_new_tokens, self._stop_token_ids = max_new_tokens, stop_token_ids
        self._free = list(range(num_rows))
        with torch.inference_mode():
            verifier.start(num_rows, capacity=capacity)
            proposer.start(num_rows, capacity=capacity)

    @torch.inference_mode()
    def run(self, requests: Sequence[Request], *, progress: Callable[[int], None] | None = None) -> DecodeRun:
        """Answer all requests; ``progress`` is called with the number of finished answers."""
        waiting = deque(requests)
        while waiting or self.running:
            self.admit(waiting)
            if self.running:
                self.step()
            if progress is not None:
                progress(len(requests) - len(waiting) - len(self.running))
        return DecodeRun([request.answer for request in requests], self.watch.seconds, self.watch.total())

    @torch.inference_mode()
    def admit(self, waiting: deque[Request]) -> None:
        """Give free rows to waiting requests: target over their prompts, first token from the last logits."""
        self._free.sort()
        arrivals = [(self._free.pop(0), waiting.popleft()) for _ in range(min(len(self._free), len(waiting)))]
        if not arrivals:
            return
        rows = self._tensor([row for row, _ in arrivals])
        requests = [request for _, request in arrivals]
        lengths_B = self._tensor([len(request.tokens) for request in requests])
        tokens_BT = self._padded([request.tokens for request in requests])
        self._proposer.reset(rows)
        states, first_tokens = self._verifier.prefill(
            rows, requests, tokens_BT=tokens_BT, lengths_B=lengths_B, watch=self.watch
        )
        self._observe(rows, tokens_BT, torch.zeros_like(lengths_B), states, lengths_B)
        for (row, request), token in zip(arrivals, first_tokens, strict=True):
            self.running[row] = request
            self._commit(row, [token])

    @torch.inference_mode()
    def step(self) -> None:
        """One draft, one verify forward, one commit, for all running rows."""
        running = sorted(self.running.items())  # consecutive rows are read from the cache without a copy
        rows = self._tensor([row for row, _ in running])
        requests = [request for _, request in running]
        anchor_B = self._tensor([request.tokens[-1] for request in requests])
        position_B = self._tensor([len(request.tokens) - 1 for request in requests])

        with self.watch.span("draft"):
            proposals = self._proposer.propose(
                rows,
                histories=[request.tokens for request in requests],
                last_token_B=anchor_B,
                position_B=position_B,
            )
            kept_B = proposals.lengths_B if self._cut is None else self._cut.decide(proposals).kept_B
            depth = int(kept_B.max())
            offered_BK = torch.arange(depth, device=rows.device) < kept_B.unsqueeze(1)
            # Padding repeats the anchor: any token of the vocabulary would do, nothing reads its outcome.
            proposals_BK = torch.where(offered_BK, proposals.tokens_BK[:, :depth], anchor_B.unsqueeze(1))
        tokens_BQ = torch.cat([anchor_B.unsqueeze(1), proposals_BK], dim=1)
        states, verdict = self._verifier.verify(rows, requests, tokens_BQ=tokens_BQ, lengths_B=kept_B, watch=self.watch)
        accepted, chosen = verdict.accepted_B.tolist(), verdict.chosen_BQ.tolist()
        counts_B = verdict.accepted_B + 1
        self._verifier.commit(counts_B)
        self._observe(rows, tokens_BQ, position_B, states, counts_B)

        drafted, kept = proposals.lengths_B.tolist(), kept_B.tolist()
        for index, (row, request) in enumerate(running):
            committed, stopped = self._commit(row, chosen[index][: accepted[index] + 1])
            answer = request.answer
            answer.accepted.append(min(accepted[index], committed) if stopped else accepted[index])
            answer.proposed.append(kept[index])
            answer.drafted.append(drafted[index])
            answer.committed.append(committed)

    def _commit(self, row: int, tokens: list[int]) -> tuple[int, bool]:
        """Add tokens to a row's answer; a finished row is freed. Returns (tokens taken, ended by a stop token)."""
        request = self.running[row]
        answer = request.answer
        taken, answer.finish_reason = accept_tokens(
            tokens, stop_token_ids=self._stop_token_ids, room=self._max_new_tokens - len(answer.tokens)
        )
        answer.tokens += taken
        request.tokens += taken
        if answer.finish_reason is not None:
            del self.running[row]
            self._free.append(row)
            self._verifier.release(row)
        return len(taken), answer.finish_reason == "stop"

    def _observe(
        self, rows: Tensor, tokens_BT: Tensor, first_B: Tensor, states: TargetStates, counts_B: Tensor
    ) -> None:
        width = int(counts_B.max())
        with self.watch.span("features"):
            observed = Observed(
                tokens_BT=tokens_BT[:, :width],
                positions_BT=first_B.unsqueeze(1) + torch.arange(width, device=rows.device),
                taps_BTF=states.taps_BTF[:, :width],
                hidden_BTD=states.hidden_BTD[:, :width],
                counts_B=counts_B,
            )
            self._proposer.observe(rows, observed)

    def _padded(self, sequences: Sequence[Sequence[int]]) -> Tensor:
        width = max(map(len, sequences))
        return self._tensor([[*sequence, *[sequence[-1]] * (width - len(sequence))] for sequence in sequences])

    def _tensor(self, values: list) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._verifier.device)
