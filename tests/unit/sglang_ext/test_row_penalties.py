"""Penalties of one request, in the order in which plain decoding with overlap applies them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("sglang")
from sglang_ext.penalties import RowPenalties

WORDS = 6


def penalties(already_put_out: tuple[int, ...] = (), **params: float) -> RowPenalties:
    facts = {
        "frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0, "min_new_tokens": 0,
        "stop_token_ids": None,
    }  # fmt: skip
    tokenizer = SimpleNamespace(additional_stop_token_ids=None, eos_token_id=5)
    req = SimpleNamespace(
        sampling_params=SimpleNamespace(**{**facts, **params}), tokenizer=tokenizer, eos_token_ids={5}, output_ids=[],
        origin_input_ids=[],
    )  # fmt: skip
    return RowPenalties(req, already_put_out=already_put_out, vocab_size=WORDS, device="cpu")


def penalised(row: RowPenalties, anchor: int) -> list[float]:
    logits = torch.tensor([[2.0, 2.0, -2.0, 2.0, 2.0, 2.0]])
    row.apply(torch.tensor([anchor]), logits)
    return [round(value, 4) for value in logits[0].tolist()]


def test_what_is_added_comes_before_what_scales() -> None:
    row = penalties(presence_penalty=0.5, repetition_penalty=1.25)
    assert penalised(row, 1) == [2.0, (2.0 - 0.5) / 1.25, -2.0, 2.0, 2.0, 2.0]
    assert penalised(row, 2) == [2.0, (2.0 - 0.5) / 1.25, (-2.0 - 0.5) * 1.25, 2.0, 2.0, 2.0]


def test_tokens_from_before_a_retraction_count() -> None:
    row = penalties(already_put_out=(3, 3, 0), frequency_penalty=0.25)
    assert penalised(row, 3) == [1.75, 2.0, -2.0, 2.0 - 3 * 0.25, 2.0, 2.0]
