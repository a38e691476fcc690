"""Expected tokens per pass, and the acceptance from which drafting pays, in closed form.

Pure arithmetic on one acceptance rate α that is the same at every depth. It knows neither drafters nor measurements.
"""

from __future__ import annotations

from collections.abc import Callable


def expected_tokens(alpha: float, k: int) -> float:
    """Tokens per pass when each of K drafted tokens is accepted with probability α once reached: 1 + α + … + α^K."""
    return sum(alpha**i for i in range(k + 1))


def break_even(cost: Callable[[int], float], k: int, draft: float = 0.0) -> float | None:
    """The α from which drafting K tokens beats plain decoding; None when even a perfect drafter would lose.

    `cost` gives the seconds of a pass by its rows, `draft` the seconds of drafting one token.
    """
    needed = (cost(k + 1) + k * draft) / cost(1)  # tokens per pass
    if needed > k + 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if expected_tokens(middle, k) >= needed else (middle, high)
    return high
