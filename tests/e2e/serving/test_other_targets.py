"""Targets of other families: what the drafters read is captured, so they draft as the reference does, a mixture of
experts among them, and answers stay the stock engine's."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from angelspec.core.drafter_config import BlockDrafterConfig, MoeConfig, MtpDrafterConfig
from angelspec.core.known_targets import KNOWN_TARGETS
from angelspec.core.recipe import TargetSection
from angelspec.decoding.proposers import drafter_proposer
from angelspec.drafters.checkpoint import load_drafter, save_drafter
from angelspec.targets.sources import materialise
from angelspec.targets.target import load_target
from tests.engine_builders import engine, random_drafter, run
from tests.reference_drafts import differences, is_greedy, read_drafts

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
    moe = MoeConfig(num_experts=4, experts_per_token=2, intermediate_size=32, num_shared_experts=1, router_scale=1.7)
    configs = {
        "mtp": MtpDrafterConfig(num_depths=2, mlp="moe", moe=moe, **shape),
        "dfly": BlockDrafterConfig(
            context="hybrid", head="correction", num_layers=1, target_layer_ids=(0, geometry.num_layers - 2),
            block_size=4, mask_token_id=geometry.vocab_size - 1, correction_intermediate_size=32, **shape,
        ),
    }  # fmt: skip
    entries = []
    for name, config in configs.items():
        save_drafter(_drafter(config), folder / name, dtype=torch.float32)
        facts = {"family": config.family, "mode": "no-think", "depth": config.num_proposals, "shortlist": None}
        entries.append({"name": name, "source": f"./{name}", **facts})
    path = folder / "bundle.yaml"
    path.write_text(yaml.safe_dump({"target": {"source": str(target)}, "drafters": entries}))
    return path


def _drafter(config: BlockDrafterConfig | MtpDrafterConfig) -> Any:
    """Of random weights, also where fresh ones have no effect: in a correction, and the bias of a choice of experts."""
    drafter, generator = random_drafter(config, seed=1), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for tensor in (*drafter.parameters(), *drafter.buffers()):
            if not tensor.any():
                tensor.copy_(0.1 * torch.randn(tensor.shape, generator=generator))
    return drafter


@pytest.fixture(scope="module", params=["hy3", pytest.param("qwen3", marks=pytest.mark.slow)])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Requests of every route, and what came of them."""
    folder, place = tmp_path_factory.mktemp(request.param), materialise(f"random:{request.param}")
    bundle = write_bundle(folder, place, request.param)
    dice = random.Random(2)
    labels: list[dict[str, Any]] = [{"route": "dfly", "dcut": "off"}, {"route": "mtp", "dcut": "off"}, {"route": "ar"}]
    wave = [
        {
            "rid": f"r{i}",
            "ids": [dice.randrange(32, 120) for _ in range(length)],
            "params": {"temperature": 0.0, "max_new_tokens": 24, "ignore_eos": True, "custom_params": labels[i % 3]},
        }
        for i, length in enumerate((3, 90, 40, 70, 15))
    ]
    told = run(
        folder,
        "served",
        {"engine": engine(place, speculative_algorithm="ANGELSPEC"), "waves": [wave]},
        ANGELSPEC_BUNDLE=str(bundle),
        ANGELSPEC_RECORD=str(folder / "drafts.jsonl"),
    )
    target = load_target(TargetSection(source=f"folder:{place}", mode_family="plain"), dtype=torch.float32)
    return {"folder": folder, "target": target, "wave": wave, "drafts": read_drafts(folder / "drafts.jsonl"), **told}


@pytest.mark.parametrize("name", ["mtp", "dfly"])
def test_every_draft_is_the_reference_s(name: str, served: dict[str, Any]) -> None:
    target, compared, differing = served["target"], 0, []
    drafter = load_drafter(served["folder"] / name).drafter
    proposer = drafter_proposer(drafter, target=target, name=name, shortlist=None)
    for request in served["wave"]:
        rid = request["rid"]
        drafts = served["drafts"].get((rid, name), [])
        count, where = differences(target, proposer, [*request["ids"], *served["answers"][rid]["ids"]], drafts)
        compared += count
        differing += [(rid, position) for position in where]
    assert differing == []
    assert compared > 20


def test_every_answer_is_the_target_s(served: dict[str, Any]) -> None:
    target = served["target"]
    for request in served["wave"]:
        prompt, answer = request["ids"], served["answers"][request["rid"]]["ids"]
        assert len(answer) == 24 and is_greedy(target, prompt, answer), request["rid"]
    assert served["state"]["counters"]["mixed_steps"] > 0


@pytest.mark.slow
def test_answers_are_the_stock_engine_s(served: dict[str, Any]) -> None:
    wave = [{**one, "params": {**one["params"], "custom_params": None}} for one in served["wave"]]
    stock = run(served["folder"], "stock", {"engine": engine(served["target"].folder), "waves": [wave]})
    for rid, answer in stock["answers"].items():
        assert served["answers"][rid]["ids"] == answer["ids"], rid
