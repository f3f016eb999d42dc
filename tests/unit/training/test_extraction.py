import pytest
import torch
from training_builders import pattern_rows, tiny_target

from angelspec.core.errors import DataError
from angelspec.training.extraction import Span, document_mask, document_spans, extract, length_groups


def test_mask_is_causal_inside_documents():
    mask = document_mask(torch.tensor([[0, 0, 1, 1, -1]]))[0, 0]
    assert mask.int().tolist() == [
        [1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 0, 1],
    ]  # fmt: skip


def test_spans_leave_padding_out():
    document_RT = torch.tensor([[4, 4, 5, -1, -1], [6, 6, 6, 6, 6], [-1] * 5])
    assert document_spans(document_RT) == [Span(0, 0, 2), Span(0, 2, 1), Span(1, 0, 5)]


def test_groups_hold_every_span_once_and_keep_the_limit():
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 120, (40,), generator=generator).tolist()
    spans = [Span(row, 0, length) for row, length in enumerate(lengths)]
    groups = list(length_groups(spans, max_tokens=100))
    assert sorted(span.row for group in groups for span in group) == list(range(40))
    for group in groups:
        assert len(group) == 1 or max(span.length for span in group) * len(group) <= 100
    assert len(groups) < 35
    assert list(length_groups([], max_tokens=100)) == []


def test_features_of_padding_are_zero():
    rows = pattern_rows(2)
    rows.document_RT[0, -9:] = -1
    features = extract(
        tiny_target(),
        tokens_RT=rows.tokens_RT,
        document_RT=rows.document_RT,
        position_RT=rows.position_RT,
        layer_ids=(1, 2),
    )
    assert not features.taps_RTF[0, -9:].any() and not features.hidden_RTD[0, -9:].any()
    assert features.taps_RTF[0, :-9].any(-1).all() and features.finite_R.all()


def test_a_target_of_another_shape_is_an_error_not_a_crash():
    class Short:
        real = tiny_target()
        device, dtype, geometry = real.device, real.dtype, real.geometry

        def forward(self, tokens_BT, *, positions_BT, layer_ids):
            return self.real.forward(tokens_BT[:, 1:], layer_ids=layer_ids)

    tokens_RT = torch.zeros(1, 48, dtype=torch.int32)
    with pytest.raises(DataError, match=r"shape \[1, 47, 192\] for documents of shape \[1, 48\]"):
        extract(
            Short(),
            tokens_RT=tokens_RT,
            document_RT=tokens_RT,
            position_RT=torch.arange(48)[None],
            layer_ids=(1, 2, 3),
        )
