"""The engine in bfloat16: drafts are accepted, and answers differ from stock SGLang's at near-ties alone."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.engine_builders import GUESSING, engine, run, write_markov_bundle

pytest.importorskip("sglang")
NEAR = 0.26
"""Between the two best log-probabilities where tokens may differ: two steps of bfloat16 at logits from 16."""
TOKENS = 32
Answers = dict[str, dict[str, Any]]


def wave(*, labelled: bool) -> list[dict[str, Any]]:
    """Twelve greedy requests, four for each drafter."""
    dice = random.Random(6)
    made = []
    for index, length in enumerate((4, 90, 30, 150) * 3):
        params: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": TOKENS, "ignore_eos": True}
        if labelled:
            params["custom_params"] = {"route": GUESSING[index % 3], "dcut": "off"}
        ids = [dice.randrange(32, 120) for _ in range(length)]
        made.append({"rid": f"r{index}", "ids": ids, "params": params, "top_logprobs": 2})
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bf16")


@pytest.fixture(scope="module")
def answers(folder: Path) -> tuple[Answers, Answers]:
    """Ours and the stock engine's."""
    bundle = write_markov_bundle(folder)
    arguments = engine(folder / "target", dtype="bfloat16")
    stock = run(folder, "stock", {"engine": arguments, "waves": [wave(labelled=False)]})
    job = {"engine": {**arguments, "speculative_algorithm": "ANGELSPEC"}, "waves": [wave(labelled=True)]}
    ours = run(folder, "ours", job, ANGELSPEC_BUNDLE=str(bundle))
    return ours["answers"], stock["answers"]


def test_drafts_are_accepted(answers: tuple[Answers, Answers]) -> None:
    for name in GUESSING:
        said = [one["meta"]["angelspec"] for one in answers[0].values() if one["meta"]["angelspec"]["route"] == name]
        assert len(said) == 4 and all(one["speculative_share"] == 1.0 for one in said)
        steps = sum(one["verify_steps"] for one in said)
        assert sum(one["generated_tokens"] for one in said) / steps > 1.05, name  # 1.004 by chance


def test_answers_are_the_stock_engine_s(answers: tuple[Answers, Answers]) -> None:
    """Sums are taken in another order, which in bfloat16 may turn a near-tie: a twentieth of these tokens are such."""
    excused = []
    for rid, theirs in answers[1].items():
        ours = answers[0][rid]["ids"]
        assert len(ours) == len(theirs["ids"]) == TOKENS
        differing = [at for at, pair in enumerate(zip(ours, theirs["ids"], strict=True)) if pair[0] != pair[1]]
        if differing:
            best, second = (entry[0] for entry in theirs["meta"]["output_top_logprobs"][differing[0]])
            assert best - second < NEAR, f"{rid} differs at token {differing[0]}"
            excused.append(rid)
    assert len(excused) <= 6, excused
