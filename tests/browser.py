"""Pages in a headless Chromium, for tests."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
VIEWS = [("light", 1280), ("dark", 390)]
"""Themes and widths in which pages are tested."""


@contextmanager
def opened_page(path: Path, color_scheme: str, width: int) -> Iterator[Any]:
    """Open a page; its `problems` are errors and requests. Skip the test, with the reason, if there is no browser."""
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed: apt install chromium")
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed: pip install playwright"
    )
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        opened = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=color_scheme).new_page()
        opened.problems = []
        opened.on("console", lambda message: opened.problems.append(message.text) if message.type == "error" else None)
        opened.on("pageerror", lambda error: opened.problems.append(str(error)))
        opened.on("request", lambda asked: None if asked.url.startswith("file:") else opened.problems.append(asked.url))
        opened.goto(path.as_uri())
        opened.wait_for_selector(".picture .main-svg")
        yield opened
        browser.close()


def assert_drawn(page: Any) -> None:
    """Check that every visible picture has content, and that the page is not wider than its window."""
    drawn = page.locator(".picture:visible")
    assert drawn.count() > 0
    for number in range(drawn.count()):
        picture = drawn.nth(number)
        assert picture.locator(".main-svg").count() > 0
        assert picture.locator(".trace, .hm, .bars, .scatterlayer, .heatmaplayer image").count() > 0
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), (
        "the page is wider than the window"
    )


def assert_accessible(page: Any) -> None:
    """Check that the theme's button works by keyboard, that axe finds no violation, and that there was no problem."""
    before = page.evaluate("document.documentElement.dataset.theme")
    page.locator("#theme").focus()
    page.keyboard.press("Enter")
    assert page.evaluate("document.documentElement.dataset.theme") != before
    axe = pytest.importorskip(
        "axe_core_python.sync_playwright", reason="axe is not installed: pip install axe-core-python"
    )
    found = axe.Axe().run(page)
    assert [(each["id"], each["nodes"][0]["html"]) for each in found["violations"]] == []
    assert page.problems == []
