"""Is a draft worth the host's time? `Asking` learns it: it asks, rests, and wakes."""

from __future__ import annotations

from outrider.control.costs import Asking

SPEED = 250.0  # tokens per second
OPEN, HIDDEN = 0.001, 0.0  # seconds of the host in a step: beside the device's work, and behind it


def awake() -> Asking:
    asking = Asking()
    asking.hides = True
    return asking


def live(asking: Asking, steps: int, gain: float, host: float = OPEN, batch: int = 1) -> str:
    """So many steps in which asking brings `gain` tokens: a letter each, `a` for asked."""
    said = ""
    for _ in range(steps):
        asked = asking.pays()
        asking.spent(batch, "a" not in said[-1:] and not asked, host if asked or said[-1:] == "a" else HIDDEN)
        if asked:
            asking.brought(batch, gain, SPEED)
        said += "a" if asked else "."
    return said


def rests(said: str) -> list[int]:
    return [len(part) for part in said.split("a") if part]


def test_it_asks_while_it_pays() -> None:
    assert "." not in live(awake(), 500, gain=0.5)  # half a token for a quarter's worth of time
    assert live(awake(), 500, gain=0.1, host=HIDDEN).count("a") == 500  # little, for nothing


def test_it_rests_where_asking_costs_more_than_it_brings_and_for_longer_and_longer() -> None:
    said = live(awake(), 500, gain=0.0)
    assert said.startswith("a" * 5 + ".")  # nothing at all, five times over
    assert rests(said)[:3] == [4, 16, 64]
    longest = max(rests(live(awake(), 2000, gain=0.0)))  # five steps at a quarter of a token, and a little
    assert 1.2 <= Asking.SHARE * longest <= 1.5
    dear = max(rests(live(awake(), 4000, gain=-2.0)))
    assert dear == Asking.LONGEST
    assert said[100:].count("a") < 0.1 * len(said[100:])
    little = live(awake(), 500, gain=0.1)  # something, but less than the quarter of a token that it takes
    assert little.startswith("a" * 12 + ".")  # a fair trial first
    assert little.count(".") > 0.8 * len(little)


def test_where_nothing_is_hidden_nothing_is_won_by_resting() -> None:
    asking = Asking()
    assert "." not in live(asking, 300, gain=0.0)
    asking.leave()
    assert asking.pays()


def test_a_draft_that_comes_true_shortens_the_next_rest() -> None:
    asking = awake()
    live(asking, 200, gain=0.0)
    assert asking.nap == Asking.LONGEST
    said = live(asking, 600, gain=2.0)
    assert said.endswith("a" * 200)  # the text has begun to repeat itself: it is asked ever after
    assert asking.nap == Asking.SHORTEST


def test_newcomers_wake_it() -> None:
    asking = awake()
    live(asking, 60, gain=0.0)
    assert asking.rest > 0
    asking.wake()
    assert asking.pays()
    assert live(asking, 11, gain=0.1) == "a" * 11  # and get a fair trial of their own


def test_a_batch_tells_as_much_in_fewer_steps() -> None:
    assert live(awake(), 50, gain=0.0, batch=16).startswith("a.")
    assert live(awake(), 50, gain=0.1, batch=4).startswith("aaa.")
    assert live(awake(), 50, gain=0.0, batch=4).startswith("aa.")


def test_the_price_is_what_comes_to_light_by_batch_size() -> None:
    asking = awake()
    for batch, hidden, host in ((1, True, 0.0001), (1, False, 0.0003), (8, True, 0.0005), (8, False, 0.0045)):
        for _ in range(200):
            asking.spent(batch, hidden, host)
    assert abs(asking.price(1) - 0.0002) < 1e-9
    assert abs(asking.price(8) - 0.0040) < 1e-9
    assert asking.price(8) == asking.price(15)  # sizes go by powers of two
    assert asking.price(64) == 0.0  # nothing is known there, so it is tried
    assert asking.needed(8, SPEED) == SPEED * asking.price(8) + 8 * Asking.MARGIN
    asking.spent(1, False, 10.0)
    assert asking.price(1) < 0.0003  # one pause of somebody else's moves little


def test_a_crowd_rests_too_where_its_drafts_bring_less_than_they_take() -> None:
    asking = Asking()
    asking.crowded = True
    said = ""
    for _ in range(300):
        said += "a" if asking.pays() else "."
        if said[-1] == "a":
            asking.brought(8, -0.2, SPEED)
    assert said.startswith("a.")
    assert said.count("a") < 30
    asking.wake()
    assert asking.pays()


def test_a_pause_is_no_price_the_first_time_either() -> None:
    asking = awake()
    asking.spent(1, False, 0.2)
    asking.spent(1, False, OPEN)
    assert asking.price(1) == OPEN
    for _ in range(5):
        asking.spent(1, False, 10 * OPEN)
    assert asking.price(1) == 10 * OPEN  # a lasting change is
