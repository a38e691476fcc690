"""Explain: ten seconds of a run on a stage that is drawn to scale, with six stations as bookmarks."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from outrider.engine.trace import Line, read

from support.browser import DESKTOP, PHONE, accessible, fits, looks
from support.pages import TRACES, busy, chance, choose, drop, in_view, long_trace, seen, show

if TYPE_CHECKING:
    from playwright.sync_api import Page

STATIONS = ("Baseline", "Draft", "Verify", "Accept", "Reject", "Speedup")
SHAPES = "document.querySelector('canvas.stage').shapes"
FATES = {"a": "accepted", "r": "rejected", "u": "unreached"}


def at_the_start(page: Page) -> Page:
    page.evaluate("location.hash = '#explain'")
    page.locator("#explain").wait_for()
    visit(page, "Baseline")
    return page


def visit(page: Page, station: str) -> None:
    page.locator(".dot", has_text=station).evaluate("(dot) => dot.click()")  # on a phone it is a small bookmark


def still_clock(page: Page) -> None:
    """Time passes only by `page.clock.fast_forward`."""
    page.clock.install(time=0)
    page.clock.pause_at(1)


def shapes(page: Page, *kinds: str) -> list[dict[str, Any]]:
    """What was drawn last. (Not `wait_for_function`: it would wait for a clock that stands still.)"""
    wanted = f"(kinds) => {SHAPES}?.filter((shape) => kinds.includes(shape.kind))"
    found: list[dict[str, Any]] | None
    while (found := page.evaluate(wanted, kinds)) is None:
        page.wait_for_timeout(20)
    return found


def spans(name: str = "code.jsonl") -> tuple[list[Line], dict[str, set[tuple[int, int]]]]:
    """A bundled run's steps after the prompt's, and its [start, end] in microseconds after the prompt's pass."""
    trace = read(TRACES[name])
    zero, plain = sum(trace.lines[0]["us"]["verify"]), trace.footer["plain"]["us"]
    lines = trace.lines[1:]

    def relative(each: list[list[int]], origin: int) -> set[tuple[int, int]]:
        return {(start - origin, start - origin + lasted) for start, lasted in each}

    return lines, {
        "draft": relative([line["us"]["draft"] for line in lines if line["nodes"]], zero),
        "verify": relative([line["us"]["verify"] for line in lines], zero),
        "plain": relative(plain[1:], sum(plain[0])),
    }


# ---------------------------------------------------------------- the stage


def test_the_stage_is_drawn_to_scale(bundled: Page) -> None:
    page = at_the_start(bundled)
    measured = spans()[1]
    for station in ("Baseline", "Verify", "Reject", "Speedup"):
        visit(page, station)
        bars = to_scale(page, measured)
    assert Counter(bar["kind"] for bar in bars) == {
        kind: len(each) for kind, each in measured.items()
    }  # all of the run


def to_scale(page: Page, measured: dict[str, set[tuple[int, int]]]) -> list[dict[str, Any]]:
    """Check that everything on the stage stands where its moments are on the axis; return the bars."""
    first, second = shapes(page, "tick")[:2]
    scale = (second["x"] - first["x"]) / (second["at"] - first["at"])

    def x(moment: float) -> float:
        return float(first["x"] + (moment - first["at"]) * scale)

    now = (shapes(page, "now")[0]["x"] - first["x"]) / scale + first["at"]
    bars = shapes(page, "draft", "verify", "plain")
    assert {bar["kind"] for bar in bars} == {"draft", "verify", "plain"}
    for bar in bars:
        assert (bar["from"], bar["to"]) in measured[bar["kind"]]
        assert bar["x"] == pytest.approx(x(bar["from"]), abs=0.01)
        assert bar["w"] == pytest.approx((min(bar["to"], now) - bar["from"]) * scale, abs=0.01)
    for chip in shapes(page, "chip", "sweep"):
        assert chip["x"] + chip["w"] == pytest.approx(x(min(chip["to"], now)), abs=0.01)
    return bars


