"""SmolLM2 and its shipped drafters, served as the README says: probed, and with the target's own words."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from angelspec.core.bundle import load_bundle
from angelspec.core.locations import resource_folder
from angelspec.core.modes import Mode, mode_family
from angelspec.core.request_label import RequestLabel
from angelspec.serving.answers import ChatAnswer
from angelspec.serving.wire import Sampling
from tests.engine_builders import served

pytest.importorskip("sglang")
LEAST = 1.3
"""Accepted length; a drafter with a wrong alignment or taps has 1.0."""
QUESTION = "Write a Python function that returns the largest of three numbers."


def test_the_shipped_drafters_speed_up_the_embedded_target(tmp_path: Path) -> None:
    bundle = resource_folder("checkpoints") / "bundle.yaml"
    drafters = {drafter.name: drafter for drafter in load_bundle(bundle).drafters}
    with served("--bundle", str(bundle), log=tmp_path / "serve.log") as client:

        def ask(route: str, mode: Mode) -> ChatAnswer:
            return client.chat(
                [{"role": "user", "content": QUESTION}],
                sampling=Sampling(max_tokens=96, temperature=0.0),
                template_arguments=mode_family("smollm2").arguments(mode),
                label=RequestLabel(route=route),
                details=True,
            )

        plain = {mode: ask("ar", mode).text for mode in ("no-think", "high-think")}
        assert ask("auto", "no-think").text == plain["no-think"]
        for name, drafter in drafters.items():
            answer = ask(name, drafter.mode)
            assert answer.text == plain[drafter.mode]
            metadata = answer.metadata
            assert metadata is not None and (metadata.route, metadata.workload, metadata.mode) == (
                name, "code", drafter.mode,
            )  # fmt: skip
            assert metadata.speculative_share == 1.0
            assert metadata.accepted_length is not None and metadata.accepted_length > LEAST
        engine = client.server_info().extension("the server")
    assert engine.costs is not None and engine.counters.speculative_steps > 0
    said = re.search(r"log: (\S+)", (tmp_path / "serve.log").read_text())
    assert said is not None
    log = Path(said[1]).read_text()
    for name, drafter in drafters.items():
        assert f"{name} ({drafter.algorithm or drafter.family}, {drafter.mode}," in log
