"""One chunk of positions against the whole vocabulary: statistics, gradient of the logits, and matrix products.

Student and teacher rows share one product with the head and one buffer. Probabilities are computed in place of the
logits; elementwise work walks vocabulary tiles. When TV is differentiated, the student's buffer stores q with the sign
of (p - q): the one bit per entry that dTV/dz needs, at no memory.

Shapes: R rows (positions of the chunk), T teacher rows of the chunk (T <= R), X = R + T, V vocabulary, D hidden,
K teacher's most probable tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from angelspec.objectives.channels import LowRank, Support
from angelspec.objectives.closed_forms import GradientWeights, RowStatistics
from angelspec.objectives.top_tokens import TopTokens, first_maximum, top_tokens
from angelspec.objectives.workspace import Budget, Workspace


class ChunkInput(NamedTuple):
    """The positions of one chunk."""

    states_XD: Tensor
    """What meets the head, in its dtype: the R student rows, then the T teacher rows."""
    labels_R: Tensor
    teacher_row_R: Tensor | None
    """Which of the T teacher rows judges each position; None without a teacher."""
    low_rank: LowRank | None
    """Addition to the student's logits, in the compute dtype."""


class Subset(NamedTuple):
    """The teacher's most probable tokens as seen from each position."""

    tokens_RK: Tensor
    student_RK: Tensor
    """q there: renormalised if the support is."""
    teacher_RK: Tensor
    """p there: renormalised if the support is."""
    kl_R: Tensor
    """sum_K p (log p - log q)."""


class MeasuredChunk(NamedTuple):
    """What the forward sweep leaves behind; valid until the workspace's next chunk."""

    rows: RowStatistics
    confidence_R: Tensor
    correct_R: Tensor
    student_RV: Tensor
    """q, or q with the sign of (p - q) if ``sign_mean_R`` was taken over the whole vocabulary."""
    teacher_TV: Tensor
    """p; logits if the support is renormalised; no rows without a teacher."""
    sign_mean_R: Tensor | None = None
    """sum_i sign(q_i - p_i) q_i on the support; None unless TV is differentiated."""
    subset: Subset | None = None


