"""Is a free drafter worth the host's time? `Asking` learns it: it asks, rests, and wakes."""

from __future__ import annotations

from outrider.costs import Asking

SPEED = 250.0  # tokens per second
PLAIN, DEAR = 0.0001, 0.0011  # seconds of the host in a step, when nobody is asked and when somebody is


def live(asking: Asking, steps: int, gain: float, dear: float = DEAR, batch: int = 1) -> str:
    """So many steps in which asking brings `gain` tokens: a letter each, `a` for asked."""
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
    cheap = live(Asking(), 500, gain=0.01, dear=PLAIN)  # nearly nothing, for nothing:
    assert rests(cheap) == [Asking.SHORTEST]  # one rest, to learn what a plain step takes


def test_it_rests_where_asking_costs_more_than_it_brings_and_for_longer_and_longer() -> None:
    said = live(Asking(), 500, gain=0.0)
    assert said.startswith("a" * 12 + ".")  # a fair trial first
    assert rests(said)[:5] == [4, 8, 16, 32, 64]
    assert set(rests(said)[5:-1]) == {64}
    assert said[100:].count("a") < 0.1 * len(said[100:])
    little = live(Asking(), 500, gain=0.1)  # something, but less than the quarter of a token that it takes
    assert little.count(".") > 0.2 * len(little)


def test_a_draft_that_comes_true_shortens_the_next_rest() -> None:
    asking = Asking()
    live(asking, 200, gain=0.0)
    assert asking.nap == Asking.LONGEST
    said = live(asking, 300, gain=2.0)
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
        for _ in range(200):
            asking.learn(batch, False, plain, 0.0, SPEED)
            asking.learn(batch, True, dear, 1.0, SPEED)
    assert abs(asking.price(1) - 0.0002) < 1e-9
    assert abs(asking.price(8) - 0.0040) < 1e-9
    assert asking.price(8) == asking.price(15)  # sizes go by powers of two
    assert asking.price(64) == 0.0  # nothing is known there, so it is tried
    asking.learn(1, False, 10.0, 0.0, SPEED)
    assert asking.price(1) < 0.0002  # a plain step that took long makes asking cheaper,
    assert asking.host[1, False] < 0.0002  # but one pause of somebody else's moves little
