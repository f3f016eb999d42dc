"""A whole recipe on a tiny random target: straight, interrupted anywhere, changed, and read back."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from angelspec.cli.main import cli
from angelspec.core.errors import CheckpointError, DataError, Interrupted, TargetError
from angelspec.core.files import read_json
from angelspec.core.manifest import DrafterManifest
from angelspec.core.recipe_files import load_recipe
from angelspec.drafters.checkpoint import inspect_checkpoint, load_drafter
from angelspec.evaluation.report import Report
from angelspec.pipeline.progress import Meter, Progress
from angelspec.pipeline.recipe_run import run_recipe
from angelspec.pipeline.record import RunRecord
from angelspec.pipeline.runner import run_stages
from angelspec.pipeline.session import Session
from angelspec.pipeline.stage import Work
from angelspec.pipeline.stages import stages_of
from angelspec.pipeline.store import Store
from angelspec.targets.sources import materialise

NAME = "tiny-dfly-llama"


class Recorder(Progress):
    """Remembers what was said, and raises KeyboardInterrupt at its n-th event."""

    def __init__(self, stop_at: int | None = None) -> None:
        super().__init__(quiet=True)
        self.said: list[str] = []
        self.events = 0
        self.stop_at = stop_at

    def _event(self) -> None:
        self.events += 1
        if self.events == self.stop_at:
            raise KeyboardInterrupt

    def say(self, text: str) -> None:
        self.said.append(text)
        self._event()

    def meter(self, name, *, total, unit):
        recorder = self

        class Counting(Meter):
            def __call__(self, done, *, total=None, note=""):
                recorder._event()

        from contextlib import nullcontext

        return nullcontext(Counting(self, name, total, unit))

    @property
    def reused(self) -> list[str]:
        return [line.split("]")[1].split(":")[0].strip() for line in self.said if ": reused (" in line]

    @property
    def ran(self) -> list[str]:
        return [line.split("]")[1].split(":")[0].strip() for line in self.said if ": done in " in line]


@pytest.fixture(scope="module", autouse=True)
def _own_cache(tmp_path_factory):
    patch = pytest.MonkeyPatch()
    patch.setenv("ANGELSPEC_CACHE", str(tmp_path_factory.mktemp("cache")))
    yield
    patch.undo()


def run(folder: Path, *overrides: str, progress: Progress | None = None, name: str = NAME) -> Path:
    recipe = load_recipe(name, overrides=overrides)
    return run_recipe(recipe, output=folder, store=folder / "store", quiet=True, progress=progress)


def content(drafter: Path) -> dict[str, bytes]:
    return {
        name: (drafter / name).read_bytes() for name in ("model.safetensors", "config.json", "angelspec_manifest.json")
    }


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> tuple[Path, Recorder]:
    folder = tmp_path_factory.mktemp("straight")
    recorder = Recorder()
    run(folder, progress=recorder)
    return folder, recorder


def test_ends_with_a_checked_drafter_and_its_report(straight):
    folder, _ = straight
    drafter = folder / "drafter"
    assert inspect_checkpoint(drafter) == []
    manifest = DrafterManifest.read(drafter)
    assert manifest.mode == "no-think"
    assert manifest.recipe == load_recipe(NAME)
    assert [stage.name for stage in manifest.training.stages] == ["cold-start", "end-to-end"]
    assert manifest.training.supervised_positions > 0
    report = Report.load(drafter / "report.json")
    assert {d.name for d in report.drafters} == {NAME, "prompt lookup"}
    assert report.temperatures == (0.0, 1.0)
    assert all(result.exact for result in report.exactness)
    text = (drafter / "report.md").read_text()
    assert "accepted length" in text
    for line in text.splitlines():
        if line.startswith("!["):
            assert (drafter / line.split("](")[1].rstrip(")")).stat().st_size > 1000


def test_a_second_run_reuses_every_stage(straight):
    folder, first = straight
    again = Recorder()
    before = content(folder / "drafter")
    run(folder, progress=again)
    assert again.ran == []
    assert again.reused == first.ran
    assert content(folder / "drafter") == before


def test_interrupted_again_and_again_and_resumed_gives_the_same_bytes(straight, tmp_path):
    folder, first = straight
    interruptions = 0
    # each attempt gets a little further than the last, since a unit that is interrupted is redone from its start
    for attempt in range(first.events):
        try:
            run(tmp_path / "run", progress=Recorder(stop_at=5 + 9 * attempt))
            break
        except KeyboardInterrupt:
            interruptions += 1
    assert interruptions >= 5
    assert content(tmp_path / "run" / "drafter") == content(folder / "drafter")


@pytest.mark.parametrize(
    ("override", "rerun"),
    [
        ("evaluation.max_new_tokens=9", ["evaluate", "export"]),
        ("training.stages.end-to-end.steps=4", ["train-end-to-end", "evaluate", "export"]),
        ("training.stages.cold-start.steps=12", ["train-cold-start", "train-end-to-end", "evaluate", "export"]),
        ("training.log_every=1", ["export"]),
        ("training.max_nonfinite_steps=9", ["export"]),
        ("training.features=disk", ["export"]),  # the same features, elsewhere
        ("training.rows_per_micro_batch=2", ["export"]),
        ("rollout.keep_finish_reasons=[stop, length, loop]", ["pack", "export"]),
        ("target.mode_family=plain", ["target", "rollout", "pack", "evaluate", "export"]),  # it renders the same
        ("description=another", ["export"]),
    ],
)
def test_a_changed_value_reruns_exactly_what_depends_on_it(straight, override, rerun):
    folder, first = straight
    recorder = Recorder()
    run(folder, override, progress=recorder)
    assert recorder.ran == rerun
    assert recorder.reused == [name for name in first.ran if name not in rerun]


def test_nothing_else_is_replaced_by_the_drafter(straight, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(straight[0] / "store", folder / "store")
    (folder / "drafter").mkdir()
    (folder / "drafter" / "mine.txt").write_text("kept")
    recorder = Recorder()
    with pytest.raises(CheckpointError, match="no drafter export"):
        run(folder, progress=recorder)
    assert recorder.said == [] and (folder / "drafter" / "mine.txt").read_text() == "kept"
    shutil.rmtree(folder / "drafter")
    (tmp_path / "large").mkdir()
    (folder / "drafter").symlink_to(tmp_path / "large")  # a larger disk
    run(folder)
    first = content(tmp_path / "large")
    assert (folder / "drafter").is_symlink() and inspect_checkpoint(tmp_path / "large") == []
    run(folder)
    assert (folder / "drafter").is_symlink() and content(tmp_path / "large") == first
    assert sorted(path.name for path in folder.iterdir() if path.name.startswith(".")) == [".run.lock"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["large", "run"]


def test_evaluation_prompts_that_cannot_be_asked_are_said_or_stop_the_run_before_it_trains(tmp_path):
    lines = [f'{{"prompt": "question {i}"}}\n' for i in range(31)] + [f'{{"prompt": "{"long " * 400}"}}\n']
    (tmp_path / "rows.jsonl").write_text("".join(lines))
    source = f"data.evaluation=[{{name: ev, source: 'file:{tmp_path / 'rows.jsonl'}', workload: chat}}]"
    recorder = Recorder()
    drafter = run(tmp_path / "run", source, "data.max_bad_fraction=0.05", progress=recorder)
    said = [line for line in recorder.said if "evaluation suite 'ev': prompts refused: 1 prompt-too-long" in line]
    assert len(said) == 2  # before the training and at the measuring
    (quarantine,) = (Path(line.rpartition("(see ")[2].rstrip(")")) for line in said[1:])
    assert "prompt-too-long" in quarantine.read_text()
    assert any("1 prompt-too-long" in note for note in Report.load(drafter / "report.json").notes)
    recorder = Recorder()
    with pytest.raises(DataError, match="1 of 32 rows were refused"):
        run(tmp_path / "strict", source, "data.max_bad_fraction=0.01", progress=recorder)
    assert recorder.ran == ["target", "prompts"]


def test_a_rollout_of_which_nothing_is_kept_says_why(tmp_path):
    with pytest.raises(DataError, match=r"no answer of the rollout is kept(?s:.*)answer-unfinished") as error:
        run(tmp_path, "rollout.max_new_tokens=1", "rollout.keep_finish_reasons=[stop]")
    assert "rollout.keep_finish_reasons" in error.value.mend


def test_stage_records_hold_their_digests(straight):
    folder, first = straight
    stages = read_json(folder / "stages.json")
    assert list(stages) == first.ran
    assert all(Path(item["folder"], "stage.json").is_file() for item in stages.values())


@pytest.mark.parametrize("name", ["tiny-dfly-qwen3", "tiny-dfly-hy3"])
def test_other_families_run_too(tmp_path, name):
    drafter = run(tmp_path, name=name)
    assert inspect_checkpoint(drafter) == []
    assert all(result.exact for result in Report.load(drafter / "report.json").exactness)


@pytest.mark.parametrize("algorithm", ["dflash", "dflare", "dspark"])
def test_other_drafters_run_too(tmp_path, algorithm):
    objective = "{ce: 0.1, l1: 0.9, confidence: 1.0}" if algorithm == "dspark" else "{lk: 1.0, top_k: 10}"
    drafter = run(
        tmp_path,
        f"drafter.algorithm={algorithm}",
        f"training.stages.cold-start.objective={objective}",
        "drafter.markov_rank=8",
        "evaluation.temperatures=[0]",
    )
    assert DrafterManifest.read(drafter).algorithm == algorithm
    assert inspect_checkpoint(drafter) == []


def test_given_answers_need_no_rollout(tmp_path):
    rows = "".join(
        f'{{"id": "{i}", "workload": "chat", "messages": [{{"role": "user", "content": "say {i}"}}, '
        f'{{"role": "assistant", "content": "I say {i} and {i + 1} as you asked."}}]}}\n'
        for i in range(24)
    )
    (tmp_path / "rows.jsonl").write_text(rows)
    recorder = Recorder()
    run(
        tmp_path / "run",
        "data.responses=given",
        f"data.train=[{{name: mine, source: 'file:{tmp_path / 'rows.jsonl'}'}}]",
        progress=recorder,
    )
    assert "rollout" not in recorder.ran
    assert "export" in recorder.ran


def test_high_think_is_another_rollout_with_another_manifest(tmp_path):
    drafter = run(tmp_path, "mode=high-think", "evaluation.temperatures=[0]")
    assert DrafterManifest.read(drafter).mode == "high-think"


def test_a_run_that_waits_for_another_says_so(tmp_path):
    recipe = load_recipe(NAME)
    store, progress = Store(tmp_path / "store"), Recorder()
    stage = stages_of(recipe)[0]
    lock = store.lock(stage, store.name_of(stage, stage.inputs(recipe), {}))
    waited = []

    def say(text, said=progress.say):
        said(text)
        if "waiting" in text:
            waited.append(text)
            lock.release()

    progress.say = say
    with lock:
        run_stages(
            [stage], recipe, store=store, session=Session(recipe), progress=progress, record=RunRecord(tmp_path / "run")
        )
    assert waited == ["[1/1] target: another run works on it; waiting for that"]


@pytest.mark.parametrize(
    "stop", [KeyboardInterrupt(), Interrupted("training stopped at step 3; its checkpoint is saved")]
)
def test_a_command_that_was_stopped_says_how_to_go_on(monkeypatch, stop):
    def stopped(*arguments, **settings):
        raise stop

    monkeypatch.setattr("angelspec.pipeline.recipe_run.run_recipe", stopped)
    done = CliRunner().invoke(cli, ["recipe", "run", NAME])
    assert done.exit_code == 130 and "the same command again" in done.output and "error" not in done.output


def test_a_target_that_changes_in_place_is_another_target(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(materialise("random:llama"), folder)
    recipe = load_recipe(NAME, overrides=[f"target={{source: 'folder:{folder}', dtype: float32}}"])

    def first_stages(session):
        progress, record = Recorder(), RunRecord(tmp_path / "out")
        results = run_stages(
            stages_of(recipe)[:3], recipe, store=Store(tmp_path / "store"), session=session, progress=progress,
            record=record,
        )  # fmt: skip
        return results, progress

    session = Session(recipe)
    first, _ = first_stages(session)
    assert first_stages(session)[1].ran == []
    weights = load_file(folder / "model.safetensors")
    save_file({name: tensor * 1.5 for name, tensor in weights.items()}, folder / "model.safetensors", {"format": "pt"})
    fresh = Session(recipe)
    with pytest.raises(TargetError, match="is another model by now than the one that .* was made from"):
        Work(recipe, tmp_path, first, fresh, Recorder()).target("float32")
    again, progress = first_stages(fresh)
    assert progress.ran == ["target", "decontaminate"]  # the prompts are read without it
    assert again["target"].output.digest != first["target"].output.digest


def test_an_exported_embedding_is_the_target_s_and_no_rounded_one(straight, tmp_path):
    folder, _ = straight
    recipe = load_recipe(NAME, overrides=["target.dtype=bfloat16", "export={dtype: float32, include_embedding: true}"])
    drafter = run_recipe(recipe, output=tmp_path, store=folder / "store", quiet=True)
    for dtype in ("float32", "bfloat16"):
        load_drafter(drafter, embedding_VD=Session(recipe, device="cpu").target(dtype).embedding_VD)


def test_features_of_another_precision_are_other_features(tmp_path):
    assert run(tmp_path, "training.features=disk", progress=Recorder())
    recorder = Recorder()
    run(tmp_path, "training.features=disk", "target.dtype=bfloat16", progress=recorder)
    assert recorder.reused == ["prompts", "decontaminate", "rollout", "pack"]
