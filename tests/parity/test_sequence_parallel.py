"""Ranks that share rows by positions give the losses and gradients of one rank: two and four gloo ranks, empty
shards."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from training_builders import DEPTHS, Rows, ToyTarget, mtp_config, pattern_rows, section

from angelspec.core.errors import MissingRequirement
from angelspec.core.objective import Objective
from angelspec.core.recipe import TrainingStage
from angelspec.objectives import Budget
from angelspec.ops.sequence_parallel import SequenceGroup
from angelspec.training.distributed import Ranks, connect, share_rows
from angelspec.training.features import OnlineFeatures
from angelspec.training.metrics import read_metrics
from angelspec.training.mtp_step import MtpStep
from angelspec.training.run import new_drafter, train_drafter
from angelspec.training.steps import IDLE_ROW
from angelspec.training.update import compute_gradients

BOTH = Objective(ce=0.3, lk=1.0, end_to_end_tv=0.5, slot_weights=(1.0, 0.8, 0.64))
SMALL = Budget(buffer_bytes=9 * 320 * 4, tile_columns=100, product_columns=64, min_rows=1)
"""Nine positions a piece, so that ranks with unequal shares need unequally many of their own accord."""
CASES = {
    "on-policy": {"objective": DEPTHS},
    "teacher-forced, two denominators": {"objective": BOTH, "on_policy": False},
    "experts": {"objective": DEPTHS, "mlp": "moe"},
    "pieces": {"objective": BOTH, "budget": SMALL},
    "recomputed depths": {"objective": DEPTHS, "budget": SMALL, "recompute": True},
    "empty shards": {"objective": DEPTHS, "rows": "short", "budget": SMALL},
    "a row that asks nothing": {"objective": DEPTHS, "row_ids": [[IDLE_ROW], [0]]},
    "several rows at once": {"objective": DEPTHS, "row_ids": [[0, 1, 2], [1, IDLE_ROW, 2]]},
    "kv heads for every rank": {"objective": DEPTHS, "config": {"num_kv_heads": 4}},
    "one kv head": {"objective": DEPTHS, "config": {"num_kv_heads": 1}},
}


def rows_of(kind: str) -> Rows:
    rows = pattern_rows(3, row_length=64)
    if kind == "short":  # three tokens, of which one position is asked: three of four ranks have none
        rows.document_RT[0] = torch.where(torch.arange(64) < 3, 0, -1)
        rows.position_RT[0] = torch.arange(64).clamp(max=2)
        rows.loss_mask_RT[0] = torch.arange(64) == 2
    return rows


def gradients(ranks: Ranks, *, objective, mlp="dense", rows="long", row_ids=None, config=None, **changes):
    """Facts and gradients of one update; ``changes`` are the step's."""
    target, packed = ToyTarget(), rows_of(rows)
    drafter = new_drafter(mtp_config(mlp, **(config or {})), seed=0)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.1)
    step = MtpStep(
        drafter, rows=packed, features=OnlineFeatures(target, packed, layer_ids=()), embedding_VD=target.embedding_VD,
        head_VD=target.head_VD, ranks=ranks, **changes,
    )  # fmt: skip
    result = compute_gradients(
        row_ids or [[0], [2]], lambda ids: step(ids, objective=objective, step=0), model=drafter, ranks=ranks
    )
    facts = {
        "numerators": result.numerators, "denominators": result.denominators, "positions": result.num_positions,
        "refused": result.num_refused_rows, "norm": result.norm, "valid": result.counts.valid_K.tolist(),
        "accepted": result.counts.accepted_K.tolist(), "ce": result.counts.ce_K.tolist(),
    }  # fmt: skip
    return facts, {name: p.grad.clone() for name, p in drafter.named_parameters()}


