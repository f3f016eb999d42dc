"""One chunk of positions against the whole vocabulary: statistics, gradient of the logits, and matrix products.

Student and teacher rows share one product with the head and one buffer, unless the teacher's were judged before.
Probabilities are computed in place of the logits; elementwise work walks vocabulary tiles. When TV is differentiated,
the student's buffer stores q with the sign of (p - q): the one bit per entry that dTV/dz needs, at no memory. With A =
the sum of q where q <= p,

    dTV/dz = q * A - [q where q <= p]

of which the second part is (|signed q| + signed q) / 2. That saves a pass and costs A its last digits, which is felt
where the loss divides by a small alpha; there the second part is taken as it stands (``exact_tv``).

A support of a few tokens is gathered. One of thousands is cut: the teacher's rows keep, by sign or by zeros, which
tokens belong to it, and the rest is the arithmetic of the whole vocabulary. On a renormalised one q / Q takes the place
of q, with Q = sum of q inside; what is outside is struck from the student's buffer, unless cross-entropy is
differentiated as well.

Shapes: R rows (positions of the chunk), T teacher rows, X = R + T, V vocabulary, D hidden, K teacher's most probable
tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from angelspec.objectives.channels import Judged, LowRank, Support
from angelspec.objectives.closed_forms import GradientWeights, RowStatistics
from angelspec.objectives.top_tokens import first_maximum, top_threshold, top_tokens
from angelspec.objectives.workspace import Budget, Workspace

GATHERED_SHARE = 256
"""A support is gathered if it holds at most one token in so many: searching block maxima pays only then."""
_DEEPEST = 80.0
"""Logits further below a row's peak are lifted to here before a cut, so that no token of the support has p = 0."""
_TINY = 1e-20
"""Smallest share of q inside a renormalised support: below, q / Q is computed as if it were this."""


class ChunkInput(NamedTuple):
    """The positions of one chunk."""

    states_XD: Tensor
    """What meets the head, in its dtype: the R student rows, then teacher rows unless they were judged before."""
    labels_R: Tensor
    teacher_row_R: Tensor | slice | None
    """Which of the teacher's rows judges each position (a slice: neighbours in order); None without a teacher."""
    low_rank: LowRank | None
    """Addition to the student's logits, in the compute dtype."""
    judged: Judged | None = None
    """The teacher's rows, if they were judged before."""


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
    top_R: Tensor
    correct_R: Tensor
    student_RV: Tensor
    """q (0 outside a cut and renormalised support unless CE is differentiated), with the sign of (p - q) if
    ``below_R`` was not taken over a gathered support."""
    judged: Judged | None
    below_R: Tensor | None = None
    """A = sum of q where q <= p on the support; None unless TV is differentiated."""
    subset: Subset | None = None
    inside_R: Tensor | None = None
    """Q, the share of q inside a cut and renormalised support."""


