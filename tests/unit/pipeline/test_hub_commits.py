"""A run asks the hub once for the commit of a dataset, and goes on without it where it did once."""

import datasets
import huggingface_hub
import pytest

from angelspec.core.errors import MissingRequirement
from angelspec.core.files import read_json
from angelspec.core.recipe_files import load_recipe
from angelspec.pipeline.hub_commits import HubCommits
from angelspec.pipeline.progress import Progress
from angelspec.pipeline.record import RunRecord
from angelspec.pipeline.runner import run_stages
from angelspec.pipeline.session import Session
from angelspec.pipeline.stages import stages_of
from angelspec.pipeline.store import Store

RECIPE = load_recipe(
    "tiny-dfly-llama",
    overrides=[
        "data.train=[{name: a, source: 'hf:org/rows@main', workload: chat}]",
        "data.evaluation=[{name: b, source: 'hf:org/rows', split: test, revision: main, workload: chat}]",
    ],
)


class Hub:
    """Gives a new commit at every question, or no answer; counts the questions."""

    def __init__(self):
        self.questions, self.silent = 0, False

    def __call__(self):
        return self

    def dataset_info(self, name, *, revision):
        assert (name, revision) == ("org/rows", "main")
        if self.silent:
            raise OSError("no route to host")
        self.questions += 1
        self.sha = f"{self.questions:040x}"
        return self


@pytest.fixture
def hub(monkeypatch):
    hub = Hub()
    monkeypatch.setattr(huggingface_hub, "HfApi", hub)
    return hub


def test_a_commit_is_asked_for_once_and_remembered(hub, tmp_path):
    said = []
    hub.silent = True
    with pytest.raises(MissingRequirement, match="cannot be reached"):
        HubCommits(tmp_path, said.append).pin(RECIPE.data)
    hub.silent = False
    commits = HubCommits(tmp_path, said.append)
    pinned = commits.pin(RECIPE.data)
    assert commits.pin(RECIPE.data) == pinned and hub.questions == 1
    assert {(source.source, source.revision) for source in (*pinned.train, *pinned.evaluation)} == {
        ("hf:org/rows", f"{1:040x}")
    }
    hub.silent = True
    assert said == [] and HubCommits(tmp_path, said.append).pin(RECIPE.data) == pinned
    assert said == ["  the hub does not answer; hf:org/rows@main is taken at commit 00000000, its last known one"]
    hub.silent = False
    assert HubCommits(tmp_path, said.append).pin(RECIPE.data).train[0].revision == f"{2:040x}"  # as it is now
    local = load_recipe("tiny-dfly-llama").data
    assert HubCommits(tmp_path, said.append).pin(local) == local and hub.questions == 2


def test_what_names_the_prompts_is_what_is_read_and_recorded(hub, tmp_path, monkeypatch):
    read = []

    def load_dataset(name, subset, *, revision, **arguments):
        read.append(revision)
        return iter([{"id": "1", "prompt": "a question"}])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)

    def prompts():
        data = HubCommits(tmp_path / "store", lambda text: None).pin(RECIPE.data)
        stages = [stage for stage in stages_of(RECIPE, data=data) if stage.name == "prompts"]
        return run_stages(
            stages, RECIPE, store=Store(tmp_path / "store"), session=Session(RECIPE, device="cpu"),
            progress=Progress(quiet=True), record=RunRecord(tmp_path / "run"),
        )["prompts"]  # fmt: skip

    first = prompts()
    (commit,) = set(read)
    assert hub.questions == 1 and len(read) == 2
    inputs = read_json(first.folder / "stage.json")["inputs"]
    assert {item["content"]["commit"] for part in ("train", "evaluation") for item in inputs[part]} == {commit}
    hub.silent = True
    assert prompts().reused and len(read) == 2
    hub.silent = False
    assert not prompts().reused and read[-1] == f"{2:040x}"
