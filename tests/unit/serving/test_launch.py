"""Starting, probing, running and stopping a server, with a fake SGLang as the child process."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
import threading
import time

import psutil
import pytest
from fake_sglang import Behaviour, FakeSGLang
from hub_builders import manifest_of
from serving_builders import DFLY, install_fake_sglang, plan_of, resolved_bundle

from angelspec.core.bundle import load_bundle
from angelspec.core.recipe_files import load_recipe
from angelspec.serving import launch
from angelspec.serving.client import Client
from angelspec.serving.failures import NotSpeculating, ServingError, StartFailed
from angelspec.serving.launch import check_port, free_port, serve
from angelspec.serving.probe import probe
from angelspec.serving.process import ServerProcess


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Serves with a behaviour until ``when_ready`` has run; returns what was said, and all processes started."""

    def run(*, when_ready=None, number=signal.SIGTERM, behaviour=None, **options):
        install_fake_sglang(tmp_path, monkeypatch, behaviour=behaviour)
        plan = plan_of(resolved_bundle(tmp_path), port=free_port("127.0.0.1"), arguments=options.pop("arguments", ()))
        said: list[str] = []
        processes: list[psutil.Process] = []
        started = ServerProcess.__init__

        def watched(self, *arguments, **named):
            started(self, *arguments, **named)
            processes.append(psutil.Process(self.pid))

        monkeypatch.setattr(ServerProcess, "__init__", watched)

        def ready(probed):
            said.extend(str(item) for item in probed)
            processes.extend(processes[0].children(recursive=True))
            if when_ready is not None:
                when_ready(plan)
            os.kill(os.getpid(), number)

        error = None
        try:
            serve(plan, say=said.append, ready=ready, start_timeout=options.pop("start_timeout", 20), **options)
        except ServingError as raised:
            error = raised
        return said, error, processes

    before = set(psutil.Process().children(recursive=True))  # of other tests, such as a resource tracker
    yield run
    for process in set(psutil.Process().children(recursive=True)) - before:
        assert process.status() == psutil.STATUS_ZOMBIE, f"left behind: {process}"


def _gone(processes):
    return all(not process.is_running() or process.status() == psutil.STATUS_ZOMBIE for process in processes)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_server_starts_proves_itself_answers_and_stops_on_a_signal(start, tmp_path, number):
    answers = []

    def talk(plan):
        with Client(plan.url) as client:
            answers.append(client.chat([{"role": "user", "content": "Hi"}], label={"route": "dfly"}, details=True))

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    said, error, processes = start(when_ready=talk, number=number)
    assert error is None
    assert answers[0].metadata.route == "dfly"
    text = "\n".join(said)
    assert "healthy after" in text
    assert re.search(r"mtp: accepted length 1\.\d\d over", text)
    assert re.search(r"dfly: accepted length 3\.\d\d over", text)
    assert said[-2:] == [f"{number.name}: stopping the server (up to 30 s for running requests)", "stopped"]
    assert len(processes) == 1
    assert _gone(processes)
    assert {number: signal.getsignal(number) for number in before} == before


def test_the_log_holds_no_key(start, tmp_path):
    said, _, _ = start(show_log=(shown := []).append, arguments=["--api-key", "s'3cret"])
    (log,) = (tmp_path / "cache" / "logs").iterdir()
    text = "\n".join([log.read_text(), *shown, *said])
    assert "--api-key ***" in text and "ready to serve" in text  # the server prints its own arguments
    assert "3cret" not in text


def test_a_key_as_python_writes_it_is_hidden_too(tmp_path):
    shown = []
    server = ServerProcess(
        [sys.executable, "-c", "print({'api_key': 'a\\\\b', 'admin_api_key': 'a\\\\bc'})"],
        environment={}, log_file=tmp_path / "log", show=shown.append, secrets=("a\\b", "a\\bc"),
    )  # fmt: skip
    server.ended_within(20)
    server.stop(grace=0)
    assert shown == ["{'api_key': '***', 'admin_api_key': '***'}"]


@pytest.mark.parametrize("host", ["127.0.0.1", "", "::1"])
def test_a_free_port_is_found_on_every_kind_of_address(host):
    check_port(host, free_port(host))


@pytest.mark.parametrize("host", ["no.such.host.invalid", "a..b", "203.0.113.1"])
def test_an_address_that_is_none_of_this_machine_is_named(host):
    with pytest.raises(ServingError, match=f"{host}:0 can't be listened on") as error:
        free_port(host)
    assert "--host" in error.value.mend


