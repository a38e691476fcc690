"""Which blocks to leave out, refined while serving (SWIFT): now and then a neighbour of the set in use is tried.

Both sets look at the same piece of text that the target has just said, in one pass each: what would they have drafted?
Pieces add up until one of them clearly brings more tokens per second, by how often it is right and what its blocks
cost. A small share of the time is spent on it, never more.

It reads the target's K/V and writes into slots that nobody has, so that no text can change. It knows one target's
blocks and sequences' tokens; that the set is a drafter's is not its business.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, replace

import torch

from ...backends import Part
from ...backends.rows import Rows
from ...engine.sampling import choose, widened
from ...types import Sequence, Step
from .. import Workspace
from .search import Price, Skip, expected, neighbour, seconds_of, spared

WINDOW = 32  # positions of one look
LEAST = 8  # of one at an answer that ends: short answers are looked at too
ENOUGH = 96  # positions that decide
BETTER, WORSE = 1.02, 0.9  # times the speed in use: from here on a neighbour takes over, or is given up early
SLOPE = 0.05  # what one more row adds to a pass, until it is known


@dataclass
class Trial:
    """A neighbour beside the set in use, on the same text."""

    skip: Skip
    positions: int = 0
    mine: int = 0  # hits of the set in use
    its: int = 0


class Refinement:
    """Listens to steps; `skip` is the set to draft with."""

    def __init__(self, space: Workspace, skip: Skip, share: float, seed: int = 0) -> None:
        """share: of the time, for looking."""
        self.space, self.skip, self.share = space, skip, share
        self.dice = random.Random(seed)
        self.blocks = spared(space.target.config.layers)
        self.trial = self._next_trial()
        self.price: Price | None = None
        self.slope = SLOPE
        self.passed = self.spent = self.last = 0.0  # seconds: of steps, of looks, of the last look
        self.looked: dict[int, int] = {}  # sequence -> its tokens when it was last looked at
        self.adopted = 0  # neighbours that took over, ever

    def observe(self, step: Step) -> bool:
        """Perhaps look at what was said; True when another set took over."""
        self.passed += sum(step.clock.get(phase, 0.0) for phase in ("draft", "verify", "judge"))
        self._learn_slope(step)
        self.last = self.last or 8 * step.clock["verify"]  # a guess, until one was timed
        seq = next((seq for seq in step.seqs if self._fresh(seq) >= (LEAST if seq.done else WINDOW)), None)
        if seq is None or self.spent + self.last > self.share * self.passed:
            return False
        begin = time.perf_counter()
        used = self.skip
        self._look(seq)
        self.last = time.perf_counter() - begin
        self.spent += self.last
        return used != self.skip

    def end(self, seq: Sequence) -> None:
        self.looked.pop(seq.id, None)

    def _stop(self, seq: Sequence) -> int:
        """Positions below this one have all their K/V, and the target has said what follows."""
        return min(len(seq.tokens) - 1, self.space.plane.holds(seq.id))

    def _fresh(self, seq: Sequence) -> int:
        """Positions of an answer that nobody has looked at."""
        return self._stop(seq) - max(self.looked.get(seq.id, 0), seq.prompt_len - 1)

    # ------------------------------------------------------------ one look

    def _look(self, seq: Sequence) -> None:
        stop, count = self._stop(seq), min(self._fresh(seq), WINDOW)
        slots = self.space.cache.next_free(count)
        if len(slots) < count:
            return
        rows = self._rows(seq, range(stop - count, stop), slots)
        self.looked[seq.id] = stop
        if self.price is None:
            self.price = Price(lambda part: seconds_of(lambda: self._forward(_one(rows), part)), *self._sizes)
        trial = self.trial
        trial.positions += count
        trial.mine += self._hits(seq, rows, self.skip)
        trial.its += self._hits(seq, rows, trial.skip)
        self._decide(trial)

    def _decide(self, trial: Trial) -> None:
        mine, its = self._speed(self.skip, trial.mine), self._speed(trial.skip, trial.its)
        if trial.positions >= ENOUGH and its > BETTER * mine:
            self.skip, self.adopted = trial.skip, self.adopted + 1
        elif trial.positions < ENOUGH and its > WORSE * mine:
            return  # it may still turn out better
        self.trial = self._next_trial()

    def _next_trial(self) -> Trial:
        """Of a set that leaves out everything or nothing, not every move leads to another one."""
        skip = self.skip
        while skip == self.skip:
            skip = neighbour(self.skip, self.blocks, self.dice)
        return Trial(skip)

    def _speed(self, skip: Skip, hits: int) -> float:
        """Tokens per second at the best K, in units of plain decoding."""
        assert self.price is not None
        whole = self.price.whole
        agreement = (hits + 1) / (self.trial.positions + 2)
        return expected(agreement, self.price(skip), lambda rows: whole * (1 + self.slope * (rows - 1)))[0]

    def _hits(self, seq: Sequence, rows: Rows, skip: Skip) -> int:
        """How often this set would have drafted what the target said."""
        logits = self._forward(rows, skip.part)  # [W, V]
        said = [seq.tokens[p + 1] for p in rows.positions.tolist()]
        if seq.params.plain:
            return int((logits.argmax(-1) == torch.tensor(said)).sum())
        before = (replace(seq, tokens=seq.tokens[: p + 1], matcher=None) for p in rows.positions.tolist())
        return sum(choose(row, then, []) == token for row, then, token in zip(logits, before, said, strict=True))

    def _rows(self, seq: Sequence, positions: range, slots: list[int]) -> Rows:
        """One row for each position: it reads exact K/V of what came before, and writes to a place of its own."""
        line = self.space.cache.rows[seq.id].line
        where, own = torch.tensor(list(positions)), torch.tensor(slots, dtype=torch.int32)  # [W]
        return Rows(
            tokens=torch.tensor([seq.tokens[p] for p in positions]),
            positions=where,
            slots=own.long(),
            lines=torch.full((len(slots),), line, dtype=torch.int32),
            context=where.to(torch.int32),
            table=self.space.cache.table,
            ancestors=own[:, None],
            want=torch.arange(len(slots)),
        )

    def _forward(self, rows: Rows, part: Part) -> torch.Tensor:
        logits = self.space.target.forward(rows, self.space.plane, part).logits
        return widened(logits, self.space.target.config.vocab_size)  # [R, V]

    @property
    def _sizes(self) -> tuple[int, int]:
        config = self.space.target.config
        return config.layers, config.vocab_size

    def _learn_slope(self, step: Step) -> None:
        """What more rows add to a pass, from passes of one sequence that had some."""
        rows = step.batch.count
        if self.price is not None and len(step.turns) == 1 and step.turns[0].feed == 1 and rows > 1:
            seen = max(step.clock["verify"] / self.price.whole - 1, 0.0) / (rows - 1)
            self.slope += 0.05 * (min(seen, 1.0) - self.slope)


def _one(rows: Rows) -> Rows:
    """The first row alone."""
    assert rows.ancestors is not None
    first = (rows.tokens[:1], rows.positions[:1], rows.slots[:1], rows.lines[:1], rows.context[:1])
    return Rows(*first, rows.table, rows.ancestors[:1], rows.want[:1])
