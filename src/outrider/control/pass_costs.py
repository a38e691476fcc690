"""Seconds of a target pass by its sequences and rows, and the price of more rows in the step at hand.

Pass costs are measured at the start (`backends.pass_costs`) and refined by every step. Acceptance is not known here.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping
from itertools import accumulate, pairwise
from operator import add

from ..types import Turn

MARGIN = 0.03  # tokens that a draft must bring each sequence beyond the price of its rows, for overheads not measured
EARLY = 0.95  # worth of a token in a batch without padding: a sequence that ends early saves one row of later passes

Seconds = Mapping[int, float] | Mapping[tuple[int, int], float]  # by rows (of one sequence), or by (sequences, rows)
Points = tuple[list[int], list[float]]  # row counts, rising, and their costs


class PassCosts:
    """Seconds of a pass over `rows` rows in total by `sequences` sequences. More rows never cost less.

    t(s, r) = scale(s) · (measured(s, r) + tilt(s) · (r − s)). Measured costs are linear between their points: in rows,
    and between sequence counts with as many rows each. Passes refine the scale and the tilt of their sequence count.
    """

    OWN = 0.08  # how far the error of a prediction moves the costs of that sequence count: a dozen passes
    DRIFT = 0.02  # how far that of a plain pass moves all others: a machine gets busy for all, a context grows for one

    def __init__(self, seconds: Seconds, padded: bool = True) -> None:
        """padded: passes of a batch are padded to the next measured size, as on a GPU."""
        self.padded = padded
        pairs = {key if isinstance(key, tuple) else (1, key): value for key, value in seconds.items()}
        self.seconds: dict[tuple[int, int], float] = dict(sorted(pairs.items()))
        self._rows: dict[int, list[int]] = defaultdict(list)  # sequences -> measured row counts, rising
        for sequences, rows in self.seconds:
            self._rows[sequences].append(rows)
        self._counts = list(self._rows)
        self._scale, self._tilt = dict.fromkeys(self._counts, 1.0), dict.fromkeys(self._counts, 0.0)
        self._seen: dict[tuple[int, bool], float] = defaultdict(float)  # (sequences, with drafts) -> passes
        self._points: dict[int, Points] = {}  # by sequences, as measured
        self._tables: dict[int, list[float]] = {}  # the same by rows
        self._corrections: dict[int, tuple[float, float]] = {}  # scale and tilt by sequences, until the next `refine`

    def __call__(self, rows: int, sequences: int = 1) -> float:
        scale, tilt = self.correction(sequences)
        known, costs = self._known(sequences)
        return scale * max(_interpolate(known, costs, rows) + tilt * max(rows - sequences, 0), costs[0])

    def correction(self, sequences: int) -> tuple[float, float]:
        """Scale and tilt."""
        if sequences not in self._corrections:
            near = _neighbours(self._counts, sequences)
            scale, tilt = (sum(w * each[count] for count, w in near) for each in (self._scale, self._tilt))
            self._corrections[sequences] = scale, tilt
        return self._corrections[sequences]

    def table(self, rows: int, sequences: int = 1) -> list[float]:
        """Measured costs by row count for planning, up to `rows` at least. In a padded batch, any row count costs what
        the next measured one does: the padded sizes are unknown, and just beyond one a line is too optimistic."""
        table = self._tables.get(sequences)
        if table is None or rows >= len(table):
            stairs = sequences > 1 and self.padded and self._counts != [1]
            known, costs = self._known(sequences)
            table, slope = [costs[0]] * (known[0] + 1), 0.0  # fewer rows than sequences never occur
            for (low, below), (high, above) in pairwise(zip(known, costs, strict=True)):
                slope = (above - below) / (high - low)
                table += [above if stairs else below + slope * i for i in range(1, high - low + 1)]
            size = max(known[-1] // 2, 1) if stairs else 1
            table += [costs[-1] + slope * -(-i // size) * size for i in range(1, 2 * rows - known[-1] + 1)]
            self._tables[sequences] = table
        return table

    def _known(self, sequences: int) -> Points:
        """Measured for this many sequences, or interpolated between the nearest sequence counts."""
        if sequences not in self._points:
            near = [(count, weight, *self._measured(count)) for count, weight in _neighbours(self._counts, sequences)]
            rows, costs = near[0][2:]
            if len(near) > 1:
                rows = sorted({round(row * sequences / count) for count, _, known, _ in near for row in known})
                costs = [sum(w * _interpolate(x, y, row * n / sequences) for n, w, x, y in near) for row in rows]
            self._points[sequences] = rows, costs
        return self._points[sequences]

    def _measured(self, count: int) -> Points:
        rows = self._rows[count]
        return rows, list(accumulate((self.seconds[count, row] for row in rows), max))

    def refine(self, rows: int, seconds: float, sequences: int = 1) -> None:
        """A pass took this long. A plain one moves all costs of its sequence count alike: contexts grow, and other work
        slows every pass down, which says nothing about one more row. A pass with drafts moves what its rows add."""
        if seconds < self(sequences, sequences):  # more rows never cost less: that was the plain pass's cost, at most
            rows = sequences
        cost, drafted = self(rows, sequences), rows - sequences
        error = min(max(seconds / cost, 0.5), 1.5) - 1
        for count, weight in _neighbours(self._counts, sequences):
            seen = self._seen[count, drafted > 0] = self._seen[count, drafted > 0] + weight
            rate = weight * max(self.OWN, 1 / (seen + 3))  # the first passes count most
            if drafted > 0:
                self._tilt[count] += rate * error * cost / self._scale[count] / drafted
            else:
                self._scale[count] *= 1 + rate * error
        if drafted <= 0:
            self._scale = {count: scale * (1 + self.DRIFT * error) for count, scale in self._scale.items()}
        self._corrections.clear()


def _neighbours(known: list[int], wanted: int) -> list[tuple[int, float]]:
    """The known numbers around `wanted` with their weights; outside their range, the outermost alone."""
    i = min(bisect_left(known, wanted), len(known) - 1)
    if i == 0 or known[i] <= wanted:
        return [(known[i], 1.0)]
    share = (wanted - known[i - 1]) / (known[i] - known[i - 1])
    return [(known[i - 1], 1 - share), (known[i], share)]


def _interpolate(xs: list[int], ys: list[float], x: float) -> float:
    """Linear between these points and beyond the last; constant before the first."""
    if x <= xs[0] or len(xs) == 1:
        return ys[0]
    i = min(bisect_left(xs, x), len(xs) - 1)
    slope = (ys[i] - ys[i - 1]) / (xs[i] - xs[i - 1])
    return ys[i - 1] + slope * (x - xs[i - 1])


class StepPrices:
    """Prices of more rows in this step's pass, in tokens that would be emitted in that time (`engine.drafter.Prices`).

    λ, `speed`, is the speed of plain decoding with this many sequences, times the recent lead over it.
    """

    def __init__(self, turns: list[Turn], costs: PassCosts, lead: float) -> None:
        self.sequences, self.costs = len(turns), costs
        self.deciding = sum(turn.whole for turn in turns)  # sequences that get a verdict
        self.rows = sum(turn.feed for turn in turns)
        several = max(self.deciding, 1)
        worth = EARLY if several > 1 and not costs.padded else 1.0
        self.speed = lead * several / costs(several, several) / worth  # λ
        self.limit = math.inf  # the highest price that may be paid
        self.margin = MARGIN * self.deciding  # expected tokens that the drafts of all sequences together must gain

    def exact(self, rows: int) -> float:
        """λ · (t(rows of the step + rows) − t(rows of the step))."""
        (scale, tilt), first = self.costs.correction(self.sequences), self.rows
        table = self.costs.table(first + rows, self.sequences)
        return max(self.speed * scale * (table[first + rows] - table[first] + tilt * rows), 0.0)

    def price(self, rows: int) -> float:
        """Infinite beyond the limit."""
        price = self.exact(rows)
        return price if price <= self.limit else math.inf

    def best_count(self, survival: list[float], limit: float) -> int:
        """How many of these nodes, likeliest first, gain most beyond the price of their rows, at a price of `limit` at
        most. Costs may be stairs, where one more node loses and three more win: all counts are compared."""
        best, gain, tokens = 0, self.margin, 0.0
        for n, chance in enumerate(survival, start=1):
            tokens, price = tokens + chance, self.exact(n)
            if price > limit:
                break
            if tokens - price > gain:
                best, gain = n, tokens - price
        return best

    def best_shape(self, chains: list[list[float]], seconds: list[float], limit: float) -> tuple[int, int, float]:
        """How many of these chains, best first, how many nodes of each, and what these gain; (0, 0, 0): nothing.
        They pay for their rows and for seconds[nodes] of drafting, `limit` at most. chains[i][d] is a survival."""
        best, gain, expected = (0, 0), self.margin, [0.0] * len(chains[0])
        for count, survival in enumerate(chains, start=1):
            expected = list(map(add, expected, accumulate(survival)))
            if count & (count - 1) and count != len(chains):
                continue  # powers of two and the whole batch are enough
            for k, tokens in enumerate(expected, start=1):
                price = self.exact(count * k) + self.speed * seconds[k]
                if price > limit:
                    break
                if tokens - price > gain:
                    best, gain = (count, k), tokens - price
        return *best, gain - self.margin

    @property
    def hopeless(self) -> bool:
        """Whether even a certain, free draft loses."""
        return all(n - self.exact(n) <= self.margin for n in range(max(8 * self.deciding, 16) + 1))
