"""What corrects a slot by the token before it, and what predicts whether a proposal will be accepted.

Shapes: D hidden, r Markov rank, V vocabulary; ``...`` stands for any leading axes.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from angelspec.drafters.layers import RMSNorm, add_linear, linear
from angelspec.ops.activation import gated_silu


class HiddenCorrection(nn.Module):
    """DFly's correction: z' = z + W_down(silu(W_gate x) * (W_up x)), x = [norm(z); norm(E[previous token])].

    z is the backbone's output after its final norm, E the target's frozen embedding; z' goes to the target's head
    without another norm (AngelSpec, arXiv 2607.25852). ``down_proj`` starts at zero, so an untrained correction is the
    identity.
    """

    def __init__(self, hidden_size: int, intermediate_size: int, *, eps: float) -> None:
        super().__init__()
        self.hidden_norm = RMSNorm(hidden_size, eps=eps)
        self.embed_norm = RMSNorm(hidden_size, eps=eps)
        self.gate_proj = nn.Linear(2 * hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(2 * hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, hidden: Tensor, previous_embedding: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Correct ``hidden`` [..., D] by the embedding [..., D] of the token before each slot."""
        inputs = torch.cat([self.hidden_norm(hidden), self.embed_norm(previous_embedding)], dim=-1)
        inner = gated_silu(linear(inputs, self.gate_proj.weight, dtype), linear(inputs, self.up_proj.weight, dtype))
        return add_linear(hidden, inner, self.down_proj.weight, dtype)


class MarkovHead(nn.Module):
    """DSpark's bias of a slot's logits by the token before it: W2 W1[previous] (arXiv 2607.05147).

    ``markov_w2`` starts at zero: an untrained head adds nothing.
    """

    def __init__(self, vocab_size: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, vocab_size, bias=False)

    def features(self, previous_tokens: Tensor) -> Tensor:
        """Rank features [..., r] of the token ids [...] before each slot."""
        return self.markov_w1(previous_tokens)

    def bias(self, features: Tensor, candidates: Tensor | None = None) -> Tensor:
        """Logit bias of every token [..., V], or of ``candidates`` [..., M] (ids) alone [..., M]."""
        if candidates is None:
            return self.markov_w2(features)
        return (self.markov_w2.weight[candidates] @ features.unsqueeze(-1)).squeeze(-1)


class ConfidenceHead(nn.Module):
    """Logit of a proposal's acceptance from the scored state and, where there are any, the Markov features."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.proj = nn.Linear(inputs, 1)

    def forward(self, hidden: Tensor, markov_features: Tensor | None) -> Tensor:
        """[..., D] (and [..., r]) to [...]."""
        inputs = hidden if markov_features is None else torch.cat([hidden, markov_features], dim=-1)
        return self.proj(inputs).squeeze(-1)
