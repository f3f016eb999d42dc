"""Packed rows: fixed rows of tokens in which every document stands alone.

Isolation is written into the rows: each token knows its document and its position in it, padding belongs to no
document (-1), and everything that mixes tokens (attention, anchors) asks these two.

Shapes: R rows, T tokens of a row.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from angelspec.core.errors import DataError
from angelspec.core.files import read_json, write_text_atomic
from angelspec.core.fingerprint import fingerprint
from angelspec.core.workloads import Workload
from angelspec.data.tokenised import TokenisedRow
from angelspec.ops.packing import first_fit

FORMAT_VERSION = 1
PADDING = -1
"""Document id of tokens that belong to none."""
_TENSORS = "rows.safetensors"
_INDEX = "rows.json"


@dataclass(frozen=True, slots=True)
class Document:
    """One conversation turn inside the packed rows."""

    id: str
    workload: Workload
    finish_reason: str
    group: str
    num_tokens: int
    num_supervised: int


@dataclass(frozen=True, eq=False)
class PackedRows:
    """Training rows on the CPU."""

    tokens_RT: Tensor
    """int32."""
    loss_mask_RT: Tensor
    """bool: tokens that the target generates."""
    document_RT: Tensor
    """int32: index into ``documents``; -1 for padding."""
    position_RT: Tensor
    """int32: position within the document, counted from 0; 0 for padding."""
    documents: tuple[Document, ...]

    def __post_init__(self) -> None:
        shapes = {tuple(tensor.shape) for tensor in self._tensors().values()}
        assert len(shapes) == 1 and len(next(iter(shapes))) == 2, shapes

    def __len__(self) -> int:
        return self.tokens_RT.shape[0]

    @property
    def row_length(self) -> int:
        """Tokens of a row."""
        return self.tokens_RT.shape[1]

    @property
    def digest(self) -> str:
        """Content hash of every tensor and of the documents."""
        return fingerprint({"tensors": _digest(self._tensors()), "documents": self._columns()}, length=32)

    def summary(self) -> dict[str, Any]:
        """Counts for the user: rows, supervised documents by workload, tokens, supervised tokens, share of padding."""
        present = [self.documents[index] for index in self.document_RT[self.loss_mask_RT].unique().tolist()]
        by_workload: dict[str, int] = {}
        for document in present:
            by_workload[document.workload] = by_workload.get(document.workload, 0) + 1
        num_tokens = int((self.document_RT >= 0).sum())
        num_supervised = int(self.loss_mask_RT.sum())
        slots = max(1, self.tokens_RT.numel())
        return {
            "rows": len(self),
            "row_length": self.row_length,
            "documents": len(present),
            "documents_by_workload": dict(sorted(by_workload.items())),
            "tokens": num_tokens,
            "supervised_tokens": num_supervised,
            "supervised_share": num_supervised / max(1, num_tokens),
            "padding_share": 1.0 - num_tokens / slots,
        }

    def rows(self, indices: Tensor | Sequence[int]) -> PackedRows:
        """Some rows, in the given order; ``documents`` stays whole, so document ids keep their meaning."""
        index = torch.as_tensor(indices, dtype=torch.int64)
        return PackedRows(**{name: tensor[index] for name, tensor in self._tensors().items()}, documents=self.documents)

    def only(self, *, workloads: Sequence[Workload]) -> PackedRows:
        """The same rows with supervision kept in the documents of some workloads only; no row is dropped, so that
        features of these rows still belong to them.

        Raises:
            DataError: no supervised token is left.
        """
        wanted = torch.tensor([document.workload in workloads for document in self.documents] + [False])
        mask_RT = self.loss_mask_RT & wanted[self.document_RT.long()]  # padding looks up the last entry
        if not mask_RT.any():
            raise DataError(f"no document of workload {', '.join(workloads)}", mend="choose workloads of the data")
        return PackedRows(self.tokens_RT, mask_RT, self.document_RT, self.position_RT, self.documents)

    def require_tokens(self, *, vocab_size: int, mask_token_id: int | None) -> None:
        """Refuse tokens that the target does not have, and the mask token (if any), which may occur in no document.

        Raises:
            DataError: naming the token and the number of documents.
        """
        real_RT = self.document_RT >= 0
        masks_RT = real_RT & (self.tokens_RT == mask_token_id) if mask_token_id is not None else torch.zeros(0)
        if count := int(masks_RT.sum()):
            documents = self.document_RT[masks_RT].unique().tolist()
            raise DataError(
                f"mask token id {mask_token_id} occurs in {len(documents)} rows ({count} times), "
                f"first in '{self.documents[documents[0]].id}'",
                mend="choose drafter.mask_token_id among ids that occur in no data, or drop these rows",
            )
        outside_RT = real_RT & ((self.tokens_RT < 0) | (self.tokens_RT >= vocab_size))
        if count := int(outside_RT.sum()):
            first = int(self.tokens_RT[outside_RT][0])
            raise DataError(
                f"{count} tokens are outside the target's vocabulary of {vocab_size}, the first is {first}",
                mend="these rows were made with another tokenizer; make them again",
            )

    def save(self, folder: Path) -> None:
        """Write ``rows.safetensors`` and then ``rows.json``, which names the content; each appears whole or not."""
        from safetensors.torch import save_file

        folder.mkdir(parents=True, exist_ok=True)
        unfinished = folder / f".{_TENSORS}.{os.getpid()}.tmp"
        try:
            save_file({name: tensor.contiguous() for name, tensor in self._tensors().items()}, unfinished)
            unfinished.replace(folder / _TENSORS)
        finally:
            unfinished.unlink(missing_ok=True)
        index = {
            "format_version": FORMAT_VERSION,
            "digest": self.digest,
            "summary": self.summary(),
            "documents": self._columns(),
        }
        write_text_atomic(folder / _INDEX, json.dumps(index, ensure_ascii=False, separators=(",", ":")) + "\n")

    def _tensors(self) -> dict[str, Tensor]:
        return {
            "tokens_RT": self.tokens_RT,
            "loss_mask_RT": self.loss_mask_RT,
            "document_RT": self.document_RT,
            "position_RT": self.position_RT,
        }

    def _columns(self) -> dict[str, list[Any]]:
        names = Document.__slots__
        return {name: [getattr(document, name) for document in self.documents] for name in names}


def load_rows(folder: Path, *, vocab_size: int | None = None, mask_token_id: int | None = None) -> PackedRows:
    """Read what ``PackedRows.save`` wrote.

    Args:
        folder: where it was saved.
        vocab_size: of the target that will read the rows; None: the tokens are not checked.
        mask_token_id: of the drafter that will be trained on them; None: it has none.

    Raises:
        DataError: incomplete, of another version, changed since it was written, or with tokens that it may not have.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    mend = "pack the rows again (delete the folder and run the recipe)"
    try:
        index = read_json(folder / _INDEX)
        tensors = load_file(folder / _TENSORS)
    except (OSError, json.JSONDecodeError, SafetensorError) as error:
        raise DataError(f"{folder} holds no whole set of packed rows: {error}", mend=mend) from error
    version = index.get("format_version")
    if version != FORMAT_VERSION:
        raise DataError(f"{folder} has format version {version}; this angelspec reads {FORMAT_VERSION}", mend=mend)
    columns = index["documents"]
    documents = tuple(Document(*values) for values in zip(*(columns[name] for name in Document.__slots__), strict=True))
    rows = PackedRows(**tensors, documents=documents)
    if rows.digest != index["digest"]:
        raise DataError(f"{folder} has changed since it was written", mend=mend)
    if vocab_size is not None:
        rows.require_tokens(vocab_size=vocab_size, mask_token_id=mask_token_id)
    return rows


