import pytest
import torch

from angelspec.core.errors import MissingRequirement
from angelspec.pipeline.session import best_device


def test_the_process_s_own_gpu_the_processor_or_what_is_asked_for(monkeypatch):
    monkeypatch.delenv("ANGELSPEC_DEVICE", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert best_device() == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert best_device() == "cuda:1"
    monkeypatch.setenv("ANGELSPEC_DEVICE", "cpu")
    assert best_device() == "cpu"


@pytest.mark.parametrize("wanted", ["gpu", "cuda:99"])
def test_a_device_that_is_not_here_is_named(monkeypatch, wanted):
    monkeypatch.setenv("ANGELSPEC_DEVICE", wanted)
    with pytest.raises(MissingRequirement, match=f"ANGELSPEC_DEVICE is '{wanted}'"):
        best_device()
