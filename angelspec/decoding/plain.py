"""Plain decoding: the truth that speculative decoding must reproduce token for token.

``decode_plain`` answers one request at a time with transformers' own model and its own growing cache, which no other
path of angelspec uses. ``decode_without_cache`` runs every whole sequence through the target for every token, so that
nothing can be wrong with a cache at all.

Legend: B rows, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import signature
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import DynamicCache

from angelspec.decoding.answers import Decoded, accept_tokens
from angelspec.ops.sampling import sample_tokens, stream_keys

if TYPE_CHECKING:
    from angelspec.targets.target import Target


@torch.inference_mode()
def decode_plain(
    target: Target,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    stop_token_ids: Sequence[int] | None = None,
    row_ids: Sequence[int] | None = None,
    progress: Callable[[int], None] | None = None,
) -> list[Decoded]:
    """Answer each prompt with the target alone, one after another.

    Args:
        target: the frozen model.
        prompts: token ids, each of at least one token.
        max_new_tokens: longest answer.
        temperature: 0 takes the argmax.
        seed: of the random streams; see ``ops.sampling.stream_keys``.
        stop_token_ids: tokens that end an answer; None: the target's.
        row_ids: each prompt's random stream; None: its index.
        progress: called with the number of finished answers.
    """
    stop = frozenset(target.stop_token_ids if stop_token_ids is None else stop_token_ids)
    # transformers renamed the argument in the course of version 5.
    cache_argument = "cache" if "cache" in signature(target.model.forward).parameters else "past_key_values"
    answers: list[Decoded] = []
    for row_id, prompt in zip(range(len(prompts)) if row_ids is None else row_ids, prompts, strict=True):
        answer, cache = Decoded(), DynamicCache()
        sequence, pending = list(prompt), list(prompt)
        while answer.finish_reason is None:
            tokens_BT = torch.tensor([pending], device=target.device)
            logits_BV = target.model(tokens_BT, use_cache=True, **{cache_argument: cache}).logits[:, -1].float()
            pending = _next_tokens(logits_BV, [row_id], [len(sequence)], temperature=temperature, seed=seed)
            _append(answer, sequence, pending[0], stop_token_ids=stop, max_new_tokens=max_new_tokens)
        answers.append(answer)
        if progress is not None:
            progress(len(answers))
    return answers


@torch.inference_mode()
def decode_without_cache(
    target: Target,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    stop_token_ids: Sequence[int] | None = None,
) -> list[Decoded]:
    """The same answers, all rows together, one forward over all whole sequences per token; for small models.

    Arguments as for ``decode_plain``. Padding stands behind each row, where causal attention does not look.
    """
    stop = frozenset(target.stop_token_ids if stop_token_ids is None else stop_token_ids)
    answers = [Decoded() for _ in prompts]
    sequences = [list(prompt) for prompt in prompts]
    while running := [row for row, answer in enumerate(answers) if answer.finish_reason is None]:
        lengths = [len(sequences[row]) for row in running]
        tokens_BT = torch.zeros(len(running), max(lengths), dtype=torch.int64, device=target.device)
        for index, row in enumerate(running):
            tokens_BT[index, : lengths[index]] = torch.tensor(sequences[row])
        hidden_BTD = target.forward(tokens_BT).hidden_BTD
        logits_BV = target.logits(hidden_BTD[torch.arange(len(running)), torch.tensor(lengths) - 1])
        tokens = _next_tokens(logits_BV, running, lengths, temperature=temperature, seed=seed)
        for row, token in zip(running, tokens, strict=True):
            _append(answers[row], sequences[row], token, stop_token_ids=stop, max_new_tokens=max_new_tokens)
    return answers


def _next_tokens(
    logits_BV: Tensor, row_ids: Sequence[int], positions: Sequence[int], *, temperature: float, seed: int
) -> list[int]:
    key_B = stream_keys(torch.tensor(row_ids), torch.tensor(positions), seed=seed).to(logits_BV.device)
    return sample_tokens(logits_BV, temperature=temperature, key_N=key_B).tolist()


def _append(
    answer: Decoded, sequence: list[int], token: int, *, stop_token_ids: frozenset[int], max_new_tokens: int
) -> None:
    kept, answer.finish_reason = accept_tokens(
        [token], stop_token_ids=stop_token_ids, room=max_new_tokens - len(answer.tokens)
    )
    answer.tokens += kept
    sequence += kept
