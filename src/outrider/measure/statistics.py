"""Numbers from repeated measurements: medians, ratios of speeds, and intervals that say how far to trust them.

It knows numbers in groups (one group per prompt, one entry per round); it does not know what was measured.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")
Groups = Sequence[Sequence[T]]
DRAWS, LEVEL = 1000, 0.95


def interval(
    groups: Groups[T], statistic: Callable[[Groups[T]], float | None], seed: int = 0
) -> tuple[float, float] | None:
    """A 95% bootstrap interval of a statistic: groups are drawn again, and the entries within each.

    The same seed gives the same interval. One single entry says nothing about spread: then there is none.
    """
    if sum(map(len, groups)) < 2:
        return None
    dice = random.Random(seed)
    drawn = (statistic(_again(groups, dice)) for _ in range(DRAWS))
    values = sorted(value for value in drawn if value is not None)
    if not values:
        return None
    tail = (1 - LEVEL) / 2
    return quantile(values, tail), quantile(values, 1 - tail)


def _again(groups: Groups[T], dice: random.Random) -> list[list[T]]:
    chosen = dice.choices(groups, k=len(groups))
    return [dice.choices(group, k=len(group)) for group in chosen]


def quantile(values: Sequence[float], share: float) -> float:
    """Of sorted values, by straight lines between neighbours."""
    at = share * (len(values) - 1)
    low = int(at)
    high = min(low + 1, len(values) - 1)
    return values[low] + (at - low) * (values[high] - values[low])


def expected_tokens(alpha: float, k: int) -> float:
    """Tokens of one pass when each of K drafted ones is accepted with chance α once it is reached: 1 + α + … + α^K."""
    return sum(alpha**i for i in range(k + 1))


def break_even(cost: Callable[[int], float], k: int, draft: float = 0.0) -> float | None:
    """The α from which drafting K tokens beats plain decoding; None when even a perfect drafter would lose.

    `cost` gives the seconds of a pass by its rows, `draft` the seconds of drafting one token.
    """
    price = (cost(k + 1) + k * draft) / cost(1)  # in plain tokens
    if price > k + 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if expected_tokens(middle, k) >= price else (middle, high)
    return high