def test_the_server_reads_the_resolved_bundle_from_the_cache(start, tmp_path):
    bundles = []

    def look(plan):
        (file,) = (tmp_path / "cache" / "bundles").iterdir()
        bundles.append((load_bundle(file), plan.resolved.bundle))

    assert start(when_ready=look)[1] is None
    written, planned = bundles[0]
    assert written == planned
    assert written.drafters[0].source == str(tmp_path / "mtp")


def test_a_port_that_is_taken_while_the_server_starts_ends_it(start):
    began = time.monotonic()
    _, error, processes = start(behaviour={"dies": "bind"})
    assert isinstance(error, StartFailed)
    assert "was taken by another program meanwhile" in error.message and "--port" in error.mend
    assert time.monotonic() - began < 30
    assert _gone(processes)


def test_a_server_that_dies_at_start_shows_its_last_words(start):
    _, error, processes = start(behaviour={"dies": "start"})
    assert isinstance(error, StartFailed)
    assert error.exit_code == 9
    assert "ended while it started (exit code 7)" in error.message
    assert "RuntimeError: the draft model lacks draft.layers.0.weight" in error.message
    assert _gone(processes)


def test_a_server_that_never_becomes_healthy_is_stopped(start):
    began = time.monotonic()
    _, error, processes = start(behaviour={"never_healthy": True}, start_timeout=1.6)
    assert isinstance(error, StartFailed)
    assert "not healthy after 2 s" in error.message
    assert "ready to serve" in error.message  # the last line of its log
    assert time.monotonic() - began < 10
    assert _gone(processes)


def test_a_trained_drafter_of_which_nothing_is_accepted_is_an_error(start):
    said, error, processes = start(behaviour={"committed": {"mtp": 2, "dfly": 1}})
    assert isinstance(error, NotSpeculating)
    assert error.exit_code == 10
    assert "drafter 'dfly' is trained, but none of its proposals was accepted: accepted length 1.00" in error.message
    assert not any("serving on" in line for line in said)
    assert _gone(processes)


def test_without_a_probe_it_is_served_all_the_same(start):
    said, error, _ = start(behaviour={"committed": {}}, probing=False)
    assert error is None
    assert any("serving on" in line for line in said)


def test_a_server_that_dies_while_it_is_probed_shows_its_last_words(start):
    _, error, _ = start(behaviour={"dies": "probe"})
    assert isinstance(error, StartFailed)
    assert "ended while it was probed (exit code 3)" in error.message
    assert "out of coffee" in error.message


def test_a_server_that_ends_by_itself_is_an_error(start):
    def kill(plan):
        (child,) = [p for p in psutil.Process().children() if "sglang.launch_server" in " ".join(p.cmdline())]
        os.kill(child.pid, signal.SIGKILL)

    _, error, _ = start(when_ready=kill, number=signal.SIGCONT)  # the signal that the fixture sends stops nothing
    assert isinstance(error, StartFailed)
    assert "the server ended by itself (signal 9)" in error.message


def test_a_stubborn_server_with_a_stubborn_child_is_ended_by_force(start):
    began = time.monotonic()
    said, error, processes = start(behaviour={"stubborn": True, "child": True}, grace=0.3)
    assert error is None
    assert len(processes) == 2
    assert _gone(processes)
    assert time.monotonic() - began < 20


def test_children_that_outlive_the_server_are_ended(start):
    said, error, processes = start(behaviour={"child": True}, grace=0.3)  # the server itself ends at once
    assert error is None
    assert len(processes) == 2
    assert _gone(processes)


def test_a_signal_during_the_start_stops_it(tmp_path, monkeypatch):
    install_fake_sglang(tmp_path, monkeypatch, behaviour={"never_healthy": True})
    plan = plan_of(resolved_bundle(tmp_path), port=free_port("127.0.0.1"))
    timer = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    said, before = [], set(psutil.Process().children())
    serve(plan, say=said.append, start_timeout=30)
    assert said[-1] == "stopped"
    left = set(psutil.Process().children()) - before
    assert all(child.status() == psutil.STATUS_ZOMBIE for child in left)


def test_a_signal_between_the_childs_birth_and_its_block_leaves_nothing_behind(tmp_path, monkeypatch):
    install_fake_sglang(tmp_path, monkeypatch)
    plan = plan_of(resolved_bundle(tmp_path), port=free_port("127.0.0.1"))
    born = []

    class Hasty(ServerProcess):
        def __init__(self, *arguments, **named):
            super().__init__(*arguments, **named)
            born.append(psutil.Process(self.pid))
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.05)  # the handler runs here

    monkeypatch.setattr(launch, "ServerProcess", Hasty)
    said = []
    serve(plan, say=said.append, start_timeout=30)
    assert said[-1] == "stopped"
    assert len(born) == 1
    assert _gone(born)


