"""Two tensor-parallel ranks: what the first drafts and draws holds on both, and answers stay the target's.

The second rank is made to go wrong at every place where ranks may differ (``tests.ranks_plugin``).
"""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
import torch

from tests.engine_builders import engine, run, write_markov_bundle

pytest.importorskip("sglang")
LABELS: tuple[dict[str, Any], ...] = (
    {"route": "dfly", "dcut": "off"},
    {"route": "mtp"},
    {"route": "dspark", "dcut": 0.5},
    {"route": "ar"},
    {},
)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("ranks")
    bundle = write_markov_bundle(folder)
    dice = random.Random(8)
    greedy = [
        {
            "rid": f"greedy{i}",
            "ids": [dice.randrange(32, 120) for _ in range(length)],
            "params": {
                "temperature": 0.0, "max_new_tokens": 40, "ignore_eos": True, "custom_params": LABELS[i % len(LABELS)]
            },
        }
        for i, length in enumerate((4, 90, 30, 150, 11, 64, 17, 80, 45, 5))
    ]  # fmt: skip
    drawn = [
        {**one, "rid": f"drawn{i}", "params": {**one["params"], "temperature": 1.5}} for i, one in enumerate(greedy)
    ]
    cores = sorted(os.sched_getaffinity(0))
    told = run(
        folder,
        "ranks",
        {
            "engine": engine(folder / "target", speculative_algorithm="ANGELSPEC", tp_size=2),
            "waves": [greedy, drawn],
        },
        ANGELSPEC_BUNDLE=str(bundle),
        ANGELSPEC_PERTURB="1",
        SGLANG_CPU_OMP_THREADS_BIND=f"{cores[0]}|{cores[-1]}",
    )
    return {"target": folder / "target", "greedy": greedy, **told}


def test_every_answer_is_the_target_s(served: dict[str, Any]) -> None:
    from angelspec.core.recipe import TargetSection
    from angelspec.decoding.plain import decode_plain
    from angelspec.targets.target import load_target

    section = TargetSection(source=f"folder:{served['target']}", mode_family="plain")
    target = load_target(section, dtype=torch.float32)
    for request in served["greedy"]:
        (plain,) = decode_plain(target, [request["ids"]], max_new_tokens=40, temperature=0.0, seed=0, stop_token_ids=())
        assert served["answers"][request["rid"]]["ids"] == plain.tokens, request["rid"]


def test_drafts_of_all_kinds_were_accepted(served: dict[str, Any]) -> None:
    counters = served["state"]["counters"]
    assert counters["mixed_steps"] > 5 and counters["cut_steps"] > 5
    for rid in ("greedy0", "greedy1", "greedy2"):
        said = served["answers"][rid]["meta"]["angelspec"]
        assert said["accepted_length"] > 1.1, (rid, said)
    assert all(len(served["answers"][f"drawn{i}"]["ids"]) == 40 for i in range(10))


def test_costs_hold_for_both_ranks(served: dict[str, Any]) -> None:
    assert served["state"]["costs"]["measured_for"]["flags"]["tp_size"] == 2
