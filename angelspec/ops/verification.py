"""Target-only acceptance: the target chooses every token itself, a proposal is accepted while it equals that choice.

At temperature 0 the choice is the argmax; above it, a sample of the target's own distribution, drawn from the
row's random stream. Proposals are deterministic given their prefix, so the output has the target's distribution
exactly, whatever was proposed and however the proposals were cut (q is the one-hot of what was drafted; the
sample-and-compare rule is then rejection sampling with acceptance probability p(proposal)).

Legend: B batch rows, K proposals, Q verified positions (K + 1: the anchor's slot and one per proposal), V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from angelspec.ops.sampling import sample_tokens


@dataclass(frozen=True)
class Verdict:
    """What one verify forward decided."""

    chosen_BQ: Tensor
    """int64: the target's token after each verified slot; meaningless behind ``accepted_B``."""
    accepted_B: Tensor
    """int64: accepted proposals. Row b commits ``chosen_BQ[b, : accepted_B[b] + 1]``: the accepted proposals and
    the bonus token."""


def count_accepted(proposals_BK: Tensor, lengths_B: Tensor, chosen_BQ: Tensor) -> Tensor:
    """Length of each row's longest prefix of proposals that equals the target's choice.

    Args:
        proposals_BK: int64; entries at or behind a row's length are padding of any value.
        lengths_B: int64, proposals per row, 0 to K.
        chosen_BQ: int64, Q >= K.

    Returns:
        int64 [B].
    """
    num_proposals = proposals_BK.shape[1]
    offered_BK = torch.arange(num_proposals, device=proposals_BK.device) < lengths_B.unsqueeze(1)
    hit_BK = (proposals_BK == chosen_BQ[:, :num_proposals]) & offered_BK
    return hit_BK.to(torch.int64).cumprod(dim=1).sum(dim=1)


def verify(
    logits_BQV: Tensor,
    *,
    proposals_BK: Tensor,
    lengths_B: Tensor,
    temperature: float,
    key_BQ: Tensor | None = None,
) -> Verdict:
    """Choose the target's tokens and count the accepted proposals, for a whole batch.

    Args:
        logits_BQV: the target's logits after [anchor, proposals...], Q = K + 1.
        proposals_BK: int64; may be padded behind ``lengths_B`` with any value.
        lengths_B: int64, proposals per row (they differ after a cut).
        temperature: 0 chooses the argmax.
        key_BQ: int64, the random streams at the positions of the chosen tokens; needed above temperature 0.

    Raises:
        ValueError: the shapes do not fit.
    """
    batch, num_slots, vocabulary = logits_BQV.shape
    if proposals_BK.shape != (batch, num_slots - 1):
        raise ValueError(f"{num_slots} verified slots need {num_slots - 1} proposals, not {tuple(proposals_BK.shape)}")
    if temperature == 0:
        chosen_BQ = logits_BQV.argmax(dim=-1)
    else:
        chosen_BQ = _sample_until_refused(
            logits_BQV, proposals_BK=proposals_BK, lengths_B=lengths_B, temperature=temperature, key_BQ=key_BQ
        )
    return Verdict(chosen_BQ, count_accepted(proposals_BK, lengths_B, chosen_BQ))


def _sample_until_refused(
    logits_BQV: Tensor, *, proposals_BK: Tensor, lengths_B: Tensor, temperature: float, key_BQ: Tensor | None
) -> Tensor:
    """Draw slot after slot, only in rows whose proposals were right so far: nothing reads what lies behind."""
    batch, num_slots, _ = logits_BQV.shape
    chosen_BQ = torch.zeros(batch, num_slots, dtype=torch.int64, device=logits_BQV.device)
    alive = torch.arange(batch, device=logits_BQV.device)
    for slot in range(num_slots):
        key_N = None if key_BQ is None else key_BQ[alive, slot]
        token_N = sample_tokens(logits_BQV[alive, slot], temperature=temperature, key_N=key_N)
        chosen_BQ[alive, slot] = token_N
        if slot + 1 < num_slots:
            alive = alive[(proposals_BK[alive, slot] == token_N) & (lengths_B[alive] > slot)]
            if alive.numel() == 0:
                break
    return chosen_BQ


def verify_reference(
    logits_BQV: Tensor,
    *,
    proposals_BK: Tensor,
    lengths_B: Tensor,
    temperature: float,
    key_BQ: Tensor | None = None,
) -> list[list[int]]:
    """``verify`` in the words of its definition, token by token: the committed tokens of each row."""
    committed = []
    for row in range(logits_BQV.shape[0]):
        tokens: list[int] = []
        for slot in range(int(lengths_B[row]) + 1):
            key = None if key_BQ is None else key_BQ[row, slot : slot + 1]
            logits = logits_BQV[row, slot : slot + 1]
            tokens.append(int(sample_tokens(logits, temperature=temperature, key_N=key)))
            if slot < int(lengths_B[row]) and tokens[-1] != int(proposals_BK[row, slot]):
                break
        committed.append(tokens)
    return committed