def test_chips_turn_when_the_pass_ends(page: Page, address: str) -> None:
    """Drafted one by one, covered by the target's bar, then accepted or struck."""
    page.emulate_media(reduced_motion="no-preference")
    still_clock(page)
    show(page, address)
    page.wait_for_timeout(100)  # the browser tells the stage its size, by its own clock

    def newest() -> list[str]:
        """The states of the latest draft's tokens."""
        last = max(shape["from"] for shape in shapes(page, "draft"))
        return [chip["state"] for chip in shapes(page, "chip") if chip["from"] > last and chip["state"] != "bonus"]

    visit(page, "Draft")
    counts = []
    for pause in (900, 300, 300, 310):
        page.clock.fast_forward(pause)
        assert set(newest()) == {"drafted"}
        counts.append(len(newest()))
    assert counts[0] < counts[1] < counts[3]
    visit(page, "Verify")
    covered = []
    for pause in (300, 500, 700):
        page.clock.fast_forward(pause)
        assert set(newest()) == {"drafted"}
        covered.append(max(shape["from"] + shape["w"] for shape in shapes(page, "sweep")))
    assert covered[0] < covered[1] < covered[2]
    page.clock.fast_forward(200)
    assert tuple(newest()) in {tuple(FATES[node[4]] for node in line["nodes"][:8]) for line in spans()[0]}
    assert newest().count("accepted") >= 2
    visit(page, "Reject")
    page.clock.fast_forward(1450)  # the end of its pass
    assert "rejected" in [chip["state"] for chip in shapes(page, "chip")]


def test_actors_have_one_colour_each(bundled: Page) -> None:
    """The key's colours are the stage's and the race's."""
    page = at_the_start(bundled)
    visit(page, "Speedup")
    page.wait_for_timeout(50)
    pixel = """([canvas, x, y]) => {
        const scale = devicePixelRatio, pen = document.querySelector(canvas).getContext("2d");
        const [r, g, b] = pen.getImageData(Math.round(x * scale), Math.round(y * scale), 1, 1).data;
        return `rgb(${r}, ${g}, ${b})`;
    }"""
    colours = {}
    for kind in ("draft", "verify", "plain"):
        bar = max(shapes(page, kind), key=lambda each: each["w"])
        colours[kind] = page.locator(f".swatch.{kind}").evaluate("(e) => getComputedStyle(e).backgroundColor")
        assert page.evaluate(pixel, ["canvas.stage", bar["x"] + bar["w"] / 2, bar["y"] + bar["h"] - 2]) == colours[kind]
    assert len(set(colours.values())) == 3
    page.locator("#tab-run").click()
    page.get_by_label("Step", exact=True).press("End")
    page.wait_for_timeout(50)
    row = """(y) => { const race = document.querySelector("canvas.race"), pen = race.getContext("2d");
        const data = pen.getImageData(0, Math.round(y * devicePixelRatio), race.width, 1).data, found = new Set();
        for (let i = 0; i < data.length; i += 4) found.add(`rgb(${data[i]}, ${data[i + 1]}, ${data[i + 2]})`);
        return [...found]; }"""
    above, below = page.evaluate(row, 20), page.evaluate(row, 54)
    assert {colours["draft"], colours["verify"]} <= set(above)
    assert colours["plain"] in below
    assert not {colours["draft"], colours["verify"]} & set(below)


# ---------------------------------------------------------------- playing


def test_it_plays_by_itself_for_ten_seconds(page: Page, address: str) -> None:
    page.emulate_media(reduced_motion="no-preference")
    still_clock(page)
    show(page, address)
    visited = []
    for _ in range(13):
        page.clock.fast_forward(750)
        visited += page.evaluate("[...document.querySelectorAll('.dot[aria-current] .name')].map((e) => e.textContent)")
        assert "Pause" in page.locator(".toggle").inner_text()
    assert tuple(dict.fromkeys(visited)) == STATIONS
    page.clock.fast_forward(400)  # ten seconds are over
    assert "Again" in page.locator(".toggle").inner_text()
    end = page.evaluate(SHAPES)
    page.clock.fast_forward(1000)
    assert page.evaluate(SHAPES) == end
    visit(page, "Verify")  # a bookmark: its part plays, and no more
    page.clock.fast_forward(100)
    assert "Pause" in page.locator(".toggle").inner_text()
    page.clock.fast_forward(2000)
    assert "Play" in page.locator(".toggle").inner_text()
    assert page.locator(".station").get_attribute("data-station") == "3"
    page.keyboard.press("Space")
    page.clock.fast_forward(100)
    page.locator("#tab-run").click()
    page.wait_for_selector("#run .ribbon")
    page.locator("#tab-explain").click()
    assert "Play" in page.locator(".toggle").inner_text()  # nothing plays unseen


