import torch
from training_builders import section

from angelspec.training import optimisers, precision
from angelspec.training.precision import has_bfloat16_products, product_dtype


def test_auto_follows_the_processor_and_a_named_precision_does_not(monkeypatch):
    for found in (True, False):
        monkeypatch.setattr(precision, "has_bfloat16_products", lambda device, found=found: found)
        expected = torch.bfloat16 if found else torch.float32
        assert product_dtype(section(dtype="auto")) == expected
        assert product_dtype(section(dtype="bfloat16")) == torch.bfloat16
        assert product_dtype(section(dtype="float32")) == torch.float32


def test_an_accelerator_has_them_and_a_cpu_says(monkeypatch):
    assert has_bfloat16_products("cuda:0")
    for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        monkeypatch.setattr(torch.cpu, name, lambda: False, raising=False)
    assert not has_bfloat16_products("cpu")
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    assert has_bfloat16_products("cpu")


def test_muon_iterates_in_float32_where_bfloat16_is_slow(monkeypatch):
    x = torch.randn(2, 8, 12, generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(optimisers, "has_bfloat16_products", lambda device: False)
    assert torch.equal(optimisers.orthogonalise(x), optimisers.orthogonalise(x, dtype=torch.float32))
    monkeypatch.setattr(optimisers, "has_bfloat16_products", lambda device: True)
    assert torch.equal(optimisers.orthogonalise(x), optimisers.orthogonalise(x, dtype=torch.bfloat16))
