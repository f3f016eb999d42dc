"""The law of sampled answers in a real engine equals the target's, with all routes and cuts mixed; planted faults show.

Noise for confidences, and in every slot that is not verified, changes nothing: they decide what is verified, no more.

The exact law of an answer's first tokens is enumerated from the target's own probabilities under each request's
filters (temperature, top-k, top-p, min-p), and many answers are compared with it by chi-square.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from scipy.stats import chisquare

from tests.engine_builders import GUESSING, engine, run, write_markov_bundle
from tests.fault_plugin import FAULTS
from tests.noise_plugin import PREFIX as NOISE

pytest.importorskip("sglang")
PROMPT = [40, 71, 102, 55, 90]
TOKENS = 4
"""Of an answer that are compared; answers are longer, so that steps near the end are not special."""
FILTERS: Mapping[str, dict[str, Any]] = {
    "top-k": {"temperature": 4.0, "top_k": 3},
    "top-p": {"temperature": 3.0, "top_k": 4, "top_p": 0.9},
    "min-p": {"temperature": 4.0, "top_k": 4, "min_p": 0.3},
}
LABELS: tuple[dict[str, Any], ...] = (
    {"route": "dfly", "dcut": "off"},
    {"route": "mtp"},
    {"route": "dspark", "dcut": 0.5},
    {"route": "ar"},
    {"route": "auto"},
    {"route": "dfly", "dcut": 0.25},
)
WAVES: Mapping[str, tuple[int, ...]] = {"": (7, 8), NOISE: (9,)}
"""Seeds of the waves, by what their requests' ids begin with."""
Law = dict[tuple[int, ...], float]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("law")
    write_markov_bundle(folder)
    return folder


def filtered(logits_V: torch.Tensor, *, temperature: float, top_k: int, top_p: float = 1.0, min_p: float = 0.0):
    """(token, probability) of every token that the filters leave."""
    probability, token = (logits_V.double() / temperature).softmax(-1).sort(descending=True)
    before = probability.cumsum(0) - probability
    stays = (torch.arange(len(token)) < top_k) & (before <= top_p) & (probability >= min_p * probability[0])
    kept = probability[stays] / probability[stays].sum()
    return list(zip(token[stays].tolist(), kept.tolist(), strict=True))


@torch.no_grad()
def exact_law(folder: Path, filters: Mapping[str, Any]) -> Law:
    """Probability of every beginning of an answer."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32).eval()
    law: Law = {(): 1.0}
    for _ in range(TOKENS):
        ids = torch.tensor([[*PROMPT, *answer] for answer in law])
        logits_BV = model(ids).logits[:, -1]
        law = {
            (*answer, token): chance * share
            for (answer, chance), logits_V in zip(law.items(), logits_BV, strict=True)
            for token, share in filtered(logits_V, **filters)
        }
    return law


def wave(names: Iterable[str], *, answers: int, seed: int) -> list[dict[str, Any]]:
    """Requests for many answers, by filter and route."""
    requests = []
    for index, name in itertools.product(range(answers), names):
        params = {**FILTERS[name.removeprefix(NOISE)], "max_new_tokens": TOKENS + 5, "ignore_eos": True}
        params["custom_params"] = LABELS[index % len(LABELS)]
        requests.append({"rid": f"{name}/{index}@{seed}", "ids": PROMPT, "params": params})
    return requests


def sampled(folder: Path, waves: list[list[dict[str, Any]]], *, bundle: str, **environment: str) -> dict[str, Any]:
    """What one engine answers."""
    arguments = engine(folder / "target", speculative_algorithm="ANGELSPEC", max_running_requests=48, random_seed=7)
    return run(
        folder, "law", {"engine": arguments, "waves": waves}, ANGELSPEC_BUNDLE=str(folder / bundle), **environment
    )


def p_value(told: Mapping[str, Any], name: str, law: Law) -> float:
    """Of the hypothesis that the answers follow the law; cells that are too rare for the test are put together."""
    counts = Counter(
        tuple(answer["ids"][:TOKENS]) for rid, answer in told["answers"].items() if rid.startswith(f"{name}/")
    )
    number = sum(counts.values())
    impossible = set(counts) - set(law)
    if impossible:
        return 0.0
    common = [answer for answer, chance in law.items() if chance * number >= 5]
    seen = [counts[answer] for answer in common]
    expected = [law[answer] * number for answer in common]
    rest = number - sum(expected)
    if rest > 1e-6 * number:
        seen, expected = [*seen, number - sum(seen)], [*expected, rest]
    return float(chisquare(seen, expected).pvalue)


@pytest.fixture(scope="module")
def honest(folder: Path) -> dict[str, Any]:
    waves = [
        wave([start + name for name in FILTERS], answers=400, seed=seed)
        for start, seeds in WAVES.items()
        for seed in seeds
    ]
    return sampled(folder, waves, bundle="bundle.yaml", ANGELSPEC_NOISE=str(folder / "noise"))


@pytest.mark.parametrize("start", list(WAVES))
@pytest.mark.parametrize("name", list(FILTERS))
def test_the_law_is_the_target_s(name: str, start: str, folder: Path, honest: dict[str, Any]) -> None:
    law = exact_law(folder, FILTERS[name])
    assert 12 <= len(law) <= 4**TOKENS
    found = p_value(honest, start + name, law)
    print(f"{start}{name}: p = {found:.2f}")
    assert found > 1e-3


def test_seeds_and_noise_made_a_difference(folder: Path, honest: dict[str, Any]) -> None:
    first, second = (
        [answer["ids"] for rid, answer in honest["answers"].items() if rid.endswith(f"@{seed}")] for seed in WAVES[""]
    )
    assert sum(one == other for one, other in zip(first, second, strict=True)) < len(first) / 4
    noise = Counter((folder / "noise").read_text())
    assert noise["d"] > 1000 and noise["s"] > 10000


def test_routes_were_mixed_and_cut(honest: dict[str, Any]) -> None:
    counters = honest["state"]["counters"]
    assert counters["mixed_steps"] > 50 and counters["cut_steps"] > 50
    accepted = {}
    for answer in honest["answers"].values():
        said = answer["meta"]["angelspec"]
        accepted.setdefault(said["route"], []).append(said["accepted_length"])
    assert {"dfly", "mtp", "dspark", "ar"} <= set(accepted)
    for name in GUESSING:
        mean = sum(accepted[name]) / len(accepted[name])
        assert 1.02 < mean < 2.5, f"{name}: {mean}: drafts must be accepted, and rejected"


@pytest.mark.slow
@pytest.mark.parametrize("fault", list(FAULTS))
def test_a_planted_fault_shows(fault: str, folder: Path) -> None:
    bundle = yaml.safe_load((folder / "bundle.yaml").read_text())
    for drafter in bundle["drafters"]:
        drafter["shortlist"] = None  # a fault looks at the drafter's probabilities of all tokens
    (folder / "exact.yaml").write_text(yaml.safe_dump(bundle))
    requests = wave(["top-k"], answers=2400, seed=7)
    told = sampled(folder, [requests], bundle="exact.yaml", ANGELSPEC_FAULT=fault)
    found = p_value(told, "top-k", exact_law(folder, FILTERS["top-k"]))
    print(f"{fault}: p = {found:.1e}")
    assert found < 1e-6