def test_less_motion_gives_still_pictures(page: Page, address: str) -> None:
    show(page, address)
    before = shapes(page, "now", "plain")
    page.wait_for_timeout(200)
    assert shapes(page, "now", "plain") == before
    assert "Play" in page.locator(".toggle").inner_text()
    page.keyboard.press("ArrowRight")
    assert [chip["state"] for chip in shapes(page, "chip")].count("drafted") >= 2  # the end of the draft, at once
    still_clock(page)
    page.keyboard.press("Space")
    pictures = []
    for pause in (400, 800, 1000):
        page.clock.fast_forward(pause)
        pictures.append(page.evaluate(SHAPES))
    assert pictures[0] == pictures[1]  # one picture for all of Verify,
    assert pictures[1] != pictures[2]  # then one for Accept


def test_the_stations_advance_by_keyboard_and_by_clicks(bundled: Page) -> None:
    page = at_the_start(bundled)
    station, titles = page.locator(".station"), []
    for i, key in enumerate(["ArrowRight", "PageDown", "ArrowRight", "PageDown", "ArrowRight", "ArrowRight"]):
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
    visit(page, "Verify")
    assert "How can the target emit more than one token per pass?" in station.inner_text()
    page.get_by_role("button", name="Next →").click()
    assert station.get_attribute("data-station") == "4"
    page.keyboard.press("End")
    page.get_by_role("button", name="The run →").click()
    page.wait_for_selector("#run .ribbon")


@pytest.mark.parametrize("size", [PHONE, DESKTOP], ids=["phone", "desktop"])
def test_next_never_moves_and_the_prompt_stays(page: Page, address: str, size: Any) -> None:
    page.set_viewport_size(size)
    show(page, address)
    prompt = "Write a Python class for a stack with push, pop, peek and is_empty, then show how it is used."
    places = []
    for i in range(6):
        if i:
            page.locator(".next").click()
        assert page.locator(".station").get_attribute("data-station") == str(i + 1)
        assert in_view(page, ".next")
        places.append(page.locator(".next").bounding_box())
        page.evaluate("scrollTo(0, 400)")
        if size is PHONE:
            places.append(page.locator(".next").bounding_box())
        assert in_view(page, ".prompt")
        page.evaluate("scrollTo(0, 0)")
    assert prompt in page.locator(".prompt").inner_text()
    assert fits(page)
    assert all(place == places[0] for place in places), places


# ---------------------------------------------------------------- the texts

FIRST_USES = """(view) => {
    const uses = {
        "·": /·/, "↵": /↵/, "q": /\\bq [.\\d–]/, "p": /\\bp [.\\d–]/, "target": /\\btarget/, "α": /α/, "K": /\\bK\\b/,
    };
    const walker = document.createTreeWalker(document.getElementById(view), NodeFilter.SHOW_TEXT), found = [];
    for (let node; (node = walker.nextNode()); ) {
        const parent = node.parentElement;
        if (parent.closest(".prompt, .answer, h1, svg defs") || !parent.checkVisibility()) continue;
        for (const [symbol, use] of Object.entries(uses)) {
            if (parent.closest("dfn")?.textContent === symbol) found.push([symbol, true]);
            else if (use.test(node.data)) found.push([symbol, false]);
        }
    }
    return found;
}"""


def test_symbols_are_explained_where_they_first_stand(bundled: Page) -> None:
    page = at_the_start(bundled)
    uses: list[tuple[str, bool]] = []
    for station in STATIONS:
        visit(page, station)
        uses += page.evaluate(FIRST_USES, "explain")
    choose(page, "code.jsonl")
    for found, symbols in ((uses, "· ↵ p q target α K"), (page.evaluate(FIRST_USES, "run"), "· ↵ p q target")):
        first: dict[str, bool] = {}
        for symbol, explained in found:
            first.setdefault(symbol, explained)
        assert {symbol for symbol in symbols.split() if first.get(symbol)} == set(symbols.split()), first


