"""What nothing needs can go; what something names stays until it is confirmed by itself."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from filelock import FileLock

from angelspec.cli.main import cli
from angelspec.core.errors import AngelspecError, MissingRequirement, TargetError
from angelspec.core.files import read_json, write_json_atomic
from angelspec.core.known_targets import SMOLLM2_WHEEL
from angelspec.core.repositories import Repository
from angelspec.hub import pull
from angelspec.hub.transport import RemoteFile
from angelspec.pipeline.cleaning import find_items, parse_age, parse_size, remove
from angelspec.pipeline.record import RunRecord, only_run_in
from angelspec.pipeline.store import Store, read_users
from angelspec.targets.sources import BUILD_LOCK, building, materialise


def put(path, size=1000, days=0.0):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(size))
    stamp = time.time() - days * 86400
    os.utime(path, (stamp, stamp))
    for folder in path.parents[:1]:
        os.utime(folder, (stamp, stamp))
    return path


@pytest.fixture
def disk(tmp_path, monkeypatch):
    """Runs and a cache with everything in them that clean knows, and things that it must not see."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ANGELSPEC_CACHE", str(tmp_path / "cache"))
    store = tmp_path / "runs" / "store"
    put(store / ("train-" + "a" * 16) / "stage.json", 5000, days=40)
    put(store / ("train-" + "b" * 16) / "stage.json", 3000, days=40)
    put(store / ("rollout-" + "c" * 16) / "latest", 2000, days=2)
    put(store / "mine" / "notes.txt", 9000)
    put(tmp_path / "runs" / "done" / "recipe.yaml", 100, days=40)
    put(tmp_path / "runs" / "done" / "drafter" / "config.json", 100, days=40)
    put(tmp_path / "runs" / "tried" / "recipe.yaml", 700, days=40)
    put(tmp_path / "runs" / "thesis" / "chapter.tex", 9000, days=400)
    stages = {"train": {"folder": str(store / ("train-" + "b" * 16))}}
    write_json_atomic(tmp_path / "runs" / "done" / "stages.json", stages)
    cache = tmp_path / "cache"
    drafters = cache / "drafters" / "hf" / "alice"
    put(drafters / "tiny@0123456789ab" / "model.safetensors", 4000, days=10)
    put(drafters / "tiny@ba9876543210" / "model.safetensors", 4000, days=10)
    put(drafters / ".tiny@ffff.partial" / "model.safetensors", 600, days=10)
    write_json_atomic(drafters / "tiny.refs.json", {"": "tiny@0123456789ab"})
    registered = cache / "drafters" / "hf" / "AngelSlim" / "Qwen3-8B-DFly-Block8@571292600000"
    put(registered / "config.json", 800, days=300)
    put(cache / "targets" / "wheel-smollm2" / "model.safetensors", 8000, days=300)
    write_json_atomic(cache / "targets" / "wheel-smollm2" / "angelspec_source.json", {"source": SMOLLM2_WHEEL})
    put(cache / "targets" / "random-llama-old" / "model.safetensors", 300, days=300)
    put(cache / "completed" / ("d" * 16) / "model.safetensors", 200, days=3)
    put(cache / "completed" / (".eeee.abc.tmp") / "model.safetensors", 200, days=3)
    put(cache / "digests" / "x.json", 10)
    return tmp_path


def names(items, *, named):
    return {item.path.name for item in items if bool(item.named_by) == named}


def test_lists_what_can_go_and_who_needs_the_rest(disk):
    items = find_items(disk / "runs")
    assert names(items, named=False) == {
        "train-" + "a" * 16, "tried", "tiny@ba9876543210", ".tiny@ffff.partial", "random-llama-old",
        "d" * 16, ".eeee.abc.tmp",
    }  # fmt: skip
    reasons = {item.path.name: item.named_by for item in items if item.named_by}
    assert reasons == {
        "train-" + "b" * 16: ("run done",),
        "rollout-" + "c" * 16: ("its pointer 'latest': a rerun goes on from there",),
        "done": (f"its drafter, {disk / 'runs' / 'done' / 'drafter'}",),
        "tiny@0123456789ab": ("pulled as hf:alice/tiny",),
        "Qwen3-8B-DFly-Block8@571292600000": ("registered as AngelSlim/Qwen3-8B-DFly-Block8",),
        "wheel-smollm2": ("target smollm2-135m-instruct",),
    }
    what = {item.path.name: item.what for item in items}
    assert what[".tiny@ffff.partial"] == "unfinished download" and what["d" * 16] == "completed drafter"
    assert [item.size for item in items] == sorted((item.size for item in items), reverse=True)


def test_by_age_and_size(disk):
    old = find_items(disk / "runs", older_than=100)
    assert {item.path.name for item in old} == {"random-llama-old", "Qwen3-8B-DFly-Block8@571292600000"}
    large = find_items(disk / "runs", larger_than=5000)
    assert {item.path.name for item in large} == {"wheel-smollm2", "train-" + "a" * 16}


def clean(*arguments, answers=""):
    return CliRunner().invoke(cli, ["clean", *arguments], input=answers)