@dataclass(frozen=True, kw_only=True)
class VocabularySweep:
    """The head with the decisions that hold for every chunk of one call."""

    head_VD: Tensor
    support: Support
    needs_kl: bool
    needs_tv_gradient: bool
    needs_ce_gradient: bool
    exact_tv: bool
    """Whether dTV/dz is taken as it stands: right to rounding however small alpha is, and also with q kept outside."""
    dtype: torch.dtype
    """Of logits, probabilities and losses."""
    budget: Budget
    workspace: Workspace

    # ---- the teacher

    def judge_apart(self, states_TD: Tensor) -> Judged:
        """Judge teacher rows in a buffer of their own: they outlive chunks, until the next rows are judged apart."""
        return self._judge(self._product(states_TD, name="teacher"))

    def _judge(self, logits_TV: Tensor) -> Judged:
        """Look at the teacher's logits once and leave in their place what is kept of them."""
        support = self.support
        restricts = support.top_k is not None and (self.needs_kl or support.renormalise)
        if not restricts or not len(logits_TV):
            _softmax_(logits_TV)
            return Judged(logits_TV, entropy_T=self._entropy(logits_TV))
        if support.top_k * GATHERED_SHARE <= self._num_tokens:
            top = top_tokens(logits_TV, count=support.top_k)
            if not support.renormalise:
                _softmax_(logits_TV)
            return Judged(logits_TV, top)
        self._cut_(logits_TV)
        mass_T = None
        if not support.renormalise:
            mass_T = self._row_sums(logits_TV, lambda part, tile: torch.clamp(part, min=0, out=tile))
        return Judged(logits_TV, entropy_T=self._entropy(logits_TV), mass_T=mass_T)

    def _cut_(self, logits_TV: Tensor) -> None:
        """Turn logits into p, marking what lies outside the support: see ``Judged.probability_TV``."""
        threshold_T1 = top_threshold(logits_TV, count=self.support.top_k)[:, None]
        peak_T1 = logits_TV.amax(1, keepdim=True)
        total_T1 = torch.zeros_like(peak_T1)
        for tile, columns in self._tiles(len(logits_TV)):
            part = logits_TV[:, columns]
            torch.sub(part, threshold_T1, out=tile)
            torch.maximum(part, peak_T1 - _DEEPEST, out=part).sub_(peak_T1).exp_()
            if self.support.renormalise:
                part.copysign_(tile).clamp_(min=0)
                total_T1 += part.sum(1, keepdim=True)
            else:
                total_T1 += part.sum(1, keepdim=True)
                part.copysign_(tile)
        for _, columns in self._tiles(len(logits_TV)):
            logits_TV[:, columns].div_(total_T1)

    def _entropy(self, probability_TV: Tensor) -> Tensor | None:
        """- sum p log p on the support."""
        if not self.needs_kl:
            return None

        def entropy(part: Tensor, tile: Tensor) -> Tensor:
            # outside a cut support p is 0 or negative; on the whole vocabulary there is nothing to clamp
            inside = part if self.support.top_k is None else torch.clamp(part, min=0, out=tile)
            return torch.special.entr(inside, out=tile)

        return self._row_sums(probability_TV, entropy)

    def _row_sums(self, values_TV: Tensor, function: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        total_T = torch.zeros(len(values_TV), dtype=self.dtype, device=values_TV.device)
        for tile, columns in self._tiles(len(values_TV)):
            total_T += function(values_TV[:, columns], tile).sum(1)
        return total_T

    # ---- the student

    def measure(self, chunk: ChunkInput) -> MeasuredChunk:
        """Return the statistics of the chunk's positions, leaving their probabilities in the workspace."""
        student_RV, teacher_TV = self._logits(chunk).tensor_split([len(chunk.labels_R)])
        judged = chunk.judged
        if judged is None and chunk.teacher_row_R is not None:
            judged = self._judge(teacher_TV)
        student_top_RK, cross_R = None, None
        if judged is not None and judged.top is not None:
            student_top_RK = student_RV.gather(1, judged.top.tokens_TK[chunk.teacher_row_R])
        elif judged is not None and self.needs_kl:
            cross_R = self._cross(student_RV, judged, chunk.teacher_row_R)

        label_logit_R = _pick(student_RV, chunk.labels_R)
        best_R = first_maximum(student_RV)
        best_logit_R = _pick(student_RV, best_R)
        _softmax_(student_RV)
        confidence_R = _pick(student_RV, best_R)
        log_normaliser_R = best_logit_R - confidence_R.log()
        ce_R, correct_R = log_normaliser_R - label_logit_R, best_R == chunk.labels_R
        facts = {"confidence_R": confidence_R, "top_R": best_R, "correct_R": correct_R, "student_RV": student_RV}
        if judged is None:
            return MeasuredChunk(RowStatistics(ce_R), **facts, judged=None)
        if judged.top is not None:
            return self._measure_subset(chunk, judged, student_top_RK, log_normaliser_R, ce_R, facts)

        inside_R, kl_R = None, None
        if self.support.renormalise:
            inside_R = self._inside(student_RV, judged, chunk.teacher_row_R)
            log_normaliser_R = log_normaliser_R + inside_R.log()
        if cross_R is not None:
            mass_R = 1.0 if judged.mass_T is None else judged.mass_T[chunk.teacher_row_R]
            kl_R = mass_R * log_normaliser_R - cross_R - judged.entropy_T[chunk.teacher_row_R]
        alpha_R, below_R = self._compare(student_RV, judged, chunk.teacher_row_R, inside_R)
        return MeasuredChunk(
            RowStatistics(ce_R, kl_R, alpha_R), **facts, judged=judged, below_R=below_R, inside_R=inside_R
        )

    def _measure_subset(
        self,
        chunk: ChunkInput,
        judged: Judged,
        student_top_RK: Tensor,
        log_normaliser_R: Tensor,
        ce_R: Tensor,
        facts: dict[str, Tensor],
    ) -> MeasuredChunk:
        """The comparison where the support is gathered."""
        rows = chunk.teacher_row_R
        tokens_RK, teacher_top_RK = judged.top.tokens_TK[rows], judged.top.logits_TK[rows]
        if self.support.renormalise:
            subset = _subset(tokens_RK, student_top_RK.log_softmax(1), teacher_top_RK.log_softmax(1))
            alpha_R = torch.minimum(subset.student_RK, subset.teacher_RK).sum(1)
            below_R = (_below(subset) * subset.student_RK).sum(1)
        else:
            best_logit_T, place_T = judged.top.logits_TK.max(1)
            best_T = _pick(judged.top.tokens_TK, place_T)
            teacher_normaliser_T = best_logit_T - _pick(judged.probability_TV, best_T).log()
            subset = _subset(
                tokens_RK,
                student_top_RK - log_normaliser_R[:, None],
                teacher_top_RK - teacher_normaliser_T[rows][:, None],
            )
            alpha_R, below_R = self._compare(facts["student_RV"], judged, rows, None)
        statistics = RowStatistics(ce_R, subset.kl_R, alpha_R)
        return MeasuredChunk(statistics, **facts, judged=judged, below_R=below_R, subset=subset)

    def _cross(self, student_logits_RV: Tensor, judged: Judged, rows: Tensor | slice) -> Tensor:
        """Return sum p z over the support, [R]."""
        total_R = torch.zeros(len(student_logits_RV), dtype=self.dtype, device=student_logits_RV.device)
        for tile, columns in self._tiles(len(student_logits_RV)):
            teacher = self._rows(judged.probability_TV, rows, columns)
            if judged.mass_T is not None:
                teacher = torch.clamp(teacher, min=0, out=tile)
            total_R += torch.mul(teacher, student_logits_RV[:, columns], out=tile).sum(1)
        return total_R

    def _inside(self, student_RV: Tensor, judged: Judged, rows: Tensor | slice) -> Tensor:
        """Return the share of q inside the support, [R], and strike what is outside where nothing needs it."""
        total_R = torch.zeros(len(student_RV), dtype=self.dtype, device=student_RV.device)
        for tile, columns in self._tiles(len(student_RV)):
            student = student_RV[:, columns]
            torch.sign(self._rows(judged.probability_TV, rows, columns), out=tile)
            total_R += (tile.mul_(student) if self.needs_ce_gradient else student.mul_(tile)).sum(1)
        return torch.where(total_R < _TINY, _TINY, total_R)

    def _compare(
        self, student_RV: Tensor, judged: Judged, rows: Tensor | slice, inside_R: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return alpha and, when TV is differentiated, A, leaving q with the sign of (p - q).

        On a renormalised support p Q is compared with q, which needs no second q; outside, p Q = 0 and no q is below
        it.
        """
        alpha_R = torch.zeros(len(student_RV), dtype=self.dtype, device=student_RV.device)
        below_R = torch.zeros_like(alpha_R) if self.needs_tv_gradient else None
        for tile, columns in self._tiles(len(student_RV)):
            student, teacher = student_RV[:, columns], self._rows(judged.probability_TV, rows, columns)
            if inside_R is not None:
                teacher = torch.mul(teacher, inside_R[:, None], out=self._scratch("scaled", *tile.shape))
            elif judged.mass_T is not None:
                teacher = torch.abs(teacher, out=self._scratch("scaled", *tile.shape))
            alpha_R += torch.minimum(teacher, student, out=tile).sum(1)
            if below_R is not None:
                student.copysign_(torch.sub(teacher, student, out=tile))
                below_R += (torch.clamp(student, min=0, out=tile) if self.exact_tv else student).sum(1)
        if inside_R is not None:
            alpha_R = alpha_R / inside_R
            below_R = None if below_R is None else below_R / inside_R
        if below_R is not None and not self.exact_tv:
            below_R = 0.5 * (1.0 + below_R)  # the signed sum is A less what is above p
        return alpha_R, below_R

    # ---- gradients

    def logit_gradient(
        self, chunk: ChunkInput, measured: MeasuredChunk, weights: GradientWeights, *, out_RV: Tensor
    ) -> None:
        """Write the weighted gradient with respect to the student's logits; ``out_RV`` may be the student's buffer."""
        subset, judged, inside_R = measured.subset, measured.judged, measured.inside_R
        if inside_R is not None and self.needs_ce_gradient:
            self._cut_gradient(chunk, measured, weights, out_RV=out_RV)
        else:
            renormalised = subset is not None and self.support.renormalise
            q_weight_R = torch.zeros_like(measured.confidence_R) if weights.ce_R is None else weights.ce_R
            tv_R = None if renormalised else weights.tv_R
            if weights.kl_R is not None and not renormalised:
                mass_R = 1.0
                if subset is not None:
                    mass_R = subset.teacher_RK.sum(1)
                elif judged.mass_T is not None:
                    mass_R = judged.mass_T[chunk.teacher_row_R]
                q_weight_R = q_weight_R + weights.kl_R * mass_R
            if tv_R is not None:
                q_weight_R = q_weight_R + tv_R * measured.below_R
            if inside_R is not None:
                q_weight_R = q_weight_R / inside_R
                tv_R = None if tv_R is None else tv_R / inside_R
            self._mix_probabilities(measured, q_weight_R, tv_R, out_RV=out_RV)
            if renormalised:
                out_RV.scatter_add_(1, subset.tokens_RK, _subset_gradient(subset, weights, measured.below_R))
            elif weights.kl_R is not None and subset is not None:
                out_RV.scatter_add_(1, subset.tokens_RK, -weights.kl_R[:, None] * subset.teacher_RK)
            elif weights.kl_R is not None:
                for tile, columns in self._tiles(len(out_RV)):
                    teacher = self._rows(judged.probability_TV, chunk.teacher_row_R, columns)
                    if judged.mass_T is not None:
                        teacher = torch.clamp(teacher, min=0, out=tile)
                    out_RV[:, columns].addcmul_(teacher, weights.kl_R[:, None], value=-1)
        if weights.ce_R is not None:
            out_RV.scatter_add_(1, chunk.labels_R[:, None], -weights.ce_R[:, None])

    def _cut_gradient(
        self, chunk: ChunkInput, measured: MeasuredChunk, weights: GradientWeights, *, out_RV: Tensor
    ) -> None:
        """The gradient of CE (but for the label) and of KL and TV on a cut and renormalised support.

        Inside, that of KL and TV is (kl + tv A) q/Q - tv [q/Q where q/Q <= p] - kl p; outside, where no q is below p,
        it is 0. The buffer holds q everywhere here.
        """
        inside_R1 = measured.inside_R[:, None]
        kl_R1 = 0.0 if weights.kl_R is None else weights.kl_R[:, None]
        q_weight_R1 = kl_R1 / inside_R1
        if weights.tv_R is not None:
            q_weight_R1 = (kl_R1 + (weights.tv_R * measured.below_R)[:, None]) / inside_R1
        compares = weights.kl_R is not None or weights.tv_R is not None
        for tile, columns in self._tiles(len(out_RV)):
            size = self._scratch("size", *tile.shape)
            source, out = measured.student_RV[:, columns], out_RV[:, columns]
            torch.abs(source, out=size)
            if not compares:
                torch.mul(size, weights.ce_R[:, None], out=out)
                continue
            teacher = self._rows(measured.judged.probability_TV, chunk.teacher_row_R, columns)
            torch.sign(teacher, out=tile).mul_(size).mul_(q_weight_R1)
            if weights.tv_R is None:
                out.copy_(tile)
            else:
                torch.clamp(source, min=0, out=out).mul_(-weights.tv_R[:, None] / inside_R1).add_(tile)
            if weights.kl_R is not None:
                out.addcmul_(teacher, weights.kl_R[:, None], value=-1)
            if weights.ce_R is not None:
                out.addcmul_(size, weights.ce_R[:, None])

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
        """Return the logits of all rows, [X,V], in the workspace."""
        logits_XV = self._product(chunk.states_XD, name="logits")
        if chunk.low_rank is not None:
            state_RP, weight_VP = chunk.low_rank
            for columns in _ranges(self._num_tokens, self.budget.product_columns):
                logits_XV[: len(state_RP), columns].addmm_(state_RP, weight_VP[columns].T)
        return logits_XV

    def _product(self, states_XD: Tensor, *, name: str) -> Tensor:
        """Return states @ head^T, [X,V], in a buffer of that name.

        Narrow products: their slice of the head and of the output stays in cache, which is a fifth faster on a CPU
        than one call over the vocabulary.
        """
        logits_XV = self._scratch(name, len(states_XD), self._num_tokens)
        narrow_head = self.head_VD.dtype != self.dtype
        for columns in _ranges(self._num_tokens, self.budget.product_columns):
            out, head = logits_XV[:, columns], self.head_VD[columns]
            if narrow_head:
                product = self._scratch("product", *out.shape, dtype=head.dtype)
                out.copy_(torch.mm(states_XD, head.T, out=product))
            else:
                torch.mm(states_XD, head.T, out=out)
        return logits_XV

    def _rows(self, values_TV: Tensor, rows: Tensor | slice, columns: slice) -> Tensor:
        """Each position's teacher row, [R, columns]; not to be written to."""
        part = values_TV[:, columns]
        if isinstance(rows, slice):
            return part[rows]
        return torch.index_select(part, 0, rows, out=self._scratch("rows", len(rows), part.shape[1]))

    def _mix_probabilities(
        self, measured: MeasuredChunk, q_weight_R: Tensor, tv_R: Tensor | None, *, out_RV: Tensor
    ) -> None:
        """Write q * q_weight - [q where q <= p] * tv."""
        signed = self.needs_tv_gradient and (measured.subset is None or not self.support.renormalise)
        if signed and tv_R is not None and not self.exact_tv:
            q_weight_R = q_weight_R - 0.5 * tv_R
        q_weight_R1 = q_weight_R[:, None]
        for tile, columns in self._tiles(len(out_RV)):
            source, out = measured.student_RV[:, columns], out_RV[:, columns]
            if not signed:
                torch.mul(source, q_weight_R1, out=out)
            elif tv_R is None:
                torch.abs(source, out=out).mul_(q_weight_R1)
            else:
                torch.abs(source, out=tile)
                if self.exact_tv:
                    torch.clamp(source, min=0, out=out).mul_(-tv_R[:, None])
                else:
                    torch.mul(source, -0.5 * tv_R[:, None], out=out)
                out.addcmul_(tile, q_weight_R1)

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


def _below(subset: Subset) -> Tensor:
    """1 where q < p, 1/2 where they are equal."""
    return torch.heaviside(subset.teacher_RK - subset.student_RK, subset.student_RK.new_tensor(0.5))


def _subset_gradient(subset: Subset, weights: GradientWeights, below_R: Tensor) -> Tensor:
    """Return the gradient of KL and TV, both renormalised, with respect to the subset's logits, [R,K]."""
    gradient_RK = torch.zeros_like(subset.student_RK)
    if weights.kl_R is not None:
        gradient_RK += weights.kl_R[:, None] * (subset.student_RK - subset.teacher_RK)
    if weights.tv_R is not None:
        gradient_RK += weights.tv_R[:, None] * subset.student_RK * (below_R[:, None] - _below(subset))
    return gradient_RK
