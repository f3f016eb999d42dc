"""The target's forward over packed rows, isolated by document.

The documents of several rows are sorted by length and run unpacked, a few of like length at a time: attention is then
causal over one document, with no mask and no scores between strangers, and padding of rows costs nothing.
``extract_reference`` says the same with a mask over whole rows.

Legend: R rows, T tokens of a row, B documents of a forward, L tokens of its longest, F features (number of taps times
the target's hidden size), D target hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from angelspec.core.errors import DataError

if TYPE_CHECKING:
    from angelspec.targets.target import Target, TargetStates

TOKENS_PER_FORWARD = 2048
"""Most tokens of one forward, padding included: larger buffers are given back to the system and paid for again."""


@dataclass(frozen=True)
class Features:
    """What a step receives of the target for some rows."""

    taps_RTF: Tensor
    """Outputs of the tapped layers, concatenated in id order."""
    hidden_RTD: Tensor
    """Last hidden states after the target's final norm."""
    finite_R: Tensor
    """bool; a row with a non-finite feature is refused: its features are zero and it must not be trained on."""

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> Features:
        """The same features on another device, in another precision if one is given."""
        return Features(self.taps_RTF.to(device, dtype), self.hidden_RTD.to(device, dtype), self.finite_R.to(device))


@dataclass(frozen=True)
class Span:
    """Where a document lies: tokens ``start`` to ``start + length`` of a row."""

    row: int
    start: int
    length: int

    @property
    def columns(self) -> slice:
        return slice(self.start, self.start + self.length)


def document_spans(document_RT: Tensor) -> list[Span]:
    """The documents of packed rows (ids from 0; -1 is padding), row by row."""
    spans = []
    for row, ids_T in enumerate(document_RT.cpu()):
        ids, lengths = ids_T.unique_consecutive(return_counts=True)
        start = 0
        for document, length in zip(ids.tolist(), lengths.tolist(), strict=True):
            if document >= 0:
                spans.append(Span(row, start, length))
            start += length
    return spans


def length_groups(spans: Sequence[Span], *, max_tokens: int) -> Iterator[list[Span]]:
    """Spans of like length, longest first: at most ``max_tokens`` with padding, or a single span."""
    group: list[Span] = []
    for span in sorted(spans, key=lambda span: (-span.length, span.row, span.start)):
        if group and group[0].length * (len(group) + 1) > max_tokens:
            yield group
            group = []
        group.append(span)
    if group:
        yield group


@torch.no_grad()
def extract(
    target: Target, *, tokens_RT: Tensor, document_RT: Tensor, position_RT: Tensor, layer_ids: tuple[int, ...]
) -> Features:
    """Run the target over packed rows, isolated by document.

    Args:
        tokens_RT: int [R, T].
        document_RT: int [R, T]; document ids, -1 at padding.
        position_RT: int [R, T]; positions inside each document.
        layer_ids: ascending layers to tap.

    Returns:
        Features in the target's dtype; those of padding are zero.

    Raises:
        DataError: the target gives states of another shape than these rows have.
    """
    device = target.device
    shape, hidden_size = tuple(tokens_RT.shape), target.geometry.hidden_size
    taps_RTF = torch.zeros(*shape, hidden_size * len(layer_ids), dtype=target.dtype, device=device)
    hidden_RTD = torch.zeros(*shape, hidden_size, dtype=target.dtype, device=device)
    for group in length_groups(document_spans(document_RT), max_tokens=TOKENS_PER_FORWARD):
        longest = group[0].length
        # Behind a shorter document stand zeros: causal attention never looks at them from inside it. Their positions
        # count on: where they begin anew, transformers takes the row for a packed one and builds a mask.
        tokens_BL, position_BL = torch.zeros(2, len(group), longest, dtype=torch.int64)
        for index, span in enumerate(group):
            tokens_BL[index, : span.length] = tokens_RT[span.row, span.columns]
            position_BL[index] = position_RT[span.row, span.columns][0] + torch.arange(longest)
        states = target.forward(tokens_BL.to(device), positions_BT=position_BL.to(device), layer_ids=layer_ids)
        _check_shapes(states, (len(group), longest), layer_ids=layer_ids, hidden_size=hidden_size)
        for index, span in enumerate(group):
            taps_RTF[span.row, span.columns] = states.taps_BTF[index, : span.length]
            hidden_RTD[span.row, span.columns] = states.hidden_BTD[index, : span.length]
    return _without_refused(taps_RTF, hidden_RTD)


@torch.no_grad()
def extract_reference(
    target: Target, *, tokens_RT: Tensor, document_RT: Tensor, position_RT: Tensor, layer_ids: tuple[int, ...]
) -> Features:
    """What ``extract`` computes, by one forward over whole rows under ``document_mask``; padding is not zeroed."""
    device = target.device
    states = target.forward(
        tokens_RT.to(device, torch.int64),
        positions_BT=position_RT.to(device, torch.int64),
        attention_mask=document_mask(document_RT.to(device)),
        layer_ids=layer_ids,
    )
    return _without_refused(states.taps_BTF, states.hidden_BTD)


def document_mask(document_RT: Tensor) -> Tensor:
    """Which earlier tokens each token may see: those of its own document, itself included.

    Returns:
        bool [R, 1, T, T]. Padding sees padding, so that no row of the softmax is empty.
    """
    num_tokens = document_RT.shape[1]
    causal_TT = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=document_RT.device).tril()
    return ((document_RT[:, :, None] == document_RT[:, None, :]) & causal_TT)[:, None]


def _without_refused(taps_RTF: Tensor, hidden_RTD: Tensor) -> Features:
    finite_R = taps_RTF.isfinite().flatten(1).all(1) & hidden_RTD.isfinite().flatten(1).all(1)
    if not finite_R.all():
        taps_RTF = taps_RTF.masked_fill(~finite_R[:, None, None], 0)
        hidden_RTD = hidden_RTD.masked_fill(~finite_R[:, None, None], 0)
    return Features(taps_RTF, hidden_RTD, finite_R)


def _check_shapes(
    states: TargetStates, shape: tuple[int, int], *, layer_ids: tuple[int, ...], hidden_size: int
) -> None:
    for name, tensor, width in (
        ("features", states.taps_BTF, hidden_size * len(layer_ids)),
        ("last hidden states", states.hidden_BTD, hidden_size),
    ):
        if tuple(tensor.shape) != (*shape, width):
            raise DataError(
                f"the target gave {name} of shape {list(tensor.shape)} for documents of shape {list(shape)}; "
                f"expected {[*shape, width]}"
            )
