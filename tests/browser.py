"""Chromium, with what a visitor does on the demo's page.

Needs Chromium and its driver (Debian's chromium and chromium-driver). Where they are missing, tests that use it are
skipped, unless ANGELSPEC_REQUIRE_BROWSER is set.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

REQUIRED = bool(os.environ.get("ANGELSPEC_REQUIRE_BROWSER"))
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
DRIVER = shutil.which("chromedriver")
if not REQUIRED:
    pytest.importorskip("selenium")
    pytest.importorskip("gradio")
    if not (CHROMIUM and DRIVER):
        pytest.skip("chromium or chromedriver is missing", allow_module_level=True)
assert CHROMIUM and DRIVER, "ANGELSPEC_REQUIRE_BROWSER is set, but chromium or chromedriver is missing"

from selenium import webdriver  # noqa: E402
from selenium.webdriver.chrome.service import Service  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402

DESKTOP, PHONE = 1280, 390
WAIT = 60.0


class Browser:
    """One window."""

    def __init__(self) -> None:
        options = webdriver.ChromeOptions()
        options.binary_location = CHROMIUM
        for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
                         "--no-proxy-server", "--disable-background-timer-throttling",
                         "--disable-renderer-backgrounding"):  # fmt: skip
            options.add_argument(argument)
        options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
        self.driver = webdriver.Chrome(options=options, service=Service(DRIVER))
        self.driver.set_script_timeout(WAIT)
        self.complaints: list[str] = []
        """Errors in the console, of all pages so far."""

    def open(self, url: str, *, width: int = DESKTOP, scheme: str = "light") -> None:
        """Open the page and wait for its servers' lines."""
        metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        self.driver.get(f"{url}?__theme={scheme}")
        self.until(lambda: self.all(".servers li") and self.all("#columns input"), "the page is up")

    def read_console(self) -> None:
        log = self.driver.get_log("browser")
        self.complaints += [entry["message"] for entry in log if entry["level"] == "SEVERE"]

    def all(self, css: str) -> list:
        return self.driver.find_elements(By.CSS_SELECTOR, css)

    def texts(self, css: str) -> list[str]:
        script = "return [...document.querySelectorAll(arguments[0])].map(e => e.textContent)"
        return self.driver.execute_script(script, css)

    def until(self, holds: Callable[[], object], what: str, seconds: float = WAIT) -> object:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if found := holds():
                return found
            time.sleep(0.05)
        raise AssertionError(f"not within {seconds:.0f} s: {what}; cards: {self.texts('.card .badge')}")

    def write(self, field: str, text: str) -> None:
        """Write into a field in place of what it holds."""
        box = self.all(f"#{field} :is(textarea, input[type=number])")[0]
        box.clear()
        box.send_keys(text)

    def ask(self, prompt: str, *, columns: set[str] | None = None) -> None:
        """Write a prompt, choose columns by name, and press Compare."""
        self.write("prompt", prompt)
        self.compare(columns)

    def compare(self, columns: set[str] | None) -> None:
        """Choose columns by name, and press Compare."""
        if columns is not None:
            for label in self.all("#columns label"):
                if (label.text in columns) != label.find_element(By.TAG_NAME, "input").is_selected():
                    label.click()
        self.all("#run")[0].click()

    def settings(self) -> None:
        self.all("#settings > button")[0].click()
        self.until(
            lambda: self.all("#mode input") and self.all("#mode input")[0].is_displayed(), "the settings are open"
        )

    def tab(self, name: str) -> None:
        """Open a tab."""
        button = next(button for button in self.all("button[role=tab]") if button.text == name)
        button.click()
        self.until(lambda: button.get_attribute("aria-selected") == "true", f"the tab {name} is open")

    def figure(self, name: str, kind: str) -> str:
        """One figure of a column's card."""
        return self.texts(f'.card[aria-label="{name}"] .{kind} dd')[0]

    def ended(self) -> bool:
        return bool(self.all(".card")) and not self.all(".card.running, .card.waiting")

    def overflow(self) -> int:
        """Most pixels by which what is shown is wider than its box: they are cut off, or scrolled to sideways.

        The window alone does not tell, since Gradio's outermost box cuts off what is too wide for it.
        """
        script = """
        const cuts = e => e === document.documentElement || getComputedStyle(e).overflowX !== 'visible';
        return Math.max(...[...document.querySelectorAll('html, body *')]
          .filter(e => e.checkVisibility() && e.clientWidth > 1 && cuts(e)).map(e => e.scrollWidth - e.clientWidth));"""
        return self.driver.execute_script(script)


@contextmanager
def opened() -> Iterator[Browser]:
    """A browser, and its end."""
    found = Browser()
    try:
        yield found
    finally:
        found.driver.quit()
