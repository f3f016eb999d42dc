"""The page in a real browser over servers that speak the contract: it streams, stops, compares and stays upright.

See ``browser.py`` for what it needs.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
from browser import DESKTOP, PHONE, Browser, opened
from demo_server import DemoServer
from serving_builders import bench_result

from angelspec.demo.app import build_page, launch_page
from angelspec.demo.columns import Server
from angelspec.demo.texts import EXAMPLES
from angelspec.serving.bench_result import BenchResult, cells_of

SHORT = "Paper is made from fibres, and then it is dried on a screen before it is cut."
DOWN = "http://127.0.0.1:9"  # the discard port: nothing listens there


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with opened() as found:
        yield found


@contextmanager
def page_over(*servers: Server, results: Sequence[BenchResult] = ()) -> Iterator[str]:
    page = build_page(servers, results)
    yield launch_page(page, port=None, open_browser=False)
    page.close(verbose=False)


@pytest.fixture(scope="module")
def embedded() -> Iterator[tuple[DemoServer, str]]:
    """One server and the page over it."""
    with DemoServer() as server, page_over(Server("embedded", server.url)) as url:
        yield server, url


@pytest.fixture(scope="module")
def tested(embedded) -> Iterator[str]:
    """The page over the same server with a load test, at 4 and at 8 users."""
    result = bench_result()
    eight = [one.model_copy(update={"concurrency": 8, "tokens": 2 * one.tokens}) for one in result.windows]
    cells = tuple(cells_of([*result.windows, *eight], baseline="ar"))
    with page_over(Server("embedded", embedded[0].url), results=[result.model_copy(update={"cells": cells})]) as url:
        yield url


@pytest.fixture
def server(embedded) -> DemoServer:
    """The server of ``embedded``, as if it were new."""
    found = embedded[0]
    new = DemoServer()
    changed = "step_seconds answer refuse break_after bodies most_running abandoned hold deterministic"
    for name in changed.split():
        setattr(found, name, getattr(new, name))
    found.answer = SHORT
    return found


@pytest.mark.parametrize(("width", "scheme"), [(DESKTOP, "light"), (PHONE, "dark")])
def test_streams_and_compares(browser, embedded, server, width, scheme):
    browser.open(embedded[1], width=width, scheme=scheme)
    assert browser.overflow() <= 0
    server.answer = DemoServer().answer
    browser.ask("Tell me about paper.")
    seen = set()
    while not browser.ended():
        seen |= {len(text) for text in browser.texts('.card[aria-label="Plain"] .answer')}
        time.sleep(0.03)
    assert len(seen) >= 5, f"the answer came in {len(seen)} pieces"
    names = browser.driver.execute_script("return [...document.querySelectorAll('.card')].map(e => e.ariaLabel)")
    assert names == ["Plain", "MTP", "DFly", "DFly with D-cut", "Automatic"]
    answers = {text.replace("Thinking", "") for text in browser.texts(".card .answer")}
    assert len(answers) == 1 and "wood pulp made it plentiful" in answers.pop()

    plain, mtp, dfly = (float(browser.figure(name, "speed")) for name in ("Plain", "MTP", "DFly"))
    assert plain < min(mtp, dfly)
    assert float(browser.figure("DFly", "times").rstrip("×")) == pytest.approx(dfly / plain, rel=0.02)
    assert float(browser.figure("Plain", "accepted")) == 1.0
    assert float(browser.figure("MTP", "accepted")) == pytest.approx(2.4, abs=0.2)
    assert browser.figure("DFly", "kept") == "100%"
    assert int(browser.figure("DFly with D-cut", "kept").rstrip("%")) < 90
    assert browser.figure("DFly", "first").endswith("ms")
    assert "asked for by the request" in browser.texts('.card[aria-label="DFly"] .route')[0]
    assert "61.0 tokens/s expected" in browser.texts('.card[aria-label="Automatic"] .route')[0]
    assert not browser.all('.card[aria-label="Plain"] i') and browser.all('.card[aria-label="DFly"] i.a7')

    assert browser.overflow() <= 0
    boxes = [card.rect for card in browser.all(".card")]
    same = {round(box["y"]) for box in boxes} if width == DESKTOP else {round(box["x"]) for box in boxes}
    assert len(same) == 1, "columns stand side by side on a desktop, and below each other on a phone"
    bodies = [body for body in server.bodies if body.get("stream")]
    assert [body["custom_params"]["route"] for body in bodies] == ["ar", "mtp", "dfly", "dfly", "auto"]
    assert server.most_running == 1, "columns of one machine ran together"


def test_stop_ends_the_generation_in_the_server(browser, embedded, server):
    server.step_seconds, server.answer = 0.1, SHORT * 20
    browser.open(embedded[1])
    browser.ask("Never stop.")
    browser.until(lambda: server.running and len("".join(browser.texts(".card.running .answer"))) > 30, "text streams")
    browser.all("#stop")[0].click()
    browser.until(lambda: server.running == 0, "the server is idle", seconds=5)
    assert server.abandoned == 1
    browser.until(lambda: len(browser.all(".card.stopped")) == 5, "the cards say so")
    time.sleep(0.5)
    assert not browser.all(".toast-body"), "stopping is no error"
    assert server.running == 0 and len([body for body in server.bodies if body.get("stream")]) == 1

    server.step_seconds, server.answer = 0.002, SHORT
    browser.ask("Again.", columns={"Plain"})
    browser.until(lambda: len(browser.all(".card")) == 1 and browser.all(".card.done"), "it runs again")


def test_leaving_the_page_ends_the_generation(browser, embedded, server):
    server.step_seconds, server.answer = 0.1, SHORT * 20
    browser.open(embedded[1])
    browser.ask("Never stop.", columns={"DFly"})
    browser.until(lambda: server.running, "a request runs")
    browser.read_console()
    browser.driver.get("about:blank")
    browser.until(lambda: server.running == 0, "the server is idle", seconds=15)
    browser.driver.get_log("browser")  # Gradio complains of the stream that was left, rightly


def test_an_error_in_one_column_stops_no_other(browser, embedded, server):
    def route(body) -> str:
        return (body.get("custom_params") or {}).get("route")

    server.refuse = lambda body: "route 'mtp' does not exist" if route(body) == "mtp" else None
    server.break_after = lambda body: 4 if route(body) == "dfly" and body["custom_params"]["dcut"] == "off" else None
    browser.open(embedded[1])
    browser.ask("One of you fails.")
    browser.until(browser.ended, "all have ended")
    assert "route 'mtp' does not exist" in browser.texts('.card.failed[aria-label="MTP"] .error')[0]
    assert "middle of the answer" in browser.texts('.card.failed[aria-label="DFly"] .error')[0]
    assert "One of" in browser.texts('.card[aria-label="DFly"] .answer')[0], "what had come is lost"
    assert len(browser.all(".card.done")) == 3


def test_several_servers_one_of_them_down(browser, server, embedded):
    with DemoServer(extension=False, answer=SHORT, step_seconds=0.005) as stock:
        named = Server("embedded", server.url), Server("stock", stock.url), Server("gone", DOWN)
        with page_over(*named) as url:
            browser.open(url)
            lines = browser.texts(".servers li")
            assert "dfly-think (high-think)" in lines[0] and "without the extension" in lines[1]
            assert "gone is down" in lines[2] and "angelspec serve" in lines[2]
            browser.ask("Hello", columns={"embedded: Plain", "stock", "gone"})
            browser.until(browser.ended, "all have ended")
            assert len(browser.all(".card.done")) == 2
            error = browser.texts('.card.failed[aria-label="gone"] .error')[0]
            assert DOWN in error and "start it: angelspec serve" in error
            assert float(browser.figure("stock", "speed")) > 0 and browser.figure("stock", "accepted") == "–"
            browser.driver.get("about:blank")  # before its server goes
            assert "custom_params" not in stock.bodies[-1] and "return_spec_tokens_details" not in stock.bodies[-1]


def test_what_was_written_is_shown_and_never_run(browser, embedded, server):
    prompt = "<img src=x onerror=window.hacked=1> ${window.hacked=2} {{value}} `</article>` <script>hacked=3</script>"
    server.answer = prompt
    browser.open(embedded[1])
    browser.ask(prompt, columns={"Plain", "MTP"})
    browser.until(browser.ended, "all have ended")
    for text in browser.texts(".card .answer"):
        assert text.count(prompt) == 2
    assert browser.driver.execute_script("return window.hacked") is None
    assert not browser.all(".card img, .card script")


def test_thinking_folds_and_stays_as_the_reader_left_it(browser, embedded, server):
    browser.open(embedded[1])
    browser.settings()
    browser.all("#mode label")[1].click()
    browser.until(lambda: len(browser.all("#columns label")) == 4, "columns of the other mode")
    server.step_seconds = 0.05
    browser.ask("Think about it.", columns={"Plain", "DFly"})
    fold = '.card[aria-label="Plain"] .fold'
    browser.until(lambda: browser.all(f"{fold}.live"), "thinking is shown while it comes")
    assert browser.all(f"{fold} .thought")[0].is_displayed()
    browser.until(lambda: browser.all(f"{fold}:not(.live)"), "the thinking has ended")
    assert not browser.all(f"{fold} .thought")[0].is_displayed()
    browser.all(f"{fold} label")[0].click()
    length = len(browser.texts('.card[aria-label="Plain"] .answer')[0])
    grown = lambda: len(browser.texts('.card[aria-label="Plain"] .answer')[0]) > length  # noqa: E731
    browser.until(lambda: grown() or browser.ended(), "the card is redrawn")
    browser.until(browser.ended, "all have ended")
    assert browser.all(f"{fold} .thought")[0].is_displayed(), "a redrawing folded what the reader had opened"
    assert "so a short answer will do" in browser.all(f"{fold} .thought")[0].text
    assert all(body["chat_template_kwargs"] == {"enable_thinking": True} for body in server.bodies)


def test_examples_in_several_languages_fill_the_prompt(browser, embedded, server):
    browser.open(embedded[1])
    for workload, examples in EXAMPLES.items():
        buttons, languages = browser.all(f"#examples-{workload} button"), set()
        assert [button.text for button in buttons] == list(examples)
        for button, prompt in zip(buttons, examples.values(), strict=True):
            button.click()
            filled = lambda prompt=prompt: browser.all("#prompt textarea")[0].get_property("value") == prompt  # noqa: E731
            browser.until(filled, f"{button.text} is in the prompt")
            languages.add(language(prompt))
        assert len(languages) >= 3, f"{workload}: {languages}"
    browser.compare({"Plain"})
    browser.until(browser.ended, "all have ended")
    assert server.bodies[-1]["messages"] == [{"role": "user", "content": prompt}]


def language(text: str) -> str:
    """Which of the examples' languages a text is in, by its letters and small words."""
    if re.search("[぀-ヿ]", text):
        return "Japanese"
    if re.search("[一-鿿]", text):
        return "Chinese"
    small = {"English": "a the of is in that", "German": "die der ist und einem", "French": "la le une est des",
             "Spanish": "en una un que las"}  # fmt: skip
    words = set(re.findall(r"\w+", text.lower()))
    return max(small, key=lambda name: len(words & set(small[name].split())))


