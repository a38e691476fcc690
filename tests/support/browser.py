"""A real browser for tests: the machine's own Chromium, driven by Playwright, watched all the time.

Every page is watched: an error on its console, an exception nobody caught (a refusal of its content security policy is
one of the former), or a request to another server than the one it came from fails the test, whatever else it asserts.
Browsers are never downloaded. Where there is none the tests that want one are skipped with one sentence; with
OUTRIDER_BROWSER=required, as in continuous integration, they fail with it.

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
LOCAL = ("data", "blob", "about")  # schemes that ask nobody
GRAVE = ("serious", "critical")  # what axe-core calls a violation that shuts people out


def program() -> str | None:
    """Where the machine's browser is."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


@dataclass
class Seen:
    """What a page did that nobody may do. `forgive` names what a test provokes on purpose."""

    errors: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)  # every address, in order
    home: tuple[str, str] | None = None  # scheme and host of the page itself, where it came from any
    forgiven: list[str] = field(default_factory=list)

    def forgive(self, pattern: str) -> None:
        """An error that this regular expression finds is what the test is about."""
        self.forgiven.append(pattern)

    @property
    def foreign(self) -> list[str]:
        """Requests to anybody but the server (or, of a file, the disk) that the page came from."""
        return [url for url in self.requests if _origin(url)[0] not in LOCAL and _origin(url) != self.home]

    @property
    def unforgiven(self) -> list[str]:
        return [error for error in self.errors if not any(re.search(known, error) for known in self.forgiven)]

    def watch(self, page: Page) -> None:
        page.on("console", lambda message: self.errors.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: self.errors.append(f"{error}: {getattr(error, 'stack', '')}"))
        page.on("request", self._asked)

    def _asked(self, request: Request) -> None:
        self.requests.append(request.url)
        if self.home is None and request.is_navigation_request():
            self.home = _origin(request.url)


def _origin(url: str) -> tuple[str, str]:
    parts = urlsplit(url)
    return parts.scheme, parts.netloc


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One for each file of tests: while it lives, its driver's event loop runs here, and no other can."""
    where = program()
    if where is None or not all(importlib.util.find_spec(name) for name in ("playwright", "axe_playwright_python")):
        (pytest.fail if os.environ.get("OUTRIDER_BROWSER") == "required" else pytest.skip)(MISSING)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        one = driver.chromium.launch(executable_path=where)
        yield one
        one.close()


@pytest.fixture
def seen() -> Seen:
    return Seen()


@contextmanager
def watched(browser: Browser, seen: Seen) -> Iterator[Page]:
    """A fresh page without a past, which must not have done anything wrong by the end."""
    context = browser.new_context(viewport=DESKTOP, color_scheme="light", reduced_motion="reduce", locale="en-GB")  # type: ignore[arg-type]
    context.set_default_timeout(15_000)
    context.on("page", seen.watch)
    try:
        yield context.new_page()
    finally:
        context.close()
    assert not seen.unforgiven, f"The page said: {seen.unforgiven}"
    assert not seen.foreign, f"The page asked others: {seen.foreign}"


@pytest.fixture
def page(browser: Browser, seen: Seen) -> Iterator[Page]:
    with watched(browser, seen) as one:
        yield one


def there_are(many: int, locator: Locator, seconds: float = 15.0) -> None:
    """Wait until there are so many. (The served page's policy forbids `wait_for_function`: it makes code of a text.)"""
    from playwright.sync_api import expect

    expect(locator).to_have_count(many, timeout=1e3 * seconds)


def accessible(page: Page, within: str | None = None) -> None:
    """axe-core finds nothing grave on the page as it is now, or in the part that a selector names."""
    from axe_playwright_python.sync_playwright import Axe

    found: Any = Axe().run(page, context=within).response["violations"]
    grave = {each["id"]: [node["html"][:200] for node in each["nodes"]] for each in found if each["impact"] in GRAVE}
    assert not grave, grave


def looks(page: Page, name: str, whole: bool = True) -> None:
    """Pictures of the page as it is: desktop, dark and phone. Nothing where OUTRIDER_SCREENSHOTS is not set."""
    if not (folder := os.environ.get("OUTRIDER_SCREENSHOTS")):
        return
    Path(folder).mkdir(parents=True, exist_ok=True)
    page.evaluate("scrollTo(0, 0)")  # what sticks to the window should be at its top
    for look, size, scheme in (("desktop", DESKTOP, "light"), ("dark", DESKTOP, "dark"), ("phone", PHONE, "light")):
        page.set_viewport_size(size)  # type: ignore[arg-type]
        page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
        page.wait_for_timeout(100)  # plots follow the window a frame later
        page.screenshot(path=Path(folder) / f"{name}-{look}.png", full_page=whole)
    page.set_viewport_size(DESKTOP)  # type: ignore[arg-type]
    page.emulate_media(color_scheme="light")


def fits(page: Page) -> bool:
    """Whether nothing sticks out of the window sideways."""
    inside: bool = page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    return inside
