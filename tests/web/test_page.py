"""The page in a real browser: it shows what the trace contains, works by keyboard, and is accessible."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from outrider.control.expectation import break_even, expected_tokens
from outrider.engine.trace import Line, Trace, read, recorded
from outrider.types import Stats, Tree
from outrider.web import page as make_page, read_lines

from support.browser import accessible, fits, looks
from support.pages import TRACES, VIEWS, drop, number, show

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page


def open_trace(page: Page, tmp_path: Path, path: Path) -> Trace:
    """Show one trace as `outrider trace html` does."""
    html = tmp_path / "run.html"
    html.write_text(make_page(read_lines(path), title="The run"), encoding="utf-8")
    show(page, html.as_uri(), "run")
    return read(path)


# ---------------------------------------------------------------- the explainer


def test_the_six_stations_advance_by_keyboard_and_by_clicks(page: Page, address: str) -> None:
    show(page, address)
    station = page.locator(".station")
    titles = []
    for i, key in enumerate(["Space", "ArrowRight", "Space", "PageDown", "ArrowRight", "Space"]):
        assert station.get_attribute("data-station") == str(i + 1)
        assert page.locator(".dot[aria-current=step]").inner_text().startswith(str(i + 1))
        assert len(station.locator(".rule dd").inner_text()) > 20
        assert len(station.locator(".trap dd").inner_text()) > 20
        titles.append(station.locator("h2").inner_text())
        page.keyboard.press(key)
    assert len(set(titles)) == 6
    assert station.get_attribute("data-station") == "6"  # there is no seventh
    page.keyboard.press("ArrowLeft")
    assert station.get_attribute("data-station") == "5"
    page.locator(".dot", has_text="Verify").click()
    assert "How can the target emit more than one token per pass?" in station.inner_text()
    page.get_by_role("button", name="Accept →").click()
    assert station.get_attribute("data-station") == "4"
    page.keyboard.press("Space")  # goes on, and does not press the button again
    assert station.get_attribute("data-station") == "5"
    page.keyboard.press("ArrowRight")
    page.get_by_role("button", name="See the whole run").click()
    page.wait_for_selector("#run .ribbon")


def test_the_stations_show_steps_of_the_trace(page: Page, address: str) -> None:
    trace = read(TRACES["code.jsonl"])
    steps = {tuple(line["emitted"]): line for line in trace.lines}
    pieces = {int(token): text for token, text in trace.footer["pieces"].items()}
    shown = {tuple(seen(pieces[token]) for token in emitted): line for emitted, line in steps.items()}
    show(page, address)
    page.locator(".dot", has_text="Accept").click()
    line = shown[tuple(page.locator(".station tr.emitted code").all_inner_texts())]
    accepted = sum(node[4] == "a" for node in line["nodes"])
    assert accepted >= 2
    assert (
        f"{accepted} accepted and 1 bonus: {accepted + 1} tokens from one pass"
        in page.locator("figcaption").inner_text()
    )
    page.locator(".dot", has_text="Reject").click()
    line = shown[tuple(page.locator(".station tr.emitted code").all_inner_texts())]
    missed = next(node for node in line["nodes"] if node[4] == "r")
    assert page.locator(".station td .chip.rejected").inner_text() == seen(pieces[missed[0]])


def test_a_run_without_suitable_steps_shows_the_bundled_ones(page: Page, tmp_path: Path) -> None:
    open_trace(page, tmp_path, TRACES["story.jsonl"])
    page.locator("#tab-explain").click()
    page.locator(".dot", has_text="Reject").click()
    assert "the stations show the bundled run" in page.locator("#explain").inner_text()
    assert page.locator(".station td .chip.rejected").count() == 1


def seen(text: str) -> str:
    """As the page shows white space."""
    return text.replace("\n", "↵").replace("\t", "⇥").replace("\r", "␍").replace(" ", "·")


# ---------------------------------------------------------------- the run


@pytest.mark.parametrize("name", TRACES)
def test_the_numbers_on_the_page_are_the_traces(page: Page, tmp_path: Path, name: str) -> None:
    trace = open_trace(page, tmp_path, TRACES[name])
    stats = Stats()
    for line, verdict in zip(trace.lines, recorded(trace), strict=True):
        stats.count(Tree([node[0] for node in line["nodes"]], [node[1] for node in line["nodes"]]), verdict)
    assert number(page, "tau") == f"{stats.tau:.2f}"
    assert number(page, "alpha") == f"{stats.alpha:.1%}"
    assert number(page, "steps") == str(stats.steps) == str(trace.footer["steps"])
    assert number(page, "drafted") == str(stats.drafted) == str(trace.footer["drafted"])
    caption = page.locator(".dials figcaption").first.inner_text()
    expected = [
        f"{i + 1}: {int(100 * a + 0.5)}% of {n}"
        for i, (a, n) in enumerate(zip(stats.alpha_by_position, stats.reached_at, strict=True))
    ]
    assert caption == ", ".join(expected[:8])
    own, plain = [line["us"]["verify"] for line in trace.lines], trace.footer["plain"]["us"]
    ratio = (sum(plain[-1]) - sum(plain[0])) / (sum(own[-1]) - sum(own[0]))
    assert number(page, "speedup") == f"{ratio:.2f}×"
    assert page.locator(".lanes strong").inner_text() == f"{ratio:.2f}×"


@pytest.mark.parametrize("name", TRACES)
def test_the_ribbon_is_the_text(page: Page, tmp_path: Path, name: str) -> None:
    trace = open_trace(page, tmp_path, TRACES[name])
    page.get_by_label("First step").click()
    slider = page.get_by_label("Step", exact=True)
    slider.focus()
    texts = page.evaluate(
        """() => [...document.querySelectorAll(".flow .step > .accepted, .flow .step > .bonus")].map((token) => {
            const copy = token.cloneNode(true);
            copy.querySelectorAll("i").forEach((mark) => mark.remove());
            return [copy.textContent, copy.className];
        })"""
    )
    assert [text for text, _ in texts] == trace.footer["texts"]
    origins = [origin for verdict in recorded(trace) for origin in verdict.origins]
    assert [name for _, name in texts] == [{"a": "accepted", "b": "bonus"}[origin] for origin in origins]
    for step, line in enumerate(trace.lines[:12]):
        assert page.locator(".where").inner_text() == f"step {step + 1} of {len(trace.lines)}"
        assert page.locator(".step.future").count() == len(trace.lines) - step - 1
        rejected = [node[0] for node in line["nodes"] if node[4] in "ru"][:12]
        assert page.locator(".ghosts s").all_inner_texts() == [
            seen(trace.footer["pieces"][str(token)]) for token in rejected
        ]
        page.keyboard.press("ArrowRight")
    page.locator("#run .flow .step").nth(2).click()
    assert page.locator(".where").inner_text().startswith("step 3 ")


def test_a_node_explains_its_fate(page: Page, tmp_path: Path) -> None:
    trace = open_trace(page, tmp_path, TRACES["story.jsonl"])
    at, line = next((i, line) for i, line in enumerate(trace.lines) if line.get("guesses") and "r" in fates(line))
    miss = fates(line).index("r")
    go_to(page, at)
    node = page.locator(f"g.node[data-node='{miss}']")
    token, _, q, p, _ = line["nodes"][miss]
    assert f"q {chance(q)}, p {chance(p)}" in node.get_attribute("aria-label")
    node.focus()
    page.keyboard.press("Enter")
    assert node.get_attribute("aria-pressed") == "true"
    depth = miss  # a chain: as deep as it is far
    drafters, targets = (side.locator("li") for side in page.locator(".why .sides > div").all())
    assert drafters.locator(".number").all_inner_texts() == [f"{q:.1%}" for _, q in line["guesses"][str(miss - 1)]]
    assert targets.locator(".number").all_inner_texts() == [f"{p:.1%}" for _, p in line["chose"][depth][3]]
    why = page.locator(".why").inner_text()
    assert f"{line['chose'][depth][2]:.2f}" in why  # the margin
    assert f"g = {line['noise'][depth][str(token)]:.2f}" in why
    assert f"g = {line['noise'][depth][str(line['emitted'][depth])]:.2f}" in why
    page.keyboard.press("Escape")
    page.keyboard.press("Enter")
    assert node.get_attribute("aria-pressed") == "false"


def fates(line: Line) -> str:
    return "".join(node[4] for node in line["nodes"])


def chance(value: float) -> str:
    return (f"{value:.3f}" if value < 0.01 else f"{value:.2f}").removeprefix("0")


def go_to(page: Page, step: int) -> None:
    page.get_by_label("Step", exact=True).evaluate(
        "(e, v) => { e.value = v; e.dispatchEvent(new Event('input')); }", str(step)
    )


def test_several_sequences_and_no_texts(page: Page, address: str) -> None:
    """A server's summary of a batch: no p, no pieces, no clock; each sequence by itself."""
    lines: list[Line] = [{"outrider_trace": 1, "level": "summary", "rule": "match", "model": "m", "prompt_tokens": 3}]
    for i in range(6):
        nodes = [[40, -1, 0.5, None, "a"], [41, 0, None, None, "r"]]
        lines.append({"step": i, "seq": 7, "nodes": nodes, "emitted": [40, 42], "why": "because"})
        lines.append({"step": i, "seq": 9, "nodes": [], "emitted": [43], "why": ""})
    show(page, address, "run")
    drop(page, "batch.jsonl", "\n".join(map(json.dumps, lines)))
    page.wait_for_selector("#run h1:text('batch.jsonl')")
    assert (number(page, "tau"), number(page, "alpha"), number(page, "speedup")) == ("2.00", "50.0%", "not recorded")
    assert page.locator(".flow .step").first.inner_text() == " #40 #42"
    page.get_by_label("Sequence").select_option("9")
    assert (number(page, "tau"), number(page, "alpha")) == ("1.00", "not recorded")
    assert "Nothing was drafted in this step" in page.locator(".treebox").inner_text()
    assert "not recorded" in page.locator(".lanes").inner_text()


