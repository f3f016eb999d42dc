"""What an engine drafted, as ``record_plugin`` wrote it down, against what the reference says at the same places."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest
import torch

from angelspec.decoding.proposer import Observed, Proposer

if TYPE_CHECKING:
    from angelspec.targets.target import Target


class Draft(NamedTuple):
    """Proposals behind the token at a position."""

    position: int
    tokens: list[int]
    confidences: list[float]

    def is_like(self, other: Draft) -> bool:
        """Whether both are the same but for rounding."""
        near = pytest.approx(other.confidences, abs=1e-4)
        return self.position == other.position and self.tokens == other.tokens and self.confidences == near


def read_drafts(path: Path) -> dict[tuple[str, str], list[Draft]]:
    """Drafts in the order in which they were made, by request and drafter."""
    drafts: dict[tuple[str, str], list[Draft]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        one = json.loads(line)
        drafts.setdefault((one["rid"], one["drafter"]), []).append(
            Draft(one["position"], one["tokens"], one["confidences"])
        )
    return drafts


def reference_drafts(
    target: Target, proposer: Proposer, tokens: Sequence[int], positions: Iterable[int]
) -> dict[int, Draft]:
    """What a proposer drafts behind some tokens of a known text, all those before them committed."""
    token_1T, row = torch.tensor([tokens]), torch.tensor([0])
    position_1T = torch.arange(len(tokens))[None]
    states = target.forward(token_1T, layer_ids=proposer.layer_ids)
    drafts, seen = {}, 0
    with torch.inference_mode():
        proposer.start(1, capacity=len(tokens) + proposer.depth)
        for position in sorted(set(positions)):
            new = slice(seen, position)
            proposer.observe(
                row,
                Observed(
                    tokens_BT=token_1T[:, new],
                    positions_BT=position_1T[:, new],
                    taps_BTF=states.taps_BTF[:, new],
                    hidden_BTD=states.hidden_BTD[:, new],
                    counts_B=torch.tensor([position - seen]),
                ),
            )
            proposals = proposer.propose(
                row,
                histories=[tokens[: position + 1]],
                last_token_B=token_1T[:, position],
                position_B=torch.tensor([position]),
            )
            drafts[position] = Draft(position, proposals.tokens_BK[0].tolist(), proposals.confidence_BK[0].tolist())
            seen = position
    return drafts


def differences(
    target: Target, proposer: Proposer, tokens: Sequence[int], drafts: Sequence[Draft]
) -> tuple[int, list[int]]:
    """How many of an engine's drafts of a text can be compared with the reference's, and where they differ.

    An engine that plans ahead also drafts behind an answer's end, where nobody knows the text.
    """
    known = [draft for draft in drafts if draft.position < len(tokens)]
    expected = reference_drafts(target, proposer, tokens, (draft.position for draft in known))
    return len(known), [draft.position for draft in known if not draft.is_like(expected[draft.position])]


def is_greedy(target: Target, prompt: Sequence[int], answer: Sequence[int]) -> bool:
    """Whether each of an answer's tokens is the target's likeliest."""
    states = target.forward(torch.tensor([[*prompt, *answer]]))
    best_T = target.logits(states.hidden_BTD[0, len(prompt) - 1 : -1]).argmax(-1)
    return best_T.tolist() == list(answer)
