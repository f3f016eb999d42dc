"""Documents run unpacked give the features of whole rows under the document mask."""

import torch
from training_builders import pattern_rows, tiny_target

from angelspec.training import extraction
from angelspec.training.extraction import extract, extract_reference

LAYERS = (0, 2, 3)


def test_extraction_equals_the_masked_reference(monkeypatch):
    rows = pattern_rows(7, row_length=96)
    rows.document_RT[2, 80:] = -1
    given = {
        "tokens_RT": rows.tokens_RT,
        "document_RT": rows.document_RT,
        "position_RT": rows.position_RT,
        "layer_ids": LAYERS,
    }
    slow = extract_reference(tiny_target(), **given)
    inside = rows.document_RT >= 0
    for max_tokens in (1, 100, 2048):
        monkeypatch.setattr(extraction, "TOKENS_PER_FORWARD", max_tokens)
        fast = extract(tiny_target(), **given)
        torch.testing.assert_close(fast.taps_RTF[inside], slow.taps_RTF[inside], rtol=1e-4, atol=2e-3)
        torch.testing.assert_close(fast.hidden_RTD[inside], slow.hidden_RTD[inside], rtol=1e-4, atol=2e-3)
        assert torch.equal(fast.finite_R, slow.finite_R)


def test_the_reference_and_the_comparison_can_fail():
    """Features under a mask that joins the documents are far from these."""
    rows = pattern_rows(2, row_length=96)
    given = {"tokens_RT": rows.tokens_RT, "position_RT": rows.position_RT, "layer_ids": LAYERS}
    joined = extract_reference(tiny_target(), document_RT=torch.zeros_like(rows.document_RT), **given)
    fast = extract(tiny_target(), document_RT=rows.document_RT, **given)
    assert (joined.hidden_RTD - fast.hidden_RTD).abs().max() > 0.05
