"""The browser fixtures: forbidden behaviour of a page fails its test; a missing browser is reported."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from support.browser import MISSING, Seen, accessible, fits, looks, watched

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

GOOD = "<html lang=en><title>A page</title><main><h1>Hello</h1></main></html>"


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        ("<script>console.error('a complaint')</script>", "a complaint"),
        ("<script>throw new Error('nobody caught it')</script>", "nobody caught it"),
        ("<img src='http://127.0.0.1:9/spy.png'>", "spy"),
        ("<meta http-equiv=content-security-policy content=\"script-src 'none'\"><script>1</script>", "script-src"),
    ],
)
def test_forbidden_behaviour_fails(browser: Browser, wrong: str, what: str) -> None:
    seen = Seen()
    if "spy" in what:
        seen.forgive("Failed to load")
    with pytest.raises(AssertionError, match=what), watched(browser, seen) as page:
        page.goto(f"data:text/html,{wrong}", wait_until="networkidle")


def test_provoked_errors_are_ignored(page: Page, seen: Seen) -> None:
    seen.forgive("on purpose")
    page.goto("data:text/html,<script>console.error('on purpose')</script>")
    assert seen.errors == ["on purpose"]
    assert not seen.unforgiven


def test_accessibility_violations_fail(page: Page) -> None:
    page.set_content(GOOD)
    accessible(page)
    assert fits(page)
    page.set_content(GOOD.replace("Hello", "<img src=data:,><div style='width:3000px'>wide</div>"))
    with pytest.raises(AssertionError, match="image-alt"):
        accessible(page)
    assert not fits(page)


def test_screenshots_are_taken_only_on_request(page: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page.set_content(GOOD)
    monkeypatch.delenv("OUTRIDER_SCREENSHOTS", raising=False)
    looks(page, "none")
    monkeypatch.setenv("OUTRIDER_SCREENSHOTS", str(tmp_path / "shots"))
    looks(page, "front")
    names = sorted(path.name for path in (tmp_path / "shots").iterdir())
    assert names == ["front-dark.png", "front-desktop.png", "front-phone.png"]


@pytest.mark.parametrize("required", [False, True])
def test_a_missing_browser_is_reported(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, required: bool
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("OUTRIDER_BROWSER", "required" if required else "")
    pytester.makepyfile("def test_it(page): page.goto('about:blank')")
    result = pytester.runpytest_inprocess("-p", "support.browser", "-rs")
    result.assert_outcomes(errors=int(required), skipped=int(not required))
    assert MISSING[:60] in result.stdout.str()
