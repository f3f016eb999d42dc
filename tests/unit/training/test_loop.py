"""The loop with a step of its own kind: it knows no drafter, so none is needed to test it."""

import json
import os
import signal

import pytest
import torch
from torch import nn
from training_builders import CE, section

from angelspec.core.acceptance import AcceptanceCounts
from angelspec.core.errors import CheckpointError, MissingRequirement, TrainingError
from angelspec.core.files import write_text_atomic
from angelspec.core.recipe import OptimizerSection, TrainingStage
from angelspec.objectives.terms import Ratio, SlotCounts
from angelspec.training import checkpoints
from angelspec.training.held_out import HeldOutResult
from angelspec.training.loop import train
from angelspec.training.metrics import read_metrics
from angelspec.training.update import StepTerms

X = torch.randn(7, 4, generator=torch.Generator().manual_seed(5))


class Step:
    """Regression of rows to zero; remembers what it was asked."""

    def __init__(self, model, *, poison=(), rows=7):
        self.model, self.poison, self.rows, self.seen = model, set(poison), rows, []

    def trainable_rows(self):
        return list(range(self.rows))

    def __call__(self, row_ids, *, objective, step):
        self.seen.append((step, list(row_ids)))
        value = self.model(X[list(row_ids)]).pow(2).sum()
        value = value * (float("nan") if step in self.poison else 1.0)
        ones = torch.ones(2, dtype=torch.float64)
        counts = SlotCounts(valid_K=ones, correct_K=ones, accepted_K=ones, ce_K=ones, alpha_K=None)
        return StepTerms(
            losses={"token": Ratio(value, torch.tensor(float(len(row_ids))))}, counts=counts, num_positions=2
        )


def held_out(length):
    accepted = round((length - 1) * 100)
    return HeldOutResult(
        AcceptanceCounts(
            generated_tokens=100 + accepted, verify_steps=100, proposed_tokens=100, drafted_tokens=100,
            full_depth_steps=100, accepted_through=(accepted,),
        )
    )  # fmt: skip


def model():
    torch.manual_seed(0)
    return nn.Linear(4, 2)


def steps(name, count, **settings):
    return TrainingStage(name=name, objective=CE, steps=count, **settings)


def run(folder, stages, *, net=None, lengths=None, step=None, report=None, run_id="a", **changes):
    net = net or model()
    step = step or Step(net)
    step.model = net
    values = iter(lengths) if lengths is not None else None
    result = train(
        section(stages=tuple(stages), **changes), model=net, step=step, folder=folder, run_id=run_id, report=report,
        evaluate=None if values is None else lambda: held_out(next(values)),
    )  # fmt: skip
    return result, net, step


def events(folder, kind):
    return [event for event in read_metrics(folder) if event["kind"] == kind]


def test_stages_follow_each_other_each_with_its_own_schedule(tmp_path):
    stages = [steps("cold", 4), steps("end-to-end", 3, learning_rate_scale=0.5)]
    optimizer = OptimizerSection(learning_rate=1e-2, min_learning_rate=1e-3, warmup_fraction=0.0, schedule="linear")
    result, _, step = run(tmp_path, stages, optimizer=optimizer)
    assert (result.status, result.step) == ("finished", 7)
    logged = events(tmp_path, "step")
    assert [event["stage"] for event in logged] == ["cold"] * 4 + ["end-to-end"] * 3
    assert [event["learning_rate"] for event in logged] == pytest.approx(
        [0.01 * (1 - 0.9 * i / 4) for i in range(1, 5)] + [0.005 * (1 - 0.9 * i / 3) for i in range(1, 4)]
    )
    assert [number for number, _ in step.seen] == list(range(7))


def test_epochs_visit_every_row_equally(tmp_path):
    stage = TrainingStage(name="cold", objective=CE, epochs=2)
    _, _, step = run(tmp_path, [stage], rows_per_step=2, rows_per_micro_batch=1)
    rows = [row for _, row_ids in step.seen for row in row_ids]
    assert sorted(rows) == sorted(list(range(7)) * 2)


def test_evaluates_at_the_start_on_schedule_and_at_stage_ends(tmp_path):
    run(tmp_path, [steps("cold", 5), steps("warm", 3)], lengths=[1.0 + 0.1 * i for i in range(9)], evaluate_every=2)
    assert [event["step"] for event in events(tmp_path, "held_out")] == [0, 2, 4, 5, 6, 8]


