"""Loopback servers that speak the two hubs' protocols to their real clients, and fail on demand.

Where ModelScope's client is missing its tests are skipped, unless ANGELSPEC_REQUIRE_HUBS is set.
"""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest

from hub_servers.huggingface import HuggingFaceServer
from hub_servers.loopback import SIGNATURE, LoopbackHub
from hub_servers.modelscope import ModelScopeServer

__all__ = ["SERVERS", "SIGNATURE", "LoopbackHub", "start"]

SERVERS = {"hf": HuggingFaceServer, "modelscope": ModelScopeServer}


def start(kind: str, monkeypatch: pytest.MonkeyPatch) -> LoopbackHub:
    """A server of that kind, and its client led to it with its token."""
    if kind == "modelscope" and find_spec("modelscope_hub") is None:
        give_up = pytest.fail if os.environ.get("ANGELSPEC_REQUIRE_HUBS") else pytest.skip
        give_up("ModelScope's client is not installed: pip install -e '.[modelscope]'")
    server = SERVERS[kind]()
    endpoint, token = {
        "hf": ("HF_ENDPOINT", "HF_TOKEN"),
        "modelscope": ("MODELSCOPE_ENDPOINT", "MODELSCOPE_API_TOKEN"),
    }[kind]
    monkeypatch.setenv(endpoint, server.endpoint)
    monkeypatch.setenv(token, server.token)
    return server
