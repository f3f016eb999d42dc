"""One chunk of positions against the whole vocabulary: statistics, gradient of the logits, and matrix products.

The chunk's probabilities are computed in place of its logits, in buffers that the workspace reuses; elementwise work
walks vocabulary tiles. When TV is differentiated, the student's buffer stores q with the sign of (p - q): the one bit
per entry that dTV/dz needs, at no memory.

Shapes: R rows (positions of the chunk), T teacher rows of the chunk (T <= R), V vocabulary, D hidden, K teacher's most
probable tokens, P rank of the trainable addition.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from angelspec.objectives.channels import LowRank, Support
from angelspec.objectives.closed_forms import GradientWeights, RowStatistics
from angelspec.objectives.workspace import Workspace


class ChunkInput(NamedTuple):
    """The positions of one chunk, in the head's dtype where they meet the head."""

    hidden_RD: Tensor
    labels_R: Tensor
    teacher_hidden_TD: Tensor | None
    teacher_row_R: Tensor | None
    """Row of ``teacher_hidden_TD`` that judges each position."""
    low_rank: LowRank | None


class Subset(NamedTuple):
    """The teacher's most probable tokens as seen from each position."""

    tokens_RK: Tensor
    student_RK: Tensor
    """q there: renormalised if the support is."""
    teacher_RK: Tensor
    """p there: renormalised if the support is."""


class MeasuredChunk(NamedTuple):
    """What the forward sweep leaves behind; valid until the workspace's next chunk."""

    rows: RowStatistics
    confidence_R: Tensor
    correct_R: Tensor
    student_RV: Tensor
    """q, or q with the sign of (p - q) if ``signed``."""
    signed: bool
    sign_mean_R: Tensor | None
    """sum_i sign(q_i - p_i) q_i; None unless TV is differentiated."""
    teacher_TV: Tensor | None
    """p; None without a teacher, logits if the support is renormalised."""
    kl_mass_R: Tensor | float
    """The teacher's probability on the KL's support."""
    subset: Subset | None


class _TeacherRows(NamedTuple):
    buffer_TV: Tensor
    log_normaliser_T: Tensor | None
    negative_entropy_T: Tensor | None
    top_logits_TK: Tensor | None
    top_tokens_TK: Tensor | None


