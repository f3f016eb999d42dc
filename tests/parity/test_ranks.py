"""Two gloo ranks give the losses of one rank that sees all rows, replicated and sharded, and its final weights."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from training_builders import CE, DEPTHS, ToyTarget, mtp_config, pattern_rows, section, tiny_config

from angelspec.core.errors import CheckpointError
from angelspec.core.objective import Objective
from angelspec.core.recipe import OptimizerSection, TrainingStage
from angelspec.training.checkpoints import Checkpoints
from angelspec.training.distributed import connect
from angelspec.training.metrics import read_metrics
from angelspec.training.run import train_drafter, trained_weights

TWO_TERMS = Objective(ce=1.0, end_to_end_tv=0.5, position_weights="d-pace")
CASES = {
    "replicate": ("dfly", CE, {}),
    "two-terms": ("dspark", TWO_TERMS.model_copy(update={"confidence": 0.3}), {}),
    "shard": ("dfly", TWO_TERMS, {"sharding": "shard"}),
    "shard-markov": ("dspark", CE, {"sharding": "shard"}),
    "shard-muon": ("dflare", CE, {"sharding": "shard", "optimizer": OptimizerSection(name="muon")}),
    "mtp": ("mtp", DEPTHS, {}),
    "mtp-shard": ("mtp", DEPTHS.model_copy(update={"end_to_end_tv": 0.5}), {"sharding": "shard"}),
}
STEPS = 3


def config_of(name: str):
    return mtp_config() if name == "mtp" else tiny_config(name)


def run(folder: Path, case: str, ranks=None, *, world: int):
    name, objective, changes = CASES[case]
    stage = TrainingStage(name="cold", objective=objective, steps=STEPS)
    return train_drafter(
        section(stages=(stage,), rows_per_step=4 // world, rows_per_micro_batch=1, evaluate_every=2, **changes),
        config_of(name), target=ToyTarget(), train_rows=pattern_rows(7), held_out_rows=pattern_rows(3, seed=9),
        folder=folder, ranks=ranks,
    )  # fmt: skip


def epoch_with_a_short_last_step(folder: Path, ranks=None, *, world: int):
    """5 rows, 4 per step: the second step has one row, so the second rank idles."""
    stage = TrainingStage(name="cold", objective=CE, epochs=1)
    return train_drafter(
        section(stages=(stage,), rows_per_step=4 // world, rows_per_micro_batch=1, sharding="shard"),
        tiny_config("dfly"), target=ToyTarget(), train_rows=pattern_rows(5), held_out_rows=pattern_rows(1, seed=9),
        folder=folder, ranks=ranks,
    )  # fmt: skip


def worker(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank))
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    ranks = connect()
    results = {}
    for case in CASES:
        result = run(folder / case, case, ranks, world=2)
        results[case] = [result.step, result.best_accepted_length]
    epoch_with_a_short_last_step(folder / "short", ranks, world=2)
    again = run(folder / "replicate", "replicate", ranks, world=2)
    results["again"] = [again.was_finished, again.step]
    (folder / f"rank{rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    mp.spawn(worker, args=(folder,), nprocs=2)
    return folder


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    for case in CASES:
        run(folder / case, case, world=1)
    epoch_with_a_short_last_step(folder / "short", world=1)
    return folder


def events(folder: Path, kind: str):
    return [event for event in read_metrics(folder) if event["kind"] == kind]


@pytest.mark.parametrize("case", [*CASES, "short"])
def test_two_ranks_give_the_losses_and_weights_of_one(one_rank, two_ranks, case):
    ones, twos = events(one_rank / case, "step"), events(two_ranks / case, "step")
    assert len(ones) == len(twos) == (2 if case == "short" else STEPS)
    for one, two in zip(ones, twos, strict=True):
        assert one["positions"] > 0 and one["loss"] > 0
        for key in ("loss", "gradient_norm", "accuracy", "cross_entropy", "positions", "learning_rate"):
            assert two[key] == pytest.approx(one[key], rel=2e-4), key
    assert [e["accepted_length"] for e in events(one_rank / case, "held_out")] == pytest.approx(
        [e["accepted_length"] for e in events(two_ranks / case, "held_out")]
    )
    config = config_of("dfly" if case == "short" else CASES[case][0])
    one, _ = trained_weights(one_rank / case, config, which="last")
    two, record = trained_weights(two_ranks / case, config, which="last")
    assert record["world_size"] == 2
    for name, tensor in one.items():
        # AdamW's first steps are +-lr whatever the gradient's size, so a rounding of a tiny gradient shows.
        close = (tensor - two[name]).abs() < 2e-4
        assert close.float().mean() > 0.995, name
        assert (tensor - two[name]).abs().max() < 2.1 * 3e-3 * STEPS


def test_both_ranks_agree_and_a_finished_run_is_recognised(two_ranks):
    first, second = (json.loads((two_ranks / f"rank{rank}.json").read_text()) for rank in (0, 1))
    assert first == second and first["again"] == [True, STEPS]


def test_a_checkpoint_of_two_ranks_is_taken_up_by_one_with_the_same_rows_per_step(one_rank, two_ranks, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(two_ranks / "replicate", folder)
    assert run(folder, "replicate", world=1).was_finished
    with pytest.raises(CheckpointError, match=r"saved by 2 rank\(s\) with 4 rows per step in all; this run has 1"):
        run(folder, "replicate", world=2)  # two rows per rank, and one rank


def test_a_missing_rank_file_is_named(two_ranks, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(two_ranks / "shard", folder)
    latest = (folder / "checkpoints" / "latest").read_text().strip()
    files = sorted((folder / "checkpoints" / latest).rglob("*.distcp"))
    assert len(files) == 2
    files[1].unlink()
    with pytest.raises(CheckpointError, match=rf"{files[1].name} is missing") as error:
        Checkpoints(folder / "checkpoints", run_id=None).latest()
    assert "saved by 2 rank(s)" in error.value.message


def test_sharded_checkpoints_are_compared_by_name_and_shape(two_ranks):
    store = Checkpoints(two_ranks / "shard" / "checkpoints", run_id=None)
    weights, _ = trained_weights(two_ranks / "shard", tiny_config("dfly"), which="last")
    name = "final_norm.weight"
    for changed, words in (
        ({**weights, name: torch.zeros(3)}, rf"misshapen model/{name} \[64\] instead of \[3\]"),
        ({k: v for k, v in weights.items() if k != name}, f"unexpected model/{name}"),
        ({**weights, "new": torch.zeros(3)}, "missing model/new"),
    ):
        with pytest.raises(CheckpointError, match=words):
            store.load(store.latest(), {"model": changed})
