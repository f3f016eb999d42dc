"""What an export's manifest says of the training behind it."""

from pathlib import Path

import pytest

from angelspec.core.recipe_files import load_recipe
from angelspec.pipeline.export_stage import training_record
from angelspec.pipeline.stage import StageOutput, StageResult

PACKED = {"train": {"supervised_tokens": 900, "documents_by_workload": {"chat": 5, "code": 4}}}


def stage(summary):
    return StageResult(Path("stage"), "ab", StageOutput("cd", summary), 1.0, reused=False)


def trained(name, best, chosen=None, **counted):
    return stage(
        {
            "steps": 50, "best_step": best, "chosen_from": chosen or name, "supervised_positions": 7,
            "held_out_accepted_length": 1.5, **counted,
        }
    )  # fmt: skip


def record(cold, end_to_end):
    recipe = load_recipe("tiny-dfly-llama")
    before = {"pack": stage(PACKED), "train-cold-start": cold, "train-end-to-end": end_to_end}
    return training_record(recipe, before)


@pytest.mark.parametrize(("chosen", "steps"), [("end-to-end", 30 + 20), ("cold-start", 30)])
def test_steps_are_those_that_the_exported_weights_have_seen(chosen, steps):
    found = record(trained("cold-start", 30), trained("end-to-end", 20, chosen))
    assert (found.steps, found.supervised_positions) == (steps, 14)
    assert [(item.name, item.steps) for item in found.stages] == [("cold-start", 50), ("end-to-end", 50)]


def test_tokens_and_documents_are_those_that_were_trained_on():
    counted = {"target_tokens": 400, "workloads": {"code": 4}}
    found = record(trained("cold-start", 30, **counted), trained("end-to-end", 20, **counted))
    assert (found.target_tokens, found.workloads) == (400, {"code": 4})
    old = record(trained("cold-start", 30), trained("end-to-end", 20))
    assert (old.target_tokens, old.workloads) == (900, {"chat": 5, "code": 4})
