"""What is asked of the vocabulary head: records shared by the frugal path and its reference.

Shapes: N token positions, M distinct teacher rows, T teacher rows that are held, V vocabulary, D hidden, R rank of the
trainable addition, K teacher's most probable tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Channel:
    """A mix of per-token losses with constant coefficients; it becomes one value and one gradient per token.

    Losses that share their per-token weights belong in one channel: each channel costs a matrix product.
    """

    ce: float = 0.0
    kl: float = 0.0
    tv: float = 0.0
    l1: float = 0.0
    lk_hybrid: float = 0.0
    lk_alpha: float = 0.0
    eta: float = 3.0

    @property
    def compares(self) -> bool:
        """Whether any of its losses needs the teacher."""
        return self.needs_kl or self.needs_tv

    @property
    def needs_kl(self) -> bool:
        """Whether KL enters its value."""
        return bool(self.kl or self.lk_hybrid)

    @property
    def needs_tv(self) -> bool:
        """Whether TV or alpha enters its value."""
        return bool(self.tv or self.l1 or self.lk_hybrid or self.lk_alpha)


@dataclass(frozen=True, kw_only=True)
class Support:
    """Where student and teacher are compared; the three supports of ``tokenwise.forward_kl``."""

    top_k: int | None = None
    """KL on the teacher's K most probable tokens; None: the whole vocabulary. Of tokens that share the K-th place
    either some count, or (where K is large and the frugal path cuts by a threshold) all."""
    renormalise: bool = False
    """Renormalise both inside the top K, for every comparison and for alpha; otherwise only KL is restricted."""

    def __post_init__(self) -> None:
        if self.renormalise and self.top_k is None:
            raise ValueError("renormalise needs top_k")

    @property
    def alpha_top_k(self) -> int | None:
        """The subset on which TV and alpha are taken; None: the whole vocabulary."""
        return self.top_k if self.renormalise else None


class Teacher(NamedTuple):
    """The frozen target's last hidden states (after its final norm) and which of them judges each position."""

    hidden_MD: Tensor
    index_N: Tensor | None = None
    """Row of ``hidden_MD`` for each position; None: position i has row i. Overlapping blocks share rows."""


class TopTokens(NamedTuple):
    """The K largest logits of each teacher row, in no particular order, and the tokens that have them."""

    logits_TK: Tensor
    tokens_TK: Tensor


class Judged(NamedTuple):
    """What is kept of teacher rows once their logits have been looked at."""

    probability_TV: Tensor
    """p over the whole vocabulary. Cut by a threshold: negative outside the support, or 0 there (and renormalised) with
    a renormalised support. Gathered and renormalised: the logits as they were."""
    top: TopTokens | None = None
    """The support, where it is gathered."""
    entropy_T: Tensor | None = None
    """- sum p log p on a support that is not gathered; None where no KL asks for it."""
    mass_T: Tensor | None = None
    """sum p on the support, where that may be less than 1."""


class JudgedTeacher(NamedTuple):
    """Teacher rows that met the head before (``head_loss.judge_rows``) and now judge positions of several calls."""

    rows: Judged
    index_N: Tensor
    """Row of ``rows`` for each position."""


class LowRank(NamedTuple):
    """A trainable addition to the logits, state_NR @ weight_VR^T (DSpark's Markov head)."""

    state_NR: Tensor
    weight_VR: Tensor


class TokenStatistics(NamedTuple):
    """Facts about each position, detached, [N] each."""

    ce_N: Tensor
    """-log q(label)."""
    confidence_N: Tensor
    """Largest probability of the student."""
    top_N: Tensor
    """int64: the student's most probable token, the lowest of equal ones."""
    correct_N: Tensor
    """bool: that token is the label."""
    alpha_N: Tensor | None
    """sum min(p, q) on the support; None without a teacher."""


class HeadLoss(NamedTuple):
    """Per-token losses of every channel and the statistics of every position."""

    losses: dict[str, Tensor]
    """Channel name to [N] losses with their graph."""
    statistics: TokenStatistics


def check_request(
    hidden_ND: Tensor,
    *,
    head_VD: Tensor,
    labels_N: Tensor,
    channels: Mapping[str, Channel],
    teacher: Teacher | JudgedTeacher | None,
    low_rank: LowRank | None,
    support: Support,
) -> None:
    """Refuse shapes that do not fit, a head that asks for a gradient, and comparisons without a teacher.

    Values (label range, teacher index) are not looked at: that would synchronise with an accelerator.

    Raises:
        ValueError: naming the argument that is wrong.
    """
    (num_positions, width), vocabulary = hidden_ND.shape, head_VD.shape[0]
    _expect("head_VD", head_VD, (vocabulary, width))
    _expect("labels_N", labels_N, (num_positions,))
    if head_VD.requires_grad:
        raise ValueError("head_VD is frozen here and would silently get no gradient; detach it")
    if isinstance(teacher, JudgedTeacher):
        _expect("teacher.index_N", teacher.index_N, (num_positions,))
        if low_rank is not None:
            raise ValueError("judged rows live for one walk, and an addition to the logits needs two; give the states")
    elif teacher is not None:
        num_rows = num_positions if teacher.index_N is None else teacher.hidden_MD.shape[0]
        _expect("teacher.hidden_MD", teacher.hidden_MD, (num_rows, width))
        if teacher.index_N is not None:
            _expect("teacher.index_N", teacher.index_N, (num_positions,))
    elif comparing := [name for name, channel in channels.items() if channel.compares]:
        raise ValueError(f"channels {comparing} compare with a teacher, and none was given")
    if low_rank is not None:
        rank = low_rank.weight_VR.shape[-1]
        _expect("low_rank.state_NR", low_rank.state_NR, (num_positions, rank))
        _expect("low_rank.weight_VR", low_rank.weight_VR, (vocabulary, rank))
    if support.top_k is not None and support.top_k > vocabulary:
        raise ValueError(f"top_k {support.top_k} exceeds the vocabulary of {vocabulary}")


def compute_dtype(head_VD: Tensor) -> torch.dtype:
    """Return the dtype of logits and losses: float32, or float64 for a float64 head."""
    return torch.float64 if head_VD.dtype == torch.float64 else torch.float32


def _expect(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected {shape}")
