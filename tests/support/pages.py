"""The page for tests: created once per test file, shown, and given dropped traces."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from outrider.web import examples, files, page as make_page

from support.browser import Seen, watched

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

TRACES = {each["file"]: files() / "examples" / each["file"] for each in examples()}


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The URI of the self-contained page with the bundled traces."""
    path = tmp_path_factory.mktemp("page") / "explain.html"
    path.write_text(make_page(), encoding="utf-8")
    return path.as_uri()


@pytest.fixture(scope="module")
def bundled(browser: Browser, address: str) -> Iterator[Page]:
    """That page, loaded once per test file, for tests that do not mind where others have left it."""
    with watched(browser, Seen()) as page:
        show(page, address)
        yield page


def choose(page: Page, name: str) -> None:
    """Open one of the bundled runs in Run, afresh."""
    page.evaluate("location.hash = '#run'")
    page.select_option("#runs", str(list(TRACES).index(name)))


def show(page: Page, address: str, view: str = "explain") -> None:
    page.goto(f"{address}#{view}")
    page.wait_for_selector("html[data-ready]")


def drop(page: Page, name: str, content: str) -> None:
    """Drop a file on the page."""
    page.evaluate(
        """([name, content]) => {
            const node = '[5,-1,0.5,0.5,"r"]'; // a million of them are created here: they are slow to send
            content = content.replace('"a million"', () => `${node},`.repeat(999_999) + node);
            const held = new DataTransfer();
            held.items.add(new File([content], name));
            for (const kind of ["dragenter", "dragover", "drop"])
                document.body.dispatchEvent(
                    new DragEvent(kind, { dataTransfer: held, bubbles: true, cancelable: true }));
        }""",
        [name, content],
    )


def number(page: Page, name: str) -> str:
    return page.locator(f".dials [data-number={name}]").text_content() or ""


def go_to(page: Page, step: int) -> None:
    page.get_by_label("Step", exact=True).evaluate(
        "(e, v) => { e.value = v; e.dispatchEvent(new Event('input')); }", str(step)
    )


def in_view(page: Page, selector: str) -> bool:
    """Whether all of an element is inside the window."""
    inside: bool = page.locator(selector).evaluate(
        """(e) => { const box = e.getBoundingClientRect();
            return box.height > 0 && box.top >= 0 && box.bottom <= innerHeight && box.right <= innerWidth; }"""
    )
    return inside


def seen(text: str) -> str:
    """As the page shows white space."""
    return text.replace("\n", "↵").replace("\t", "⇥").replace("\r", "␍").replace(" ", "·")


def chance(value: float) -> str:
    """As the page shows a probability."""
    return (f"{value:.3f}" if value < 0.01 else f"{value:.2f}").removeprefix("0")


def long_trace(steps: int) -> str:
    """A trace of this many steps, with a plain run."""
    told: list[dict[str, Any]] = [{"outrider_trace": 1, "rule": "match", "drafter": "suffix"}]
    clock = 0
    for i in range(steps):
        kept = i % 4
        nodes = [[100 + j, j - 1, 0.9, 0.8, "a" if j < kept else "r" if j == kept else "u"] for j in range(4)]
        us = {"draft": [clock, 900], "verify": [clock + 900, 9000], "judge": [clock + 9900, 90]}
        told.append(
            {
                "step": i,
                "seq": 1,
                "source": "suffix",
                "budget": 4,
                "why": f"{i} of 4",
                "us": us,
                "nodes": nodes,
                "emitted": [*range(100, 100 + kept), 200 + i % 50],
            }
        )
        clock += 10_000
    passes = [[i * 9100, 9000] for i in range(steps * 5 // 2)]
    told.append({"end": True, "pieces": {t: f" word{t}" for t in range(100, 260)}, "plain": {"us": passes}})
    return "\n".join(map(json.dumps, told))


def busy(browser: Any) -> float:
    """Seconds that the page's main thread has worked."""
    metrics = browser.send("Performance.getMetrics")["metrics"]
    return next(metric["value"] for metric in metrics if metric["name"] == "TaskDuration")
