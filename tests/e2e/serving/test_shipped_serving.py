"""SmolLM2 and its shipped drafter, served as the README says: probed, and with the target's own words."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from angelspec.core.request_label import RequestLabel
from angelspec.serving.wire import Sampling
from tests.engine_builders import served

pytest.importorskip("sglang")
QUESTION = "Write a Python function that returns the largest of three numbers."


def test_the_shipped_drafter_speeds_up_the_embedded_target(tmp_path: Path) -> None:
    arguments = ["--target", "smollm2-135m-instruct", "--drafter", "smollm2-dfly-nothink"]
    with served(*arguments, log=tmp_path / "serve.log") as client:
        answers = {
            route: client.chat(
                [{"role": "user", "content": QUESTION}],
                sampling=Sampling(max_tokens=96, temperature=0.0),
                label=RequestLabel(route=route),
                details=True,
            )
            for route in ("ar", "dfly", "auto")
        }
        engine = client.server_info().extension("the server")
    assert answers["ar"].text == answers["dfly"].text == answers["auto"].text
    metadata = answers["dfly"].metadata
    assert metadata is not None and (metadata.workload, metadata.mode) == ("code", "no-think")
    assert metadata.speculative_share == 1.0
    assert metadata.accepted_length is not None and metadata.accepted_length > 1.3
    assert engine.costs is not None and engine.counters.speculative_steps > 0
    said = re.search(r"log: (\S+)", (tmp_path / "serve.log").read_text())
    assert said is not None and "drafters dfly (dfly, no-think, 7 proposals)" in Path(said[1]).read_text()