def test_the_stations_show_steps_of_the_trace(bundled: Page) -> None:
    trace = read(TRACES["code.jsonl"])
    pieces = {int(token): seen(text) for token, text in trace.footer["pieces"].items()}
    shown = {tuple(pieces[token] for token in line["emitted"]): line for line in trace.lines}
    page = at_the_start(bundled)
    visit(page, "Accept")
    line = shown[tuple(page.locator(".station tr.emitted code").all_inner_texts())]
    accepted = sum(node[4] == "a" for node in line["nodes"])
    assert accepted >= 2
    sentence = f"{accepted} accepted and 1 of the target’s own: {accepted + 1} tokens from one pass."
    assert page.locator(".caption").inner_text() == sentence
    visit(page, "Reject")
    line = shown[tuple(page.locator(".station tr.emitted code").all_inner_texts())]
    miss = next(node for node in line["nodes"] if node[4] == "r")
    at = line["nodes"].index(miss)
    drafted, chosen = (pieces[miss[0]], chance(miss[3])), (pieces[line["emitted"][at]], chance(line["chose"][at][1]))
    caption = page.locator(".caption").inner_text()  # both numbers: of the drafted token and of the chosen one
    assert caption.endswith(
        f"drafted “{drafted[0]}” (p {drafted[1]}), chosen by the target “{chosen[0]}” (p {chosen[1]})."
    )
    columns = [page.locator(f".station tr.{row} td").nth(at).inner_text().split("\n") for row in ("draft", "target")]
    assert [part for part in columns[0] if part] == [drafted[0], f"q {chance(miss[2])}", f"p {drafted[1]}"]
    assert [part for part in columns[1] if part] == [chosen[0], f"p {chosen[1]}"]


def test_p_is_the_same_wherever_a_token_stands(bundled: Page) -> None:
    """In every table of Explain p is the target's probability of the token above it."""
    trace = read(TRACES["code.jsonl"])
    pieces = {int(token): seen(text) for token, text in trace.footer["pieces"].items()}
    chances: dict[str, set[str]] = {}
    for line in trace.lines:
        for token, _, _, p, _ in line["nodes"]:
            chances.setdefault(pieces[token], set()).add(f"p {chance(p)}")
        for token, p, *_ in line["chose"]:
            chances.setdefault(pieces[token], set()).add(f"p {chance(p)}")
    page = at_the_start(bundled)
    for station in ("Verify", "Accept", "Reject"):
        visit(page, station)
        cells = page.locator(".station td").all_inner_texts()
        pairs = [[part for part in cell.split("\n") if part] for cell in cells if "p " in cell]
        assert len(pairs) >= 4
        for text, *numbers in pairs:
            assert set(numbers[-1:]) <= chances[text], (station, text, numbers)


def test_a_run_without_suitable_steps_shows_a_bundled_one(bundled: Page) -> None:
    lines: list[Line] = [{"outrider_trace": 1}, {"nodes": [], "emitted": [5]}, {"nodes": [], "emitted": [6]}]
    page = at_the_start(bundled)
    drop(page, "plain.jsonl", "\n".join(map(json.dumps, lines)))
    page.wait_for_selector("#run h1:text('plain.jsonl')")
    page.locator("#tab-explain").click()
    page.wait_for_selector("#explain >> text=this is a bundled run")
    assert shapes(page, "plain")
    choose(page, "code.jsonl")


@pytest.mark.parametrize(("scheme", "size"), [("light", PHONE), ("dark", DESKTOP)], ids=["phone", "desktop"])
def test_every_station_is_accessible(page: Page, address: str, scheme: Any, size: Any) -> None:
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size(size)
    show(page, address)
    visit(page, "Draft")
    accessible(page, ".station")
    visit(page, "Reject")  # the other stations have no other kinds of parts
    accessible(page)
    looks(page, "explain")


# ---------------------------------------------------------------- five hundred steps

FRAMES = """async () => {
    const gaps = [];
    let then = await new Promise(requestAnimationFrame);
    while (gaps.length < 40) {
        const now = await new Promise(requestAnimationFrame);
        gaps.push(now - then);
        then = now;
    }
    return gaps.sort((a, b) => a - b);
}"""


def test_five_hundred_steps_play_at_sixty_frames(page: Page, address: str, record_property: Any) -> None:
    """By the processor time of a frame: the wall clock belongs to other processes as well."""
    page.emulate_media(reduced_motion="no-preference")
    show(page, address, "run")
    drop(page, "long.jsonl", long_trace(500))
    page.wait_for_selector("#run h1:text('long.jsonl')")
    page.locator("#tab-explain").click()
    visit(page, "Speedup")
    page.wait_for_timeout(900)  # now the whole run is in the window, and more than half of it is drawn
    driver = page.context.new_cdp_session(page)
    driver.send("Performance.enable", {"timeDomain": "threadTicks"})
    before = busy(driver)
    gaps = page.evaluate(FRAMES)
    work = 1e3 * (busy(driver) - before) / len(gaps)  # script, style, layout and paint
    drawn = len([bar for bar in shapes(page, "verify") if bar["w"] > 0])
    record_property("stage", {"work": work, "median": gaps[20], "slowest": gaps[-1], "drawn": drawn})
    assert drawn > 250
    assert work < 12, (work, gaps)
