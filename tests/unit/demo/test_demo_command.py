"""``angelspec demo``: what it refuses before anything starts, and one engine with the page from start to end."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import threading
from types import SimpleNamespace

import httpx
import psutil
import pytest
from click.testing import CliRunner
from serving_builders import bench_result, fake_parts, install_fake_sglang, plan_of, resolved_bundle, target_folder

from angelspec.cli import demo_commands, serving_parts
from angelspec.cli.main import cli
from angelspec.serving.launch import free_port

needs_gradio = pytest.mark.skipif(
    importlib.util.find_spec("gradio") is None, reason="the extra 'demo' is not installed"
)


class FakePage:
    def block_thread(self) -> None:
        pass

    def close(self, *, verbose: bool) -> None:
        pass


def failed(*arguments: str) -> str:
    result = CliRunner().invoke(cli, ["demo", "--no-browser", *arguments])
    assert result.exit_code == 2, result.output
    return result.output


def test_without_gradio_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install -e '.[serve,demo]'" in failed()


@needs_gradio
def test_wrong_arguments_are_refused(tmp_path):
    assert "NAME=URL" in failed("--port", "0", "--server", "nonsense")
    assert "can't be listened on" in failed("--port", "0", "--host", "no.such.host.invalid")
    assert "exclude each other" in failed("--server", "a=http://127.0.0.1:9", "--bundle", "x.yaml")
    assert "exclude each other" in failed("--server", "a=http://a:9", "--drafter", "d", "--host", "host.invalid")
    (tmp_path / "r.json").write_text("{}", encoding="utf-8")
    assert "bench serve" in failed("--server", "a=http://127.0.0.1:9", "--results", str(tmp_path / "r.json"))


@needs_gradio
def test_the_servers_key_reaches_the_page(monkeypatch):
    built = []
    monkeypatch.setattr("angelspec.demo.app.build_page", lambda servers, results: built.extend(servers) or FakePage())
    monkeypatch.setattr("angelspec.demo.app.launch_page", lambda page, **_: "http://page")
    monkeypatch.setenv("ANGELSPEC_SERVER_KEY", "s3cret")
    arguments = ["demo", "--no-browser", "--port", "0", "--server", "a=http://127.0.0.1:9"]
    assert CliRunner().invoke(cli, arguments).exit_code == 0
    assert built[0].api_key == "s3cret"


@needs_gradio
@pytest.mark.parametrize("named", [False, True])
def test_the_load_test_beside_a_bundle_is_drawn(tmp_path, monkeypatch, named):
    """And one that is named instead of it."""
    drawn = []
    monkeypatch.setattr("angelspec.demo.app.build_page", lambda servers, results: drawn.extend(results) or FakePage())
    monkeypatch.setattr(serving_parts, "shown_plan", lambda *parts, **settings: SimpleNamespace(url="http://engine"))
    monkeypatch.setattr("angelspec.serving.launch.serve", lambda plan, **settings: None)
    (tmp_path / "bundle.yaml").write_text("{}")
    beside = bench_result()
    beside.save(tmp_path)
    arguments = ["demo", "--no-browser", "--port", "0", "--bundle", str(tmp_path / "bundle.yaml")]
    other = beside.model_copy(update={"url": "http://other"})
    if named:
        (tmp_path / "other").mkdir()
        other.save(tmp_path / "other")
        arguments += ["--results", str(tmp_path / "other")]
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 0, result.output
    assert drawn == [other if named else beside]


@needs_gradio
def test_a_taken_port_is_refused_before_anything_starts():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert "--port" in failed("--server", "a=http://127.0.0.1:9", "--port", str(taken.getsockname()[1]))


@needs_gradio
def test_without_drafters_it_says_what_to_give(tmp_path, monkeypatch):
    monkeypatch.setattr("angelspec.core.locations.resource_folder", lambda name: tmp_path)
    said = failed("--port", "0")
    assert "angelspec bundle create" in said and "--server NAME=URL" in said


@needs_gradio
@pytest.mark.parametrize(
    "arguments",
    [
        ["--target", "t"], ["--drafter", "d"], ["--bundle", "b.yaml", "--drafter", "d"],
        ["--bundle", "b.yaml", "--target", "t", "--drafter", "d"],
    ],
)  # fmt: skip
def test_a_choice_is_refused_as_serve_refuses_it(arguments):
    said = failed(*arguments)
    assert "give either --bundle FILE, or --target with --drafter" in said and "angelspec demo --help" in said
    assert said == CliRunner().invoke(cli, ["serve", *arguments]).output.replace("serve --help", "demo --help")


@needs_gradio
def test_a_target_is_served_with_its_drafters_as_by_serve(tmp_path, monkeypatch):
    install_fake_sglang(tmp_path, monkeypatch)
    monkeypatch.setattr(serving_parts, "parts", lambda: fake_parts(tmp_path, mode=None))
    started = []
    monkeypatch.setattr("angelspec.serving.launch.serve", lambda plan, **_: started.append(plan))
    target, drafters = target_folder(tmp_path / "target"), (tmp_path / "mtp", f"mine={tmp_path / 'dfly'}")
    named = ["--target", target, *(word for drafter in drafters for word in ("--drafter", drafter))]
    for command in (["demo", "--no-browser"], ["serve"]):
        arguments = [*command, "--port", "0", "--mode", "high-think", *named]
        result = CliRunner().invoke(cli, [str(word) for word in arguments])
        assert result.exit_code == 0, result.output
    ours, theirs = (plan.resolved.bundle for plan in started)
    assert ours == theirs
    assert [f"{drafter.name} {drafter.mode}" for drafter in ours.drafters] == ["mtp high-think", "mine high-think"]


@needs_gradio
def test_one_engine_is_started_shown_and_ended_with_the_page(tmp_path, monkeypatch):
    install_fake_sglang(tmp_path, monkeypatch)
    page = free_port("127.0.0.1")
    bundle = resolved_bundle(tmp_path)
    monkeypatch.setattr(serving_parts, "shown_plan", lambda *_, port, **__: plan_of(bundle, port=port))
    found, said, announced = {}, [], threading.Event()

    def echo(text: str, **_) -> None:
        said.append(text)
        if text.startswith("demo on"):
            announced.set()

    def visit() -> None:
        announced.wait(60)
        found["page"] = httpx.get(f"http://127.0.0.1:{page}/", trust_env=False).text
        found["engine"] = [p for p in psutil.Process().children() if "sglang.launch_server" in " ".join(p.cmdline())]
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(demo_commands.click, "echo", echo)
    threading.Thread(target=visit, daemon=True).start()
    result = CliRunner().invoke(cli, ["demo", "--no-browser", "--port", str(page)])
    assert result.exit_code == 0, result.output
    assert "angelspec demo" in found["page"]
    assert f"demo on http://127.0.0.1:{page}/ (Ctrl-C stops it)" in said
    assert len(found["engine"]) == 1 and not found["engine"][0].is_running()
    with pytest.raises(httpx.TransportError):
        httpx.get(f"http://127.0.0.1:{page}/", trust_env=False)