def test_each_setting_reaches_the_request_under_its_own_name(browser, embedded, server):
    browser.open(embedded[1])
    browser.settings()
    for field, text in {"temperature": "0.7", "length": "48", "seed": "1234", "stops": "END\nFIN"}.items():
        browser.write(field, text)
    browser.ask("Heed them all.", columns={"DFly"})
    browser.until(browser.ended, "all have ended")
    (body,) = [body for body in server.bodies if body.get("stream")]
    assert (body["temperature"], body["max_tokens"], body["seed"], body["stop"]) == (0.7, 48, 1234, ["END", "FIN"])


def test_a_server_that_heeds_no_seeds_is_named_beside_the_field(browser, embedded, server):
    browser.open(embedded[1])
    browser.settings()
    browser.write("seed", "7")
    assert "Not heeded by embedded: SGLang heeds seeds only with --enable-determ" in browser.all("#seed")[0].text
    server.deterministic = True
    next(button for button in browser.all("button") if button.text == "Look again").click()
    browser.until(lambda: browser.all("#seed")[0].text == "Seed", "nothing is said")
    assert browser.all("#seed input")[0].get_property("value") == "7"


def test_background_requests_run_beside_and_end_with_the_comparison(browser, embedded, server):
    server.answer = SHORT * 3
    browser.open(embedded[1])
    browser.settings()
    browser.write("load", "3\n")
    browser.ask("Under load.", columns={"Plain"})
    browser.until(browser.ended, "all have ended")
    assert server.most_running == 4
    browser.until(lambda: server.running == 0, "the background has ended", seconds=5)


