"""Is a free drafter worth the host's time? `Asking` learns it: it asks, rests, and wakes."""

from __future__ import annotations

from outrider.costs import Asking

SPEED = 250.0  # tokens per second
PLAIN, DEAR = 0.0001, 0.0011  # seconds of the host in a step, when nobody is asked and when somebody is


def live(asking: Asking, steps: int, gain: float, dear: float = DEAR, batch: int = 1) -> str:
    """So many steps in which asking brings `gain` tokens: a letter each, `a` for asked."""
    asking.hides = True
    said = ""
    for _ in range(steps):
        asked = asking.pays()
        asking.learn(batch, asked, dear if asked else PLAIN, gain if asked else 0.0, SPEED)
        said += "a" if asked else "."
    return said


def rests(said: str) -> list[int]:
    return [len(part) for part in said.split("a") if part]


def test_it_asks_while_it_pays() -> None:
    assert "." not in live(Asking(), 500, gain=0.5)  # half a token for a quarter's worth of time
    cheap = live(Asking(), 500, gain=0.1, dear=PLAIN)  # little, for nothing
    assert cheap.count("a") > 450


def test_it_rests_where_asking_costs_more_than_it_brings_and_for_longer_and_longer() -> None:
    said = live(Asking(), 500, gain=0.0)
    assert said.startswith("a" * 12 + ".")  # a fair trial first
    assert rests(said)[:3] == [4, 16, 64]
    assert max(rests(live(Asking(), 2000, gain=0.0))) == Asking.LONGEST
    assert said[100:].count("a") < 0.1 * len(said[100:])
    little = live(Asking(), 500, gain=0.1)  # something, but less than the quarter of a token that it takes
    assert little.count(".") > 0.2 * len(little)


def test_a_draft_that_comes_true_shortens_the_next_rest() -> None:
    asking = Asking()
    live(asking, 200, gain=0.0)
    assert asking.nap == Asking.LONGEST
    said = live(asking, 600, gain=2.0)
    assert said.endswith("a" * 200)  # the text has begun to repeat itself: it is asked ever after
    assert asking.nap == Asking.SHORTEST


def test_newcomers_wake_it() -> None:
    asking = Asking()
    live(asking, 100, gain=0.0)
    assert asking.rest > 0
    asking.wake()
    assert asking.pays()
    assert live(asking, 11, gain=0.0) == "a" * 11  # and get a fair trial of their own


def test_the_price_is_what_asking_takes_beyond_a_plain_step_by_batch_size() -> None:
    asking = Asking()
    for batch, plain, dear in ((1, 0.0001, 0.0003), (8, 0.0005, 0.0045)):
        for asked, host in ((False, plain), (True, dear)):
            for _ in range(200):
                asking.learn(batch, asked, host, 1.0, SPEED)
        asking.asked = False  # as if there had been a pause
    assert abs(asking.price(1) - 0.0002) < 1e-9
    assert abs(asking.price(8) - 0.0040) < 1e-9
    assert asking.price(8) == asking.price(15)  # sizes go by powers of two
    assert asking.price(64) == 0.0  # nothing is known there, so it is tried
    asking.learn(1, False, 10.0, 0.0, SPEED)
    assert asking.price(1) < 0.0002  # a plain step that took long makes asking cheaper,
    assert asking.host[1, False] < 0.0002  # but one pause of somebody else's moves little


def test_the_step_after_is_part_of_the_price() -> None:
    """Nothing was started ahead of it, because a draft might have come: that is asking's fault."""
    asking = Asking()
    for _ in range(300):
        for asked, host in ((True, 0.0008), (False, 0.0005), (False, 0.0), (False, 0.0)):
            asking.learn(4, asked, host, 1.0, SPEED)
    assert 0.0009 < asking.price(4) < 0.0014