def pack(rows: Sequence[TokenisedRow], *, row_length: int, pad_id: int) -> PackedRows:
    """Pack rows that fit (see ``fitting.fit_rows``) first-fit, in their order.

    Args:
        rows: each of 1 to ``row_length`` tokens, with a supervised one.
        row_length: T.
        pad_id: token that fills the rest; it is never looked at.

    Raises:
        DataError: no rows, or a row that is too long, or one without a supervised token (named).
    """
    if not rows:
        raise DataError("nothing to pack: no rows", mend="see why rows were dropped before")
    for row in rows:
        if len(row) > row_length:
            raise DataError(
                f"row '{row.id}' has {len(row)} tokens; a packed row has {row_length}", mend="raise pack.row_length"
            )
        if not row.num_supervised:
            raise DataError(f"row '{row.id}' supervises no token", mend="drop it before packing (fit_rows does)")
    plan = first_fit([len(row) for row in rows], row_length=row_length)
    shape = (len(plan), row_length)
    tokens_RT, mask_RT = np.full(shape, pad_id, np.int32), np.zeros(shape, bool)
    document_RT, position_RT = np.full(shape, PADDING, np.int32), np.zeros(shape, np.int32)
    documents: list[Document] = []
    for number, items in enumerate(plan):
        begin = 0
        for item in items:
            row = rows[item]
            span = slice(begin, begin + len(row))
            tokens_RT[number, span] = row.tokens
            mask_RT[number, span] = row.loss_mask
            document_RT[number, span] = len(documents)
            position_RT[number, span] = np.arange(len(row), dtype=np.int32)
            documents.append(Document(row.id, row.workload, row.finish_reason, row.group, len(row), row.num_supervised))
            begin += len(row)
    tensors = (torch.from_numpy(array) for array in (tokens_RT, mask_RT, document_RT, position_RT))
    return PackedRows(*tensors, documents=tuple(documents))


def _digest(tensors: dict[str, Tensor]) -> dict[str, str]:
    digests = {}
    for name, tensor in tensors.items():
        content = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)} ".encode())
        content.update(tensor.contiguous().numpy().data)
        digests[name] = content.hexdigest()
    return digests
