import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from angelspec.core.errors import CheckpointError
from angelspec.training import checkpoints as module
from angelspec.training.checkpoints import Checkpoints


def tensors(value=1.0):
    return {
        "model": {"a": torch.full((2, 3), value), "b": torch.full((4,), value)},
        "optimiser": {"a/exp_avg": torch.full((2, 3), -value), "a/step": torch.tensor(value)},
        "rng": {"rank0": torch.arange(5, dtype=torch.uint8)},
    }


@pytest.fixture
def store(tmp_path):
    return Checkpoints(tmp_path / "run", run_id="run-a", keep=2)


def save(store, step, **settings):
    return store.save(tensors(float(step)), step=step, progress={"stage": 0}, **settings)


def test_round_trip_restores_every_tensor_and_the_progress(store):
    assert store.latest() is None
    store.save(tensors(7.0), step=3, progress={"stage": 1, "best": 1.5})
    found = store.latest()
    assert (found.step, found.progress, found.world_size) == (3, {"stage": 1, "best": 1.5}, 1)
    into = tensors(0.0)
    store.load(found, into)
    assert all(torch.equal(into[part][k], v) for part, group in tensors(7.0).items() for k, v in group.items())


def test_newest_and_best_are_kept_and_nothing_else(store):
    save(store, 1, is_best=True)
    for step in (2, 3, 4):
        save(store, step)
    assert sorted(p.name for p in store.folder.iterdir()) == [
        "best", "latest", "step-00000001", "step-00000003", "step-00000004",
    ]  # fmt: skip
    assert store.best().step == 1 and store.latest().step == 4
    save(store, 5, is_best=True)
    save(store, 6)
    assert [p.name for p in sorted(store.folder.glob("step-*"))] == ["step-00000005", "step-00000006"]


def test_a_checkpoint_of_an_interruption_leaves_no_trace_after_the_next(store):
    save(store, 1)
    save(store, 2, reason="interrupted")
    assert store.latest().step == 2
    save(store, 3)
    assert [p.name for p in sorted(store.folder.glob("step-*"))] == ["step-00000001", "step-00000003"]


def test_equal_runs_write_equal_bytes(tmp_path):
    files = []
    for name in ("one", "two"):
        store = Checkpoints(tmp_path / name, run_id="run-a")
        save(store, 1, is_best=True)
        files.append({str(p.relative_to(store.folder)): p.read_bytes() for p in store.folder.rglob("*.*")})
    assert files[0] == files[1] and len(files[0]) == 4


# B21, case by case


def test_half_written_folder_is_ignored_and_swept(store):
    save(store, 1)
    half = store.folder / ".step-00000002.tmp"
    half.mkdir()
    (half / "model.safetensors").write_bytes(b"half")
    assert store.latest().step == 1
    save(store, 2)
    assert not half.exists()


def test_kill_before_the_rename_leaves_the_old_checkpoint_whole(store, monkeypatch):
    save(store, 1)
    monkeypatch.setattr(module, "write_json_atomic", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        save(store, 2)
    monkeypatch.undo()
    assert store.latest().step == 1
    store.load(store.latest(), tensors(0.0))


def test_kill_between_rename_and_pointer_resumes_from_the_older_one(store, monkeypatch):
    for step in (1, 2):
        with monkeypatch.context() as patch:
            original = module.write_text_atomic

            def stop(path, text, original=original):
                if "step-" in text:
                    raise KeyboardInterrupt
                original(path, text)

            patch.setattr(module, "write_text_atomic", stop)
            with pytest.raises(KeyboardInterrupt):
                save(store, step)
        found = store.latest()
        assert found is None if step == 1 else found.step == 1
        save(store, step)
        assert store.latest().step == step


def test_no_record(store):
    (save(store, 1) / "meta.json").unlink()
    with pytest.raises(CheckpointError, match=r"step-00000001 has no meta\.json"):
        store.latest()


def test_two_runs_are_never_chosen_between(store):
    save(store, 1)
    record = json.loads((save(store, 2) / "meta.json").read_text())
    (store.folder / "step-00000002" / "meta.json").write_text(json.dumps(record | {"run_id": "run-b"}))
    with pytest.raises(CheckpointError, match=r"2 runs \(run run-a: step-00000001; run run-b: step-00000002\)"):
        store.latest()


def test_another_run_s_folder_is_refused(store):
    save(store, 1)
    with pytest.raises(CheckpointError, match="belongs to run run-a, not to this run"):
        Checkpoints(store.folder, run_id="run-z").latest()


@pytest.mark.parametrize("name", ["model.safetensors", "optimiser.safetensors"])
def test_missing_and_short_files_are_named(store, name):
    file = save(store, 1) / name
    file.write_bytes(file.read_bytes()[:-16])
    with pytest.raises(CheckpointError, match=f"{name} has .* bytes instead of"):
        store.latest()
    file.unlink()
    with pytest.raises(CheckpointError, match=f"{name} is missing"):
        store.latest()


def test_pointer_to_a_deleted_folder(store):
    save(store, 1)
    (store.folder / "latest").write_text("step-00000009\n")
    with pytest.raises(CheckpointError, match="points to 'step-00000009', which is not there") as error:
        store.latest()
    assert "step-00000001" in error.value.mend


def test_lost_pointer_is_ambiguous(store):
    save(store, 1)
    (store.folder / "latest").unlink()
    with pytest.raises(CheckpointError, match="ambiguous"):
        store.latest()


def test_other_format_version(store):
    path = save(store, 1) / "meta.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format_version": 99}))
    with pytest.raises(CheckpointError, match="format version 99"):
        store.latest()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t | {"z": t["b"].clone()}, "unexpected model/z"),
        (lambda t: {"a": t["a"], "renamed": t["b"]}, "missing model/b; unexpected model/renamed"),
        (lambda t: t | {"b": torch.zeros(5)}, r"misshapen model/b \[5\] instead of \[4\]"),
        (lambda t: t | {"b": torch.tensor([0.0, float("nan"), 0, 0])}, "non-finite values: model/b"),
    ],
)
def test_wrong_tensors_are_named_and_nothing_is_loaded(store, change, words):
    path = save(store, 1)
    file = path / "model.safetensors"
    save_file(change(load_file(file)), file)
    meta = json.loads((path / "meta.json").read_text())
    meta["files"]["model.safetensors"] = file.stat().st_size
    (path / "meta.json").write_text(json.dumps(meta))
    into = tensors(0.0)
    with pytest.raises(CheckpointError, match=words):
        store.load(store.latest(), into)
    assert all(torch.equal(v, torch.zeros_like(v)) for v in into["model"].values())