def test_asks_first(disk):
    result = clean(answers="n\n")
    assert result.exit_code == 0 and "removed 0" in result.output
    assert (disk / "runs" / "tried").is_dir()
    assert clean(answers="").exit_code == 1  # nobody answers
    assert (disk / "runs" / "tried").is_dir()


def test_removes_what_nothing_needs(disk):
    result = clean("--yes")
    assert result.exit_code == 0, result.output
    left = find_items(disk / "runs")
    assert names(left, named=False) == set()
    assert len(names(left, named=True)) == 6
    assert (disk / "runs" / "thesis" / "chapter.tex").is_file()
    assert (disk / "runs" / "store" / "mine" / "notes.txt").is_file()
    assert "something needs each of them; --named offers them too" in clean("--yes").output


def test_what_is_named_needs_a_second_word_each(disk):
    result = clean("--yes", "--named", answers="n\n" * 6)
    assert result.exit_code == 0, result.output
    assert len(names(find_items(disk / "runs"), named=True)) == 6
    result = clean("--named", "--larger-than", "3500", answers="y\nn\n")
    assert "wheel-smollm2 is needed by target smollm2-135m-instruct. Remove it all the same?" in result.output
    assert not (disk / "cache" / "targets" / "wheel-smollm2").exists()
    assert (disk / "cache" / "drafters" / "hf" / "alice" / "tiny@0123456789ab").is_dir()


def test_what_is_in_use_is_not_offered(disk):
    lock = disk / "runs" / "store" / (".train-" + "a" * 16 + ".lock")
    with FileLock(lock):
        result = clean("--yes")
        assert "in use now" in result.output
    assert (disk / "runs" / "store" / ("train-" + "a" * 16)).is_dir()


def listed(disk, name):
    return next(item for item in find_items(disk / "runs") if item.path.name == name)


def test_a_download_under_way_stays(disk, monkeypatch):
    """The real pull, cleaned in the middle and then cut off."""
    seen = []

    class Hub:
        tokens = ()
        content = b"{}"

        def snapshot(self, name, revision):
            return "0" * 40

        def files(self, name, revision):
            return {path: RemoteFile(len(self.content)) for path in ("config.json", "model.safetensors")}

        def download(self, name, path, *, revision, into, expected):
            (into / path).write_bytes(self.content)
            if path == "model.safetensors":
                seen.append((into, clean("--yes").output, into.is_dir()))
                raise KeyboardInterrupt

    monkeypatch.setattr(pull, "connect", lambda kind: Hub())
    with pytest.raises(KeyboardInterrupt):
        pull.pull(Repository("hf", "bob/new"))
    ((partial, output, stayed),) = seen
    assert stayed and f"{partial}; in use now" in output
    assert not listed(disk, partial.name).in_use  # abandoned
    clean("--yes")
    assert not partial.exists()


def test_a_target_being_built_stays(disk):
    folder = disk / "cache" / "targets" / "new"
    with building(folder, record={"source": "random:llama"}) as unfinished:
        put(unfinished / "model.safetensors")
        assert listed(disk, unfinished.name).what == "unfinished target"
        assert f"{unfinished}; in use now" in clean("--yes").output
        assert unfinished.is_dir()
    assert not listed(disk, "new").in_use
    assert sorted(path.name for path in folder.iterdir()) == ["angelspec_source.json", "model.safetensors"]


def test_a_build_that_died_can_go(disk):
    died = disk / "cache" / "targets" / ".new.abcd"
    put(died / BUILD_LOCK, 0)
    clean("--yes")
    assert not died.exists()


def test_a_target_being_fetched_stays(disk, monkeypatch):
    seen = []

    class ModelScope:
        @staticmethod
        def snapshot_download(location, *, local_dir, **named):
            put(Path(local_dir) / "model.safetensors")
            seen.append((clean("--yes").output, Path(local_dir).is_dir()))
            raise OSError("cut off")

    monkeypatch.setitem(sys.modules, "modelscope", ModelScope)
    with pytest.raises(TargetError, match="cut off"):
        materialise("modelscope:org/name")
    folder = disk / "cache" / "targets" / "modelscope-org--name"
    assert seen[0][1] and f"{folder}; in use now" in seen[0][0]
    clean("--yes")
    assert not folder.exists()


def test_a_copy_that_is_just_written_is_not_taken_for_abandoned(disk):
    young = put(disk / "cache" / "completed" / ".ffff.abc.tmp" / "model.safetensors", days=0.5 / 24)
    (reason,) = listed(disk, ".ffff.abc.tmp").named_by
    assert "within the hour" in reason
    clean("--yes")
    assert young.is_file() and not (disk / "cache" / "completed" / ".eeee.abc.tmp").exists()


def test_what_begins_while_the_user_thinks_stays(disk, monkeypatch):
    lock = FileLock(disk / "runs" / "store" / (".train-" + "a" * 16 + ".lock"))
    monkeypatch.setattr("click.confirm", lambda text: lock.acquire() and True)
    try:
        output = clean().output
    finally:
        lock.release()
    assert "stays: a command began to work in it" in output and "removed 6," in output
    assert (disk / "runs" / "store" / ("train-" + "a" * 16)).is_dir()


