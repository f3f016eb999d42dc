"""The server drafts what the reference loop drafts, and is as sure of it: every step accepts the same proposals.

The target mostly answers a token with a fixed other one, and the drafters are made to guess it, so that many proposals
are accepted and many are not.
"""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from angelspec.core.engine import WAITING_STATES
from angelspec.core.recipe import TargetSection
from angelspec.decoding.plain import decode_plain
from angelspec.decoding.proposer import Proposer
from angelspec.decoding.proposers import drafter_proposer
from angelspec.decoding.speculative import decode
from angelspec.drafters.checkpoint import convert_checkpoint, load_drafter
from angelspec.targets.target import Target, load_target
from tests.engine_builders import DEPTHS, GUESSING, engine, run, write_markov_bundle
from tests.reference_drafts import differences, is_greedy, read_drafts
from tests.wander_plugin import PREFIX as WANDER

pytest.importorskip("sglang")
NAMES = (*GUESSING, "dflash", "dflare")
"""The last two are random: what they draft is compared, though little of it is accepted."""
PUBLIC = ("dspark", "dflash")
"""Dialects from which the engine loads the drafters of these names; the reference loads our own."""
ANSWER = 48


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("parity")


def asked(rid: str, ids: list[int], *, route: str, new_tokens: int = ANSWER) -> dict[str, Any]:
    label = {"route": route, "dcut": "off"}
    params = {"temperature": 0.0, "max_new_tokens": new_tokens, "ignore_eos": True, "custom_params": label}
    return {"rid": rid, "ids": ids, "params": params}


@pytest.fixture(scope="module")
def target(folder: Path) -> Target:
    write_markov_bundle(folder, (*NAMES, "broken"), shortlist=None)
    for name in PUBLIC:
        (folder / name).rename(folder / f"our-{name}")
        convert_checkpoint(folder / f"our-{name}", folder / name, dialect=name)
    section = TargetSection(source=f"folder:{folder / 'target'}", mode_family="plain")
    return load_target(section, dtype=torch.float32)


def plain(target: Target, request: dict[str, Any]) -> list[int]:
    """The answer by plain decoding."""
    (answer,) = decode_plain(
        target, [request["ids"]], max_new_tokens=request["params"]["max_new_tokens"], temperature=0.0, seed=0,
        stop_token_ids=(),
    )  # fmt: skip
    return answer.tokens


