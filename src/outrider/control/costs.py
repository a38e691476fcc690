"""What passes and drafts cost: seconds, which the clocks of steps correct, and prices in tokens for the step at hand.

Target passes are measured at the start (`backends.pass_costs`), recorded drafts as well, other calls of a drafter are
learnt. Nothing is known here of acceptance, nor of what a pass or a call does in its time.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import cache

from ..types import Turn

MARGIN = 0.03  # tokens that a draft must bring each sequence beyond its price, for overheads that are not measured

Seconds = Mapping[int, float] | Mapping[tuple[int, int], float]  # by rows (of one sequence), or by (sequences, rows)
Points = tuple[list[int], list[float]]  # row counts, rising, and their costs


class PassCosts:
    """Seconds of a pass over `rows` rows in total by `sequences` sequences. More rows never cost less.

    t(s, r) = scale(s) · (measured(s, r) + base(s) + tilt(s) · (r − s)), the last two of passes with drafts. Measured
    costs are linear between their points: in rows, and between sequence counts with as many rows each. Passes refine
    scale, base (caches are cold after a draft) and tilt.
    """

    RATE = 0.08  # how far the error of a prediction moves the next one: a dozen passes. The first plain ones move it
    # further: costs were measured at another time, and a shared machine's memory is slower or faster by half
    FEW = 4  # drafted rows, squared, whose error moves base and tilt alike: that of fewer says little about one more
    CLIP = 0.5  # the largest error that counts: a thread that was descheduled says nothing

    def __init__(self, seconds: Seconds, padded: bool = True) -> None:
        """padded: passes of a batch are padded to the next measured size, as on a GPU."""
        self.padded = padded
        self._points: dict[int, Points] = {}  # by the measured numbers of sequences, rising
        pairs = {key if isinstance(key, tuple) else (1, key): value for key, value in seconds.items()}
        for (sequences, rows), cost in sorted(pairs.items()):
            known, costs = self._points.setdefault(sequences, ([], []))
            known.append(rows)
            costs.append(max([cost, *costs[-1:]]))
        self._counts = list(self._points)
        self._corrections = [[1.0, 0.0, 0.0, 0] for _ in self._counts]  # scale, base, tilt, passes without drafts
        self._measured = cache(self._interpolate)

    def __call__(self, rows: int, sequences: int = 1, planned: bool = False) -> float:
        (scale, base, tilt, _), stairs = self._corrections[self._index(sequences)], planned and self.padded
        cost, drafted = self._measured(rows, sequences, stairs), max(rows - sequences, 0)
        more = base * (drafted > 0) + tilt * drafted
        return scale * (cost + more if more >= 0 else max(cost + more, self._measured(sequences, sequences, stairs)))

    def _index(self, sequences: int) -> int:
        """Of the next measured number of sequences."""
        return min(bisect_left(self._counts, sequences), len(self._counts) - 1)

    def _interpolate(self, rows: int, sequences: int, stairs: bool) -> float:
        """Without corrections. stairs: in a padded batch, any row count costs what the next measured one does, because
        the sizes are unknown, and just beyond one a line is too optimistic."""
        near, cost = _around(self._counts, min(sequences, self._counts[-1])), 0.0
        for index, weight in near:
            count = self._counts[index]
            known, costs = self._points[count]
            size = rows * count / sequences if len(near) > 1 else rows  # as many rows for each sequence
            if stairs and count > 1 and size <= known[-1]:
                size = known[bisect_left(known, size)]
            elif stairs and count > 1:  # beyond the last one, steps of half of it
                size = known[-1] + math.ceil(2 * (size / known[-1] - 1)) * known[-1] / 2
            cost += weight * sum(share * costs[i] for i, share in _around(known, size))
        return cost

    def refine(self, rows: int, seconds: float, sequences: int = 1) -> None:
        """A pass took this long. Plain ones move all costs of their sequence count alike: contexts grow,
        and other work slows every pass down, which says nothing about one more row. A pass with drafts moves what its
        rows add."""
        correction, plain = self._corrections[self._index(sequences)], self(sequences, sequences)
        drafted = rows - sequences
        if drafted > 0 and seconds > plain:  # more rows never cost less: else that was the plain pass's cost, at most
            # Between measured sizes a padded pass may cost anything up to the next one: that is no error.
            cost = min(max(seconds, self(rows, sequences)), self(rows, sequences, planned=True))
            error = self._error(seconds, cost) * cost / correction[0] * self.RATE / (self.FEW + drafted**2)  # seconds
            correction[1] += error * self.FEW
            correction[2] += error * drafted
            return
        correction[3] += 1
        correction[0] *= 1 + self._error(seconds, plain) * max(self.RATE, 1 / (1 + correction[3]))

    def _error(self, seconds: float, cost: float) -> float:
        return min(max(seconds / cost - 1, -self.CLIP), self.CLIP)


def _around(xs: list[int], x: float) -> list[tuple[int, float]]:
    """Indices of the known numbers around x, with the weights of a line through them; before the first, it alone."""
    i = min(bisect_left(xs, x), len(xs) - 1)
    if i == 0 or x == xs[i]:
        return [(i, 1.0)]
    share = (x - xs[i - 1]) / (xs[i] - xs[i - 1])
    return [(i - 1, 1 - share), (i, share)]


class StepPrices:
    """Prices of more rows in this step's pass, in tokens that would be emitted in that time (`engine.drafter.Prices`).

    λ, `speed`, is the speed of plain decoding with this many sequences, times the recent lead over it.
    """

    def __init__(self, turns: list[Turn], costs: PassCosts, lead: float, credit: float) -> None:
        self.costs, self.sequences, self.rows = costs, len(turns), sum([turn.feed for turn in turns])
        self._added: dict[int, float] = {}  # seconds that so many rows add: several ask for the same
        self.without = costs(self.rows, self.sequences, planned=True)  # seconds
        batch = max(len(turns), 1)
        self.speed = lead * batch / costs(batch, batch)  # λ
        self.margin = MARGIN * batch  # expected tokens that the drafts of all sequences together must gain
        # Of a price. A token of plain decoding is worth `lead` of these; half of what may be lost is for later drafts.
        self.limit = lead * max(credit, 0.0) / 2

    def price(self, rows: int, seconds: float = 0.0) -> float:
        """λ · (t(rows of the step + rows) − t(rows of the step) + seconds of drafting)."""
        added = self._added.get(rows)
        if added is None:
            seconds_in_all = self.costs(self.rows + rows, self.sequences, planned=True)
            added = self._added[rows] = max(seconds_in_all - self.without, 0.0)
        return self.speed * (added + seconds)

    def can_pay(self, most: int) -> bool:
        """Whether so many nodes, or half, a quarter, … of them, would gain something if all were right, for nothing."""
        return any((most >> i) - self.price(most >> i) > self.margin for i in reversed(range(most.bit_length())))

    def best(self, tokens: Iterable[float], limit: float = math.inf) -> int:
        """How many of some nodes, which are expected to bring so many tokens each, gain most beyond their price within
        the limit; 0: nothing pays. Costs may be stairs, where one more loses and three more win: all are compared."""
        best, gain, total = 0, self.margin, 0.0
        for rows, more in enumerate(tokens, start=1):
            total, price = total + more, self.price(rows)
            if price > limit:
                break  # more cost more
            if total - price > gain:
                best, gain = rows, total - price
        return best


class Line:
    """a + b · k by least squares over recent samples; through the origin while they are all at one k."""

    FADE = 0.95  # the last twenty samples count
    CLIP = 3.0  # a sample counts as at most so many times its estimate: a descheduled thread says nothing

    def __init__(self) -> None:
        self.n = self.k = self.y = self.kk = self.ky = 0.0  # sums

    def add(self, k: int, seconds: float) -> None:
        if self.n:
            seconds = min(seconds, self.CLIP * self(k))
        fade = self.FADE
        self.n, self.k, self.y = fade * self.n + 1.0, fade * self.k + k, fade * self.y + seconds
        self.kk, self.ky = fade * self.kk + k * k, fade * self.ky + k * seconds

    def __call__(self, k: float) -> float:
        return self.y / self.n + self.slope * (k - self.k / self.n)

    @property
    def slope(self) -> float:
        mean, seconds = self.k / self.n, self.y / self.n
        variance, most = self.kk / self.n - mean * mean, seconds / mean
        return most if variance < 0.01 else min(max((self.ky / self.n - mean * seconds) / variance, 0.0), most)


class DraftCosts:
    """Seconds of a call by the nodes that it may draft for each sequence, for each size of batch in powers of two."""

    def __init__(self) -> None:
        self.lines: dict[int, Line] = defaultdict(Line)  # by the bit length of the number of sequences
        self.count = 0  # calls

    def add(self, sequences: int, k: int, seconds: float, foreseen: bool = False) -> None:
        """foreseen: the call was timed before anybody asked for a draft."""
        self.count += not foreseen
        self.lines[sequences.bit_length()].add(k, seconds)

    def line(self, sequences: int) -> Line:
        """That of the nearest known batch, if anything is known."""
        size = sequences.bit_length()
        return self.lines[min(self.lines, key=lambda known: abs(known - size))]