def test_a_drafters_pointers_go_with_it(disk):
    alice = disk / "cache" / "drafters" / "hf" / "alice"
    write_json_atomic(alice / "tiny.refs.json", {"": "tiny@0123456789ab", "v1": "tiny@ba9876543210"})
    write_json_atomic(alice / "big.refs.json", {"": "big@0123456789ab"})
    remove(listed(disk, "tiny@0123456789ab"))
    assert read_json(alice / "tiny.refs.json") == {"v1": "tiny@ba9876543210"}
    assert listed(disk, "tiny@ba9876543210").named_by == ("pulled as hf:alice/tiny@v1",)
    remove(listed(disk, "tiny@ba9876543210"))
    assert not (alice / "tiny.refs.json").exists() and (alice / "big.refs.json").is_file()


def test_only_lists(disk):
    before = sorted(str(path) for path in disk.rglob("*"))
    result = clean("--list")
    assert result.exit_code == 0 and "tried" in result.output
    assert sorted(str(path) for path in disk.rglob("*")) == before
    assert clean("--older-than", "500d").output == "nothing to remove\n"


@pytest.mark.parametrize(("text", "value"), [("0", 0), ("500MB", 500 * 10**6), ("1.5 gb", 1_500_000_000), ("2k", 2000)])
def test_sizes(text, value):
    assert parse_size(text) == value


@pytest.mark.parametrize(("text", "value"), [("12h", 0.5), ("30d", 30), ("2w", 14), ("1m", 30)])
def test_ages(text, value):
    assert parse_age(text) == value


def test_what_is_neither():
    for parse, text in ((parse_size, "much"), (parse_size, "3 XB"), (parse_age, "30"), (parse_age, "old")):
        with pytest.raises(AngelspecError, match=text):
            parse(text)


def test_what_an_interrupted_run_has_entered_is_named_by_it(disk):
    store = disk / "runs" / "store"
    record = RunRecord(disk / "runs" / "tried")
    record.enter("rollout", store / ("rollout-" + "c" * 16))
    record.enter("train", store / ("train-" + "a" * 16))
    named = {item.path.name: item.named_by for item in find_items(disk / "runs") if item.what == "stage"}
    assert "run tried" in named["rollout-" + "c" * 16] and named["train-" + "a" * 16] == ("run tried",)
    RunRecord(disk / "runs" / "tried")  # the next run in the folder enters other stages
    assert not next(i for i in find_items(disk / "runs") if i.path.name == "train-" + "a" * 16).named_by


def test_a_stage_is_named_by_a_run_whose_output_lies_elsewhere(disk, tmp_path):
    stage = disk / "runs" / "store" / ("train-" + "a" * 16)
    output = tmp_path / "elsewhere" / "out"
    with only_run_in(output):
        record, store = RunRecord(output), Store(stage.parent)
        record.enter("train", stage)
        store.note_user(stage, output)
        store.note_user(stage, output)
        assert read_users(stage) == [str(output)]
        (item,) = [item for item in find_items(disk / "runs") if item.path == stage]
        assert item.named_by == (f"run {output}",)
        assert item.in_use
        assert not remove(item) and stage.is_dir()
    assert not item.in_use
    assert remove(item) and not stage.exists()
    assert read_users(stage) == []


def test_two_runs_never_share_an_output_folder(tmp_path):
    refused = pytest.raises(MissingRequirement, match="another run writes into")
    with only_run_in(tmp_path), refused, only_run_in(tmp_path):
        pass
    with only_run_in(tmp_path):
        pass


def test_an_interrupted_removal_leaves_no_finished_stage(disk, monkeypatch):
    from angelspec.pipeline import cleaning

    stage = disk / "runs" / "store" / ("train-" + "a" * 16)
    (item,) = [item for item in find_items(disk / "runs") if item.path == stage]

    def stopped(path):
        raise KeyboardInterrupt

    monkeypatch.setattr(cleaning.shutil, "rmtree", stopped)
    with pytest.raises(KeyboardInterrupt):
        remove(item)
    assert stage.is_dir() and Store.finished(stage) is None


@pytest.mark.parametrize("place", ["drafters/hf/alice/tiny@ba9876543210", "completed/" + "f" * 16])
def test_an_interrupted_removal_leaves_no_whole_drafter(disk, monkeypatch, place):
    from angelspec.pipeline import cleaning

    folder = put(disk / "cache" / place / "config.json", days=9).parent
    (item,) = [item for item in find_items(disk / "runs") if item.path == folder]

    def stopped(path, **_):
        if path.is_dir():
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(cleaning.shutil, "rmtree", stopped)
        with pytest.raises(KeyboardInterrupt):
            remove(item)
    assert not folder.exists()
    (left,) = [item for item in find_items(disk / "runs") if folder.name in item.path.name]
    assert remove(left) and not left.path.exists()


@pytest.mark.parametrize("text", ["1.2.3d", ".d", "d", "-1d"])
def test_what_is_no_age(text):
    with pytest.raises(AngelspecError, match="is no age"):
        parse_age(text)
