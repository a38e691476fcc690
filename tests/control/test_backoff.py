"""Pauses between trials, and `HostBackoff`: drafts are requested while they gain more than the host time they cost."""

from __future__ import annotations

from outrider.control.backoff import FIRST_PAUSE, LONGEST_PAUSE, Backoff, HostBackoff
from outrider.control.ema import Ema

SPEED = 250.0  # tokens per second
EXPOSED, HIDDEN = 0.001, 0.0  # host seconds of a step: between passes, and during one


def pipelined() -> HostBackoff:
    backoff = HostBackoff()
    backoff.pipelined = True
    return backoff


def run(backoff: HostBackoff, steps: int, gain: float, host: float = EXPOSED, batch: int = 1) -> str:
    """Steps in which a draft request gains `gain` tokens: a letter for each, `d` where drafts were requested."""
    history = ""
    for _ in range(steps):
        drafts, before = backoff.next_step(), history[-1:]
        backoff.add_host_time(batch, before != "d" and not drafts, host if drafts or before == "d" else HIDDEN)
        if drafts:
            backoff.add_gain(batch, gain, SPEED)
        history += "d" if drafts else "."
    return history


def pauses(history: str) -> list[int]:
    return [len(part) for part in history.split("d") if part]


def test_a_pause_doubles_up_to_the_longest() -> None:
    backoff, lengths = Backoff(), []
    for _ in range(7):
        backoff.idle = 0
        while not backoff.due:
            backoff.idle += 1
        lengths.append(backoff.idle)
        backoff.tried()
    assert lengths == [FIRST_PAUSE, 48, 96, 192, LONGEST_PAUSE, LONGEST_PAUSE, LONGEST_PAUSE]
    backoff.reset()
    assert backoff.pause == FIRST_PAUSE


def test_an_average_takes_its_first_sample_as_it_is_and_clips_outliers() -> None:
    average = Ema(0.5)
    assert average.value is None
    assert average.add(2.0) == 2.0
    assert average.add(100.0) == 4.0  # counts as 6
    assert average.add(0.0) == 2.0
    assert average.value == 2.0


def test_drafts_are_requested_while_they_pay() -> None:
    assert "." not in run(pipelined(), 500, gain=0.5)  # half a token for a quarter's worth of time
    assert run(pipelined(), 500, gain=0.1, host=HIDDEN).count("d") == 500  # little, for nothing


def test_pauses_grow_where_drafts_cost_more_than_they_gain() -> None:
    history = run(pipelined(), 500, gain=0.0)
    assert history.startswith("d" * 5 + ".")  # no gain at all in five trials
    assert pauses(history)[:3] == [4, 16, 64]
    longest = max(pauses(run(pipelined(), 2000, gain=0.0)))  # five steps at a quarter of a token, and a little
    assert 1.2 <= HostBackoff.SHARE * longest <= 1.5
    expensive = max(pauses(run(pipelined(), 4000, gain=-2.0)))
    assert expensive == HostBackoff.LONGEST
    assert history[100:].count("d") < 0.1 * len(history[100:])
    little = run(pipelined(), 500, gain=0.1)  # something, but less than the quarter of a token that it costs
    assert little.startswith("d" * 12 + ".")  # a fair trial first
    assert little.count(".") > 0.8 * len(little)


def test_without_pipelining_there_are_no_pauses() -> None:
    backoff = HostBackoff()
    assert "." not in run(backoff, 300, gain=0.0)
    backoff.pause()
    assert backoff.next_step()


def test_an_accepted_draft_shortens_the_next_pause() -> None:
    backoff = pipelined()
    run(backoff, 200, gain=0.0)
    assert backoff.backoff.pause == HostBackoff.LONGEST
    history = run(backoff, 600, gain=2.0)
    assert history.endswith("d" * 200)  # the text repeats itself now: no pause any more
    assert backoff.backoff.pause == HostBackoff.FIRST


def test_new_sequences_end_a_pause() -> None:
    backoff = pipelined()
    run(backoff, 60, gain=0.0)
    assert backoff.left > 0
    backoff.reset()
    assert backoff.next_step()
    assert run(backoff, 11, gain=0.1) == "d" * 11  # a fair trial of their own


def test_a_batch_needs_fewer_steps_for_the_same_evidence() -> None:
    assert run(pipelined(), 50, gain=0.0, batch=16).startswith("d.")
    assert run(pipelined(), 50, gain=0.1, batch=4).startswith("ddd.")
    assert run(pipelined(), 50, gain=0.0, batch=4).startswith("dd.")


def test_the_cost_is_the_exposed_host_time_by_batch_size() -> None:
    backoff = pipelined()
    for batch, hidden, host in ((1, True, 0.0001), (1, False, 0.0003), (8, True, 0.0005), (8, False, 0.0045)):
        for _ in range(200):
            backoff.add_host_time(batch, hidden, host)
    assert abs(backoff.exposed(1) - 0.0002) < 1e-9
    assert abs(backoff.exposed(8) - 0.0040) < 1e-9
    assert backoff.exposed(8) == backoff.exposed(15)  # sizes go by powers of two
    assert backoff.exposed(64) == 0.0  # unknown, so that it is tried
    assert backoff.needed(8, SPEED) == SPEED * backoff.exposed(8) + 8 * HostBackoff.MARGIN
    backoff.add_host_time(1, False, 10.0)
    assert backoff.exposed(1) < 0.0003  # an outlier moves it little


def test_a_batch_pauses_without_pipelining_where_its_drafts_gain_less_than_they_cost() -> None:
    backoff = HostBackoff()
    backoff.batched = True
    history = ""
    for _ in range(300):
        history += "d" if backoff.next_step() else "."
        if history[-1] == "d":
            backoff.add_gain(8, -0.2, SPEED)
    assert history.startswith("d.")
    assert history.count("d") < 30
    backoff.reset()
    assert backoff.next_step()


def test_an_outlier_is_ignored_even_as_the_first_sample() -> None:
    backoff = pipelined()
    backoff.add_host_time(1, False, 0.2)
    backoff.add_host_time(1, False, EXPOSED)
    assert backoff.exposed(1) == EXPOSED
    for _ in range(5):
        backoff.add_host_time(1, False, 10 * EXPOSED)
    assert backoff.exposed(1) == 10 * EXPOSED  # a lasting change is not
