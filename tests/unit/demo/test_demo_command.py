"""``angelspec demo``: what it refuses before anything starts."""

from __future__ import annotations

import importlib.util
import socket

import pytest
from click.testing import CliRunner

from angelspec.cli.main import cli

needs_gradio = pytest.mark.skipif(
    importlib.util.find_spec("gradio") is None, reason="the extra 'demo' is not installed"
)


def failed(*arguments: str) -> str:
    result = CliRunner().invoke(cli, ["demo", "--no-browser", *arguments])
    assert result.exit_code == 2, result.output
    return result.output


def test_without_gradio_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install 'angelspec[demo]'" in failed()


@needs_gradio
def test_wrong_arguments_are_refused(tmp_path):
    assert "NAME=URL" in failed("--port", "0", "--server", "nonsense")
    assert "exclude each other" in failed("--server", "a=http://127.0.0.1:9", "--bundle", "x.yaml")
    (tmp_path / "r.json").write_text("{}", encoding="utf-8")
    assert "bench serve" in failed("--server", "a=http://127.0.0.1:9", "--results", str(tmp_path / "r.json"))


@needs_gradio
def test_a_taken_port_is_refused_before_anything_starts():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert "--port" in failed("--server", "a=http://127.0.0.1:9", "--port", str(taken.getsockname()[1]))


@needs_gradio
def test_without_drafters_it_says_what_to_give(tmp_path, monkeypatch):
    monkeypatch.setattr("angelspec.core.locations.resource_folder", lambda name: tmp_path)
    said = failed("--port", "0")
    assert "angelspec bundle create" in said and "--server NAME=URL" in said
