"""Targets of other families: what the drafters read is captured, and answers stay the stock engine's."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from angelspec.core.drafter_config import BlockDrafterConfig, MoeConfig, MtpDrafterConfig
from angelspec.core.known_targets import KNOWN_TARGETS
from angelspec.drafters.checkpoint import save_drafter
from angelspec.drafters.families import build_drafter
from tests.engine_builders import engine, run

pytest.importorskip("sglang")


def write_bundle(folder: Path, target: Path, family: str) -> Path:
    """A DFly and an MTP drafter (a mixture of experts) of random weights."""
    geometry = KNOWN_TARGETS[f"tiny-{family}"].geometry
    shape = {
        "hidden_size": geometry.hidden_size, "intermediate_size": geometry.intermediate_size,
        "num_heads": geometry.num_heads, "num_kv_heads": geometry.num_kv_heads, "head_dim": geometry.head_dim,
        "vocab_size": geometry.vocab_size, "rms_norm_eps": geometry.rms_norm_eps,
        "max_position_embeddings": geometry.max_position_embeddings, "rope": geometry.rope,
        "target_hidden_size": geometry.hidden_size, "target_num_layers": geometry.num_layers,
    }  # fmt: skip
    moe = MoeConfig(num_experts=4, experts_per_token=2, intermediate_size=32, num_shared_experts=1)
    configs = {
        "mtp": MtpDrafterConfig(num_depths=2, mlp="moe", moe=moe, **shape),
        "dfly": BlockDrafterConfig(
            context="hybrid", head="correction", num_layers=1, target_layer_ids=(0, geometry.num_layers - 2),
            block_size=4, mask_token_id=geometry.vocab_size - 1, correction_intermediate_size=32, **shape,
        ),
    }  # fmt: skip
    entries = []
    for name, config in configs.items():
        save_drafter(build_drafter(config).initialise(seed=1), folder / name, dtype=torch.float32)
        depth = 2 if name == "mtp" else 3
        entries.append(
            {"name": name, "source": f"./{name}", "family": config.family, "mode": "no-think", "depth": depth}
        )
    path = folder / "bundle.yaml"
    path.write_text(yaml.safe_dump({"target": {"source": str(target)}, "drafters": entries}))
    return path


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "hy3"])
def test_answers_are_the_stock_engine_s(family: str, tmp_path: Path) -> None:
    from angelspec.core.recipe import TargetSection
    from angelspec.decoding.plain import decode_plain
    from angelspec.targets.sources import materialise
    from angelspec.targets.target import load_target

    target = materialise(f"random:{family}")
    bundle = write_bundle(tmp_path, target, family)
    dice = random.Random(2)

    def wave(labels: list[dict[str, Any] | None]) -> list[dict[str, Any]]:
        found = []
        for i, length in enumerate((3, 40, 90, 15)):
            params: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 24, "ignore_eos": True}
            if labels[i]:
                params["custom_params"] = labels[i]
            found.append({"rid": f"r{i}", "ids": prompts[i][:length], "params": params})
        return found

    prompts = [[dice.randrange(32, 120) for _ in range(90)] for _ in range(4)]
    stock = run(tmp_path, "stock", {"engine": engine(target), "waves": [wave([None] * 4)]})
    served = run(
        tmp_path,
        "served",
        {
            "engine": engine(target, speculative_algorithm="ANGELSPEC"),
            "waves": [wave([{"route": "dfly", "dcut": "off"}, {"route": "mtp", "dcut": "off"}, {"route": "ar"}, None])],
        },
        ANGELSPEC_BUNDLE=str(bundle),
    )
    plain = decode_plain(
        load_target(TargetSection(source=f"folder:{target}", mode_family="plain"), dtype=torch.float32),
        [prompts[0][:3]], max_new_tokens=24, temperature=0.0, seed=0, stop_token_ids=(),
    )  # fmt: skip
    assert stock["answers"]["r0"]["ids"] == plain[0].tokens, "the stock engine did not load the weights"
    for rid, answer in stock["answers"].items():
        assert served["answers"][rid]["ids"] == answer["ids"], rid
    assert served["state"]["counters"]["mixed_steps"] > 0
