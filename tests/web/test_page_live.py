"""The Live view in a real browser against a real server: it shows what the API returns and the traces contain."""

from __future__ import annotations

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
from support.pages import in_view
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
    """The server's own address opens Live."""
    page.goto(f"{address}/")
    page.wait_for_selector("#live form")


def settle(page: Page, **settings: Any) -> None:
    page.wait_for_selector("#live-drafter option", state="attached")
    if not page.locator("#live-seed").is_visible():
        page.locator("#live form summary").click()
    for name, value in settings.items():
        if name == "drafter":
            page.select_option("#live-drafter", value)
        else:
            page.fill(f"#live-{name}", str(value))


def send(page: Page, message: str, **settings: Any) -> None:
    settle(page, **settings)
    page.fill("#live-prompt", message)
    page.get_by_role("button", name="Send").click()


def wait_for_results(page: Page, count: int = 1) -> None:
    there_are(count, page.locator("[data-same]"), seconds=60)


def card(page: Page, runner: str, number: str) -> str:
    return page.locator(f'[data-runner="{runner}"] [data-number="{number}"]').last.inner_text()


def downloaded(page: Page, folder: Path) -> Trace:
    with page.expect_download() as waiting:
        page.get_by_role("button", name="Download the trace").last.click()
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
def test_an_answer_streams_with_its_race_beside_it(page: Page, real: Served, tmp_path: Path) -> None:
    address, _ = real
    open_live(page, address)
    assert page.locator("#tab-live").get_attribute("aria-current") == "page"
    accessible(page)
    page.evaluate("""() => {  // every length that the answer ever had
        window.lengths = [];
        new MutationObserver(() => window.lengths.push(document.querySelector('.said')?.textContent.length ?? 0))
            .observe(document.querySelector('.chat'), { childList: true, subtree: true, characterData: true });
    }""")
    send(page, STORY, temperature=0.8, seed=5, tokens=160)
    wait_for_results(page)
    assert len(set(page.evaluate("window.lengths"))) > 3, "the text did not come piece by piece"

    body = {"messages": [{"role": "user", "content": STORY}], "temperature": 0.8, "seed": 5, "max_tokens": 160}
    body |= {"return_token_ids": True, "speculation": {"enabled": False}}
    reference = httpx.post(f"{address}/v1/chat/completions", json=body, timeout=60).json()["choices"][0]
    assert page.locator(".said").text_content() == reference["message"]["content"]
    for runner in ("auto", "plain decoding"):
        assert card(page, runner, "tokens") == str(len(reference["token_ids"]))

    trace = downloaded(page, tmp_path)
    assert [token for line in trace.lines for token in line["emitted"]] == reference["token_ids"]
    assert replay(trace) == recorded(trace)
    stats = stats_of(trace)
    assert stats.alpha is not None
    assert stats.tau is not None
    assert card(page, "auto", "alpha") == f"{stats.alpha:.0%}"
    assert card(page, "auto", "tau") == f"{stats.tau:.2f}"
    rate = clock(trace.footer["plain"]["us"]) / clock([line["us"]["verify"] for line in trace.lines])
    assert page.locator(".beside [data-number=speedup]").inner_text() == f"{rate:.2f}×"
    assert page.locator("[data-same]").get_attribute("data-same") == "true"
    assert f"all {len(reference['token_ids'])} tokens" in page.locator("[data-same]").inner_text()
    assert any(line.get("chose") for line in trace.lines)
    answer, race = page.locator(".replied").bounding_box(), page.locator(".beside").bounding_box()
    assert answer
    assert race
    assert race["y"] == answer["y"]
    assert race["x"] >= answer["x"] + answer["width"]  # beside it
    accessible(page)
    looks(page, "live", whole=False)
    page.set_viewport_size({"width": 390, "height": 844})
    page.emulate_media(color_scheme="dark")
    page.wait_for_timeout(100)
    assert fits(page)
    accessible(page)


# ---------------------------------------------------------------- a tiny one


def test_a_conversation_remembers(page: Page, small: Served) -> None:
    asked: list[Any] = []
    open_live(page, small[0])
    page.on("request", lambda request: asked.append(request.post_data_json) if request.method == "POST" else None)
    send(page, "one two three", tokens=8, drafter="suffix")
    wait_for_results(page)
    first = page.locator(".said").text_content()
    send(page, "four five")
    wait_for_results(page, 2)
    for body in asked[2:]:
        assert [each["content"] for each in body["messages"]] == ["one two three", first, "four five"]
        assert body["messages"][1]["role"] == "assistant"
    assert [body["speculation"].get("enabled", True) for body in asked] == [True, False, True, False]
    assert page.locator(".asked").all_inner_texts() == ["one two three", "four five"]
    page.get_by_role("button", name="New conversation").click()
    assert page.locator(".turn").count() == 0
    send(page, "six")
    wait_for_results(page)
    assert asked[-1]["messages"] == [{"role": "user", "content": "six"}]


