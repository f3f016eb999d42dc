"""``sglang serve`` itself, with the shipped bundle, whose drafters have registered names, named in one variable."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from angelspec.core.known_targets import KNOWN_TARGETS
from angelspec.core.locations import resource_folder
from angelspec.core.modes import mode_family
from angelspec.core.request_label import RequestLabel
from angelspec.serving.answers import ChatAnswer
from angelspec.serving.client import Client
from angelspec.serving.wire import Sampling
from angelspec.targets.sources import materialise
from tests.engine_builders import launched

pytest.importorskip("sglang")
LEAST = 1.3
"""Accepted length; a drafter with a wrong alignment or taps has 1.0."""


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    target = materialise(KNOWN_TARGETS["smollm2-135m-instruct"].source)
    log = tmp_path_factory.mktemp("launcher") / "sglang.log"
    arguments = ["--model-path", str(target), "--dtype", "float32", "--max-total-tokens", "8192"]
    with launched(*arguments, bundle=resource_folder("checkpoints") / "bundle.yaml", log=log) as client:
        yield client


def ask(client: Client, route: str) -> ChatAnswer:
    return client.chat(
        [{"role": "user", "content": "Write a Python function that returns the largest of three numbers."}],
        sampling=Sampling(max_tokens=64, temperature=0.0),
        template_arguments=mode_family("smollm2").arguments("no-think"),
        label=RequestLabel(route=route),
        details=True,
    )


def test_the_drafters_of_the_bundle_answer_as_the_target_does(client: Client) -> None:
    plain = ask(client, "ar").text
    for route in ("mtp", "dfly"):
        answer = ask(client, route)
        assert answer.text == plain
        assert answer.metadata is not None and answer.metadata.route == route
        assert answer.metadata.accepted_length is not None and answer.metadata.accepted_length > LEAST