def test_together_on_request(browser, embedded, server):
    browser.open(embedded[1])
    browser.settings()
    browser.all("#order label")[1].click()
    browser.ask("All at once.")
    browser.until(browser.ended, "all have ended")
    assert server.most_running == 5 and len(browser.all(".card.done")) == 5


def test_ten_visitors_at_once(browser, embedded, server):
    server.hold = True
    driver, first = browser.driver, browser.driver.current_window_handle
    tabs = [first]
    for number in range(10):
        if number:
            driver.switch_to.new_window("tab")
            tabs.append(driver.current_window_handle)
        # a host of its own for each, as a browser opens six connections to one host and no more
        browser.open(embedded[1].replace("127.0.0.1", f"visitor{number}.localhost"))
    try:
        for number, tab in enumerate(tabs):
            driver.switch_to.window(tab)
            browser.ask(f"I am visitor {number}.", columns={"Plain", "DFly"})
        browser.until(lambda: server.running == 10, "all ten are served at a time")
        server.hold = False
        for number, tab in enumerate(tabs):
            driver.switch_to.window(tab)
            browser.until(browser.ended, f"visitor {number} is served")
            answers = browser.texts(".card.done .answer")
            assert len(answers) == 2 and all(f"“I am visitor {number}.”" in text for text in answers)
            assert any("Another visitor" in text for text in browser.texts(".card .shared"))
    finally:
        for tab in tabs[1:]:
            driver.switch_to.window(tab)
            driver.close()
        driver.switch_to.window(first)