def test_a_drafters_own_statistics_are_shown(page: Page, address: str) -> None:
    lines = read_lines(TRACES["code.jsonl"])
    lines[-1]["drafting"] = {"ahead": {"hit_rate": 0.75, "hidden_seconds": 0.5, "exposed_seconds": 0.0021}}
    lines[-1]["learning"] = {"state": "on", "updates": 12, "records": 3456}
    show(page, address, "run")
    drop(page, "told.jsonl", "\n".join(map(json.dumps, lines)))
    hits = page.locator("[data-number=hits]").inner_text()
    assert hits.startswith("Ahead: 75% of outcomes were drafted in advance; 500 ms of drafting hidden")
    assert hits.endswith("2.1 ms not.")
    assert page.locator("[data-number=learning]").inner_text().startswith("Learning on: 12 updates from 3,456 verified")
    rows = page.locator(".sources tbody tr").all_inner_texts()
    drafts = Counter(line["source"] for line in lines if line.get("nodes"))
    assert {row.split()[0]: int(row.split()[1]) for row in rows} == drafts


def test_it_plays_and_pauses(page: Page, address: str) -> None:
    show(page, address, "run")
    page.get_by_label("Speed").select_option("1")
    page.get_by_label("First step").click()
    page.get_by_role("button", name="Play").click()
    page.wait_for_selector(".where:text('step 57 of 57')")
    assert page.get_by_role("button", name="Play").count() == 1  # it has stopped
    page.locator(".ribbon").focus()
    page.keyboard.press("Home")
    assert page.locator(".where").inner_text() == "step 1 of 57"
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("ArrowRight")  # wherever the focus is
    assert page.locator(".where").inner_text() == "step 2 of 57"
    page.keyboard.press("Space")
    assert page.get_by_role("button", name="Pause").count() == 1
    page.keyboard.press("Space")
    assert page.get_by_role("button", name="Pause").count() == 0


