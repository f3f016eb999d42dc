"""A comparison on a tiny target: every variant and seed trained, measured together, and reused."""

import pytest

from angelspec.core.comparison import Comparison
from angelspec.core.files import read_json
from angelspec.pipeline.compare_run import run_comparison
from angelspec.pipeline.progress import Progress

COMPARISON = Comparison(
    name="tiny",
    base="tiny-dfly-llama",
    set={"training.features": "disk", "evaluation.prompts_per_suite": 2},
    seeds=(0, 1),
    modes=("no-think",),
    variants={"dfly": {}, "no head": {"drafter.head": "none"}, "code": {"training.workloads": ["code"]}},
    orderings=({"claim": "heads help", "better": "dfly", "worse": "no head"},),
)


class Sayings(Progress):
    def __init__(self):
        super().__init__(quiet=True)
        self.said = []

    def say(self, text):
        self.said.append(text)


@pytest.fixture(scope="module", autouse=True)
def _own_cache(tmp_path_factory):
    patch = pytest.MonkeyPatch()
    patch.setenv("ANGELSPEC_CACHE", str(tmp_path_factory.mktemp("cache")))
    yield
    patch.undo()


def test_every_variant_and_seed_is_trained_measured_and_reused(tmp_path):
    folders = {"output": tmp_path / "out", "store": tmp_path / "store"}
    first = run_comparison(COMPARISON, **folders, quiet=True)
    assert len(first.trainings) == 6 and {item.variant for item in first.trainings} == set(COMPARISON.variants)
    for variant in COMPARISON.variants:
        assert {o.seed for o in first.outcomes if o.variant == variant} == {0, 1}
    answered = {o.variant: o.finished + o.unfinished for o in first.outcomes}
    assert all(counts.verify_steps > 0 for counts in answered.values()) and "prompt lookup" in answered
    assert len(list((tmp_path / "store").glob("rollout-*"))) == 1  # all variants share the answers
    assert len(list((tmp_path / "store").glob("pack-*/features/*"))) == 1
    positions = {item.variant: item.supervised_positions for item in first.trainings}
    assert positions["code"] < positions["dfly"] == positions["no head"]
    trained = [read_json(path)["summary"] for path in (tmp_path / "store").glob("train-cold-start-*/stage.json")]
    code, everything = sorted({(len(item["workloads"]), item["target_tokens"]) for item in trained})
    assert code[0] == 1 < everything[0] and code[1] < everything[1]

    text = (tmp_path / "out" / "comparison.md").read_text()
    assert "heads help" in text and "comparison.png" in text and (tmp_path / "out" / "comparison.png").exists()
    assert read_json(tmp_path / "out" / "comparison.json")["outcomes"]

    progress = Sayings()
    again = run_comparison(COMPARISON, **folders, quiet=True, progress=progress)
    assert again.outcomes == first.outcomes
    for mine, other in zip(again.trainings, first.trainings, strict=True):  # the store rounds seconds
        assert mine.model_copy(update={"seconds": other.seconds}) == other
    assert not [line for line in progress.said if "done in" in line]
