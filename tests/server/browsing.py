"""A real browser on a real server with a tiny model, whose steps can be slowed down to be watched."""

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from server.serving import serving
from thinfer import LLM
from thinfer.core.selector import ThresholdSelector
from thinfer.server.state import ServerSettings, ServerState

DESKTOP = {"width": 1280, "height": 800}
PHONE = {"width": 390, "height": 844}
SITES = [f"layers.{layer}.{kind}" for layer in range(2) for kind in ("qkv", "o", "gate_up", "down")]


@contextmanager
def chromium() -> Iterator[Any]:
    """A browser; skips where there is none. THINFER_CHROMIUM names one that is not on the path."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = os.environ.get("THINFER_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("no Chromium: install it, or name one in THINFER_CHROMIUM")
    with sync_api.sync_playwright() as playwright:
        # Containers do not allow the sandbox, and no page but the tests' own is opened.
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


class PacedServer:
    """A running server whose model waits `pace` seconds before each step.

    Attributes:
        url: its address.
        pace: seconds; set it back to 0.
    """

    def __init__(self, folder: Path) -> None:
        self.pace = 0.0
        self.url = ""
        self._folder = folder

    def load(self) -> LLM:
        """The model, with thresholds and the brake."""
        llm = LLM(self._folder, executor="reference", threads=1)
        llm.engine.selector = ThresholdSelector("teal", dict.fromkeys(SITES, 0.5))
        step = llm.engine.step

        def paced(*args: Any, **named: Any) -> Any:
            time.sleep(self.pace)
            return step(*args, **named)

        llm.engine.step = paced
        return llm


@contextmanager
def paced_server(folder: Path, **settings: Any) -> Iterator[PacedServer]:
    """A `PacedServer` that is ready."""
    paced = PacedServer(folder)
    with serving(ServerState(ServerSettings(("tiny",), **settings), paced.load)) as url:
        paced.url = url
        yield paced


@contextmanager
def opened(
    browser: Any, url: str, *, ready: bool = True, expected: tuple[str, ...] = (), **context: Any
) -> Iterator[Any]:
    """A page at an address in a profile of its own; fails on script errors and on requests to anywhere else.

    `expected` are parts of console messages that a test provokes.
    """
    profile = browser.new_context(**({"viewport": DESKTOP} | context))
    page = profile.new_page()
    page.set_default_timeout(20_000)
    problems: list[str] = []

    def heard(message: Any) -> None:
        if message.type in ("error", "warning") and not any(part in message.text for part in expected):
            problems.append(message.text)

    page.on("console", heard)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("request", lambda request: request.url.startswith(url) or problems.append(request.url))
    page.goto(url + "/")
    if ready:
        page.locator("#dot[data-state=ready]").wait_for()
    yield page
    profile.close()
    assert not problems


def answer(page: Any, number: int = 1) -> Any:
    """The so-many-th answer, finished."""
    found = page.locator(".message.assistant").nth(number - 1)
    page.locator(".message.assistant:not(.pending)").nth(number - 1).wait_for()
    return found


def settings(page: Any, **values: object) -> None:
    """Set fields of the settings dialog."""
    page.click("#open-settings")
    for name, value in values.items():
        page.fill(f"#settings [name={name}]", str(value))
    page.click("#settings .primary")


def picture(page: Any, name: str) -> None:
    """Keep a screenshot in THINFER_SCREENSHOTS, where that is set."""
    folder = os.environ.get("THINFER_SCREENSHOTS")
    if folder:
        page.screenshot(path=str(Path(folder) / f"{name}.png"))
