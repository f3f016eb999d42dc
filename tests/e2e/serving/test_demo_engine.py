"""``angelspec demo`` as a visitor has it: the real engine with the shipped drafters, under a real browser."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from browser import Browser, opened

from angelspec.core.locations import resource_folder
from angelspec.serving.bench_result import RESULT_FILE
from angelspec.serving.launch import free_port

pytest.importorskip("sglang")
UP = 180
"""Seconds from the command to the page."""
LEAST = 1.3
"""Accepted length; a drafter with a wrong alignment or taps has 1.0."""
ANSWERED = 240
QUESTION = "Write a Python function that returns the largest of three numbers."


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The page's address. The command must end well, with all that it started."""
    port, log = free_port("127.0.0.1"), tmp_path_factory.mktemp("demo") / "demo.log"
    command = [Path(sys.executable).with_name("angelspec"), "demo", "--no-browser", "--quiet", "--port", str(port)]
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env=dict(os.environ))
    began = time.monotonic()
    started: list[psutil.Process] = []
    try:
        while "demo on http" not in log.read_text():
            assert process.poll() is None and time.monotonic() - began < UP, log.read_text()[-4000:]
            time.sleep(0.2)
        started = psutil.Process(process.pid).children(recursive=True)
        assert started, "the engine is a process of its own"
        yield f"http://127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGINT)
        ended = process.wait(60)
    assert ended == 0, log.read_text()[-4000:]
    with suppress(psutil.NoSuchProcess):
        assert not psutil.wait_procs(started, timeout=10)[1], "processes were left behind"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with opened() as found:
        yield found


def test_every_drafter_answers_as_the_target_does_and_says_how(browser: Browser, demo: str) -> None:
    browser.open(demo)
    browser.settings()
    browser.write("length", "64")
    browser.ask(QUESTION)
    browser.until(lambda: browser.texts(".card.running .answer"), "the first column streams", seconds=30)
    browser.until(browser.ended, "all columns have ended", seconds=ANSWERED)
    names = browser.driver.execute_script("return [...document.querySelectorAll('.card')].map(e => e.ariaLabel)")
    assert names == ["Plain", "MTP", "DFly", "DFly with D-cut", "Automatic"]
    assert len(browser.all(".card.done")) == len(names)
    answers = {name: browser.texts(f'.card[aria-label="{name}"] .answer')[0] for name in names}
    assert len(set(answers.values())) == 1 and len(answers["Plain"]) > 100, answers
    accepted = {name: float(browser.figure(name, "accepted")) for name in names}
    assert accepted["Plain"] == 1.0
    for name in names[1:4]:
        assert accepted[name] > LEAST, name
        assert browser.all(f'.card[aria-label="{name}"] .answer i'), "no token is marked as drafted"
    assert not browser.all('.card[aria-label="Plain"] .answer i')
    assert browser.figure("DFly", "kept") == "100%"
    assert int(browser.figure("DFly with D-cut", "kept").rstrip("%")) < 100
    assert "code" in browser.texts('.card[aria-label="Automatic"] .route')[0]
    for name in names:
        assert float(browser.figure(name, "speed")) > 0


def test_the_other_mode_has_its_own_drafter(browser: Browser, demo: str) -> None:
    browser.open(demo)
    browser.settings()
    browser.all("#mode label")[1].click()
    browser.until(lambda: len(browser.all("#columns label")) == 4, "columns of the other mode")
    browser.write("length", "48")
    browser.ask(QUESTION, columns={"Plain", "DFly"})
    browser.until(browser.ended, "both columns have ended", seconds=ANSWERED)
    assert len(browser.all(".card.done")) == 2
    assert len(set(browser.texts(".card .answer"))) == 1
    assert float(browser.figure("DFly", "accepted")) > LEAST


@pytest.mark.skipif(not (resource_folder("checkpoints") / RESULT_FILE).is_file(), reason="no load test ships")
def test_the_load_test_that_ships_is_drawn(browser: Browser, demo: str) -> None:
    browser.open(demo)
    browser.tab("Measured")
    browser.until(lambda: browser.all("#throughput circle"), "the chart is drawn")
    assert {"ar", "mtp", "dfly", "auto"} <= set(browser.texts("#throughput .lines span"))
