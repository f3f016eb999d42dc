"""A whole run by two ranks, started as a user starts them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from angelspec.core.errors import MissingRequirement
from angelspec.core.files import read_json
from angelspec.core.recipe_files import load_recipe
from angelspec.pipeline.compare_run import run_comparison
from angelspec.pipeline.requirements import missing_requirements
from angelspec.pipeline.session import Session
from angelspec.pipeline.training_stages import training_stages

ROOT = Path(__file__).parents[2]
LAUNCH = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "angelspec")


def run(folder: Path, *options: str, ranks: bool) -> subprocess.CompletedProcess[str]:
    command = [*(LAUNCH if ranks else (sys.executable, "-m", "angelspec")), "recipe", "run", "tiny-dfly-llama"]
    environment = {
        **os.environ, "ANGELSPEC_CACHE": str(folder.parent / "cache"), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1",
        "ANGELSPEC_DEVICE": "cpu",
    }  # fmt: skip
    return subprocess.run(
        [*command, *options, "--output", str(folder)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, subprocess.CompletedProcess[str]]]:
    """One rank with two rows a step; two ranks with a row each; and the two again, to go on with what they finished."""
    folder = tmp_path_factory.mktemp("ranks")
    rows = ("--set", "training.rows_per_step=1", "--set", "training.features=disk")
    made = {"one": (folder / "one", run(folder / "one", "--set", "training.features=disk", ranks=False))}
    made["two"] = (folder / "two", run(folder / "two", *rows, ranks=True))
    made["again"] = (folder / "two", run(folder / "two", *rows, ranks=True))
    for _, done in made.values():
        assert done.returncode == 0, done.stderr[-3000:]
    return made


def test_two_ranks_end_with_the_drafter_of_one(runs):
    one, two = (load_file(runs[name][0] / "drafter" / "model.safetensors") for name in ("one", "two"))
    assert set(one) == set(two)
    for name in one:
        assert (one[name].float() - two[name].float()).abs().max() < 2e-2, name  # bfloat16 of weights equal to rounding
    stages = [read_json(runs[name][0] / "stages.json") for name in ("one", "two")]
    for stage in ("rollout", "pack"):
        assert stages[0][stage]["digest"] == stages[1][stage]["digest"]
    assert (runs["two"][0] / "drafter" / "report.md").is_file()


def test_the_first_rank_alone_speaks_and_a_second_run_reuses_all(runs):
    said = runs["two"][1].stderr
    assert said.count("train-cold-start: done in") == 1 and said.count("rollout: done in") == 1
    assert runs["two"][1].stdout.count("compare drafters: angelspec evaluate") == 1
    again = runs["again"][1].stderr
    assert again.count(": reused (") == 9 and ": done in" not in again


def test_ranks_that_can_not_share_rows_are_refused_before_anything_runs(monkeypatch, tmp_path):
    recipe = load_recipe("tiny-mtp-llama", overrides=["training.sequence_parallel=2"])
    (missing,) = missing_requirements(recipe, output=tmp_path)
    assert "torchrun --nproc-per-node 2 -m angelspec recipe run tiny-mtp-llama" in missing
    monkeypatch.setenv("WORLD_SIZE", "4")
    (missing,) = missing_requirements(recipe, output=tmp_path)
    assert "training.features=memory is for one; use disk or online" in missing
    online = load_recipe("tiny-mtp-llama", overrides=["training.sequence_parallel=2", "training.features=online"])
    assert missing_requirements(online, output=tmp_path) == []


def test_the_rows_of_a_step_name_a_training_whatever_number_of_ranks_shares_them(monkeypatch):
    def inputs(ranks: int, *overrides: str) -> object:
        monkeypatch.setenv("WORLD_SIZE", str(ranks))
        recipe = load_recipe("tiny-mtp-llama", overrides=["training.features=online", *overrides])
        return training_stages(recipe)[0].inputs(recipe)

    one = inputs(1, "training.rows_per_step=4")
    assert inputs(4, "training.rows_per_step=1", "training.sharding=shard") == one
    assert inputs(4, "training.rows_per_step=2", "training.sequence_parallel=2") == one
    assert inputs(4, "training.rows_per_step=4") != one


def test_a_comparison_is_run_by_one_process(monkeypatch, tmp_path):
    from angelspec.core.comparison import load_comparison
    from angelspec.training.distributed import Ranks

    monkeypatch.setattr(Session, "ranks", Ranks(rank=0, world_size=2))
    with pytest.raises(MissingRequirement, match="by one process, and 2 were started"):
        run_comparison(
            load_comparison("paper-orderings"), output=tmp_path / "out", store=tmp_path / "store", quiet=True
        )