def run(folder: Path, ranks: Ranks | None, *, sequence: int, data: int):
    """A short training; ``data`` shares of rows, each shared by ``sequence`` ranks."""
    stage = TrainingStage(name="cold", objective=DEPTHS, steps=2)
    changes = {"rows_per_step": 4 // data, "rows_per_micro_batch": 2, "sequence_parallel": sequence}
    return train_drafter(
        section(stages=(stage,), **changes), mtp_config(), target=ToyTarget(), train_rows=pattern_rows(5),
        held_out_rows=pattern_rows(3, seed=9), folder=folder, ranks=ranks,
    )  # fmt: skip


def worker(rank: int, folder: Path, world: int) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
    every = connect()
    ranks = share_rows(every, world)
    results = {}
    for number, (name, case) in enumerate(CASES.items()):
        facts, tensors = gradients(ranks, **case)
        results[name] = facts
        torch.save(tensors, folder / f"{number}-{rank}.pt")
    result = run(folder / "run", every, sequence=2, data=world // 2)
    results["run"] = [result.step, result.supervised_positions, result.best_accepted_length]
    group, generator = ranks.sequence, torch.Generator().manual_seed(0)
    counts = [3, 0, 2, 1][:world]
    whole = torch.randn(sum(counts), 8, 5, generator=generator)
    first = sum(counts[:rank])
    mine = whole[first : first + counts[rank]].clone().requires_grad_()
    by_heads = group.to_heads(mine, counts)
    share = slice(rank * 8 // world, (rank + 1) * 8 // world)
    assert torch.equal(by_heads, whole[:, share])
    back = group.to_positions(by_heads, counts)
    assert torch.equal(back, mine)
    weight = torch.randn(whole.shape, generator=generator)
    (by_heads * weight[:, share]).sum().backward()
    assert torch.equal(mine.grad, weight[first : first + counts[rank]])
    (folder / f"rank{rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


@pytest.fixture(scope="module", params=[2, 4], ids=["two ranks", "four ranks"])
def shared(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(f"ranks{request.param}")
    mp.spawn(worker, args=(folder, request.param), nprocs=request.param)
    return folder, request.param


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    run(folder, None, sequence=1, data=1)
    return folder, {name: gradients(Ranks(), **case) for name, case in CASES.items()}


@pytest.mark.parametrize("name", CASES)
def test_losses_counts_and_gradients_are_those_of_one_rank(shared, alone, name):
    folder, world = shared
    facts, expected = alone[1][name]
    assert facts["positions"] > 0
    for rank in range(world):
        found = json.loads((folder / f"rank{rank}.json").read_text())[name]
        for key, value in facts.items():
            assert found[key] == pytest.approx(value, rel=2e-4, abs=1e-6), key
        tensors = torch.load(folder / f"{list(CASES).index(name)}-{rank}.pt")
        for key, reference in expected.items():
            scale = reference.abs().max().clamp(min=1e-6)
            torch.testing.assert_close(
                tensors[key] / scale, reference / scale, rtol=1e-3, atol=1e-3, msg=lambda t, k=key: f"{k}: {t}"
            )


def test_a_training_with_shared_rows_is_that_of_one_rank(shared, alone):
    """Two ranks: one share of the rows; four: two shares, each of two ranks."""
    folder, _ = shared
    ones, twos = (
        [event for event in read_metrics(place) if event["kind"] in ("step", "held_out")]
        for place in (alone[0], folder / "run")
    )
    assert len(ones) == len(twos) > 3
    for one, two in zip(ones, twos, strict=True):
        for key in set(one) & {"loss", "gradient_norm", "positions", "accuracy", "accepted", "accepted_length"}:
            assert two[key] == pytest.approx(one[key], rel=5e-4, abs=1e-6), key


def test_the_case_of_empty_shards_has_some(alone):
    assert alone[1]["empty shards"][0]["valid"][2] < alone[1]["on-policy"][0]["valid"][2]
    assert SequenceGroup(0, 4).bounds(2) == [0, 0, 1, 1, 2]


def test_runs_of_positions_are_of_equal_length():
    assert SequenceGroup(0, 3).bounds(10) == [0, 3, 6, 10]
    assert SequenceGroup(0, 4).bounds(0) == [0] * 5


def test_heads_are_repeated_just_so_often_that_ranks_can_share_them():
    states = torch.arange(3.0)[None, :, None]
    group = SequenceGroup(0, 3)
    assert group.spread_heads(states, num_query_heads=9) is states
    assert SequenceGroup(0, 6).spread_heads(states, num_query_heads=6)[0, :, 0].tolist() == [0, 0, 1, 1, 2, 2]
    assert SequenceGroup(0, 2).spread_heads(states, num_query_heads=6)[0, :, 0].tolist() == [0, 0, 1, 1, 2, 2]
    with pytest.raises(ValueError, match="9 query heads cannot be shared evenly by 2 ranks"):
        SequenceGroup(0, 2).spread_heads(states, num_query_heads=9)


def test_ranks_that_do_not_fall_into_groups_are_refused():
    with pytest.raises(MissingRequirement, match=r"sequence_parallel is 2 and 1 rank\(s\) run"):
        share_rows(Ranks(), 2)
    assert share_rows(Ranks(), 1) == Ranks()
