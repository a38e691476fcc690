"""Refines the set of skipped blocks while serving (SWIFT): now and then a neighbour of the current set is tried.

Both sets run one pass over the same committed tokens: how many of them would each have drafted? Windows add up until
one set clearly yields more tokens per second, by its hits and the cost of its blocks. The time spent is a small, fixed
share of the steps' time.

It reads the target's K/V and writes only into free slots, so no text can change. It knows one target's blocks and the
tokens of sequences; it does not know that a drafter uses the set.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import torch

from ...backends import Part
from ...backends.rows import Rows, rows_of
from ...engine.batch import BatchBuilder
from ...engine.sampling import choose, widened
from ...types import Sequence, Step
from .. import Workspace
from .search import DraftCost, Skip, expected_speedup, first_row, neighbour, seconds_of, skippable

WINDOW = 32  # positions of one comparison
MIN_WINDOW = 8  # at the end of an answer: short answers are compared too
ENOUGH = 96  # positions for a decision
BETTER, WORSE = 1.02, 0.9  # times the current set's speed: a neighbour replaces it, or is dropped early
SLOPE = 0.05  # of a pass, added by one more row; until it is measured


@dataclass
class Trial:
    """A neighbour compared with the current set on the same tokens."""

    skip: Skip
    positions: int = 0
    current_hits: int = 0
    hits: int = 0


class Refinement:
    """Observes steps; `skip` is the set to draft with."""

    def __init__(self, space: Workspace, skip: Skip, share: float, seed: int = 0) -> None:
        """share: of the time, for comparisons."""
        self.space, self.skip, self.share = space, skip, share
        self.rng = random.Random(seed)
        self.blocks = skippable(space.target.config.layers)
        self.trial = self._next_trial()
        self.draft_cost: DraftCost | None = None  # measured with the first window
        self.slope = SLOPE
        self.step_seconds = self.spent = self.last = 0.0  # seconds: of steps, of all comparisons, of the last one
        self.compared: dict[int, int] = {}  # sequence id -> positions up to its last comparison
        self.adopted = 0  # neighbours that replaced the set

    def observe(self, step: Step) -> bool:
        """Compare the sets if there is time and a window of new tokens; True when the set was replaced."""
        self.step_seconds += sum(step.clock.get(phase, 0.0) for phase in ("draft", "verify", "judge"))
        self._learn_slope(step)
        self.last = self.last or 8 * step.clock["verify"]  # an estimate, until one was timed
        seq = next((seq for seq in step.seqs if self._new(seq) >= (MIN_WINDOW if seq.done else WINDOW)), None)
        if seq is None or self.spent + self.last > self.share * self.step_seconds:
            return False
        before = self.skip
        self.last = seconds_of(lambda: self._compare(seq))
        self.spent += self.last
        return before != self.skip

    def end(self, seq: Sequence) -> None:
        self.compared.pop(seq.id, None)

    def _stop(self, seq: Sequence) -> int:
        """Positions below this one have their K/V, and the token after them is known."""
        return min(len(seq.tokens) - 1, self.space.plane.holds(seq.id))

    def _new(self, seq: Sequence) -> int:
        """Positions of the answer that were not compared yet."""
        return self._stop(seq) - max(self.compared.get(seq.id, 0), seq.prompt_len - 1)

    def _compare(self, seq: Sequence) -> None:
        """One pass of each set over the last new positions."""
        stop, count = self._stop(seq), min(self._new(seq), WINDOW)
        slots = self.space.cache.next_free(count)
        if len(slots) < count:
            return
        rows = self._rows(seq, range(stop - count, stop), slots)
        self.compared[seq.id] = stop
        if self.draft_cost is None:
            config, one = self.space.target.config, first_row(rows)
            self.draft_cost = DraftCost(
                lambda part: seconds_of(lambda: self._forward(one, part)), config.layers, config.vocab_size
            )
        trial = self.trial
        trial.positions += count
        trial.current_hits += self._hits(seq, rows, self.skip)
        trial.hits += self._hits(seq, rows, trial.skip)
        self._decide(trial)

    def _decide(self, trial: Trial) -> None:
        current, speed = self._speed(self.skip, trial.current_hits), self._speed(trial.skip, trial.hits)
        if trial.positions >= ENOUGH and speed > BETTER * current:
            self.skip, self.adopted = trial.skip, self.adopted + 1
        elif trial.positions < ENOUGH and speed > WORSE * current:
            return  # undecided
        self.trial = self._next_trial()

    def _next_trial(self) -> Trial:
        skip = self.skip
        while skip == self.skip:  # a move may have no effect on a set of all or no blocks
            skip = neighbour(self.skip, self.blocks, self.rng)
        return Trial(skip)

    def _speed(self, skip: Skip, hits: int) -> float:
        """Tokens per second at the best K, relative to plain decoding."""
        assert self.draft_cost is not None
        plain = self.draft_cost.whole
        agreement = (hits + 1) / (self.trial.positions + 2)
        return expected_speedup(agreement, self.draft_cost(skip), lambda rows: plain * (1 + self.slope * (rows - 1)))[0]

    def _hits(self, seq: Sequence, rows: Rows, skip: Skip) -> int:
        """How many of the tokens after these rows this set would have drafted."""
        logits = self._forward(rows, skip.part)  # [W, V]
        positions = rows.positions.tolist()
        tokens = [seq.tokens[p + 1] for p in positions]
        if seq.params.plain:
            return int((logits.argmax(-1) == torch.tensor(tokens)).sum())
        before = (replace(seq, tokens=seq.tokens[: p + 1], matcher=None) for p in positions)
        return sum(choose(row, then, []) == token for row, then, token in zip(logits, before, tokens, strict=True))

    def _rows(self, seq: Sequence, positions: range, slots: list[int]) -> Rows:
        """One row for each position: it reads exact K/V of the positions before it and writes to its own free slot."""
        batch = BatchBuilder(self.space.cache)
        for position, slot in zip(positions, slots, strict=True):
            batch.again(seq, position, slot)
        return rows_of(batch)

    def _forward(self, rows: Rows, part: Part) -> torch.Tensor:
        logits = self.space.target.forward(rows, self.space.plane, part).logits
        return widened(logits, self.space.target.config.vocab_size)  # [R, V]

    def _learn_slope(self, step: Step) -> None:
        """The cost of one more row, from verifying passes of a single sequence."""
        rows = step.rows
        if self.draft_cost is not None and len(step.turns) == 1 and step.turns[0].feed == 1 and rows > 1:
            slope = max(step.clock["verify"] / self.draft_cost.whole - 1, 0.0) / (rows - 1)
            self.slope += 0.05 * (min(slope, 1.0) - self.slope)
