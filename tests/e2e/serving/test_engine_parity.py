"""The server drafts what the reference loop drafts, and is as sure of it: every step accepts the same proposals.

The target mostly answers a token with a fixed other one, and the drafters are made to guess it, so that many proposals
are accepted and many are not.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from angelspec.drafters.checkpoint import convert_checkpoint
from tests.engine_builders import GUESSING, engine, run, write_markov_bundle

pytest.importorskip("sglang")
NAMES = (*GUESSING, "dflash", "dflare")
"""The last two are random: what they draft is compared, though little of it is accepted."""
PUBLIC = ("dspark", "dflash")
"""Dialects from which the engine loads the drafters of these names; the reference loads our own."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("parity")


@pytest.fixture(scope="module")
def served(folder: Path) -> dict[str, Any]:
    bundle = write_markov_bundle(folder, (*NAMES, "broken"), shortlist=None)
    for name in PUBLIC:
        (folder / name).rename(folder / f"our-{name}")
        convert_checkpoint(folder / f"our-{name}", folder / name, dialect=name)
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
        for name in (*NAMES, "broken")
        for i, length in enumerate((4, 90, 30, 150))
    ]  # fmt: skip
    told = run(
        folder,
        "parity",
        {"engine": engine(folder / "target", speculative_algorithm="ANGELSPEC"), "waves": [wave]},
        ANGELSPEC_BUNDLE=str(bundle),
        ANGELSPEC_RECORD=str(folder / "drafts.jsonl"),
    )
    drafts: dict[str, dict[int, Draft]] = {}
    for line in (folder / "drafts.jsonl").read_text().splitlines():
        one = json.loads(line)
        drafts.setdefault(one["rid"], {})[one["position"]] = Draft(one["tokens"], one["confidences"])
    return {"wave": wave, "drafts": drafts, "answers": told["answers"], "state": told["state"]}


class Draft(NamedTuple):
    """Proposals, and how sure the drafter is of each."""

    tokens: list[int]
    confidences: list[float]

    def is_like(self, other: Draft) -> bool:
        return self.tokens == other.tokens and self.confidences == pytest.approx(other.confidences, abs=1e-4)


class Recording:
    """A proposer, and what it proposed by position."""

    def __init__(self, proposer: Any) -> None:
        self._proposer = proposer
        self.drafts: dict[int, Draft] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._proposer, name)

    def propose(self, rows: Any, *, position_B: torch.Tensor, **rest: Any) -> Any:
        proposals = self._proposer.propose(rows, position_B=position_B, **rest)
        drafts = map(Draft, proposals.tokens_BK.tolist(), proposals.confidence_BK.tolist())
        self.drafts |= dict(zip(position_B.tolist(), drafts, strict=True))
        return proposals


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


@pytest.mark.parametrize("name", NAMES)
def test_every_step_drafts_and_accepts_what_the_reference_loop_does(
    name: str, folder: Path, served: dict[str, Any]
) -> None:
    from angelspec.core.recipe import TargetSection
    from angelspec.decoding.proposers import drafter_proposer
    from angelspec.decoding.speculative import decode
    from angelspec.drafters.checkpoint import load_drafter
    from angelspec.targets.target import load_target

    loaded = load_drafter(folder / (f"our-{name}" if name in PUBLIC else name))
    section = TargetSection(source=f"folder:{folder / 'target'}", mode_family="plain")
    target = load_target(section, dtype=torch.float32)
    total, compared, differing = 0, 0, []
    for request in served["wave"]:
        rid = request["rid"]
        if not rid.startswith(name):
            continue
        proposer = Recording(drafter_proposer(loaded.drafter, target=target, name=name, shortlist=None))
        answer = served["answers"][rid]
        (reference,) = decode(
            target, proposer, [request["ids"]], max_new_tokens=48, temperature=0.0, seed=0, batch_size=1,
            stop_token_ids=(),
        ).answers  # fmt: skip
        assert answer["ids"] == reference.tokens
        steps = accepted_by_step(answer["meta"]["angelspec_positions"])
        whole = min(len(steps), len(reference.accepted)) - 1  # the last step of either may end early
        differing += [(rid, index) for index in range(whole) if steps[index] != reference.accepted[index]]
        shared = served["drafts"][rid].keys() & proposer.drafts.keys()
        differing += [(rid, at) for at in shared if not served["drafts"][rid][at].is_like(proposer.drafts[at])]
        total += sum(reference.accepted)
        compared += len(shared)
    assert differing == []
    assert compared > 20
    if name in GUESSING:
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