def test_the_next_message_need_not_wait_for_the_plain_run(
    page: Page, small: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = small[1].service.worker.engine.llm.engine
    step = engine.step
    open_live(page, small[0])
    monkeypatch.setattr(engine, "step", lambda: (time.sleep(0.02), step())[1])
    send(page, "one two three", tokens=24, drafter="suffix")
    page.locator(".verdict", has_text="Now plain decoding").wait_for()
    send(page, "four")
    page.locator(".verdict", has_text="no comparison").wait_for()
    monkeypatch.undo()
    wait_for_results(page)
    assert page.locator(".turn").nth(1).locator("[data-same=true]").count() == 1


def test_stop_frees_the_slots_at_once(page: Page, small: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    address, application = small
    worker = application.service.worker
    engine = worker.engine.llm.engine
    step = engine.step
    before = cancelled(address)
    monkeypatch.setattr(engine, "step", lambda: (time.sleep(0.05), step())[1])  # so that there is something to stop
    open_live(page, address)
    send(page, "one two three", tokens=200, temperature=1.3, seed=3)
    page.wait_for_selector("[data-runner][data-state=running]")
    page.keyboard.press("Escape")
    page.wait_for_selector("[data-runner][data-state=stopped]")
    wait_for(lambda: worker.running == 0 and not engine.busy)
    wait_for(lambda: cancelled(address) == before + 1)  # counted where the answer is sent
    monkeypatch.undo()
    assert "Stopped" in page.locator("#live > [role=status]").inner_text()
    assert "Stopped before the answer was complete" in page.locator(".verdict").inner_text()
    assert page.input_value("#live-prompt") == "one two three"  # to send it again
    send(page, "one two three", tokens=8)
    wait_for_results(page)


def cancelled(address: str) -> float:
    found = re.search(
        r'request_success_total\{finished_reason="cancelled",.*\} (\S+)', httpx.get(f"{address}/metrics").text
    )
    return float(found[1]) if found else 0.0


def test_it_is_driven_by_the_keyboard_alone(page: Page, small: Served) -> None:
    open_live(page, small[0])
    settle(page, tokens=12)
    page.focus("#live-prompt")
    page.keyboard.type("the lazy")
    page.keyboard.press("Shift+Enter")  # a line break
    page.keyboard.type("dog")
    page.keyboard.press("Enter")
    wait_for_results(page)
    assert page.locator(".asked").inner_text() == "the lazy\ndog"
    assert card(page, "suffix", "tokens") == card(page, "plain decoding", "tokens") == "12"
    assert page.evaluate("document.activeElement.id") == "live-prompt"
    page.get_by_role("button", name="Open in Run").focus()
    page.keyboard.press("Enter")
    page.locator("#run .facts .note", has_text="Live, suffix").wait_for()
    assert page.locator("#run .flow").inner_text().strip()
    page.get_by_role("link", name="Live", exact=True).press("Enter")
    assert card(page, "suffix", "tokens") == "12"  # what was measured is still there
    for view in ("Explain", "Run"):
        page.get_by_role("link", name=view, exact=True).press("Enter")
        page.locator(f"#{view.lower()}").wait_for()


def test_a_key_is_kept_in_memory_only(page: Page, locked: Served, seen: Seen) -> None:
    seen.forgive("401")
    open_live(page, locked[0])
    page.fill("#live-key", "a-wrong-key-of-mine")
    page.press("#live-key", "Tab")
    alert = page.locator("#problem")
    alert.wait_for()
    assert "The API key is missing or wrong" in alert.inner_text()
    assert in_view(page, "#problem")
    page.fill("#live-key", KEY)
    page.press("#live-key", "Tab")
    send(page, "one two", tokens=8)
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
    send(page, "one two three " * 20, tokens=8)
    alert = page.locator("#problem")
    alert.wait_for()
    assert "this server takes at most 40" in alert.inner_text()
    assert page.locator("[data-runner]").first.get_attribute("data-state") == "failed"
    send(page, "one two", tokens=8)
    wait_for_results(page)
    assert not alert.is_visible()


def test_no_text_can_run_as_script(page: Page, small: Served) -> None:
    evil = "<img src=x onerror=alert(1)><script>alert(2)</script>"
    page.on("dialog", lambda dialog: pytest.fail("something ran"))
    open_live(page, small[0])
    settle(page, tokens=8)
    page.check("#live-raw")
    send(page, evil)
    wait_for_results(page)
    assert page.locator(".asked").inner_text() == evil
    page.get_by_role("button", name="Open in Run").click()
    page.locator("#run h1", has_text=evil).wait_for()
    assert page.locator("#main img, #main script").count() == 0


def test_an_unreachable_server_is_reported(page: Page, small: Served, seen: Seen) -> None:
    open_live(page, small[0])
    page.wait_for_selector("#live-drafter option", state="attached")
    seen.forgive("ERR_FAILED|Failed to load")
    page.route("**/v1/chat/completions", lambda route: route.abort())
    send(page, "one two", tokens=8)
    alert = page.locator("#problem")
    alert.wait_for()
    assert "cannot be reached" in alert.inner_text()


def test_a_different_text_is_reported(page: Page, small: Served) -> None:
    """One id of the plain run is changed on its way: the badge says where."""
    before: list[int] = []  # tokens in the chunks before it: a chunk may hold several steps

    def tampered(route: Any) -> None:
        answer = route.fetch()
        text = answer.text()
        if '"enabled":false' in (route.request.post_data or ""):
            *earlier, last = re.finditer(r'"token_ids":\[([\d,]+)\]', text)  # a slow machine sends one chunk only
            before.append(sum(len(found[1].split(",")) for found in earlier))
            text = f"{text[: last.start(1)]}9{text[last.start(1) :]}"
        route.fulfill(response=answer, body=text)

    open_live(page, small[0])
    page.route("**/v1/chat/completions", tampered)
    send(page, "one two three one two", tokens=16)
    wait_for_results(page)
    badge = page.locator("[data-same]")
    assert badge.get_attribute("data-same") == "false"
    assert f"from token {before[0] + 1} on" in badge.inner_text()
    assert page.locator(".beside [data-number=speedup]").count() == 0  # no speedup of a different text,
    assert "same text" not in page.locator(".beside").inner_text()  # and no claim that it is the same
