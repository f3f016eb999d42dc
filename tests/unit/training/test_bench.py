import pytest
import torch
from training_builders import E2E, mtp_config, tiny_config

from angelspec.core.errors import TrainingError
from angelspec.core.known_targets import KNOWN_TARGETS
from angelspec.training import precision
from angelspec.training.bench import bench_training, print_bench, run_apart
from angelspec.training.bench_cases import OBJECTIVES, BenchCase, recipe_cases, reference_cases
from angelspec.training.bench_step import measure


def tiny_case(**changes):
    base = {
        "name": "tiny", "objective_name": "ce", "objective": OBJECTIVES["dfly"]["ce"], "drafter": tiny_config(),
        "target": KNOWN_TARGETS["tiny-llama"].geometry, "row_length": 32, "rows_per_step": 2, "anchors_per_row": 5,
        "repeats": 2,
    }  # fmt: skip
    return BenchCase(**{**base, **changes})


@pytest.mark.parametrize("objective", list(OBJECTIVES["dfly"]))
def test_measures_every_objective(objective):
    result = measure(tiny_case(objective_name=objective, objective=OBJECTIVES["dfly"][objective]))
    assert result.positions_per_step == 2 * 5 * 3
    assert result.positions_per_second == pytest.approx(30 / result.step_seconds)
    assert result.yardsticks == pytest.approx(result.step_seconds / result.yardstick_seconds)
    assert sum(result.shares.values()) == pytest.approx(1.0, abs=1e-3)
    assert set(result.shares) == {"backbone", "head", "optimiser", "other"}
    assert all(share > -0.01 for share in result.shares.values())
    assert result.peak_process_bytes > 100 * 2**20


@pytest.mark.parametrize("online", [False, True])
def test_measures_mtp_at_every_position_of_a_row(online):
    result = measure(tiny_case(drafter=mtp_config(), objective=E2E, online=online))
    assert result.positions_per_step == 2 * (30 + 29 + 28)
    assert set(result.shares) == {"backbone", "head", "optimiser", "other", *(["target"] if online else [])}
    assert result.num_parameters == 64 * 128 + 64 * 16 * 12 + 3 * 64 * 96 + 5 * 64 + 2 * 16


def test_an_online_target_has_its_share_and_a_huge_one_says_why_not():
    result = measure(tiny_case(online=True))
    assert result.shares["target"] > 0.01
    qwen = KNOWN_TARGETS["qwen3-8b"].geometry
    assert qwen.num_parameters > 1e9
    from angelspec.training import bench_step

    case = tiny_case(online=True, target=qwen.model_copy(update={"vocab_size": 320, "hidden_size": 64}))
    assert "not measured" in bench_step._World(case.model_copy(update={"target": _Huge.of(case.target)})).note


class _Huge(type(KNOWN_TARGETS["tiny-llama"].geometry)):
    @property
    def num_parameters(self):
        return 8_000_000_000

    @classmethod
    def of(cls, geometry):
        return cls(**geometry.model_dump())


def test_a_case_runs_in_a_process_of_its_own_and_a_dead_one_is_reported(capsys):
    result = run_apart(tiny_case(matmul="bfloat16"))
    assert result.matmul == "bfloat16" and result.threads == torch.get_num_threads()
    print_bench([result])
    assert "yardsticks" in capsys.readouterr().out
    with pytest.raises(
        TrainingError, match="measuring tiny with ce failed: rows of 2 tokens host no draft of 3 tokens"
    ):
        run_apart(tiny_case(row_length=2))


def test_the_reference_configuration_is_that_of_the_issue():
    cases = reference_cases()
    assert [(c.matmul, c.objective_name) for c in cases] == [
        (matmul, objective) for matmul in ("float32", "bfloat16") for objective in ("ce", "lk", "e2e")
    ]
    case = cases[0]
    drafter = case.drafter
    assert (drafter.num_layers, len(drafter.target_layer_ids), drafter.block_size) == (5, 5, 8)
    assert (case.row_length, case.anchors_per_row, case.rows_per_step) == (512, 64, 1)
    assert (drafter.hidden_size, drafter.vocab_size, case.optimizer.name) == (576, 49152, "adamw")
    assert drafter.algorithm == "dfly"


def test_the_mtp_reference_is_that_of_the_issue():
    cases = reference_cases(reference="mtp")
    assert [(c.matmul, c.objective_name) for c in cases][:3] == [
        ("float32", "ce"),
        ("float32", "lk"),
        ("float32", "e2e"),
    ]
    case = cases[0]
    assert (case.drafter.num_depths, case.drafter.mlp, case.row_length, case.on_policy) == (3, "dense", 512, True)
    assert (case.drafter.hidden_size, case.drafter.vocab_size, case.optimizer.name) == (576, 49152, "adamw")
    assert (cases[1].objective.top_k, cases[1].objective.renormalise) == (10_000, True)
    recipe = recipe_cases("smollm2-mtp-nothink", overrides=["training.on_policy=false"])
    assert {case.on_policy for case in recipe} == {False} and len(recipe) == 2


def test_a_recipe_gives_a_case_per_stage_with_its_own_precision():
    cases = recipe_cases("smollm2-dfly-nothink", overrides=["training.dtype=float32"], repeats=1)
    assert len({case.objective_name for case in cases}) == len(cases) >= 2
    assert {case.matmul for case in cases} == {"float32"}
    assert cases[0].drafter.num_layers == 2 and cases[0].target.hidden_size == 576
    both = recipe_cases("smollm2-dfly-nothink", matmuls=["float32", "bfloat16"])
    assert len(both) == 2 * len(cases)


def test_bench_training_measures_the_named_cases(monkeypatch):
    from angelspec.training import bench

    asked = []
    monkeypatch.setattr(bench, "run_apart", lambda case: asked.append(case) or case)
    bench_training(objectives=["lk"], matmuls=["bfloat16"], repeats=7, device="cuda:1")
    assert [(c.objective_name, c.matmul, c.repeats, c.device) for c in asked] == [("lk", "bfloat16", 7, "cuda:1")]


def test_a_recipe_is_measured_in_the_precision_that_it_trains_in_on_that_device(monkeypatch):
    from angelspec.training import bench

    monkeypatch.setattr(precision, "has_bfloat16_products", lambda device: device != "cpu")
    monkeypatch.setattr(bench, "run_apart", lambda case: (case.device, case.matmul))
    for device, own in (("cpu", "float32"), ("cuda:1", "bfloat16")):
        assert set(bench_training("smollm2-dfly-nothink", device=device)) == {(device, own)}