@dataclass(frozen=True, kw_only=True)
class VocabularySweep:
    """The head with the decisions that hold for every chunk of one call."""

    head_VD: Tensor
    support: Support
    needs_kl: bool
    needs_tv_gradient: bool
    tile_columns: int
    dtype: torch.dtype
    """Of logits, probabilities and losses."""
    workspace: Workspace

    def measure(self, chunk: ChunkInput) -> MeasuredChunk:
        """Return the statistics of the chunk's positions, leaving their probabilities in the workspace."""
        teacher = None if chunk.teacher_hidden_TD is None else self._teacher_rows(chunk.teacher_hidden_TD)
        student_RV = self._scratch("student", len(chunk.hidden_RD), self._num_tokens)
        self._project(chunk.hidden_RD, out_RV=student_RV, low_rank=chunk.low_rank)

        label_logit_R = student_RV.gather(1, chunk.labels_R[:, None])[:, 0]
        peak_R = student_RV.amax(1)
        correct_R = row_argmax(student_RV) == chunk.labels_R
        tokens_RK = student_logits_RK = None
        if teacher is not None and teacher.top_tokens_TK is not None:
            tokens_RK = teacher.top_tokens_TK[chunk.teacher_row_R]
            student_logits_RK = student_RV.gather(1, tokens_RK)
        cross_R = self._expected_logit(student_RV, teacher, chunk.teacher_row_R)

        softmax_(student_RV)
        confidence_R = student_RV.amax(1)
        log_normaliser_R = peak_R - confidence_R.log()
        ce_R = log_normaliser_R - label_logit_R
        if teacher is None:
            rows = RowStatistics(ce_R)
            return MeasuredChunk(
                rows, confidence_R, correct_R, student_RV, False, None, None, kl_mass_R=1.0, subset=None
            )

        subset, kl_R, kl_mass_R = None, None, 1.0
        if tokens_RK is not None:
            teacher_logits_RK = teacher.top_logits_TK[chunk.teacher_row_R]
            if self.support.renormalise:
                log_q_RK, log_p_RK = student_logits_RK.log_softmax(1), teacher_logits_RK.log_softmax(1)
            else:
                log_q_RK = student_logits_RK - log_normaliser_R[:, None]
                log_p_RK = teacher_logits_RK - teacher.log_normaliser_T[chunk.teacher_row_R][:, None]
            subset = Subset(tokens_RK, log_q_RK.exp(), log_p_RK.exp())
            kl_R = (subset.teacher_RK * (log_p_RK - log_q_RK)).sum(1)
            if not self.support.renormalise:
                kl_mass_R = subset.teacher_RK.sum(1)
        elif self.needs_kl:
            kl_R = teacher.negative_entropy_T[chunk.teacher_row_R] + log_normaliser_R - cross_R

        if self.support.renormalise:
            alpha_R = torch.minimum(subset.student_RK, subset.teacher_RK).sum(1)
            sign_mean_R = (_sign(subset) * subset.student_RK).sum(1)
        else:
            alpha_R, sign_mean_R = self._compare(student_RV, teacher.buffer_TV, chunk.teacher_row_R)
        return MeasuredChunk(
            RowStatistics(ce_R, kl_R, alpha_R),
            confidence_R,
            correct_R,
            student_RV,
            self.needs_tv_gradient and not self.support.renormalise,
            sign_mean_R,
            teacher.buffer_TV,
            kl_mass_R,
            subset,
        )

    def logit_gradient(
        self, chunk: ChunkInput, measured: MeasuredChunk, weights: GradientWeights, *, out_RV: Tensor
    ) -> None:
        """Write the weighted gradient with respect to the student's logits; ``out_RV`` may be the student's buffer."""
        subset, renormalised = measured.subset, self.support.renormalise
        q_weight_R = torch.zeros_like(measured.confidence_R) if weights.ce_R is None else weights.ce_R
        sign_weight_R = None
        if weights.kl_R is not None and not renormalised:
            q_weight_R = q_weight_R + weights.kl_R * measured.kl_mass_R
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
        result_RD = torch.empty(len(gradient_RV), self.head_VD.shape[1], dtype=self.dtype, device=gradient_RV.device)
        if self.head_VD.dtype == self.dtype:
            return torch.mm(gradient_RV, self.head_VD, out=result_RD)
        result_RD.zero_()
        for staging, columns in self._tiles(len(gradient_RV), dtype=self.head_VD.dtype):
            result_RD += torch.mm(staging.copy_(gradient_RV[:, columns]), self.head_VD[columns])
        return result_RD

    def gradient_buffer(self, num_rows: int) -> Tensor:
        """Return a second [R,V] buffer, for a gradient that must leave the probabilities intact."""
        return self._scratch("gradient", num_rows, self._num_tokens)

    @property
    def _num_tokens(self) -> int:
        return self.head_VD.shape[0]

    def _teacher_rows(self, hidden_TD: Tensor) -> _TeacherRows:
        buffer_TV = self._scratch("teacher", len(hidden_TD), self._num_tokens)
        self._project(hidden_TD, out_RV=buffer_TV)
        top_logits_TK = top_tokens_TK = None
        if self.support.top_k is not None and (self.needs_kl or self.support.renormalise):
            top_logits_TK, top_tokens_TK = buffer_TV.topk(self.support.top_k, 1)
        if self.support.renormalise:
            return _TeacherRows(buffer_TV, None, None, top_logits_TK, top_tokens_TK)
        peak_T = buffer_TV.amax(1)
        softmax_(buffer_TV)
        log_normaliser_T = peak_T - buffer_TV.amax(1).log()
        negative_entropy_T = None
        if self.needs_kl and self.support.top_k is None:
            negative_entropy_T = torch.zeros_like(peak_T)
            for tile, columns in self._tiles(len(buffer_TV)):
                negative_entropy_T -= torch.special.entr(buffer_TV[:, columns], out=tile).sum(1)
        return _TeacherRows(buffer_TV, log_normaliser_T, negative_entropy_T, top_logits_TK, top_tokens_TK)

    def _project(self, hidden_RD: Tensor, *, out_RV: Tensor, low_rank: LowRank | None = None) -> None:
        """Write hidden @ head^T (+ state @ weight^T)."""
        same_dtype = self.head_VD.dtype == self.dtype
        for staging, columns in self._tiles(len(out_RV), dtype=self.head_VD.dtype):
            out = out_RV[:, columns]
            product = torch.mm(hidden_RD, self.head_VD[columns].T, out=out if same_dtype else staging)
            if not same_dtype:
                out.copy_(product)
            if low_rank is not None:
                out.addmm_(low_rank.state_NR, low_rank.weight_VR[columns].T)

    def _expected_logit(
        self, logits_RV: Tensor, teacher: _TeacherRows | None, teacher_row_R: Tensor | None
    ) -> Tensor | None:
        """Return sum_V p z, [R], when the KL runs over the whole vocabulary."""
        if teacher is None or teacher.negative_entropy_T is None:
            return None
        total_R = torch.zeros(len(logits_RV), dtype=self.dtype, device=logits_RV.device)
        for tile, columns in self._tiles(len(logits_RV)):
            torch.index_select(teacher.buffer_TV[:, columns], 0, teacher_row_R, out=tile)
            total_R += tile.mul_(logits_RV[:, columns]).sum(1)
        return total_R

    def _compare(self, student_RV: Tensor, teacher_TV: Tensor, teacher_row_R: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return alpha and, when TV is differentiated, sum of sign(q - p) q, leaving q with the sign of (p - q)."""
        alpha_R = torch.zeros(len(student_RV), dtype=self.dtype, device=student_RV.device)
        sign_mean_R = torch.zeros_like(alpha_R) if self.needs_tv_gradient else None
        for (tile, columns), (smaller, _) in zip(
            self._tiles(len(student_RV)), self._tiles(len(student_RV), name="smaller"), strict=True
        ):
            student = student_RV[:, columns]
            torch.index_select(teacher_TV[:, columns], 0, teacher_row_R, out=tile)
            alpha_R += torch.minimum(tile, student, out=smaller).sum(1)
            if sign_mean_R is not None:
                sign_mean_R -= student.copysign_(tile.sub_(student)).sum(1)
        return alpha_R, sign_mean_R

    def _mix_probabilities(
        self, measured: MeasuredChunk, q_weight_R: Tensor, sign_weight_R: Tensor | None, *, out_RV: Tensor
    ) -> None:
        """Write q * q_weight + q * sign(p - q) * sign_weight."""
        q_weight_R1 = q_weight_R[:, None]
        for tile, columns in self._tiles(len(out_RV)):
            source, out = measured.student_RV[:, columns], out_RV[:, columns]
            if not measured.signed:
                torch.mul(source, q_weight_R1, out=out)
            elif sign_weight_R is None:
                torch.abs(source, out=out).mul_(q_weight_R1)
            else:
                torch.abs(source, out=tile)
                torch.mul(source, sign_weight_R[:, None], out=out).addcmul_(tile, q_weight_R1)

    def _tiles(
        self, num_rows: int, *, dtype: torch.dtype | None = None, name: str = "tile"
    ) -> Iterator[tuple[Tensor, slice]]:
        """Yield the vocabulary in column ranges, each with a temporary [rows, columns] that fits it."""
        for start in range(0, self._num_tokens, self.tile_columns):
            stop = min(start + self.tile_columns, self._num_tokens)
            yield self._scratch(name, num_rows, stop - start, dtype=dtype), slice(start, stop)

    def _scratch(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return self.workspace.take(name, shape, dtype=dtype or self.dtype, device=self.head_VD.device)


def softmax_(logits_RV: Tensor) -> None:
    """Turn logits into probabilities in place.

    The kernel reads a row for its maximum and its sum before it writes the row elementwise, so input and output may
    be one buffer; the parity tests would notice a kernel that breaks this.
    """
    torch.softmax(logits_RV, 1, out=logits_RV)


def row_argmax(values_RV: Tensor) -> Tensor:
    """Return the first index of each row's maximum, [R]."""
    return values_RV.argmax(1)


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
