"""Loopback servers that speak the two hubs' protocols to their real clients, and fail on demand."""

from __future__ import annotations

import pytest

from hub_servers.huggingface import HuggingFaceServer
from hub_servers.loopback import SIGNATURE, LoopbackHub
from hub_servers.modelscope import ModelScopeServer

__all__ = ["SERVERS", "SIGNATURE", "LoopbackHub", "start"]

SERVERS = {"hf": HuggingFaceServer, "modelscope": ModelScopeServer}


def start(kind: str, monkeypatch: pytest.MonkeyPatch) -> LoopbackHub:
    """A server of that kind, and its client led to it with its token."""
    if kind == "modelscope":
        pytest.importorskip("modelscope_hub", reason="pip install -e '.[modelscope]'")
    server = SERVERS[kind]()
    endpoint, token = {
        "hf": ("HF_ENDPOINT", "HF_TOKEN"),
        "modelscope": ("MODELSCOPE_ENDPOINT", "MODELSCOPE_API_TOKEN"),
    }[kind]
    monkeypatch.setenv(endpoint, server.endpoint)
    monkeypatch.setenv(token, server.token)
    return server
