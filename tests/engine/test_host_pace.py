"""How the host keeps pace with a device's rounds, in invented time."""

from __future__ import annotations

from outrider.engine.rounds import HostPace


def rounds(pace: HostPace, device: float, base: float, fixed: float, n: int) -> tuple[int, float]:
    """Rounds that were planned, and the mean seconds of a round: the host works `base`, and `fixed` to plan one."""
    planned, total = 0, 0.0
    for _ in range(n):
        host = base
        if pace.plans:
            planned, host = planned + 1, base + fixed
            pace.planned(fixed)
        pace.waited(max(device - host, 0.0), {"verify": device})
        total += max(host, device)
    return planned, total / n


def test_planning_is_left_out_where_the_host_is_the_slower_one() -> None:
    planned, mean = rounds(HostPace(), device=2.25e-3, base=2.2e-3, fixed=1e-3, n=400)
    assert planned < 20
    assert mean < 1.03 * 2.25e-3


def test_planning_goes_on_where_there_is_time() -> None:
    planned, mean = rounds(HostPace(), device=5e-3, base=2e-3, fixed=1e-3, n=100)
    assert planned == 100
    assert mean < 1.001 * 5e-3


def test_a_host_that_is_nearly_as_slow_plans_now_and_then() -> None:
    planned, mean = rounds(HostPace(), device=2.25e-3, base=1.6e-3, fixed=0.8e-3, n=1000)
    assert 20 < planned < 1000
    assert mean < 1.03 * 2.25e-3


def test_a_device_without_a_clock_does_not_stop_planning() -> None:
    pace = HostPace()
    pace.planned(0.5)
    pace.seconds = 1.0
    for _ in range(5):
        pace.waited(0.0, {"verify": 0.0})
    assert pace.plans


def test_an_outlier_does_not_end_planning() -> None:
    pace = HostPace()
    pace.planned(0.05)
    planned, _ = rounds(pace, device=4e-3, base=0.5e-3, fixed=0.2e-3, n=100)
    assert planned == 100


def test_a_busy_moment_is_forgotten() -> None:
    pace = HostPace()
    pace.fixed = 0.02
    planned, _ = rounds(pace, device=4e-3, base=0.5e-3, fixed=0.2e-3, n=3000)
    assert planned > 1000


def test_the_first_drafts_of_a_large_batch_are_few() -> None:
    """All prompts of a batch were indexed in one round, which the device waited for."""
    assert len(HostPace().affordable(list(range(64)))) < 8


def test_one_slow_draft_does_not_end_drafting() -> None:
    pace = HostPace()
    pace.drafted(1, 0.1)
    pace.seconds = 0.004
    assert pace.affordable([0]) == []
    assert any(pace.affordable([0]) for _ in range(5000))


def test_a_device_without_a_clock_drafts_for_all() -> None:
    pace = HostPace()
    pace.drafted(1, 0.1)
    pace.waited(0.0, {})
    assert pace.affordable([0, 1, 2]) == [0, 1, 2]


def test_after_rounds_without_drafts_fewer_sequences_are_drafted_for() -> None:
    """They have to catch up: a round waited 4 ms for the drafts of 56 sequences after 27 rounds without any."""
    pace = HostPace()
    for _ in range(50):
        pace.drafted(8, 8 * 50e-6)
        pace.waited(3e-3, {"verify": 5e-3})
    at_once = len(pace.affordable(list(range(64))))
    for _ in range(30):
        pace.waited(3e-3, {"verify": 5e-3})
    assert len(pace.affordable(list(range(64)))) < 0.6 * at_once
    for _ in range(1000):
        pace.waited(3e-3, {"verify": 5e-3})
    assert len(pace.affordable(list(range(64)))) > 8