def test_the_best_checkpoint_is_that_of_the_largest_accepted_length(tmp_path):
    result, _, _ = run(
        tmp_path, [steps("cold", 8)], lengths=[9.0, 1.2, 1.5, 1.4, 1.45], evaluate_every=2, save_every=100
    )
    assert (result.best_step, result.best_accepted_length) == (4, pytest.approx(1.5))
    assert (tmp_path / "checkpoints" / "best").read_text() == "step-00000004\n"
    assert (tmp_path / "checkpoints" / "latest").read_text() == "step-00000008\n"


@pytest.mark.parametrize("pointer", ["best", "latest"])
@pytest.mark.parametrize(("lengths", "best"), [([1.5, 1.4, 1.45], 4), ([1.1, 1.15, 1.0], 2)])
def test_killed_between_the_pointers_and_resumed_the_best_is_what_the_run_says(
    tmp_path, monkeypatch, pointer, lengths, best
):
    """Also where a GPU's other rounding makes the second attempt at a step no best one."""

    def killed(path, text):
        if path.name == pointer and "step-00000004" in text:
            raise KeyboardInterrupt
        write_text_atomic(path, text)

    changes = {"evaluate_every": 2, "save_every": 2, "keep_checkpoints": 1}
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "write_text_atomic", killed)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path, [steps("cold", 8)], lengths=[1.0, 1.2, 1.5], **changes)
    result, _, _ = run(tmp_path, [steps("cold", 8)], lengths=lengths, **changes)
    assert (result.step, result.best_step) == (8, best)
    pointed = tmp_path / "checkpoints" / (tmp_path / "checkpoints" / "best").read_text().strip()
    assert json.loads((pointed / "meta.json").read_text())["progress"]["step"] == best


def test_a_plateau_ends_its_stage_early_and_the_next_begins(tmp_path):
    stages = [steps("cold", 50, plateau_evaluations=2, plateau_gain=0.1), steps("warm", 3)]
    result, _, _ = run(tmp_path, stages, lengths=[1.0, 1.5, 1.55, 1.7, 1.75, 1.79, 2.0, 2.0], evaluate_every=2)
    assert result.step == 13
    assert [event["step"] for event in events(tmp_path, "plateau")] == [10]
    assert [event["step"] for event in events(tmp_path, "step") if event["stage"] == "warm"] == [11, 12, 13]


def test_the_steps_before_a_plateau_are_logged(tmp_path):
    stages = [steps("cold", 50, plateau_evaluations=2, plateau_gain=0.1)]
    run(tmp_path, stages, lengths=[1.0, 1.5, 1.55, 1.56], evaluate_every=2, log_every=4)
    assert [event["step"] for event in events(tmp_path, "plateau")] == [6]
    assert [event["step"] for event in events(tmp_path, "step")] == [4, 6]


def test_a_resumed_run_logs_a_skipped_step_once(tmp_path):
    class Killed(Step):
        def __call__(self, row_ids, *, objective, step):
            if step == 7 and self.poison:
                raise KeyboardInterrupt
            return super().__call__(row_ids, objective=objective, step=step)

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, [steps("cold", 9)], step=Killed(None, poison=[5]), save_every=5, max_nonfinite_steps=2)
    assert [event["step"] for event in events(tmp_path, "skipped")] == [6]
    result, _, _ = run(tmp_path, [steps("cold", 9)], step=Step(None, poison=[5]), save_every=5, max_nonfinite_steps=2)
    assert result.skipped_steps == 1 and [event["step"] for event in events(tmp_path, "skipped")] == [6]