def test_a_port_in_use_is_named_before_anything_starts(tmp_path, monkeypatch):
    install_fake_sglang(tmp_path, monkeypatch)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        plan = plan_of(resolved_bundle(tmp_path), port=port)
        with pytest.raises(ServingError, match=f"127.0.0.1:{port} can't be listened on"):
            serve(plan, say=lambda text: None)
    assert not (tmp_path / "cache" / "logs").exists()


# --------------------------------------------------------------------------------------------------- probe


def _probe(tmp_path, behaviour, **changes):
    resolved = resolved_bundle(tmp_path, **changes)
    with FakeSGLang(resolved.bundle, behaviour) as server, Client(server.url) as client:
        return probe(client, resolved), server.requests


def test_the_probe_forces_each_route_and_cuts_nothing(tmp_path):
    probed, requests = _probe(tmp_path, Behaviour())
    assert [item.drafter for item in probed] == ["mtp", "dfly"]
    bodies = [body for path, body in requests if path.endswith("completions")]
    assert {(body["custom_params"]["route"], body["custom_params"]["dcut"]) for body in bodies} == {
        ("mtp", "off"), ("dfly", "off"),
    }  # fmt: skip
    assert all(body["chat_template_kwargs"] == {"enable_thinking": False} for body in bodies)


def test_the_probes_accepted_length_is_pooled_over_steps(tmp_path):
    # nine tokens at two a step are five steps: 9 / 5, for each prompt alike
    probed, _ = _probe(tmp_path, Behaviour(words="a b c d e f g h i"))
    assert probed[0].accepted_length == pytest.approx(1.8)
    assert probed[0].steps == 15


@pytest.mark.parametrize(
    ("behaviour", "words"),
    [
        (Behaviour(extension=False), "runs without angelspec's extension"),
        (Behaviour(metadata=False), "carry no metadata"),
        (Behaviour(committed={"dfly": 4}), "drafter 'mtp' is trained, but none"),
    ],
)
def test_what_the_probe_finds(tmp_path, behaviour, words):
    with pytest.raises(NotSpeculating, match=words):
        _probe(tmp_path, behaviour)


def test_the_probe_misses_a_drafter_that_was_not_loaded(tmp_path):
    resolved = resolved_bundle(tmp_path)
    fewer = resolved.bundle.model_copy(update={"drafters": resolved.bundle.drafters[:1]})
    with (
        FakeSGLang(fewer) as server,
        Client(server.url) as client,
        pytest.raises(NotSpeculating, match="did not load dfly"),
    ):
        probe(client, resolved)


def test_nothing_is_expected_of_an_untrained_drafter(tmp_path):
    manifest = manifest_of(load_recipe("tiny-dfly-llama"), drafter=DFLY, acceptance=())
    fresh = manifest.model_copy(update={"training": manifest.training.model_copy(update={"steps": 0})})
    probed, _ = _probe(
        tmp_path, Behaviour(committed={}), names=("dfly",), manifests={"dfly": fresh}, digest="ab12" * 16
    )
    assert probed[0].accepted_length == 1.0
    assert not probed[0].trained


def test_a_log_that_cannot_be_written_is_said_before_anything_starts(tmp_path):
    (tmp_path / "log").mkdir()
    with pytest.raises(IsADirectoryError):
        ServerProcess(
            [sys.executable, "-c", f"open({str(tmp_path / 'ran')!r}, 'w')"], environment={}, log_file=tmp_path / "log"
        )
    assert not (tmp_path / "ran").exists()


def test_a_second_signal_ends_the_server_even_on_a_closed_terminal(tmp_path):
    server = ServerProcess(
        [sys.executable, "-c", "import time; time.sleep(60)"], environment={}, log_file=tmp_path / "log"
    )

    def closed(text):
        raise OSError("the terminal is closed")

    with launch._hurried(server, say=closed):
        signal.raise_signal(signal.SIGHUP)
    assert server.ended_within(10)
    server.stop(grace=0)


def test_whose_port_it_is(tmp_path):
    """A server that answers may be another one: both were started while nobody listened there yet."""
    mine, free = free_port("127.0.0.1"), free_port("127.0.0.1")
    listening = f"s = socket.create_server(('127.0.0.1', {mine}))"
    script = f"import socket, time; {listening}; print('up', flush=True); time.sleep(60)"
    server = ServerProcess([sys.executable, "-c", script], environment={}, log_file=tmp_path / "log")
    try:
        while server.last_line != "up":
            assert server.exit_code is None
            time.sleep(0.01)
        with socket.create_server(("127.0.0.1", 0)) as other:
            assert server.listens_on(mine) is True
            assert server.listens_on(other.getsockname()[1]) is False
            assert server.listens_on(free) is None
    finally:
        server.stop(grace=0)
