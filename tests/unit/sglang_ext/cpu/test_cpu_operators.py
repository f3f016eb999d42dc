"""The platform's operators and packed layers equal SGLang's plain torch forms."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

pytest.importorskip("sglang")

from sglang.srt.layers.layernorm import RMSNorm  # noqa: E402
from sglang.srt.layers.quantization.unquant import UnquantizedEmbeddingMethod, UnquantizedLinearMethod  # noqa: E402
from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding  # noqa: E402
from sglang.srt.layers.rotary_embedding.utils import apply_rotary_emb  # noqa: E402
from sglang.srt.model_executor.model_runner_components import weight_updater  # noqa: E402

from sglang_ext.cpu import weights  # noqa: E402
from sglang_ext.cpu.operators import rms_norm, rotate  # noqa: E402

DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("changes", [{}, {"cast_x_before_out_mul": True}, {"fp32_residual": True}])
def test_rms_norm(dtype, changes):
    torch.manual_seed(0)
    norm = RMSNorm(48, eps=1e-5, **changes).to(dtype)
    norm.weight.data.normal_()
    with torch.inference_mode():
        x, residual = torch.randn(9, 48).to(dtype), torch.randn(9, 48).to(dtype)
        torch.testing.assert_close(rms_norm(norm, x), norm.forward_native(x))
        for got, want in zip(rms_norm(norm, x, residual), norm.forward_native(x, residual), strict=True):
            assert got.dtype == want.dtype
            torch.testing.assert_close(got, want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("neox", "rotary"), [(True, 16), (True, 8), (False, 16)])
@pytest.mark.parametrize("fused", [True, False])
def test_rotation(dtype, neox, rotary, fused):
    torch.manual_seed(0)
    angle = torch.arange(50).unsqueeze(1) / 100 ** (torch.arange(0, rotary, 2) / rotary)
    rope = SimpleNamespace(
        is_neox_style=neox,
        rotary_dim=rotary,
        head_size=16,
        cos_sin_cache=torch.cat([angle.cos(), angle.sin()], -1).to(dtype),
        _apply_rotary_emb_wrapped=apply_rotary_emb,
    )
    rope.forward_native = lambda *args: RotaryEmbedding.forward_native(rope, *args)
    columns = torch.randn(7, 16 * 8).to(dtype)
    query, key, _ = columns.split([16 * 5, 16 * 2, 16], dim=-1)
    if not fused:
        query, key = query.clone(), key.clone()
    before = columns.clone()
    positions = torch.randint(0, 50, (7,))
    tolerance = 1e-6 if dtype == torch.float32 else 3e-2
    for got, want in zip(rotate(rope, positions, query, key), rope.forward_native(positions, query, key), strict=True):
        assert got.shape == want.shape and got.dtype == want.dtype
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
    assert torch.equal(columns, before)


def small_model(dtype, tied):
    def layer(method, rows, columns):
        module = nn.Module()
        module.weight = nn.Parameter(torch.randn(rows, columns).to(dtype), requires_grad=False)
        module.quant_method = method()
        return module

    model = nn.Module()
    model.embed = layer(UnquantizedEmbeddingMethod, 40, 24)
    model.lm_head = model.embed if tied else layer(UnquantizedEmbeddingMethod, 40, 24)
    model.proj = layer(UnquantizedLinearMethod, 33, 24)
    return model


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tied", [True, False])
def test_packed_layers(dtype, tied):
    torch.manual_seed(0)
    model = small_model(dtype, tied)
    size = weights.pack_weights(model)
    assert size == model.proj.weight.nbytes + model.lm_head.weight.nbytes
    assert isinstance(model.lm_head.quant_method, weights.PackedHeadMethod)
    assert isinstance(model.embed.quant_method, weights.PackedHeadMethod) == tied
    tolerance = 1e-5 if dtype == torch.float32 else 5e-2
    for rows in (1, 2, 9, 130):
        x = torch.randn(rows, 24).to(dtype)
        bias = torch.randn(33).to(dtype)
        got, want = model.proj.quant_method.apply(model.proj, x, bias), x @ model.proj.weight.T + bias
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
        got, want = model.lm_head.quant_method.apply(model.lm_head, x), x @ model.lm_head.weight.T
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
    tokens = torch.tensor([3, 7])
    assert torch.equal(model.embed.quant_method.embedding(model.embed, tokens), model.embed.weight[tokens])
    # SGLang refuses to load new weights beneath the copies
    assert "packed copies" in weight_updater._unsupported_derived_weight_cache_error(model)


def test_nothing_is_packed_without_room(monkeypatch):
    model = small_model(torch.float32, True)
    monkeypatch.setattr(weights, "SHARE", 0.0)
    assert weights.pack_weights(model) == 0
    assert type(model.proj.quant_method) is UnquantizedLinearMethod
    assert weight_updater._unsupported_derived_weight_cache_error(model) is None


def test_the_packed_head_is_taken_by_the_logits_processor():
    from sglang.srt.layers.logits_processor import should_apply_lm_head_quant_method

    model = small_model(torch.float32, True)
    weights.pack_weights(model)
    assert should_apply_lm_head_quant_method(model.lm_head, model.lm_head.quant_method)
