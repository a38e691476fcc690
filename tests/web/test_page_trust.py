"""Nothing in a trace is trusted: it is shown as text, or refused with a sentence; and a long one stays smooth."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest

from outrider.engine.trace import Line

from support.pages import busy, drop, long_trace, show

if TYPE_CHECKING:
    from playwright.sync_api import Page

HEADER = {"outrider_trace": 1, "rule": "match"}
STEP: Line = {"step": 0, "seq": 1, "nodes": [[5, -1, 0.5, 0.5, "r"]], "emitted": [7]}
EVIL = "<img src=x onerror=alert(1)><script>alert(1)</script>"


def lines(*told: Any) -> str:
    return "\n".join(json.dumps(line) for line in told)


REFUSED = {
    "nothing": ("", "The file is empty"),
    "a picture": ("\x89PNG\r\n\x1a\n", "its first line is not JSON"),
    "another file": (lines({"a": 1}), "has no “outrider_trace”"),
    "a list": (lines([1, 2]), "has no “outrider_trace”"),
    "a newer version": (lines({"outrider_trace": 99}, STEP), "version 99, but this page reads version 1"),
    "an evil version": (lines({"outrider_trace": EVIL}, STEP), "The trace has version <img src=x"),
    "no step": (lines(HEADER), "no step"),
    "no nodes": (lines(HEADER, {"emitted": [1]}), "no list of nodes"),
    "nodes that are none": (lines(HEADER, STEP | {"nodes": [7]}), "a node that is not a list"),
    "nothing emitted": (lines(HEADER, {"nodes": []}), "does not say which tokens were emitted"),
    "tokens that are text": (lines(HEADER, STEP | {"emitted": [EVIL]}), "does not say which tokens were emitted"),
    "a parent to come": (lines(HEADER, STEP | {"nodes": [[5, 3, 0.5, 0.5, "r"]]}), "parent does not come before it"),
    "its own parent": (lines(HEADER, STEP | {"nodes": [[5, 0, 0.5, 0.5, "r"]]}), "parent does not come before it"),
    "a fate of its own": (lines(HEADER, STEP | {"nodes": [[5, -1, 0.5, 0.5, EVIL]]}), "fate is unknown"),
    "a damaged line": (lines(HEADER) + "\n{broken\n" + lines(STEP), "Line 2 of the trace is not JSON"),
    "deep nesting": (lines(HEADER) + "\n" + "[" * 100_000 + "\n" + lines(STEP), "Line 2 of the trace is not JSON"),
    "many sequences": (lines(HEADER, *(STEP | {"seq": i} for i in range(300))), "more than 256 sequences"),
    "a million nodes": (
        lines(HEADER, STEP | {"nodes": ["a million"]}),
        "1,000,000 nodes; this page draws at most 4,096",
    ),
}


def test_what_cannot_be_shown_is_refused_with_a_sentence(page: Page, address: str) -> None:
    show(page, address, "run")
    before = page.locator("#run h1").inner_text()
    for name, (content, sentence) in REFUSED.items():
        page.evaluate("document.getElementById('problem-text').textContent = ''")
        drop(page, "bad.jsonl", content)
        page.locator("#problem-text").filter(has_text=re.compile(".")).wait_for()
        assert sentence in page.locator("#problem-text").inner_text(), name
        assert page.locator("#run h1").inner_text() == before, name
    assert not page.locator("img, #main script").count()


THOUGHT = [7, 0.5, 1, [[9, 0.5]]]
SHOWN = {
    "html": STEP | dict.fromkeys(("why", "source", "failure", "finish"), EVIL) | {"texts": [EVIL], "chose": [THOUGHT]},
    "huge numbers": STEP | {"at": 1e308, "budget": 1e308, "us": {"verify": [1e300, 1e300], "draft": [-5, 1]}},
    "no numbers": STEP | {"nodes": [[5, -1, None, "x", "r"], [5, -1, 1e9, -3, "u"]], "chose": [None, 3], "noise": 5},
    "odd thoughts": STEP | {"chose": [[EVIL, 9, {}, [[EVIL, 2], [3], 4]]], "guesses": {"-1": [[5, EVIL]], "x": 1}},
    "odd guesses": STEP | {"chose": [THOUGHT], "noise": [EVIL, {"5": EVIL}], "guesses": [EVIL]},
    "nothing drafted": {"nodes": [], "emitted": []},
    "a wide tree": STEP | {"nodes": [[5, -1, 0.5, 0.5, "r"]] * 4_000},
    "a deep tree": STEP | {"nodes": [[5, i - 1, 0.5, 0.5, "u"] for i in range(4_000)]},
}  # fmt: skip
FOOTER = {
    "end": True, "pieces": {"5": EVIL, "7": EVIL, "9": EVIL, "__proto__": EVIL, "x": 1}, "finish": EVIL, "texts": EVIL,
    "plain": {"us": [[1, 1e999], "x"]}, "drafting": {"ahead": {"hit_rate": EVIL}, EVIL: EVIL},
}  # fmt: skip


def test_whatever_a_trace_says_is_only_shown(page: Page, address: str) -> None:
    evil = {"model": EVIL, "prompt_text": EVIL, "drafter": {"a": 1}, "k": [EVIL], "temperature": "hot", "prompt": 5}
    page.on("dialog", lambda dialog: pytest.fail("something in the trace ran"))
    show(page, address, "run")
    for name, step in SHOWN.items():
        text = lines(HEADER | evil, step, step | {"step": 1}, FOOTER).replace("Infinity", "1e999")
        drop(page, f"{name}: {EVIL}.jsonl", text)
        page.locator("#run .facts .note").filter(has_text=f"{name}: <img src=x").wait_for()
        assert page.locator("#run h1").text_content() == EVIL
        assert page.locator("#problem").is_hidden(), name
        for node in page.locator("g.node[role=button]").all()[:2]:
            node.press("Enter")
        page.get_by_label("Step forward").click()
        assert page.locator("#run .where").inner_text() == "step 2 of 2"
        for view in ("whatif", "explain", "run") if name in ("html", "huge numbers") else ():
            page.locator(f"#tab-{view}").click()
        assert not page.locator("img, #main script, iframe").count(), name


# ---------------------------------------------------------------- five thousand steps


SCRUB = """async () => {
    const slider = document.querySelector(".controls input[type=range]"), last = Number(slider.max);
    const work = [], frames = [];
    let then = null;
    for (let i = 0; i < 60; i++) {
        const now = await new Promise(requestAnimationFrame);
        if (then !== null) frames.push(now - then);
        then = now;
        const begin = performance.now();
        // slow and fast by turns: a step, then a leap through the whole run
        slider.value = String(i % 3 ? (Number(slider.value) + 1) % last : (i * 997) % last);
        slider.dispatchEvent(new Event("input"));
        document.body.getBoundingClientRect(); // layout belongs to the work
        work.push(performance.now() - begin);
    }
    const at = (values, share) => [...values].sort((a, b) => a - b)[Math.floor(share * (values.length - 1))];
    const elements = document.querySelectorAll("*").length;
    return { frames: 60, work: at(work, 0.5), worst: at(work, 0.95), frame: at(frames, 0.5), elements };
}"""


@pytest.mark.slow  # by the wall clock: a busy or slow machine draws fewer frames
def test_five_thousand_steps_scrub_smoothly(page: Page, address: str, record_property: Any) -> None:
    show(page, address, "run")
    drop(page, "long.jsonl", long_trace(5_000))
    page.wait_for_selector("#run h1:text('long.jsonl')")
    assert page.locator(".where").inner_text().endswith("of 5000")
    browser = page.context.new_cdp_session(page)
    browser.send("Performance.enable", {"timeDomain": "threadTicks"})  # processor time: others use this machine too
    before = busy(browser)
    told = page.evaluate(SCRUB)
    told["processor"] = 1e3 * (busy(browser) - before) / told["frames"]  # script, style, layout and paint of a frame
    record_property("scrub", told)
    assert told["processor"] < 16, told
    assert told["elements"] < 5_000, told  # the document does not grow with the run
