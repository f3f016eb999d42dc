"""Batched decoding of one target: the engine under rollout.

A fixed number of slots decodes together; a finished row makes room for the next prompt, and when no prompts are left
the batch is compacted. Everything is a function of the arguments: the same prompts give the same tokens.

Legend: B rows decoding together, T tokens of the longest new prompt, V vocabulary, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from angelspec.core.acceptance import repeated_ngram_share
from angelspec.core.errors import TargetError
from angelspec.objectives.top_tokens import first_maximum
from angelspec.ops.sampling import sample_tokens, stream_keys
from angelspec.targets.cache import SlotCache
from angelspec.targets.target import Target

_PREFILL_ROWS = 8
"""Prompts prefilled together: enough tokens to fill a product, few enough that they are padded little."""
_LOOP_CHECK_FROM, _LOOP_CHECK_EVERY = 64, 16


@dataclass(frozen=True)
class Answer:
    """What the target said to one prompt."""

    tokens: tuple[int, ...]
    """Generated ids, the stop token included."""
    finish_reason: str
    """stop: it ended by itself; length: it was cut; loop: it repeated itself (where asked for)."""


def generate(
    target: Target,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_p: float = 1.0,
    batch_size: int = 64,
    seed: int = 0,
    row_keys: Sequence[int] | None = None,
    stop_token_ids: Sequence[int] | None = None,
    max_repeated_share: float = 1.0,
    on_progress: Callable[[int, int], None] | None = None,
) -> list[Answer]:
    """Answer every prompt.

    Args:
        target: the frozen model.
        prompts: token ids, each at least one.
        max_new_tokens: longest answer.
        temperature: 0 takes the most likely token.
        top_p: nucleus kept at temperature above 0.
        batch_size: rows decoded together.
        seed: of the random numbers at temperature above 0.
        row_keys: one integer per prompt that names its random stream, so that an answer does not depend on what is
            decoded beside it; None: the prompt's index.
        stop_token_ids: None: the target's.
        max_repeated_share: an answer whose share of repeated 12-grams exceeds this is stopped with reason ``loop``;
            1 (the default) lets every answer run.
        on_progress: called now and then with (tokens generated, answers finished) so far.

    Returns:
        Answers in the order of the prompts.

    Raises:
        ValueError: an empty prompt, or one that leaves no room within the target's positions.
        TargetError: the target gives logits that are not numbers.
    """
    limit = target.geometry.max_position_embeddings
    for index, prompt in enumerate(prompts):
        if not prompt:
            raise ValueError(f"prompt {index} is empty")
        if len(prompt) + max_new_tokens > limit:
            raise ValueError(
                f"prompt {index} has {len(prompt)} tokens; with {max_new_tokens} new ones it exceeds {limit} positions"
            )
    if not prompts:
        return []
    with torch.inference_mode():
        return _Engine(
            target,
            prompts,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_p=top_p,
            batch_size=min(batch_size, len(prompts)),
            seed=seed,
            row_keys=list(range(len(prompts))) if row_keys is None else list(row_keys),
            stop_token_ids=target.stop_token_ids if stop_token_ids is None else stop_token_ids,
            max_repeated_share=max_repeated_share,
            on_progress=on_progress,
        ).run()


class _Engine:
    """One call of ``generate``: slots, the queue of prompts, and the answers as they finish."""

    def __init__(
        self,
        target: Target,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        temperature: float,
        top_p: float,
        batch_size: int,
        seed: int,
        row_keys: Sequence[int],
        stop_token_ids: Sequence[int],
        max_repeated_share: float,
        on_progress: Callable[[int, int], None] | None,
    ) -> None:
        self.target = target
        self.prompts = prompts
        self.max_new_tokens = max_new_tokens
        self.temperature = temperature
        self.top_p = top_p
        self.seed = seed
        self.row_keys = row_keys
        self.max_repeated_share = max_repeated_share
        self.on_progress = on_progress
        device = target.device
        self.stops = torch.tensor(sorted(set(stop_token_ids)), dtype=torch.long, device=device)
        # Longest first: prompts of like length are prefilled together, and the cache only becomes narrower.
        self.queue = sorted(range(len(prompts)), key=lambda index: (-len(prompts[index]), index))
        self.answers: list[Answer | None] = [None] * len(prompts)
        self.finished = 0
        self.tokens_done = 0
        # Filling few slots at once wastes little; filling one at a time would waste most of a forward.
        self.refill_at = max(1, batch_size // 16)

        capacity = max(map(len, prompts)) + max_new_tokens
        self.prefix = _common_prefix(prompts)
        self.prefix_cache: SlotCache | None = None
        self.cache = target.new_cache(rows=batch_size, capacity=capacity)
        self.prompt_of: list[int | None] = [None] * batch_size
        self.last_token_B = torch.zeros(batch_size, dtype=torch.long, device=device)
        self.count_B = torch.zeros(batch_size, dtype=torch.long, device=device)
        self.active_B = torch.zeros(batch_size, dtype=torch.bool, device=device)
        self.key_B = torch.zeros(batch_size, dtype=torch.long, device=device)
        self.written_BT = torch.zeros(batch_size, max_new_tokens, dtype=torch.long, device=device)

    def run(self) -> list[Answer]:
        steps = 0
        while self.finished < len(self.prompts):
            free = [slot for slot, prompt in enumerate(self.prompt_of) if prompt is None]
            if self.queue and (len(free) >= min(self.refill_at, len(self.queue)) or len(free) == len(self.prompt_of)):
                for start in range(0, min(len(free), len(self.queue)), _PREFILL_ROWS):
                    self._fill(free[start : start + _PREFILL_ROWS])
            elif free and not self.queue and len(free) >= max(1, len(self.prompt_of) // 8):
                self._compact()
            if bool(self.active_B.any()):
                self._step()
                steps += 1
            if self.max_repeated_share < 1.0:
                self._stop_loops()
            if self.on_progress is not None and steps % 8 == 0:
                self.on_progress(self.tokens_done, self.finished)
        if self.on_progress is not None:
            self.on_progress(self.tokens_done, self.finished)
        return [answer for answer in self.answers if answer is not None]

    def _fill(self, slots: list[int]) -> None:
        """Prefill the next prompts of the queue into free slots and choose their first tokens."""
        chosen, self.queue = self.queue[: len(slots)], self.queue[len(slots) :]
        slots = slots[: len(chosen)]
        cache, device = self.cache, self.target.device
        rows_B = torch.tensor(slots)
        skip = self._copy_prefix(rows_B)
        lengths_B = torch.tensor([len(self.prompts[index]) - skip for index in chosen])
        tokens_BT = torch.zeros(len(slots), int(lengths_B.max()), dtype=torch.long)
        for row, index in enumerate(chosen):
            tokens_BT[row, : lengths_B[row]] = torch.tensor(self.prompts[index][skip:])
        cache.select(rows_B)
        hidden_BTD = self.target.forward(tokens_BT.to(device), cache=cache).hidden_BTD
        cache.commit(lengths_B)
        cache.select(None)
        hidden_BD = hidden_BTD[torch.arange(len(slots), device=device), (lengths_B - 1).to(device)]
        slots_B = rows_B.to(device)
        for slot, index in zip(slots, chosen, strict=True):
            self.prompt_of[slot] = index
        self.key_B[slots_B] = torch.tensor([self.row_keys[index] for index in chosen], device=device)
        self.count_B[slots_B] = 0
        self.active_B[slots_B] = True
        self._take(self._choose(hidden_BD, rows_B=slots_B), rows_B=slots_B)

    def _copy_prefix(self, rows_B: Tensor) -> int:
        """Give empty rows the beginning that all prompts share, computed once; return its length."""
        cache = self.cache
        cache.lengths[rows_B] = 0
        if not self.prefix:
            return 0
        if self.prefix_cache is None:
            self.prefix_cache = self.target.new_cache(rows=1, capacity=len(self.prefix))
            self.target.forward(torch.tensor([self.prefix], device=self.target.device), cache=self.prefix_cache)
            self.prefix_cache.commit(len(self.prefix))
        cache.copy_from(self.prefix_cache, row=0, targets=rows_B)
        return len(self.prefix)

    def _step(self) -> None:
        """One token for every active row; idle rows are computed and ignored."""
        hidden_BTD = self.target.forward(self.last_token_B[:, None], cache=self.cache).hidden_BTD
        self.cache.commit(self.active_B)
        self._take(self._choose(hidden_BTD[:, 0], rows_B=None), rows_B=None)

    def _choose(self, hidden_BD: Tensor, *, rows_B: Tensor | None) -> Tensor:
        logits_BV = self.target.head_logits(hidden_BD)
        if self.temperature == 0:
            token_B = first_maximum(logits_BV)
            peak_B = logits_BV.gather(-1, token_B[:, None])
        else:
            keys_B = self.key_B if rows_B is None else self.key_B[rows_B]
            lengths_B = self.cache.lengths.to(hidden_BD.device)
            key_B = stream_keys(keys_B, lengths_B if rows_B is None else lengths_B[rows_B], seed=self.seed)
            token_B = sample_tokens(logits_BV.float(), temperature=self.temperature, key_N=key_B, top_p=self.top_p)
            peak_B = logits_BV.amax(-1)
        if not bool(torch.isfinite(peak_B).all()):
            raise TargetError(f"target {self.target.name} gives logits that are not finite numbers")
        return token_B

    def _take(self, token_B: Tensor, *, rows_B: Tensor | None) -> None:
        """Append the chosen tokens and close the answers that end with them."""
        everything = rows_B is None
        rows_B = torch.arange(token_B.shape[0], device=token_B.device) if rows_B is None else rows_B
        count_B, active_B = self.count_B[rows_B], self.active_B[rows_B]
        if everything and bool(active_B.all()):
            self.written_BT.scatter_(1, count_B[:, None], token_B[:, None])
        else:
            self.written_BT[rows_B[active_B], count_B[active_B]] = token_B[active_B]
        count_B = count_B + active_B
        self.count_B[rows_B] = count_B
        self.last_token_B[rows_B] = token_B
        self.tokens_done += int(active_B.sum())
        stopped_B = torch.isin(token_B, self.stops)
        ended_B = active_B & (stopped_B | (count_B >= self.max_new_tokens))
        if bool(ended_B.any()):
            for position in ended_B.nonzero().flatten().tolist():
                self._close(int(rows_B[position]), "stop" if bool(stopped_B[position]) else "length")

    def _close(self, slot: int, reason: str) -> None:
        index = self.prompt_of[slot]
        assert index is not None
        self.answers[index] = Answer(tuple(self.written_BT[slot, : int(self.count_B[slot])].tolist()), reason)
        self.prompt_of[slot] = None
        self.active_B[slot] = False
        self.cache.lengths[slot] = 0
        self.finished += 1

    def _stop_loops(self) -> None:
        """Close answers that repeat themselves, looked at after every so many of their own tokens."""
        due_B = self.active_B & (self.count_B >= _LOOP_CHECK_FROM) & (self.count_B % _LOOP_CHECK_EVERY == 0)
        for slot in due_B.nonzero().flatten().tolist():
            if (
                repeated_ngram_share(self.written_BT[slot, : int(self.count_B[slot])].tolist())
                > self.max_repeated_share
            ):
                self._close(slot, "loop")

    def _compact(self) -> None:
        """Drop the free slots."""
        keep = torch.tensor([slot for slot, index in enumerate(self.prompt_of) if index is not None], dtype=torch.long)
        self.cache.compact(keep)
        self.prompt_of = [self.prompt_of[slot] for slot in keep.tolist()]
        index = keep.to(self.target.device)
        self.last_token_B, self.count_B, self.active_B = (
            self.last_token_B[index],
            self.count_B[index],
            self.active_B[index],
        )
        self.key_B, self.written_BT = self.key_B[index], self.written_BT[index]


def _common_prefix(prompts: Sequence[Sequence[int]]) -> list[int]:
    """The beginning that all prompts share, short of the whole of the shortest (its last token must be computed)."""
    if len(prompts) < 2:
        return []
    low, high = min(prompts), max(prompts)  # every other prompt lies between these two
    length = 0
    while length < min(len(low), len(high)) - 1 and low[length] == high[length]:
        length += 1
    length = min(length, min(map(len, prompts)) - 1)
    return list(low[:length])
