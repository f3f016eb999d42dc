"""Losses: per-token references, position weights, the memory-frugal head path, and their composition."""

from angelspec.objectives.channels import (
    Channel,
    HeadLoss,
    Judged,
    JudgedTeacher,
    LowRank,
    Support,
    Teacher,
    TokenStatistics,
)
from angelspec.objectives.compose import block_loss_terms
from angelspec.objectives.end_to_end import end_to_end_tv
from angelspec.objectives.head_loss import head_loss, judge_rows
from angelspec.objectives.head_loss_reference import reference_head_loss
from angelspec.objectives.terms import LossTerms, Ratio, SlotCounts, sum_counts, sum_losses, total_loss
from angelspec.objectives.unrolled import UnrolledHead
from angelspec.objectives.workspace import Budget, Workspace

__all__ = [
    "Budget",
    "Channel",
    "HeadLoss",
    "Judged",
    "JudgedTeacher",
    "LossTerms",
    "LowRank",
    "Ratio",
    "SlotCounts",
    "Support",
    "Teacher",
    "TokenStatistics",
    "UnrolledHead",
    "Workspace",
    "block_loss_terms",
    "end_to_end_tv",
    "head_loss",
    "judge_rows",
    "reference_head_loss",
    "sum_counts",
    "sum_losses",
    "total_loss",
]