def test_measured_draws_what_this_visit_measured(browser, embedded, server):
    browser.open(embedded[1])
    browser.ask("Measure.", columns={"Plain", "DFly", "DFly with D-cut"})
    browser.until(browser.ended, "all have ended")
    browser.tab("Measured")
    lines = '[...document.querySelectorAll("#acceptance .line, #kept .line")].length'
    browser.until(lambda: browser.driver.execute_script(f"return {lines}") == 4, "both charts have a line per drafter")
    assert browser.texts("#acceptance .lines span") == ["DFly", "DFly with D-cut"]
    assert "angelspec bench serve" in browser.texts("#throughput")[0]


def test_a_load_test_is_drawn(browser, tested):
    browser.open(tested)
    browser.tab("Measured")
    assert browser.texts("#throughput .lines span") == ["ar", "dfly", "control"]
    told = ["ar: 10", "ar: 20", "dfly: 19", "dfly: 38", "control: 11", "control: 22"]
    assert browser.texts("#throughput circle title") == told
    places = {text: dot.rect for text, dot in zip(told, browser.all("#throughput circle"), strict=True)}
    assert places["ar: 10"]["x"] + 200 < places["ar: 20"]["x"] and places["ar: 20"]["y"] > places["dfly: 38"]["y"]
    assert all(line.is_displayed() and line.rect["width"] > 200 for line in browser.all("#throughput .line"))
    assert "angelspec bench serve" not in browser.texts("#throughput")[0]


def test_how_it_works_is_told_in_a_picture_and_in_words(browser, embedded):
    browser.open(embedded[1])
    browser.tab("How it works")
    (picture,) = browser.all("svg.explain")
    assert picture.is_displayed() and min(picture.rect["width"], picture.rect["height"]) > 300
    assert "Draft and verify: one pass for several" in browser.texts("svg.explain text")
    words = browser.all("body")[0].text  # what is not shown is left out
    assert "A drafter guesses ahead." in words and "accepted length: tokens per verify step" in words


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [DESKTOP, PHONE])
def test_no_tab_is_wider_than_the_window(browser, tested, server, width, scheme):
    server.step_seconds = 0.002
    browser.open(tested, width=width, scheme=scheme)
    browser.settings()
    browser.ask(f"What is at https://{'long' * 20}?")
    browser.until(browser.ended, "all have ended")
    shown = {"Compare": ".card.done", "Measured": "#kept .line", "How it works": "svg.explain"}
    for tab, css in shown.items():
        browser.tab(tab)
        browser.until(lambda css=css: any(one.is_displayed() for one in browser.all(css)), f"{tab} is drawn")
        assert browser.overflow() <= 0, tab


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_words_are_legible_on_every_shade(browser, embedded, scheme):
    browser.open(embedded[1], scheme=scheme)
    script = """
    const rgb = text => { const c = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
      c.fillStyle = text; c.fillRect(0, 0, 1, 1); return [...c.getImageData(0, 0, 1, 1).data].slice(0, 3); };
    return [...document.querySelectorAll('.legend i')].filter(e => /^a\\d$/.test(e.className)).map(e => {
      const s = getComputedStyle(e); return [rgb(s.color), rgb(s.backgroundColor)]; });"""
    pairs = browser.driver.execute_script(script)
    assert len(pairs) == 8
    contrasts = [contrast(*pair) for pair in pairs]
    assert min(contrasts) >= 4.5, contrasts
    assert sorted(contrasts, reverse=True) == contrasts, "each shade stands out more than the one before"


def contrast(one: list[int], other: list[int]) -> float:
    """WCAG 2 contrast of two colours."""

    def luminance(colour: list[int]) -> float:
        parts = [c / 255 for c in colour]
        red, green, blue = (c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_nothing_is_sent_anywhere_else(browser):
    """Runs last: what the browser asked for, in all tests above, and what its console said."""
    urls = set()
    for entry in browser.driver.get_log("performance"):
        message = json.loads(entry["message"])["message"]
        if message["method"] == "Network.requestWillBeSent":
            urls.add(message["params"]["request"]["url"])
    assert len(urls) > 20
    here = re.compile(r"(http://(127\.0\.0\.1|visitor\d\.localhost):\d+/|data:|blob:|about:)")
    assert {url for url in urls if not here.match(url)} == set()
    browser.read_console()
    assert browser.complaints == []