def test_non_finite_steps_change_nothing_are_counted_and_stop_at_the_limit(tmp_path):
    clean = run(tmp_path / "a", [steps("cold", 1)])[1]
    result, net, _ = run(tmp_path / "b", [steps("cold", 3)], step=Step(None, poison=[1, 2]), max_nonfinite_steps=2)
    assert result.skipped_steps == 2 and len(events(tmp_path / "b", "skipped")) == 2
    for a, b in zip(clean.parameters(), net.parameters(), strict=True):
        assert torch.isfinite(b).all() and a.shape == b.shape
    with pytest.raises(TrainingError, match="3 steps had a non-finite"):
        run(tmp_path / "c", [steps("cold", 9)], step=Step(None, poison=[1, 2, 5, 6]), max_nonfinite_steps=2)
    with pytest.raises(TrainingError, match="1 steps had a non-finite"):
        run(tmp_path / "d", [steps("cold", 9)], step=Step(None, poison=[0]), max_nonfinite_steps=0)
    for line in (tmp_path / "b" / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def test_a_skipped_step_leaves_the_optimiser_as_it_was(tmp_path):
    """Steps 0 and 2 applied, 1 skipped: equal to a run in which step 1's gradient never was."""
    _, skipped, _ = run(tmp_path / "a", [steps("cold", 3)], step=Step(None, poison=[1]))
    saved = [p.clone() for p in skipped.parameters()]

    class Without(Step):
        def __call__(self, row_ids, *, objective, step):
            terms = super().__call__(row_ids, objective=objective, step=step)
            if step == 1:
                ratio = Ratio(terms.losses["token"].numerator * 0, torch.tensor(0.0))
                terms = StepTerms(losses={"token": ratio}, counts=terms.counts, num_positions=0)
            return terms

    result, other, _ = run(tmp_path / "b", [steps("cold", 3)], step=Without(None))
    assert result.empty_steps == 1 and result.skipped_steps == 0
    assert all(torch.equal(a, b) for a, b in zip(saved, other.parameters(), strict=True))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_stops_and_leaves_the_handlers_alone(tmp_path, number):
    before = signal.getsignal(number)

    def stop(done, total, note):
        if done == 2:
            os.kill(os.getpid(), number)

    result, stopped, _ = run(tmp_path, [steps("cold", 6)], report=stop)
    assert (result.status, result.step) == ("interrupted", 3)
    assert signal.getsignal(number) is before
    finished, resumed, _ = run(tmp_path, [steps("cold", 6)])
    assert (finished.status, finished.step) == ("finished", 6)
    straight = run(tmp_path / "straight", [steps("cold", 6)])[1]
    assert all(torch.equal(a, b) for a, b in zip(resumed.parameters(), straight.parameters(), strict=True))
    assert [event["step"] for event in events(tmp_path, "step")] == list(range(1, 7))


def test_every_step_is_reported_with_the_total(tmp_path):
    seen = []
    run(tmp_path, [steps("cold", 2), steps("warm", 3)], report=lambda *update: seen.append(update))
    assert [update[:2] for update in seen] == [(i, 5) for i in range(1, 6)] and seen[0][2] == "cold"


def test_metrics_are_means_over_the_logged_steps(tmp_path):
    run(tmp_path / "each", [steps("cold", 4)], log_every=1)
    run(tmp_path / "four", [steps("cold", 4)], log_every=4)
    each, (four,) = events(tmp_path / "each", "step"), events(tmp_path / "four", "step")
    assert four["loss"] == pytest.approx(sum(event["loss"] for event in each) / 4)
    assert four["positions"] == 8 and four["step"] == 4 and len(four["accuracy"]) == 2
    assert {"epoch", "gradient_norm", "positions_per_second", "time_share", "loss_token"} <= set(four)


def test_tensorboard_gets_the_same_numbers_or_says_how_to_install_it(tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    run(tmp_path / "a", [steps("cold", 2)], tracker="tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(tmp_path / "a" / "tensorboard"))
    board.Reload()
    logged = [event["loss"] for event in events(tmp_path / "a", "step")]
    assert [item.value for item in board.Scalars("step/loss")] == pytest.approx(logged)
    monkeypatch.setitem(__import__("sys").modules, "torch.utils.tensorboard", None)
    with pytest.raises(MissingRequirement, match="tensorboard is not installed") as error:
        run(tmp_path / "b", [steps("cold", 2)], tracker="tensorboard")
    assert "-e '.[tracking]'" in error.value.mend


def test_nothing_to_train_on_and_another_batch_size_are_refused(tmp_path):
    with pytest.raises(TrainingError, match="no packed row can be trained on"):
        run(tmp_path, [steps("cold", 2)], step=Step(None, rows=0))
    run(tmp_path, [steps("cold", 2)])
    with pytest.raises(CheckpointError, match="2 rows per step in all; this run has 1 rank.s. with 4"):
        run(tmp_path, [steps("cold", 2)], rows_per_step=4)
    with pytest.raises(CheckpointError, match="belongs to run a"):
        run(tmp_path, [steps("cold", 2)], run_id="b")
