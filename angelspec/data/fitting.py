"""Rows that can be trained on: cut to the longest document, and able to host at least one block.

An anchor ``a`` starts a block of ``block_size`` slots, itself included: the token before the proposals, and those.
(MTP's "block" is the anchor with one proposal per depth.) It is valid if it is supervised and the whole block lies in
the document: ``loss_mask[a]`` and ``a + block_size - 1 <= length - 1``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np

from angelspec.core.errors import DataError
from angelspec.data.reasons import Reason, RowRefused, count_reasons, table_below
from angelspec.data.tokenised import TokenisedRow


@dataclass(frozen=True, slots=True)
class DroppedRow:
    """A row that cannot be trained on."""

    id: str
    reason: Reason
    detail: str


@dataclass
class FittedRows:
    """Rows that can be trained on, and what became of the others."""

    kept: list[TokenisedRow] = field(default_factory=list)
    dropped: list[DroppedRow] = field(default_factory=list)
    num_cut: int = 0
    """Kept rows that lost their end."""

    @property
    def counts(self) -> dict[str, int]:
        """Dropped rows by reason."""
        return count_reasons(row.reason for row in self.dropped)


def count_anchors(loss_mask: np.ndarray, *, block_size: int) -> int:
    """Valid anchors of one document with this mask [length]."""
    return int(np.count_nonzero(loss_mask[: max(0, len(loss_mask) - block_size + 1)]))


def fit_row(row: TokenisedRow, *, max_document_tokens: int, block_size: int) -> TokenisedRow:
    """Cut a row to ``max_document_tokens``.

    Raises:
        RowRefused: what is left has no anchor.
    """
    if not row.num_supervised:
        raise RowRefused(Reason.NO_SUPERVISED_TOKEN, f"{len(row)} tokens")
    fitted = row
    if len(row) > max_document_tokens:
        kept = slice(max_document_tokens)
        fitted = replace(row, tokens=row.tokens[kept], loss_mask=row.loss_mask[kept])
        if not fitted.num_supervised:
            raise RowRefused(
                Reason.NO_SUPERVISED_TOKEN_AFTER_TRUNCATION,
                f"no supervised token after truncation from {len(row)} to {max_document_tokens} tokens",
            )
    if not count_anchors(fitted.loss_mask, block_size=block_size):
        first = int(np.argmax(fitted.loss_mask))
        raise RowRefused(
            Reason.NO_ANCHOR,
            f"{len(fitted)} tokens, {fitted.num_supervised} supervised from token {first}; a block has {block_size}",
        )
    return fitted


def fit_rows(rows: Iterable[TokenisedRow], *, max_document_tokens: int, block_size: int) -> FittedRows:
    """Cut rows to ``max_document_tokens`` and drop those that are left without an anchor, by reason.

    Raises:
        DataError: no row is left; the reasons are named.
    """
    result = FittedRows()
    for row in rows:
        try:
            fitted = fit_row(row, max_document_tokens=max_document_tokens, block_size=block_size)
        except RowRefused as refused:
            result.dropped.append(DroppedRow(row.id, refused.reason, refused.detail))
        else:
            result.kept.append(fitted)
            result.num_cut += len(fitted) < len(row)
    if not result.kept:
        table = table_below(result.counts)
        raise DataError(
            f"no row can be trained on ({len(result.dropped):,} rows){table}",
            mend="raise pack.row_length or pack.max_document_tokens, or give rows with longer answers",
        )
    return result
