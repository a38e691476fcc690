"""The Live view in a real browser against a real server: it shows what the API returns and the traces contain."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from outrider import LLM
from outrider.engine.trace import Trace, read, recorded, replay
from outrider.server.app import Application
from outrider.server.settings import Limits, Settings
from outrider.types import Stats, Tree

from support.browser import Seen, accessible, fits, looks, there_are
from support.serving import listening, wait_for

if TYPE_CHECKING:
    from playwright.sync_api import Page

KEY = "a-key-for-tests"
STORY = "Tell me about the sea. Use short sentences."
Served = tuple[str, Application]


@pytest.fixture(scope="module")
def real() -> Iterator[Served]:
    """The default model with all its drafters."""
    with listening(LLM(k=5, max_length=1024)) as served:
        yield served


@pytest.fixture(scope="module")
def small(llm: LLM) -> Iterator[Served]:
    with listening(llm) as served:
        yield served


@pytest.fixture(scope="module")
def locked(folder: Path) -> Iterator[Served]:
    llm = LLM(folder, drafter="auto", dtype="float32", k=4)
    with listening(llm, Settings(keys=(KEY,), limits=Limits(prompt_tokens=40))) as served:
        yield served


def open_live(page: Page, address: str) -> None:
    page.goto(f"{address}/#live")
    page.wait_for_selector("#live form")


def start_race(page: Page, prompt: str, **settings: Any) -> None:
    """Fill the form and start."""
    page.wait_for_selector("#live-drafter option", state="attached")
    page.fill("#live-prompt", prompt)
    for name, value in settings.items():
        if name in ("drafter", "second"):
            page.select_option(f"#live-{name}", value)
        else:
            page.fill(f"#live-{name}", str(value))
    page.get_by_role("button", name="Run the race").click()


def wait_for_results(page: Page, count: int = 1) -> None:
    there_are(count, page.locator("[data-verdict]"), seconds=60)
    there_are(0, page.locator(".runner:not([data-state=done])"))


def card(page: Page, runner: str, number: str) -> str:
    return page.locator(f'[data-runner="{runner}"] [data-number="{number}"]').inner_text()


def downloaded(page: Page, runner: str, folder: Path) -> Trace:
    page.locator(".looking").get_by_role("button", name=runner, exact=True).click()
    with page.expect_download() as waiting:
        page.get_by_role("button", name="Download this trace").click()
    path = folder / waiting.value.suggested_filename
    waiting.value.save_as(path)
    return read(path)


def stats_of(trace: Trace) -> Stats:
    stats = Stats()
    for line, verdict in zip(trace.lines, recorded(trace), strict=True):
        stats.count(Tree([node[0] for node in line["nodes"]], [node[1] for node in line["nodes"]]), verdict)
    return stats


def clock(passes: list[list[int]]) -> int:
    """Microseconds from the end of the first pass to the end of the last."""
    return sum(passes[-1]) - sum(passes[0])


# ---------------------------------------------------------------- the real model


@pytest.mark.real
def test_a_race_streams_what_the_api_returns(page: Page, real: Served, tmp_path: Path) -> None:
    address, _ = real
    open_live(page, address)
    accessible(page)
    page.evaluate("""() => {  // every length that the first card's text ever had
        window.lengths = [];
        new MutationObserver(() => window.lengths.push(document.querySelector('.said')?.textContent.length ?? 0))
            .observe(document.querySelector('.runners'), { childList: true, subtree: true, characterData: true });
    }""")
    start_race(page, STORY, temperature=0.8, seed=5, tokens=96)
    wait_for_results(page)
    assert len(set(page.evaluate("window.lengths"))) > 3, "the text did not come piece by piece"

    body = {"messages": [{"role": "user", "content": STORY}], "temperature": 0.8, "seed": 5, "max_tokens": 96}
    body |= {"return_token_ids": True, "speculation": {"enabled": False}}
    reference = httpx.post(f"{address}/v1/chat/completions", json=body, timeout=60).json()["choices"][0]
    for runner in ("auto", "plain decoding"):
        assert page.locator(f'[data-runner="{runner}"] .said').text_content() == reference["message"]["content"]
        assert card(page, runner, "tokens") == str(len(reference["token_ids"]))

    trace, plain = downloaded(page, "auto", tmp_path), downloaded(page, "plain decoding", tmp_path)
    for each in (trace, plain):
        assert [token for line in each.lines for token in line["emitted"]] == reference["token_ids"]
        assert replay(each) == recorded(each)
    stats = stats_of(trace)
    assert stats.alpha is not None
    assert stats.tau is not None
    assert card(page, "auto", "alpha") == f"{stats.alpha:.0%}"
    assert card(page, "auto", "tau") == f"{stats.tau:.2f}"
    own = [line["us"]["verify"] for line in trace.lines]
    plain_passes = [line["us"]["verify"] for line in plain.lines]
    assert trace.footer["plain"]["us"] == plain_passes
    rate = f"{clock(plain_passes) / clock(own):.2f}×"
    assert page.locator("[data-verdict] [data-number=speedup]").inner_text() == rate
    page.locator(".looking").get_by_role("button", name="auto", exact=True).click()
    assert page.locator(".lanes [data-number=speedup]").inner_text().startswith(rate)
    badge = page.locator("[data-verdict] [data-same]")
    assert badge.get_attribute("data-same") == "true"
    assert f"All {len(reference['token_ids'])} tokens" in badge.inner_text()
    assert any(line.get("chose") for line in trace.lines)
    looks(page, "live-race")


@pytest.mark.real
def test_two_drafters_and_the_kinds_of_text_side_by_side(page: Page, real: Served, tmp_path: Path) -> None:
    open_live(page, real[0])
    again = "Repeat: one two three four. one two three four. one two three four."
    start_race(page, again, drafter="suffix", second="head", tokens=32)
    wait_for_results(page, 2)
    for name in ("suffix", "head"):
        assert page.locator(f'[data-verdict="{name}"] [data-same]').get_attribute("data-same") == "true"
        trace = downloaded(page, name, tmp_path)
        sources = {line["source"].partition(":")[0] for line in trace.lines if line["nodes"]}
        assert sources == {name} == {trace.header["drafter"]}
    page.fill("#live-tokens", "24")
    page.select_option("#live-second", "")
    page.get_by_role("button", name="Compare the two").click()
    rows = page.locator(".scores tbody tr")
    there_are(4, rows, seconds=60)
    assert [rows.nth(i).locator("th").inner_text() for i in (2, 3)] == ["Code", "Creative writing"]
    assert all("✓ the same" in row for row in rows.all_inner_texts())
    accessible(page)
    looks(page, "live-compared")
    page.set_viewport_size({"width": 390, "height": 844})
    page.wait_for_timeout(200)
    assert fits(page)
    page.emulate_media(color_scheme="dark")
    accessible(page)


# ---------------------------------------------------------------- a tiny one


def test_stop_frees_the_slots_at_once(page: Page, small: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    address, application = small
    worker = application.service.worker
    engine = worker.engine.llm.engine
    step = engine.step
    monkeypatch.setattr(engine, "step", lambda: (time.sleep(0.05), step())[1])  # so that there is something to stop
    open_live(page, address)
    start_race(page, "one two three", tokens=200, temperature=1.3, seed=3)
    page.wait_for_selector(".runner[data-state=running]")
    page.keyboard.press("Escape")
    page.wait_for_selector(".runner[data-state=stopped]")
    wait_for(lambda: worker.running == 0 and not engine.busy)
    cancelled = re.compile(r'request_success_total\{finished_reason="cancelled",.*\} 1\.0')
    wait_for(lambda: cancelled.search(httpx.get(f"{address}/metrics").text))  # counted where the answer is sent
    monkeypatch.undo()
    assert "Stopped" in page.locator("#live > [role=status]").inner_text()
    assert page.locator(".runner.plain").get_attribute("data-state") == "waiting"
    assert page.get_by_role("button", name="Run the race").is_enabled()
    start_race(page, "one two three", tokens=8)  # and another race can start
    wait_for_results(page)


def test_it_is_driven_by_the_keyboard_alone(page: Page, small: Served) -> None:
    open_live(page, small[0])
    page.wait_for_selector("#live-drafter option", state="attached")
    page.focus("#live-prompt")
    page.keyboard.press("Control+A")
    page.keyboard.type("the lazy dog")
    for _ in range(5):
        page.keyboard.press("Tab")
    page.keyboard.press("Control+A")
    page.keyboard.type("12")
    page.keyboard.press("Control+Enter")
    wait_for_results(page)
    assert card(page, "suffix", "tokens") == card(page, "plain decoding", "tokens") == "12"
    assert page.evaluate("document.activeElement.textContent") == "Run the race"
    page.get_by_role("button", name="Open it in Run").focus()
    page.keyboard.press("Enter")
    page.locator("#run h1", has_text="Live: suffix").wait_for()
    assert page.locator("#run .flow").inner_text().strip()
    page.get_by_role("link", name="Live", exact=True).press("Enter")
    assert card(page, "suffix", "tokens") == "12"  # what was measured is still there


def test_a_key_is_kept_in_memory_only(page: Page, locked: Served, seen: Seen) -> None:
    seen.forgive("401")
    open_live(page, locked[0])
    page.fill("#live-key", "a-wrong-key-of-mine")
    page.press("#live-key", "Tab")
    alert = page.locator("#live [role=alert]")
    alert.wait_for()
    assert "The API key is missing or wrong" in alert.inner_text()
    page.fill("#live-key", KEY)
    page.press("#live-key", "Tab")
    start_race(page, "one two", tokens=8)
    wait_for_results(page)
    assert not alert.is_visible()
    kept = page.evaluate("JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie, location.href])")
    assert KEY not in kept
    assert not any(KEY in url for url in seen.requests)
    accessible(page)


def test_the_servers_error_messages_are_shown(page: Page, locked: Served, seen: Seen) -> None:
    seen.forgive("400")
    open_live(page, locked[0])
    page.fill("#live-key", KEY)
    page.press("#live-key", "Tab")
    start_race(page, "one two three " * 20, tokens=8)
    alert = page.locator("#live [role=alert]")
    alert.wait_for()
    assert "this server takes at most 40" in alert.inner_text()
    assert page.locator(".runner").first.get_attribute("data-state") == "failed"
    start_race(page, "one two", tokens=8)
    wait_for_results(page)
    assert not alert.is_visible()


def test_no_text_can_run_as_script(page: Page, small: Served) -> None:
    evil = "<img src=x onerror=alert(1)><script>alert(2)</script>"
    page.on("dialog", lambda dialog: pytest.fail("something ran"))
    open_live(page, small[0])
    page.check("#live-raw")
    start_race(page, evil, tokens=8)
    wait_for_results(page)
    page.locator(".live-run summary").first.click()
    assert evil in page.locator(".live-run details pre").first.inner_text()
    assert page.locator("#live img, #live script").count() == 0


def test_an_unreachable_server_is_reported(page: Page, small: Served, seen: Seen) -> None:
    open_live(page, small[0])
    page.wait_for_selector("#live-drafter option", state="attached")
    seen.forgive("ERR_FAILED|Failed to load")
    page.route("**/v1/chat/completions", lambda route: route.abort())
    start_race(page, "one two", tokens=8)
    alert = page.locator("#live [role=alert]")
    alert.wait_for()
    assert "cannot be reached" in alert.inner_text()


def test_a_different_text_is_reported(page: Page, small: Served) -> None:
    """One id of the plain run is changed on its way: the badge says where."""
    before: list[int] = []  # tokens in the chunks before it: a chunk may hold several steps

    def tampered(route: Any) -> None:
        answer = route.fetch()
        text = answer.text()
        if '"enabled":false' in (route.request.post_data or ""):
            lines = text.split("\n\n")
            chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:4]]
            before.append(sum(len(chunk["choices"][0]["token_ids"]) for chunk in chunks))
            lines[4] = re.sub(r'"token_ids":\[(\d+)', r'"token_ids":[9\1', lines[4])
            text = "\n\n".join(lines)
        route.fulfill(response=answer, body=text)

    open_live(page, small[0])
    page.route("**/v1/chat/completions", tampered)
    start_race(page, "one two three one two", tokens=16)
    wait_for_results(page)
    badge = page.locator("[data-same]")
    assert badge.get_attribute("data-same") == "false"
    assert f"from token {before[0] + 1} on" in badge.inner_text()
    assert page.locator("[data-verdict] [data-number=speedup]").count() == 0  # no speedup of a different text,
    assert "same text" not in page.locator("#live .lanes").inner_text()  # and no claim that it is the same