# ---------------------------------------------------------------- what if


def test_the_curves_are_the_librarys(page: Page, address: str) -> None:
    show(page, address, "whatif")
    for slider, value in (("α:", "0.8"), ("K:", "4"), ("c:", "0.1")):
        page.get_by_label(slider).evaluate("(e, v) => { e.value = v; e.dispatchEvent(new Event('input')); }", value)
    words = page.locator("#whatif figcaption").all_inner_texts()
    tokens = expected_tokens(0.8, 4)
    assert words[0].startswith(f"At K = 4: {tokens:.2f} expected.")
    assert words[1].startswith(f"At K = 4: {tokens / 1.4:.2f}×.")
    assert words[2].startswith(f"At K = 4: {break_even(lambda rows: 1.0, 4, draft=0.1):.1%}.")
    assert page.locator("#whatif .result").inner_text() == "Best: K = 6, 2.47× the plain speed."
    trace = read(TRACES["code.jsonl"])
    tau, k = trace.footer["emitted"] / trace.footer["steps"], trace.footer["drafted"] / trace.footer["steps"]
    assert f"τ = {tau:.2f} at {k:.1f} drafted per pass" in words[0]


# ---------------------------------------------------------------- opened traces


def test_a_dropped_trace_and_a_picked_one_are_shown(page: Page, address: str, tmp_path: Path) -> None:
    show(page, address)
    drop(page, "mine.jsonl", TRACES["story.jsonl"].read_text(encoding="utf-8"))
    page.wait_for_selector("#run h1:text('mine.jsonl')")
    assert number(page, "steps") == str(read(TRACES["story.jsonl"]).footer["steps"])
    page.locator("#file").set_input_files(TRACES["tree.jsonl"])
    page.wait_for_selector("#run h1:text('tree.jsonl')")
    assert page.locator("#runs option").all_inner_texts()[-2:] == ["mine.jsonl", "tree.jsonl"]
    page.locator("#runs").select_option(label="mine.jsonl")
    page.wait_for_selector("#run h1:text('mine.jsonl')")
    text = TRACES["code.jsonl"].read_text(encoding="utf-8")
    drop(page, "cut.jsonl", text[: len(text) // 3])  # a run that was interrupted in mid-line
    page.wait_for_selector("#run h1:text('cut.jsonl')")
    assert "not recorded" in page.locator(".lanes .result").inner_text()


# ---------------------------------------------------------------- accessibility


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_view_is_accessible_and_fits_a_phone(page: Page, address: str, view: str, scheme: Any) -> None:
    page.emulate_media(color_scheme=scheme)
    show(page, address, view)
    if view == "run":
        page.locator("g.node[role=button]").first.press("Enter")
    accessible(page)
    if view == "explain":
        for station in ("Verify", "Reject", "Speedup"):
            page.locator(".dot", has_text=station).click()
            accessible(page, ".station")
    page.set_viewport_size({"width": 360, "height": 740})
    page.wait_for_timeout(50)
    assert fits(page)
    if scheme == "light":
        looks(page, view)


def test_dark_and_light_by_the_button(page: Page, address: str) -> None:
    show(page, address, "run")
    look = """async () => {
        for (let i = 0; i < 3; i++) await new Promise(requestAnimationFrame);
        const drawn = [...document.querySelectorAll("#run canvas")].map((canvas) => canvas.toDataURL());
        return [getComputedStyle(document.body).backgroundColor, ...drawn];
    }"""
    light = page.evaluate(look)
    page.get_by_label("Dark or light").click()
    dark = page.evaluate(look)
    assert len(light) == 6  # the paper, two lanes and three plots
    assert all(before != after for before, after in zip(light, dark, strict=True))
    accessible(page)
    page.get_by_label("Dark or light").click()
    assert page.evaluate(look) == light


def test_the_first_paint_comes_within_a_second(browser: Browser, address: str) -> None:
    painted = []
    for _ in range(3):
        page = browser.new_page()
        show(page, address)
        first = "performance.getEntriesByName('first-contentful-paint')[0]"
        page.wait_for_function(first)  # the entry appears shortly after the paint
        painted.append(page.evaluate(f"{first}.startTime"))
        page.close()
    assert min(painted) < 1000, painted


@pytest.fixture(autouse=True)
def _no_requests(seen: Any) -> Iterator[None]:
    """A page from a file makes no request."""
    yield
    assert not [url for url in seen.requests if not url.startswith(("file:", "data:"))]