@pytest.fixture(scope="module")
def served(folder: Path, target: Target) -> dict[str, Any]:
    """Three waves: each drafter by itself; prompts that go on from the first wave's prompts and answers, each under
    another route; and requests that change their drafter, and are retracted, while they run."""
    dice = random.Random(4)

    def some(length: int) -> list[int]:
        return [dice.randrange(32, 120) for _ in range(length)]

    first = [
        asked(f"{name}{i}", some(length), route=name)
        for name in (*NAMES, "broken")
        for i, length in enumerate((4, 90, 30, 150))
    ]
    second = []
    for number, one in enumerate(first[:-4]):
        ids = [*one["ids"], *plain(target, one)[:45], *some(1 + 45 * (number % 4))]
        second += [asked(f"{one['rid']}-again{k}", ids, route=NAMES[(number // 4 + k) % len(NAMES)]) for k in (1, 3)]
    third = [asked(f"{WANDER}{i}", some(10 + 25 * i), route="auto", new_tokens=240) for i in range(6)]
    told = run(
        folder,
        "parity",
        {"engine": engine(folder / "target", speculative_algorithm="ANGELSPEC"), "waves": [first, second, third]},
        ANGELSPEC_BUNDLE=str(folder / "bundle.yaml"),
        ANGELSPEC_RECORD=str(folder / "drafts.jsonl"),
        ANGELSPEC_WANDER=",".join(NAMES),
    )
    drafts = read_drafts(folder / "drafts.jsonl")
    return {"waves": [first, second, third], "drafts": drafts, **told}


@pytest.fixture(params=NAMES)
def proposer(request: pytest.FixtureRequest, folder: Path, target: Target) -> Proposer:
    name = request.param
    loaded = load_drafter(folder / (f"our-{name}" if name in PUBLIC else name))
    return drafter_proposer(loaded.drafter, target=target, name=name, shortlist=None)


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


def test_every_step_accepts_what_the_reference_loop_does(
    proposer: Proposer, target: Target, served: dict[str, Any]
) -> None:
    total, differing = 0, []
    for request in served["waves"][0]:
        rid = request["rid"]
        if not rid.startswith(proposer.name):
            continue
        answer = served["answers"][rid]
        (reference,) = decode(
            target, proposer, [request["ids"]], max_new_tokens=ANSWER, temperature=0.0, seed=0, batch_size=1,
            stop_token_ids=(),
        ).answers  # fmt: skip
        assert answer["ids"] == reference.tokens
        steps = accepted_by_step(answer["meta"]["angelspec_positions"])
        whole = min(len(steps), len(reference.accepted)) - 1  # the last step of either may end early
        differing += [(rid, index) for index in range(whole) if steps[index] != reference.accepted[index]]
        total += sum(reference.accepted)
    assert differing == []
    if proposer.name in GUESSING:
        assert 40 < total < 150, "all alike: the comparison shows nothing"


@pytest.mark.parametrize("wave", range(3), ids=["by itself", "from the cache", "in turns"])
def test_every_draft_is_the_reference_s(wave: int, proposer: Proposer, target: Target, served: dict[str, Any]) -> None:
    compared, differing = 0, []
    for request in served["waves"][wave]:
        rid = request["rid"]
        drafts = served["drafts"].get((rid, proposer.name), [])
        count, where = differences(target, proposer, [*request["ids"], *served["answers"][rid]["ids"]], drafts)
        compared += count
        differing += [(rid, position) for position in where]
    assert differing == []
    assert compared > 40


def test_every_answer_is_the_target_s(target: Target, served: dict[str, Any]) -> None:
    for request in itertools.chain(*served["waves"]):
        answer = served["answers"][request["rid"]]["ids"]
        assert len(answer) == request["params"]["max_new_tokens"]
        assert is_greedy(target, request["ids"], answer), request["rid"]


def test_caches_chunks_retractions_and_overflowing_rings_took_part(served: dict[str, Any]) -> None:
    first, second, third = (state["counters"] for state in served["states"])
    assert second["prefix_hits"] - first["prefix_hits"] >= len(served["waves"][1])
    assert second["continued_chunks"] - first["continued_chunks"] > 10
    assert third["prefilled_again"] - second["prefilled_again"] > 3
    assert "lost states" not in third["fallbacks"]
    for name in NAMES:
        gaps = []
        for request in served["waves"][2]:
            drafts = served["drafts"].get((request["rid"], name), [])
            positions = [len(request["ids"]), *(draft.position for draft in drafts)]
            gaps += [after - before for before, after in itertools.pairwise(positions)]
        assert max(gaps) > WAITING_STATES + max(DEPTHS.values()) + 1, name


def test_a_drafter_that_is_not_finite_falls_back_and_harms_nobody(served: dict[str, Any]) -> None:
    answers = served["answers"]
    for i in range(4):
        broken, sound = answers[f"broken{i}"], answers[f"dfly{i}"]
        assert len(broken["ids"]) == len(sound["ids"]) == ANSWER
        said = broken["meta"]["angelspec"]
        assert said["accepted_length"] == 1.0
        assert said["steps_by_route"]["ar"] > said["steps_by_route"]["broken"] > 0
    assert served["state"]["counters"]["nan_rows"] == 4 * 3


def test_costs_were_measured_at_the_start(served: dict[str, Any]) -> None:
    assert served["state"]["costs"]["verification"]
