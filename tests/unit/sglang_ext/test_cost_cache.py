"""Costs are measured once per machine, model and flags: what an earlier start measured is kept, and read with care."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from angelspec.core.bundle import parse_bundle
from angelspec.core.step_costs import DraftPoint, StepCosts, VerifyPoint

pytest.importorskip("sglang")
from sglang_ext import compat, profiling

DRAFTER = {"name": "mtp", "source": "./a", "family": "mtp", "mode": "no-think", "depth": 3, "digest": "d" * 64}
RANKS = SimpleNamespace(is_first=True, agree=lambda value: value)


def costs(seconds: float) -> StepCosts:
    return StepCosts(
        drafting={"mtp": (DraftPoint(rows=1, seconds=0.001),)},
        verification=(VerifyPoint(batch_size=1, slots=1, seconds=seconds),),
    )


class Starts:
    """Starts of an engine; every measurement takes a hundredth of a second longer than the one before."""

    def __init__(self) -> None:
        self.measurements = 0

    def __call__(self, *, given: StepCosts | None = None, page_size: int = 1) -> StepCosts:
        """The costs that an engine with this page size plans by, its bundle having those that are given."""
        document: dict[str, Any] = {"target": {"source": "./t", "digest": "t" * 64}, "drafters": [DRAFTER]}
        if given is not None:
            document["costs"] = given.model_dump(mode="json", exclude_none=True)
        bundle = parse_bundle(document, where="test")
        plan: Any = SimpleNamespace(bundle=bundle, places=[SimpleNamespace(drafter=bundle.drafters[0])])
        config = SimpleNamespace(model_path="t", quantization=None)
        facts = {"dtype": "torch.float32", "kv_cache_dtype": "torch.float32", "attn_backend": "native"}
        runner = SimpleNamespace(model_config=config, decode_cuda_graph_runner=None, **facts)
        worker = SimpleNamespace(
            model_runner=runner, draft_model_runner=runner, device="cpu", page_size=page_size, ranks=RANKS
        )
        drafts: Any = None
        return profiling.find_costs(plan, worker, drafts)

    def measure(self) -> StepCosts:
        """In the profiler's place."""
        self.measurements += 1
        return costs(self.measurements / 100)


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Starts:
    schedule = SimpleNamespace(max_running_requests=8, disable_overlap_schedule=False)
    starts = Starts()
    monkeypatch.setenv("ANGELSPEC_CACHE", str(tmp_path))
    monkeypatch.setattr(compat, "get_schedule", lambda: schedule)
    monkeypatch.setattr(compat, "get_parallel", lambda: SimpleNamespace(tp_size=1))
    monkeypatch.setattr(profiling, "Profiler", lambda worker, drafts: starts)
    return starts


def plain_seconds(found: StepCosts) -> float:
    return found.verification[0].seconds


def test_a_second_start_measures_nothing(start: Starts) -> None:
    assert plain_seconds(start()) == plain_seconds(start()) == 0.01
    assert start.measurements == 1


def test_another_flag_is_measured_for_itself(start: Starts) -> None:
    assert plain_seconds(start()) == 0.01
    assert plain_seconds(start(page_size=16)) == 0.02
    assert plain_seconds(start()) == 0.01
    assert start.measurements == 2


def test_costs_of_the_bundle_come_first_where_they_hold(start: Starts, caplog: pytest.LogCaptureFixture) -> None:
    measured = start()
    assert measured.measured_for is not None
    told = costs(0.5).model_copy(update={"measured_for": measured.measured_for})
    assert plain_seconds(start(given=told)) == 0.5
    assert plain_seconds(start(given=costs(0.25))) == 0.25, "they don't say where they hold"
    assert start.measurements == 1 and not caplog.records


def test_costs_of_the_bundle_that_do_not_hold_are_measured_and_said(
    start: Starts, caplog: pytest.LogCaptureFixture
) -> None:
    elsewhere = costs(0.5).model_copy(update={"measured_for": start(page_size=16).measured_for})
    with caplog.at_level(logging.WARNING):
        assert plain_seconds(start(given=elsewhere)) == 0.02
    assert "do not hold here (flags.page_size was 16, is 1): measuring" in caplog.text


def test_a_broken_file_is_measured_again_and_said(
    start: Starts, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    start()
    (kept,) = (tmp_path / "costs").iterdir()
    kept.write_bytes(kept.read_bytes()[:-20])
    with caplog.at_level(logging.WARNING):
        assert plain_seconds(start()) == 0.02
    assert f"{kept} can't be read: measuring again" in caplog.text
    assert plain_seconds(start()) == 0.02
    assert start.measurements == 2
