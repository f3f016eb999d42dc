"""The server drafts what the reference loop drafts: every step of every answer accepts the same proposals.

The target mostly answers a token with a fixed other one, and the drafters are made to guess it, so that many proposals
are accepted and many are not.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.engine_builders import DEPTHS, engine, run, write_markov_drafters, write_markov_target

pytest.importorskip("sglang")
FAMILIES = {"dfly": "block", "dspark": "block", "mtp": "mtp"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("parity")
    write_markov_target(folder / "target")
    write_markov_drafters(folder)
    return folder


@pytest.fixture(scope="module")
def served(folder: Path) -> dict[str, Any]:
    entries = [
        {
            "name": n,
            "source": f"./{n}",
            "family": family,
            "mode": "no-think",
            "depth": DEPTHS.get(n, 4),
            "shortlist": None,
        }
        for n, family in {**FAMILIES, "broken": "block"}.items()
    ]
    bundle = folder / "bundle.yaml"
    bundle.write_text(yaml.safe_dump({"target": {"source": str(folder / "target")}, "drafters": entries}))
    dice = random.Random(4)
    wave = [
        {
            "rid": f"{name}{i}",
            "ids": [dice.randrange(32, 120) for _ in range(length)],
            "params": {
                "temperature": 0.0, "max_new_tokens": 48, "ignore_eos": True,
                "custom_params": {"route": name, "dcut": "off"},
            },
        }
        for name in (*FAMILIES, "broken")
        for i, length in enumerate((4, 90, 30, 150))
    ]  # fmt: skip
    told = run(
        folder,
        "parity",
        {"engine": engine(folder / "target", speculative_algorithm="ANGELSPEC"), "waves": [wave]},
        ANGELSPEC_BUNDLE=str(bundle),
    )
    return {"wave": wave, "answers": told["answers"], "state": told["state"]}


def accepted_by_step(positions: list[int]) -> list[int]:
    """Accepted proposals of every step from the positions of an answer's tokens, the first of which is prefill's."""
    steps, run = [], 0
    for position in positions[1:]:
        if position:
            run += 1
        else:
            steps.append(run)
            run = 0
    return steps


@pytest.mark.parametrize("name", list(FAMILIES))
def test_every_step_accepts_what_the_reference_loop_accepts(name: str, folder: Path, served: dict[str, Any]) -> None:
    from angelspec.core.recipe import TargetSection
    from angelspec.decoding.proposers import drafter_proposer
    from angelspec.decoding.speculative import decode
    from angelspec.drafters.checkpoint import load_drafter
    from angelspec.targets.target import load_target

    loaded = load_drafter(folder / name)
    section = TargetSection(source=f"folder:{folder / 'target'}", mode_family="plain")
    target = load_target(section, dtype=torch.float32)
    proposer = drafter_proposer(loaded.drafter, target=target, name=name, shortlist=None)
    total, differing = 0, []
    for request in served["wave"]:
        if not request["rid"].startswith(name):
            continue
        answer = served["answers"][request["rid"]]
        (reference,) = decode(
            target, proposer, [request["ids"]], max_new_tokens=48, temperature=0.0, seed=0, batch_size=1,
            stop_token_ids=(),
        ).answers  # fmt: skip
        assert answer["ids"] == reference.tokens
        steps = accepted_by_step(answer["meta"]["angelspec_positions"])
        whole = min(len(steps), len(reference.accepted)) - 1  # the last step of either may end early
        differing += [(request["rid"], index) for index in range(whole) if steps[index] != reference.accepted[index]][
            :1
        ]
        total += sum(reference.accepted)
    assert differing == []
    assert 40 < total < 150, "all alike: the comparison shows nothing"


def test_a_drafter_that_is_not_finite_falls_back_and_harms_nobody(served: dict[str, Any]) -> None:
    answers = served["answers"]
    for i in range(4):
        broken, sound = answers[f"broken{i}"], answers[f"dfly{i}"]
        request = next(one for one in served["wave"] if one["rid"] == f"broken{i}")
        twin = next(one for one in served["wave"] if one["rid"] == f"dfly{i}")
        assert len(broken["ids"]) == len(sound["ids"]) and request["ids"] != twin["ids"]
        said = broken["meta"]["angelspec"]
        assert said["accepted_length"] == 1.0
        assert said["steps_by_route"]["ar"] > said["steps_by_route"]["broken"] > 0
    assert served["state"]["counters"]["nan_rows"] == 4 * 3


def test_its_answers_are_the_target_s(folder: Path, served: dict[str, Any]) -> None:
    from angelspec.core.recipe import TargetSection
    from angelspec.decoding.plain import decode_plain
    from angelspec.targets.target import load_target

    section = TargetSection(source=f"folder:{folder / 'target'}", mode_family="plain")
    target = load_target(section, dtype=torch.float32)
    for request in served["wave"]:
        if request["rid"].startswith("broken"):
            (plain,) = decode_plain(
                target, [request["ids"]], max_new_tokens=48, temperature=0.0, seed=0, stop_token_ids=()
            )
            assert served["answers"][request["rid"]]["ids"] == plain.tokens


def test_costs_were_measured_at_the_start(served: dict[str, Any]) -> None:
    assert served["state"]["costs"]["verification"]
