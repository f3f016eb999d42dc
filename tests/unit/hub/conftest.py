"""Loopback hubs, the environment that leads the real clients to them, and a clock that does not wait."""

from __future__ import annotations

import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from hub_builders import RECIPE, exported_drafter, plain_card
from hub_servers import SERVERS, LoopbackHub, start
from huggingface_hub import constants
from huggingface_hub.utils import disable_progress_bars

from angelspec.core.recipe import Recipe
from angelspec.core.recipe_files import load_recipe
from angelspec.hub.publish import Publication, prepare


@pytest.fixture(autouse=True)
def _surroundings(tmp_path, monkeypatch):
    """No token, cache or endpoint of this machine is seen."""
    disable_progress_bars()
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_ENDPOINT", "MODELSCOPE_ENDPOINT", "MODELSCOPE_API_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MODELSCOPE_HOME", str(tmp_path / "modelscope"))
    monkeypatch.setenv("MODELSCOPE_CACHE", str(tmp_path / "modelscope-cache"))
    monkeypatch.setenv("ANGELSPEC_CACHE", str(tmp_path / "angelspec"))
    monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")


@pytest.fixture
def waits(monkeypatch) -> list[float]:
    """Seconds that would have been slept, by us and by the clients."""
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    with suppress(ImportError):
        from modelscope_hub import _download

        monkeypatch.setattr(_download, "DOWNLOAD_RETRY_MAX_DELAY_SECONDS", 0)
        monkeypatch.setattr(_download, "DOWNLOAD_INTEGRITY_RETRY_BACKOFF", 0.0)
    return slept


@pytest.fixture(params=["hf", "modelscope"])
def hub(request, monkeypatch) -> Iterator[LoopbackHub]:
    """Each hub in turn."""
    server = start(request.param, monkeypatch)
    yield server
    server.close()


@pytest.fixture
def both(monkeypatch) -> Iterator[dict[str, LoopbackHub]]:
    """Both hubs at once."""
    servers = {kind: start(kind, monkeypatch) for kind in SERVERS}
    yield servers
    for server in servers.values():
        server.close()


@pytest.fixture(scope="session")
def drafter(tmp_path_factory) -> Path:
    """An exported drafter; not to be changed."""
    return exported_drafter(tmp_path_factory.mktemp("export") / "tiny-dfly")


@pytest.fixture(scope="session")
def _far_drafter(tmp_path_factory) -> Path:
    recipe = load_recipe(RECIPE).model_dump(mode="json")
    recipe["target"]["source"] = "hf:org/tiny-llama"
    return exported_drafter(tmp_path_factory.mktemp("far") / "tiny-dfly", recipe=Recipe.model_validate(recipe))


@pytest.fixture
def tree(_far_drafter, tmp_path) -> Path:
    """An exported drafter to be changed; its target is not on this machine, so that nothing is drafted."""
    return Path(shutil.copytree(_far_drafter, tmp_path / "tiny-dfly"))


@pytest.fixture
def no_network(monkeypatch):
    """Any attempt to reach anything is an error."""

    def refuse(*arguments, **named):
        raise AssertionError(f"a request was made: {arguments}")

    for name in ("connect", "connect_ex", "sendto"):
        monkeypatch.setattr(socket.socket, name, refuse)
    for name in ("create_connection", "getaddrinfo", "gethostbyname"):
        monkeypatch.setattr(socket, name, refuse)


@pytest.fixture(scope="session")
def publication(drafter) -> Iterator[Publication]:
    """Staged and checked as far as that needs no drafter."""
    with prepare(drafter, license="apache-2.0", base_model=None, write_card=plain_card, checks={}) as made:
        yield made
