"""A tokenised conversation with the mask that says which tokens a drafter learns from."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from angelspec.core.workloads import Workload
from angelspec.data.answers import AnswerRecord


@dataclass(frozen=True, eq=False)
class TokenisedRow:
    """One prompt with one answer, as a server's model saw and generated it."""

    id: str
    workload: Workload
    tokens: np.ndarray
    """int32 [length]."""
    loss_mask: np.ndarray
    """bool [length]: the tokens that the target generates (answer and stop token)."""
    group: str
    """Hash shared by everything that grew from one conversation."""
    finish_reason: str = "given"
    """How the answer ended; given: it was in the data."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens", np.asarray(self.tokens, dtype=np.int32))
        object.__setattr__(self, "loss_mask", np.asarray(self.loss_mask, dtype=bool))
        if self.tokens.ndim != 1 or self.tokens.shape != self.loss_mask.shape:
            raise ValueError(f"row '{self.id}': {self.tokens.shape} tokens and {self.loss_mask.shape} mask values")

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def num_supervised(self) -> int:
        """Tokens the mask selects."""
        return int(self.loss_mask.sum())


def answered_row(
    prompt: list[int] | tuple[int, ...], answer: list[int] | tuple[int, ...], *, id: str, workload: Workload,
    group: str, finish_reason: str = "given",
) -> TokenisedRow:  # fmt: skip
    """Join a prompt, unsupervised, and an answer, supervised."""
    mask = np.zeros(len(prompt) + len(answer), dtype=bool)
    mask[len(prompt) :] = True
    return TokenisedRow(id, workload, np.array([*prompt, *answer], dtype=np.int32), mask, group, finish_reason)


def row_from_answer(record: AnswerRecord) -> TokenisedRow:
    """The training row of a rollout's answer; samples of one prompt get ids of their own."""
    return answered_row(
        record.prompt_tokens,
        record.answer_tokens,
        id=record.id if record.sample == 0 else f"{record.id}~{record.sample}",
        workload=record.workload,
        group=record.group,
        finish_reason=record.finish_reason,
    )