@dataclass(frozen=True, kw_only=True)
class VocabularySweep:
    """The head with the decisions that hold for every chunk of one call."""

    head_VD: Tensor
    support: Support
    needs_kl: bool
    needs_tv_gradient: bool
    dtype: torch.dtype
    """Of logits, probabilities and losses."""
    budget: Budget
    workspace: Workspace

    def measure(self, chunk: ChunkInput) -> MeasuredChunk:
        """Return the statistics of the chunk's positions, leaving their probabilities in the workspace."""
        logits_XV = self._logits(chunk)
        student_RV, teacher_TV = logits_XV.tensor_split([len(chunk.labels_R)])
        teacher_top = self._judge(teacher_TV)
        student_top_RK = None
        if teacher_top is not None:
            tokens_RK = teacher_top.tokens_RK[chunk.teacher_row_R]
            student_top_RK = student_RV.gather(1, tokens_RK)
        kl_R = self._full_kl_up_to_normaliser(student_RV, teacher_TV, chunk.teacher_row_R)

        label_logit_R = _pick(student_RV, chunk.labels_R)
        best_R = first_maximum(student_RV)
        best_logit_R = _pick(student_RV, best_R)
        _softmax_(student_RV)
        confidence_R = _pick(student_RV, best_R)
        log_normaliser_R = best_logit_R - confidence_R.log()
        ce_R, correct_R = log_normaliser_R - label_logit_R, best_R == chunk.labels_R
        if chunk.teacher_row_R is None:
            return MeasuredChunk(RowStatistics(ce_R), confidence_R, correct_R, student_RV, teacher_TV)

        subset = None
        if kl_R is not None:
            kl_R = kl_R + log_normaliser_R
        elif teacher_top is not None:
            teacher_top_RK = teacher_top.logits_RK[chunk.teacher_row_R]
            if self.support.renormalise:
                subset = _subset(tokens_RK, student_top_RK.log_softmax(1), teacher_top_RK.log_softmax(1))
            else:
                best_logit_T, place_T = teacher_top.logits_RK.max(1)
                best_T = _pick(teacher_top.tokens_RK, place_T)
                teacher_normaliser_T = best_logit_T - _pick(teacher_TV, best_T).log()
                subset = _subset(
                    tokens_RK,
                    student_top_RK - log_normaliser_R[:, None],
                    teacher_top_RK - teacher_normaliser_T[chunk.teacher_row_R][:, None],
                )
            kl_R = subset.kl_R

        if self.support.renormalise:
            alpha_R = torch.minimum(subset.student_RK, subset.teacher_RK).sum(1)
            sign_mean_R = (_sign(subset) * subset.student_RK).sum(1)
        else:
            alpha_R, sign_mean_R = self._compare(student_RV, teacher_TV, chunk.teacher_row_R)
        rows = RowStatistics(ce_R, kl_R, alpha_R)
        return MeasuredChunk(rows, confidence_R, correct_R, student_RV, teacher_TV, sign_mean_R, subset)

    def logit_gradient(
        self, chunk: ChunkInput, measured: MeasuredChunk, weights: GradientWeights, *, out_RV: Tensor
    ) -> None:
        """Write the weighted gradient with respect to the student's logits; ``out_RV`` may be the student's buffer."""
        subset, renormalised = measured.subset, self.support.renormalise
        q_weight_R = torch.zeros_like(measured.confidence_R) if weights.ce_R is None else weights.ce_R
        sign_weight_R = None
        if weights.kl_R is not None and not renormalised:
            q_weight_R = q_weight_R + weights.kl_R * (1.0 if subset is None else subset.teacher_RK.sum(1))
        if weights.tv_R is not None and not renormalised:
            q_weight_R = q_weight_R - 0.5 * weights.tv_R * measured.sign_mean_R
            sign_weight_R = -0.5 * weights.tv_R
        self._mix_probabilities(measured, q_weight_R, sign_weight_R, out_RV=out_RV)

        if renormalised:
            out_RV.scatter_add_(1, subset.tokens_RK, _subset_gradient(subset, weights, measured.sign_mean_R))
        elif weights.kl_R is not None and subset is not None:
            out_RV.scatter_add_(1, subset.tokens_RK, -weights.kl_R[:, None] * subset.teacher_RK)
        elif weights.kl_R is not None:
            for tile, columns in self._tiles(len(out_RV)):
                torch.index_select(measured.teacher_TV[:, columns], 0, chunk.teacher_row_R, out=tile)
                out_RV[:, columns].addcmul_(tile, weights.kl_R[:, None], value=-1)
        if weights.ce_R is not None:
            out_RV.scatter_add_(1, chunk.labels_R[:, None], -weights.ce_R[:, None])

    def pull_back(self, gradient_RV: Tensor) -> Tensor:
        """Return gradient_RV @ head, [R,D], in the compute dtype."""
        shape = len(gradient_RV), self.head_VD.shape[1]
        if self.head_VD.dtype == self.dtype:
            return torch.mm(gradient_RV, self.head_VD)
        result_RD = torch.zeros(shape, dtype=self.dtype, device=gradient_RV.device)
        for narrow, columns in self._tiles(len(gradient_RV), dtype=self.head_VD.dtype):
            result_RD += torch.mm(narrow.copy_(gradient_RV[:, columns]), self.head_VD[columns])
        return result_RD

    def gradient_buffer(self, num_rows: int) -> Tensor:
        """Return a second [R,V] buffer, for a gradient that must leave the probabilities intact."""
        return self._scratch("gradient", num_rows, self._num_tokens)

    @property
    def _num_tokens(self) -> int:
        return self.head_VD.shape[0]

    def _logits(self, chunk: ChunkInput) -> Tensor:
        """Return the logits of all rows, [X,V], in the workspace.

        Narrow products: their slice of the head and of the output stays in cache, which is a fifth faster on a CPU
        than one call over the vocabulary.
        """
        logits_XV = self._scratch("logits", len(chunk.states_XD), self._num_tokens)
        narrow_head = self.head_VD.dtype != self.dtype
        for columns in _ranges(self._num_tokens, self.budget.product_columns):
            out, head = logits_XV[:, columns], self.head_VD[columns]
            if narrow_head:
                product = self._scratch("product", *out.shape, dtype=head.dtype)
                out.copy_(torch.mm(chunk.states_XD, head.T, out=product))
            else:
                torch.mm(chunk.states_XD, head.T, out=out)
            if chunk.low_rank is not None:
                state_RP, weight_VP = chunk.low_rank
                out[: len(state_RP)].addmm_(state_RP, weight_VP[columns].T)
        return logits_XV

    def _judge(self, teacher_TV: Tensor) -> TopTokens | None:
        """Turn the teacher's logits into probabilities, and return its top K logits where the support needs them."""
        top = None
        if self.support.top_k is not None and len(teacher_TV) and (self.needs_kl or self.support.renormalise):
            top = top_tokens(teacher_TV, count=self.support.top_k)
        if not self.support.renormalise:
            _softmax_(teacher_TV)
        return top

    def _full_kl_up_to_normaliser(
        self, student_logits_RV: Tensor, teacher_TV: Tensor, teacher_row_R: Tensor | None
    ) -> Tensor | None:
        """Return sum_V p (log p - z), [R], when the KL runs over the whole vocabulary."""
        if teacher_row_R is None or not self.needs_kl or self.support.top_k is not None:
            return None
        total_R = torch.zeros(len(student_logits_RV), dtype=self.dtype, device=teacher_TV.device)
        for tile, columns in self._tiles(len(teacher_TV)):
            total_R -= torch.special.entr(teacher_TV[:, columns], out=tile).sum(1)[teacher_row_R]
        for tile, columns in self._tiles(len(student_logits_RV)):
            torch.index_select(teacher_TV[:, columns], 0, teacher_row_R, out=tile)
            total_R -= tile.mul_(student_logits_RV[:, columns]).sum(1)
        return total_R

    def _compare(self, student_RV: Tensor, teacher_TV: Tensor, teacher_row_R: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return alpha and, when TV is differentiated, sum of sign(q - p) q, leaving q with the sign of (p - q)."""
        num_rows = len(student_RV)
        alpha_R = torch.zeros(num_rows, dtype=self.dtype, device=student_RV.device)
        sign_mean_R = torch.zeros_like(alpha_R) if self.needs_tv_gradient else None
        for tile, columns in self._tiles(num_rows):
            student, smaller = student_RV[:, columns], self._scratch("smaller", *tile.shape)
            torch.index_select(teacher_TV[:, columns], 0, teacher_row_R, out=tile)
            alpha_R += torch.minimum(tile, student, out=smaller).sum(1)
            if sign_mean_R is not None:
                sign_mean_R -= student.copysign_(tile.sub_(student)).sum(1)
        return alpha_R, sign_mean_R

    def _mix_probabilities(
        self, measured: MeasuredChunk, q_weight_R: Tensor, sign_weight_R: Tensor | None, *, out_RV: Tensor
    ) -> None:
        """Write q * q_weight + q * sign(p - q) * sign_weight."""
        signed = self.needs_tv_gradient and not self.support.renormalise
        q_weight_R1 = q_weight_R[:, None]
        for tile, columns in self._tiles(len(out_RV)):
            source, out = measured.student_RV[:, columns], out_RV[:, columns]
            if not signed:
                torch.mul(source, q_weight_R1, out=out)
            elif sign_weight_R is None:
                torch.abs(source, out=out).mul_(q_weight_R1)
            else:
                torch.abs(source, out=tile)
                torch.mul(source, sign_weight_R[:, None], out=out).addcmul_(tile, q_weight_R1)

    def _tiles(self, num_rows: int, *, dtype: torch.dtype | None = None) -> Iterator[tuple[Tensor, slice]]:
        """Yield the vocabulary in column ranges, each with a temporary [rows, columns] that fits it."""
        for columns in _ranges(self._num_tokens, self.budget.tile_columns):
            yield self._scratch("tile", num_rows, columns.stop - columns.start, dtype=dtype), columns

    def _scratch(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return self.workspace.take(name, shape, dtype=dtype or self.dtype, device=self.head_VD.device)


def _ranges(size: int, step: int) -> Iterator[slice]:
    for start in range(0, size, step):
        yield slice(start, min(start + step, size))


def _pick(values_RV: Tensor, tokens_R: Tensor) -> Tensor:
    return values_RV.gather(1, tokens_R[:, None])[:, 0]


def _softmax_(logits_RV: Tensor) -> None:
    """Turn logits into probabilities in place.

    The kernel reads a row for its maximum and its sum before it writes the row elementwise, so input and output may
    be one buffer; the parity tests would notice a kernel that breaks this.
    """
    torch.softmax(logits_RV, 1, out=logits_RV)


def _subset(tokens_RK: Tensor, log_q_RK: Tensor, log_p_RK: Tensor) -> Subset:
    p_RK = log_p_RK.exp()
    return Subset(tokens_RK, log_q_RK.exp(), p_RK, (p_RK * (log_p_RK - log_q_RK)).sum(1))


def _sign(subset: Subset) -> Tensor:
    return torch.sign(subset.student_RK - subset.teacher_RK)


def _subset_gradient(subset: Subset, weights: GradientWeights, sign_mean_R: Tensor) -> Tensor:
    """Return the gradient of KL and TV, both renormalised, with respect to the subset's logits, [R,K]."""
    gradient_RK = torch.zeros_like(subset.student_RK)
    if weights.kl_R is not None:
        gradient_RK += weights.kl_R[:, None] * (subset.student_RK - subset.teacher_RK)
    if weights.tv_R is not None:
        gradient_RK += 0.5 * weights.tv_R[:, None] * subset.student_RK * (_sign(subset) - sign_mean_R[:, None])
    return gradient_RK
