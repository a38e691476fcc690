"""A real browser for tests: the machine's own Chromium, driven by Playwright.

A test fails if its page logs an error (violations of the content security policy included), does not catch an
exception, or requests anything from another server than its own. Browsers are never downloaded. Without one these tests
are skipped with a message; with OUTRIDER_BROWSER=required, as in continuous integration, they fail with it.

    def test_it(page, seen):
        page.goto(address)
        accessible(page)
        looks(page, "front")  # pictures, where OUTRIDER_SCREENSHOTS names a folder
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page, Request

NAMES = ("chromium", "chromium-browser", "google-chrome")
MISSING = (
    "This test needs a browser and its driver: `apt-get install chromium` (or Google Chrome) and "
    "`pip install 'outrider[test]'`."
)
DESKTOP, PHONE = {"width": 1280, "height": 860}, {"width": 390, "height": 844}
LOCAL = ("data", "blob", "about")  # schemes without a request to a server


def program() -> str | None:
    """The path of the machine's browser."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


@dataclass
class Seen:
    """Errors and requests of a page. `forgive` names errors that a test provokes on purpose."""

    errors: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)  # every address, in order
    home: tuple[str, str] | None = None  # scheme and host of the page itself
    forgiven: list[str] = field(default_factory=list)

    def forgive(self, pattern: str) -> None:
        """Ignore errors that match this regular expression."""
        self.forgiven.append(pattern)

    @property
    def foreign(self) -> list[str]:
        """Requests to another origin than the page's own."""
        return [url for url in self.requests if _origin(url)[0] not in LOCAL and _origin(url) != self.home]

    @property
    def unforgiven(self) -> list[str]:
        return [error for error in self.errors if not any(re.search(pattern, error) for pattern in self.forgiven)]

    def watch(self, page: Page) -> None:
        page.on("console", lambda message: self.errors.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: self.errors.append(f"{error}: {getattr(error, 'stack', '')}"))
        page.on("request", self._on_request)

    def _on_request(self, request: Request) -> None:
        self.requests.append(request.url)
        if self.home is None and request.is_navigation_request():
            self.home = _origin(request.url)


def _origin(url: str) -> tuple[str, str]:
    parts = urlsplit(url)
    return parts.scheme, parts.netloc


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One per test file: its driver's event loop runs in this thread and excludes others."""
    path = program()
    if path is None or not all(importlib.util.find_spec(name) for name in ("playwright", "axe_playwright_python")):
        (pytest.fail if os.environ.get("OUTRIDER_BROWSER") == "required" else pytest.skip)(MISSING)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        one = driver.chromium.launch(executable_path=path)
        yield one
        one.close()


@pytest.fixture
def seen() -> Seen:
    return Seen()


@contextmanager
def watched(browser: Browser, seen: Seen) -> Iterator[Page]:
    """A page in a fresh context; errors and foreign requests fail at the end."""
    context = browser.new_context(viewport=DESKTOP, color_scheme="light", reduced_motion="reduce", locale="en-GB")  # type: ignore[arg-type]
    context.set_default_timeout(15_000)
    context.on("page", seen.watch)
    try:
        yield context.new_page()
    finally:
        context.close()
    assert not seen.unforgiven, f"The page logged: {seen.unforgiven}"
    assert not seen.foreign, f"The page requested: {seen.foreign}"


@pytest.fixture
def page(browser: Browser, seen: Seen) -> Iterator[Page]:
    with watched(browser, seen) as one:
        yield one


def there_are(count: int, locator: Locator, seconds: float = 15.0) -> None:
    """Wait for this many elements. (The served page's policy forbids `wait_for_function`, which evaluates text.)"""
    from playwright.sync_api import expect

    expect(locator).to_have_count(count, timeout=1e3 * seconds)


def accessible(page: Page, within: str | None = None) -> None:
    """Assert that axe-core finds nothing on the page, or in the part that a selector names."""
    from axe_playwright_python.sync_playwright import Axe

    found: Any = Axe().run(page, context=within).response["violations"]
    violations = {each["id"]: [node["html"][:200] for node in each["nodes"]] for each in found}
    assert not violations, violations


def looks(page: Page, name: str, whole: bool = True) -> None:
    """Screenshots: desktop, dark and phone. Nothing without OUTRIDER_SCREENSHOTS."""
    if not (folder := os.environ.get("OUTRIDER_SCREENSHOTS")):
        return
    Path(folder).mkdir(parents=True, exist_ok=True)
    page.evaluate("scrollTo(0, 0)")  # sticky elements belong at the top
    for look, size, scheme in (("desktop", DESKTOP, "light"), ("dark", DESKTOP, "dark"), ("phone", PHONE, "light")):
        page.set_viewport_size(size)  # type: ignore[arg-type]
        page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
        page.wait_for_timeout(100)  # plots follow the window a frame later
        page.screenshot(path=Path(folder) / f"{name}-{look}.png", full_page=whole)
    page.set_viewport_size(DESKTOP)  # type: ignore[arg-type]
    page.emulate_media(color_scheme="light")


def fits(page: Page) -> bool:
    """Whether there is no horizontal overflow."""
    inside: bool = page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    return inside
