"""Seconds of a target pass by its sequences and rows, and the price of more rows in the step at hand.

Pass costs are measured at the start (`backends.pass_costs`) and refined by every step. Acceptance is not known here.
"""

from __future__ import annotations

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

    Costs are linear between measured points: in rows, and between sequence counts with as many rows each.
    """

    DRIFT, OWN = 0.02, 0.08  # how far the error of a prediction moves all costs, and the costs of that sequence count

    def __init__(self, seconds: Seconds, padded: bool = True) -> None:
        """padded: passes of a batch are padded to the next measured size, as on a GPU."""
        self.padded = padded
        pairs = {key if isinstance(key, tuple) else (1, key): value for key, value in seconds.items()}
        self.seconds: dict[tuple[int, int], float] = dict(sorted(pairs.items()))
        self._rows: dict[int, list[int]] = defaultdict(list)  # sequences -> measured row counts, rising
        for sequences, rows in self.seconds:
            self._rows[sequences].append(rows)
        self._counts = list(self._rows)
        self._drift = 1.0  # growing contexts and a busy machine slow all passes down together
        # Valid until the next `refine`; by (rows, sequences), by sequences, and by sequences and then by rows:
        self._costs: dict[tuple[int, int], float] = {}
        self._points: dict[int, Points] = {}
        self._tables: dict[int, list[float]] = {}

    def __call__(self, rows: int, sequences: int = 1) -> float:
        cost = self._costs.get((rows, sequences))
        if cost is None:
            cost = self._costs[rows, sequences] = _interpolate(*self.points(sequences), rows)
        return cost

    def table(self, rows: int, sequences: int = 1) -> list[float]:
        """Costs by row count for planning, up to `rows` at least. In a padded batch, any row count costs what the next
        measured one does: the padded sizes are unknown, and just beyond one a line is too optimistic."""
        table = self._tables.get(sequences)
        if table is None or rows >= len(table):
            stairs = sequences > 1 and self.padded and self._counts != [1]
            known, costs = self.points(sequences)
            table, slope = [costs[0]] * (known[0] + 1), 0.0  # fewer rows than sequences never occur
            for (low, below), (high, above) in pairwise(zip(known, costs, strict=True)):
                slope = (above - below) / (high - low)
                table += [above if stairs else below + slope * i for i in range(1, high - low + 1)]
            table += [costs[-1] + slope * i for i in range(1, rows - known[-1] + 1)]
            self._tables[sequences] = table
        return table

    def points(self, sequences: int) -> Points:
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
        return rows, list(accumulate((self._drift * self.seconds[count, row] for row in rows), max))

    def refine(self, rows: int, seconds: float, sequences: int = 1) -> None:
        """A pass took this long. All costs of a sequence count move together, a little: contexts grow, which says
        nothing about the cost of one more row. A pass with drafts moves the cost of a plain one half as far."""
        error = min(max(seconds / self(rows, sequences), 0.5), 1.5) - 1
        if sequences > 1 and sequences in self._rows and rows > self._rows[sequences][-1]:
            # The cost was extrapolated: its error says nothing about other sizes.
            self.seconds[sequences, rows] = self(rows, sequences) * (1 + error) / self._drift
            self._rows[sequences].append(rows)
            error = 0.0
        for count, weight in _neighbours(self._counts, sequences):
            for row in self._rows[count]:
                if count == 1:
                    share = float(row == rows)
                else:
                    share = 0.5 if row <= count and rows > sequences else 1.0
                self.seconds[count, row] *= 1 + self.OWN * weight * share * error
        self._drift *= 1 + self.DRIFT * error
        for cached in (self._costs, self._points, self._tables):
            cached.clear()


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

    def __init__(self, turns: list[Turn], costs: PassCosts, lead: float, most: int) -> None:
        self.sequences, self.costs, self.lead = len(turns), costs, lead
        self.most = most  # rows that a price is needed for
        self.deciding = sum(turn.whole for turn in turns)  # sequences that get a verdict
        self.rows = sum(turn.feed for turn in turns)
        self._table: list[float] | None = None  # made for the first price: most steps need none
        self.plain = costs(self.rows, self.sequences)
        several = max(self.deciding, 1)
        worth = EARLY if several > 1 and not costs.padded else 1.0
        self.speed = lead * several / costs(several, several) / worth  # λ
        self.margin = MARGIN * self.deciding  # expected tokens that the drafts of all sequences together must gain

    def price(self, rows: int) -> float:
        """λ · (t(rows of the step + rows) − t(rows of the step)), for up to `most` rows."""
        if self._table is None:
            self._table = self.costs.table(self.rows + self.most, self.sequences)
        return self.speed * (self._table[self.rows + rows] - self.plain)

    def best_count(self, survival: list[float], needed: float) -> int:
        """How many of these nodes, likeliest first, gain most beyond the price of their rows; 0: less than needed.
        Costs may be stairs, where one more node loses and three more win: all counts are compared."""
        best, gain, tokens = 0, needed, 0.0
        for n, chance in enumerate(survival, start=1):
            tokens += chance
            value = tokens - self.price(n)
            if value > gain:
                best, gain = n, value
        return best

    def best_shape(self, chains: list[list[float]], deeper: float, needed: float) -> tuple[int, int]:
        """How many of these chains, best first, and how many nodes of each gain most; (0, 0): less than needed.
        Together they pay for their rows, and `deeper` tokens for every depth. chains[i][d] is a survival."""
        best, gain, expected = (0, 0), needed, [0.0] * len(chains[0])
        for count, survival in enumerate(chains, start=1):
            expected = list(map(add, expected, accumulate(survival)))
            if count & (count - 1) and count != len(chains):
                continue  # powers of two and the whole batch are enough
            for k, tokens in enumerate(expected, start=1):
                value = tokens - self.price(count * k) - deeper * k
                if value > gain:
                    best, gain = (count, k), value
        return best

    def break_even(self, sequences: int, deeper: float = 0.0) -> float:
        """The survival at which one more row for each of these sequences pays; drafting it costs `deeper` tokens."""
        return max((self.price(sequences) + deeper) / sequences, 0.0)

    @property
    def hopeless(self) -> bool:
        """Whether even a certain, free draft loses. Linear and stair costs have their best counts at their points."""
        last = self.rows + self.most
        ends = [(row, cost) for row, cost in zip(*self.costs.points(self.sequences), strict=True) if row < last]
        ends.append((last, self.costs(last, self.sequences)))
        return all(
            row - self.rows - self.speed * (cost - self.plain) <= self.margin for row, cost in ends if row > self.rows
        )
