"""What the controller knows: what a pass costs, and what became of drafts.

Costs are measured at the start (`profile`) and refined by every step; experience begins with a guess and is all that
counts after a while. It sees numbers, never tokens.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict, deque
from collections.abc import Mapping
from itertools import accumulate, pairwise
from operator import mul
from statistics import median_low

from ..types import ACCEPTED, REJECTED, REQUEST_DRAFTS, Tree

Seconds = Mapping[int, float] | Mapping[tuple[int, int], float]  # by rows (of one sequence), or by (sequences, rows)


class Costs:
    """Seconds of a target pass by its sequences and its rows in all: measured at the start, refined by every step.

    More rows never cost less. Between what was measured lie straight lines: in rows, and in sequences that have as many
    rows each.
    """

    DRIFT, OWN = 0.02, 0.08  # how far a surprise moves everything, and the place where it happened

    def __init__(self, seconds: Seconds, padded: bool = True) -> None:
        """padded: passes of a batch are as large as the next size that is known, as on a GPU."""
        self.padded = padded
        pairs = {key if isinstance(key, tuple) else (1, key): value for key, value in seconds.items()}
        self.seconds: dict[tuple[int, int], float] = dict(sorted(pairs.items()))
        self._rows: dict[int, list[int]] = defaultdict(list)  # sequences -> measured row counts, rising
        for sequences, rows in self.seconds:
            self._rows[sequences].append(rows)
        self._counts = list(self._rows)
        self._drift = 1.0  # contexts grow and machines get busy: everything becomes slower together
        # What was asked since the last surprise: costs by (rows, sequences), points and tables by sequences.
        self._said: dict[tuple[int, int], float] = {}
        self._found: dict[int, tuple[list[int], list[float]]] = {}
        self._tables: dict[int, list[float]] = {}  # seconds by rows, as far as anybody asked

    def __call__(self, rows: int, sequences: int = 1) -> float:
        """The cost of a pass over this many rows in all, by so many sequences."""
        said = self._said.get((rows, sequences))
        if said is None:
            said = self._said[rows, sequences] = _height(*self.points(sequences), rows)
        return said

    def table(self, rows: int, sequences: int = 1) -> list[float]:
        """Costs by row count, up to `rows` at least: made once, until the next surprise."""
        table = self._tables.get(sequences)
        if table is None or rows >= len(table):
            known, heights = self.points(sequences)
            table, slope = [heights[0]] * (known[0] + 1), 0.0  # fewer rows than sequences never occur
            for (at, height), (row, above) in pairwise(zip(known, heights, strict=True)):
                slope = (above - height) / (row - at)
                table += [height + slope * i for i in range(1, row - at + 1)]
            table += [heights[-1] + slope * i for i in range(1, rows - known[-1] + 1)]
            self._tables[sequences] = table
        return table

    def stairs(self, rows: int, sequences: int) -> list[float]:
        """The same table for planning: in a batch, any row count costs what the next known one does.

        On a GPU passes are padded to some edge, and it is not known where: just beyond one, straight lines promise too
        much. One sequence is measured closely enough.
        """
        straight = self.table(rows, sequences)
        if sequences == 1 or not self.padded or self._counts == [1]:
            return straight
        known, heights = self.points(sequences)
        table = straight[: known[0] + 1]
        for (low, _), (high, height) in pairwise(zip(known, heights, strict=True)):
            table += [height] * (high - low)
        return table + straight[len(table) :]

    def points(self, sequences: int) -> tuple[list[int], list[float]]:
        """Row counts whose costs are known for so many sequences, or follow from those of some more and some less."""
        if sequences not in self._found:
            self._found[sequences] = self._points(sequences)
        return self._found[sequences]

    def _points(self, sequences: int) -> tuple[list[int], list[float]]:
        around = [(count, part, *self._line(count)) for count, part in _between(self._counts, sequences)]
        if len(around) == 1:
            return around[0][2], around[0][3]
        rows = sorted({round(row * sequences / count) for count, _, known, _ in around for row in known})
        heights = [
            sum(part * _height(known, line, row * count / sequences) for count, part, known, line in around)
            for row in rows
        ]
        return rows, heights

    def _line(self, count: int) -> tuple[list[int], list[float]]:
        """What was measured for a number of sequences, never falling."""
        known = self._rows[count]
        return known, list(accumulate((self._drift * self.seconds[count, row] for row in known), max))

    def refine(self, rows: int, seconds: float, sequences: int = 1) -> None:
        """Such a pass took this long. One slow pass is somebody else's load: it moves little.

        Several sequences' passes move together: contexts grow, which says nothing about what one more row costs, and
        plain passes are often the only ones seen. A pass with drafts says less about one without.
        """
        surprise = min(max(seconds / self(rows, sequences), 0.5), 1.5) - 1
        if sequences > 1 and sequences in self._rows and rows > self._rows[sequences][-1]:
            # Beyond all that was measured there was only a guess: its error says nothing about the rest.
            self.seconds[sequences, rows] = self(rows, sequences) * (1 + surprise) / self._drift
            self._rows[sequences].append(rows)
            surprise = 0.0
        for count, part in _between(self._counts, sequences):
            for row in self._rows[count]:
                if count == 1:
                    moved = float(row == rows)
                else:
                    moved = 0.5 if row <= count and rows > sequences else 1.0
                self.seconds[count, row] *= 1 + self.OWN * part * moved * surprise
        self._drift *= 1 + self.DRIFT * surprise
        for memory in (self._said, self._found, self._tables):
            memory.clear()


def _between(known: list[int], wanted: int) -> list[tuple[int, float]]:
    """The known numbers around the one that is wanted, and how much each counts; outside, the outermost alone."""
    i = bisect_left(known, wanted)
    if i == len(known):
        return [(known[-1], 1.0)]
    if i == 0 or known[i] == wanted:
        return [(known[i], 1.0)]
    share = (wanted - known[i - 1]) / (known[i] - known[i - 1])
    return [(known[i - 1], 1 - share), (known[i], share)]


def _height(known: list[int], heights: list[float], at: float) -> float:
    """The straight lines through these points, between them and beyond the last."""
    if at <= known[0] or len(known) == 1:
        return heights[0]
    i = min(bisect_left(known, at), len(known) - 1)
    slope = (heights[i] - heights[i - 1]) / (known[i] - known[i - 1])
    return heights[i - 1] + slope * (at - known[i - 1])


class Rate:
    """How often something comes true: the recent past counts most, and a prior while little has been seen."""

    FADE, WEIGHT = 0.98, 4.0

    def __init__(self) -> None:
        self.hits = self.tries = 0.0

    def add(self, hit: bool) -> None:
        self.hits, self.tries = self.hits * self.FADE + hit, self.tries * self.FADE + 1

    def given(self, prior: float) -> float:
        return (self.hits + self.WEIGHT * prior) / (self.tries + self.WEIGHT)


class Experience:
    """What became of drafts: by what the drafter claimed, and by depth where it claims nothing.

    A sequence's own experience leans on everybody's, which leans on the drafter's word.
    """

    EDGES = (0.03, 0.06, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.97)

    def __init__(self, wider: Experience | None = None) -> None:
        self.wider = wider
        self.claims: dict[tuple[str, int], Rate] = defaultdict(Rate)  # by who claims, and how much
        self.depths: list[Rate] = []
        self.added = 0  # trees, ever
        self._known: dict[int, tuple[int, int, list[float]]] = {}  # what `chances` said, and after how many trees

    def survival(self, claim: float, source: str = "") -> float:
        """The chance that a node is accepted whose drafter gives it this chance."""
        prior = self.wider.survival(claim, source) if self.wider else claim
        return self.claims[source, bisect_right(self.EDGES, claim)].given(prior)

    def chances(self, depths: int) -> list[float]:
        """The chance that the node at each depth is accepted once it is reached. Asked in every step, so remembered."""
        wide = self.wider.added if self.wider else 0
        mine, theirs, known = self._known.get(depths, (-1, -1, []))
        if (mine, theirs) != (self.added, wide):
            if self.wider:
                priors = self.wider.chances(depths)
                known = [rate.given(prior) for rate, prior in zip(self.depths, priors, strict=False)]
                known += priors[len(known) :]
            else:  # each depth leans on the one before
                known = list(accumulate(self.depths[:depths], lambda last, rate: rate.given(last), initial=0.5))[1:]
                known += known[-1:] * (depths - len(known)) if known else [0.5] * depths
            self._known[depths] = self.added, wide, known
        return known

    def hopes(self, depths: int) -> list[float]:
        """The chance that a chain survives to each depth."""
        return list(accumulate(self.chances(depths), mul))

    def refuse(self) -> None:
        """A draft was asked for and not worth verifying: as good as wrong, for whoever thinks of asking again."""
        self.added += 1
        self._walk(1, 0)

    def add(self, tree: Tree, path: list[int], fates: str) -> None:
        self.added += 1
        if tree.source not in REQUEST_DRAFTS:  # by depth it is the drafter who is known
            self._walk(len(path) + (REJECTED in fates), len(path))
        for claim, fate in zip(tree.survival or (), fates, strict=False):
            self.claims[tree.source, bisect_right(self.EDGES, claim)].add(fate == ACCEPTED)

    def _walk(self, reached: int, accepted: int) -> None:
        self.depths += [Rate() for _ in range(reached - len(self.depths))]
        for depth, rate in enumerate(self.depths[:reached]):
            rate.add(depth < accepted)


class Threshold:
    """Below which chance a drafter had better stop (Draft & Verify's rule): it follows acceptance.

    When too little of what is drafted is accepted it rises, else it falls, unless drafts are as long as they may be
    anyway. How little is too little? Where a token breaks even at a chance of c, those worth drafting have chances from
    c to 1, so half-way on average. A drafter is taken at its word at first: the threshold begins at c.
    """

    FADE, STEP, HIGHEST = 0.8, 0.01, 0.9

    def __init__(self) -> None:
        self.value: float | None = None  # once anybody knows what breaks even
        self.break_even = 0.0
        self.accepted: float | None = None  # share of what was drafted, of late

    def below(self, break_even: float) -> float:
        """The chance to stop below, where one more token for everybody must be this likely to pay."""
        self.break_even = min(max(break_even, 0.0), 1.0)
        if self.value is None:
            self.value = min(self.break_even, self.HIGHEST)
        return self.value

    def learn(self, drafted: int, accepted: int, most: int) -> None:
        """So many of a draft's tokens were accepted; `most`: as many could have been drafted."""
        if self.value is None or not drafted:
            return
        share = accepted / drafted
        self.accepted = share if self.accepted is None else self.FADE * self.accepted + (1 - self.FADE) * share
        if self.accepted < (1 + self.break_even) / 2:
            self.value = min(self.value + self.STEP, self.HIGHEST)
        elif drafted < most:
            self.value = max(self.value - self.STEP, 0.0)


class Asking:
    """Whether a draft is worth the host's time, beside what the drafter and its rows cost a device.

    While nobody is asked, a device that has a clock of its own starts the next pass before the host has read the last
    one, and the host's work is hidden. Asking for a draft puts it back between the passes. What that takes and what
    asking has brought of late are learnt; where it does not pay, it is left for a while, and for longer and longer.
    Where nothing is hidden, the same holds for a batch whose drafts are free one by one, and not all together.
    """

    FADE = 0.9
    MARGIN = 0.02  # tokens for each sequence that asking must bring beyond its price
    SHORTEST, LONGEST = 4, 256  # steps of a rest
    SHARE = 0.015  # of a sequence's tokens that trials may cost for good; in a batch a trial costs everybody's time
    EMPTY, NOD = 3, 16  # steps in vain before a rest and of it, where some parts of a drafter cannot look meanwhile
    SEEN = 9  # steps whose middle is what the host takes

    def __init__(self) -> None:
        self.hides = False  # does anything hide the host's work? Where nothing does, asking takes what it takes
        self.crowded = False  # several share a step, and nothing is hidden: a draft for each of them adds up
        self.host: dict[tuple[int, bool], float] = {}  # (batch in powers of two, hidden) -> seconds that nothing hid
        self._seen: dict[tuple[int, bool], deque[float]] = {}  # the last ones: a pause, the first too, is not a price
        self.gain = 0.0  # tokens that asking brought in a step, less what their rows cost
        self.trials = 0  # asked steps since the last rest, or since somebody new came
        self.several = False  # sequences in them
        self.vain = 0  # of them in a row that brought nothing
        self.lost = 0.0  # tokens that each sequence lost by them
        self.rest, self.nap = 0, self.SHORTEST
        self.resting = False
        self.empty = 0  # asked steps in a row without a draft

    def pays(self) -> bool:
        """Ask this time?"""
        self.resting = self.rest > 0
        self.rest -= self.resting
        return not self.resting

    def spent(self, batch: int, hidden: bool, host: float) -> None:
        """What a step cost the host beside the device's work; `hidden`: its pass had been started ahead."""
        key = (batch.bit_length(), hidden)
        if key not in self._seen:
            self._seen[key] = deque(maxlen=self.SEEN)
        self._seen[key].append(host)
        self.host[key] = median_low(self._seen[key])

    def brought(self, batch: int, gain: float, speed: float) -> None:
        """Tokens that asking brought in a step, less what they cost the device; `speed` is in tokens per second."""
        self.trials += 1
        self.gain += max(1 - self.FADE, 1 / self.trials) * (gain - self.gain)
        needed = self.needed(batch, speed)
        self.lost += (needed - gain) / batch
        self.several = batch > 1
        self.vain = self.vain + 1 if gain <= 0 else 0
        if gain > needed:
            self.nap = self.SHORTEST
        # Steps that tell; each tells as much as it has sequences.
        enough = 12 if self.nap == self.SHORTEST and self.vain < self.trials else 5
        if self.trials * batch >= enough and self.gain < needed:
            self.leave()

    def needed(self, batch: int, speed: float) -> float:
        """Tokens that asking must bring in a step."""
        return speed * self.price(batch) + self.MARGIN * batch if self.hides else 0.0

    def price(self, batch: int) -> float:
        """Seconds of the host's work that come to light when the next pass cannot be started ahead."""
        size = batch.bit_length()
        return max(self.host.get((size, False), 0.0) - self.host.get((size, True), 0.0), 0.0)

    def leave(self) -> None:
        """Let it be for a while, and the next time for longer; never for so long that what the last trials lost is
        next to nothing of what is made meanwhile: texts change."""
        if self.hides or self.crowded:
            known = self.hides and self.trials > 0 and not self.several
            long_enough = max(int(self.lost / self.SHARE), self.SHORTEST) if known else self.LONGEST
            self.rest, self.nap = min(self.nap, long_enough), min(4 * self.nap, self.LONGEST)
            self.trials, self.vain, self.lost = 0, 0, 0.0

    def nod(self, partly: bool) -> bool:
        """There was nothing to verify, and one can look while resting (partly: some cannot, and may yet make up their
        minds): no lesson, and no reason to stay awake. Returns whether it rests now."""
        self.empty += 1
        if self.empty >= (self.EMPTY if partly else 1):
            self.rest = self.NOD if partly else self.LONGEST
        return self.rest > 0

    def wake(self) -> None:
        """Somebody new came: whatever was learnt about silence may not hold for them."""
        self.rest, self.nap, self.trials, self.vain, self.lost = 0, self.SHORTEST, 0, 0, 0.0
