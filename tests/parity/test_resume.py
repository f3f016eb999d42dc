"""B31: a run that stops anywhere and goes on is, bit for bit, the run that never stopped."""

from pathlib import Path

import pytest
import torch
from training_builders import CE, DEPTHS, E2E, mtp_config, pattern_rows, section, tiny_config, tiny_target

from angelspec.core.errors import CheckpointError
from angelspec.core.recipe import OptimizerSection, TrainingStage
from angelspec.training import loop
from angelspec.training.families import what_training_reads
from angelspec.training.metrics import read_metrics
from angelspec.training.run import train_drafter, trained_weights

STAGES = (
    TrainingStage(name="cold", objective=CE, epochs=2),  # 7 rows, 2 per step: 7 steps, an epoch ends inside one
    TrainingStage(name="end-to-end", objective=E2E, steps=3, learning_rate_scale=0.5),
)


def settings(**changes):
    base = {
        "stages": STAGES, "log_every": 2, "evaluate_every": 3, "save_every": 4, "rows_per_micro_batch": 1,
    }  # fmt: skip
    return section(**{**base, **changes})


def train(folder: Path, *, name="dfly", report=None, **changes):
    config = mtp_config() if name == "mtp" else tiny_config(name)
    return train_drafter(
        settings(**changes), config, target=tiny_target(), train_rows=pattern_rows(7),
        held_out_rows=pattern_rows(2, seed=9), folder=folder, report=report,
    )  # fmt: skip


def stop_after(step: int):
    def report(done: int, total: int, note: str) -> None:
        if done == step:
            raise KeyboardInterrupt  # not a signal: nothing is saved beyond the last checkpoint

    return report


def without_clock(folder: Path):
    return [
        {k: v for k, v in event.items() if k not in ("seconds", "time_share", "positions_per_second")}
        for event in read_metrics(folder)
    ]


def files(folder: Path):
    root = folder / "checkpoints"
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    folder = tmp_path_factory.mktemp("straight")
    assert train(folder).step == 10
    return folder


@pytest.mark.parametrize("stop", [3, 5, 7, 9])
def test_killed_and_resumed_ends_with_the_same_bytes(straight, tmp_path, stop):
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, report=stop_after(stop))
    result = train(tmp_path)
    assert result.status == "finished" and not result.was_finished and result.step == 10
    assert files(tmp_path) == files(straight)
    assert without_clock(tmp_path) == without_clock(straight)


def test_stopped_by_a_signal_and_resumed_ends_with_the_same_bytes(straight, tmp_path, monkeypatch):
    for stop in (2, 3):
        asked = []
        monkeypatch.setattr(loop, "Interruption", lambda stop=stop, asked=asked: _Asked(lambda: len(asked) >= stop))
        result = train(tmp_path, report=lambda *_, asked=asked: asked.append(1))
        assert result.status == "interrupted"
    monkeypatch.undo()
    assert train(tmp_path).status == "finished"
    assert files(tmp_path) == files(straight)
    assert without_clock(tmp_path) == without_clock(straight)


def test_a_finished_run_says_so_and_changes_nothing(straight):
    before, metrics = files(straight), (straight / "metrics.jsonl").read_bytes()
    result = train(straight)
    assert result.was_finished and result.status == "finished" and result.step == 10
    assert files(straight) == before and (straight / "metrics.jsonl").read_bytes() == metrics


@pytest.mark.parametrize("on_policy", [True, False])
def test_mtp_resumes_exactly(tmp_path, on_policy):
    stages = (
        TrainingStage(name="cold", objective=DEPTHS, steps=4),
        TrainingStage(name="end-to-end", objective=E2E, steps=2, learning_rate_scale=0.5),
    )
    changes = {"name": "mtp", "stages": stages, "on_policy": on_policy, "features": "memory", "save_every": 3}
    assert train(tmp_path / "a", **changes).step == 6
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "b", report=stop_after(4), **changes)
    assert train(tmp_path / "b", **changes).step == 6
    assert files(tmp_path / "a") == files(tmp_path / "b")
    assert without_clock(tmp_path / "a") == without_clock(tmp_path / "b")


def test_what_a_family_never_reads_is_no_part_of_a_run_s_identity(tmp_path):
    train(tmp_path / "blocks", anchors_per_row=6)
    assert train(tmp_path / "blocks", on_policy=False).was_finished
    with pytest.raises(CheckpointError):
        train(tmp_path / "blocks", anchors_per_row=5)
    changes = {"name": "mtp", "stages": (TrainingStage(name="cold", objective=DEPTHS, steps=1),)}
    train(tmp_path / "depths", **changes)
    assert train(tmp_path / "depths", anchors_per_row=5, **changes).was_finished
    with pytest.raises(CheckpointError):
        train(tmp_path / "depths", on_policy=False, **changes)


def test_how_many_steps_may_be_skipped_is_no_part_of_a_run_s_identity(straight):
    """A run that stopped at the limit goes on with a higher one."""
    assert train(straight, max_nonfinite_steps=9).was_finished
    assert what_training_reads(settings(), tiny_config())["max_nonfinite_steps"] == 5  # as finished trainings are named


def test_muon_and_memory_features_resume_exactly_too(tmp_path):
    muon = {"optimizer": OptimizerSection(name="muon"), "features": "memory", "save_every": 3}
    train(tmp_path / "a", name="dspark", **muon)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "b", name="dspark", report=stop_after(5), **muon)
    train(tmp_path / "b", name="dspark", **muon)
    assert files(tmp_path / "a") == files(tmp_path / "b")


def test_disk_features_give_the_weights_of_online_ones_and_resume(straight, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, features="disk", report=stop_after(5))
    train(tmp_path, features="disk")
    ours, _ = trained_weights(tmp_path, tiny_config(), which="last")
    theirs, _ = trained_weights(straight, tiny_config(), which="last")
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=1e-3, atol=2e-4)


def test_the_exported_choice_is_the_best_checkpoint(straight):
    _, record = trained_weights(straight, tiny_config())
    lengths = {e["step"]: e["accepted_length"] for e in read_metrics(straight) if e["kind"] == "held_out" and e["step"]}
    assert lengths[record["step"]] == max(lengths.values())


class _Asked:
    def __init__(self, requested):
        self._requested = requested

    @property
    def requested(self):
        return self._requested()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None
