"""Learning in slices: one update every so many verifications, never longer than a cap in one step.

Promise: what drafts (`live`) changes only in `swap`, whole, and only for weights that were right more often than it on
records that nothing was learnt from yet (except the first few); weights that were right less often go back to what
drafts. An update that fails, meets NaN or is interrupted leaves no trace but a count and a reason; after a few failures
in a row learning stops and says why. Nothing here raises, except what was meant to end the program.
It knows records and weights; it does not know where they come from or what they are for.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ...backends.machine import gc_paused
from .adapter import Frozen, Weights, copied
from .buffer import TOP, Records, Ring, Seen, digested
from .losses import Lesson, Schedule, lesson, loss
from .stream import Aside

_FAILURES = 3  # in a row, until learning stops
_INBOX = 64  # nodes that wait to be looked at
_HANDFUL = 16  # nodes of one look
_TOO_SLOW = 64  # slices in a row that are as small as can be and yet over the cap, until learning stops
_LEAST = 4  # records of the smallest slice
_FORGET = 0.98  # of what a larger one took, with every slice
_CAREFUL = 3.0  # times what a slice usually takes: now and then one takes so long
_BETTER, _WORSE = 1.0, 2.0  # standard deviations by which new weights must be better to draft, and worse to be dropped
_WORDS, _FEWEST = 512, 32  # of the largest and the smallest slice of a comparison, which looks at every word
_WARM = 64  # calls that one update surely needs no more of
_EVEN = 0.99  # weight of the past in the baseline


@dataclass(frozen=True)
class Plan:
    """When, how long and how fast to learn."""

    every: int = 8  # verifications between two updates, at least
    cap: float = 0.010  # seconds that one step may spend on learning; usually it is half of that
    share: float = 0.04  # of the time that serving takes, at most
    batch: int = 64  # records of one update
    slice: int = 32  # and of one slice of it
    rate: float = 7e-4
    rank: int = 128
    capacity: int = 2048  # records that are kept
    words: int = 16  # of each record's distribution that all of an update's records are compared over
    judge_every: int = 8  # updates between two comparisons with what drafts
    judged: int = 64  # records of such a comparison, the latest: nothing is learnt from them before
    decay: float = 0.01
    schedule: Schedule = field(default_factory=Schedule)


@dataclass
class Report:
    """What became of it so far."""

    state: str = "on"  # on, off, stopped
    why: str = ""  # the last reason for a rollback or a stop
    records: int = 0
    missed: int = 0  # verifications that there was no time to look at
    updates: int = 0
    rollbacks: int = 0
    failures: int = 0
    seconds: float = 0.0  # of a processor's time that learning has used, the noting of records included
    slowest: float = 0.0  # seconds of the longest work in one step, by the clock on the wall
    busiest: float = 0.0  # and by what it used itself: the rest is a busy machine's
    served: float = 0.0  # seconds of serving, learning included


@dataclass(frozen=True)
class Compared:
    """The words that an update is about."""

    rows: Tensor  # [m, H]
    where: Tensor  # [V + 1] each target id's place among them, or m


class Learner:
    """Trains a copy of what drafts."""

    def __init__(
        self,
        frozen: Frozen,
        weights: Weights,
        plan: Plan,
        clock: Callable[[], float] = time.perf_counter,  # on the wall
        used: Callable[[], float] = time.thread_time,  # of the processor, by whoever calls
    ) -> None:
        self.frozen, self.plan, self.clock, self.used, self.report = frozen, plan, clock, used, Report()
        self.live = copied(weights)
        self.ring = Ring(plan.capacity, frozen.hidden, frozen.norm, min(TOP, frozen.place.shape[0]))
        self.aside = Aside(frozen.norm.device)
        self.slice, self.words = plan.slice, _WORDS
        self._larger = math.inf  # seconds of a slice of twice as many records
        self.baseline = 0.0  # of rewards: how often drafts are right lately
        self.waiting = 0  # verifications since the last update
        self.inbox: deque[Seen] = deque()
        self.pending = 0  # nodes in it
        self.costs: dict[str, float] = {}  # seconds by kind of slice
        self._dice = torch.Generator().manual_seed(0)
        self._failed = self._slow = 0  # in a row
        self._ready: Weights | None = None
        self._job: Iterator[str] | None = None
        self._start_over(weights)

    @property
    def due(self) -> bool:
        """Whether there is something to do while the target is busy."""
        enough = self.waiting >= self.plan.every and len(self.ring) + self.pending >= self.plan.batch
        return self.report.state == "on" and (self._job is not None or (enough and self.listens))

    @property
    def listens(self) -> bool:
        """Whether there is time to learn: its share of serving is not used up."""
        return self.report.state == "on" and self.report.seconds <= self.plan.share * self.report.served

    def pay(self, seconds: float, learning: float = 0.0) -> None:
        """A step has taken so long, and this much of it was spent on what is to be learnt."""
        self.report.served += seconds
        self.report.seconds += learning

    def add(self, seen: Seen) -> None:
        """One verification. It is looked at when there is time; when there is none, the oldest are forgotten."""
        if self.report.state != "on":
            return
        self.inbox.append(seen)
        self.aside.told()
        self.pending += len(seen)
        self.waiting += 1
        while self.pending > _INBOX and len(self.inbox) > 1:
            self.pending -= len(self.inbox.popleft())
            self.report.missed += 1
        for drafted, outcome in zip(seen.drafted, seen.accepted, strict=True):
            if drafted >= 0:
                self.baseline = _EVEN * self.baseline + (1 - _EVEN) * outcome

    def swap(self) -> None:
        """Between two steps: what was learnt drafts from now on."""
        if self._ready is not None and self.aside.idle:
            self.live, self._ready = self._ready, None

    def stop(self, state: str, why: str) -> None:
        self.report.state, self.report.why = state, why
        self._job = None
        self.inbox.clear()
        self.ring.clear()

    def work(self) -> None:
        """As many slices as fit under the cap; the rest of the update waits for the next step."""
        begin, own = self.clock(), self.used()
        now = own
        try:
            with torch.inference_mode(False), torch.enable_grad(), self.aside.reading(), gc_paused():
                while self.due and self.aside.idle:
                    expected = _CAREFUL * self.costs.get(self._next, self.plan.cap)  # unknown: alone
                    elapsed = self.clock() - begin
                    if now > own and (2 * elapsed > self.plan.cap or elapsed + expected > self.plan.cap):
                        break
                    self._advance()
                    self.aside.mark()
                    now = self._took(self.used() - now)
        except Exception as error:
            self._fail(f"{type(error).__name__}: {error}")
        except BaseException:  # somebody wants to leave: half an update must not stay
            self._roll_back("an update was interrupted")
            raise
        spent = self.used() - own
        self.report.seconds += spent
        self.report.slowest = max(self.report.slowest, self.clock() - begin)
        self.report.busiest = max(self.report.busiest, spent)

    def weights(self) -> Weights:
        """What is worth keeping: what drafts, or will in the next step."""
        return copied(self._drafting)

    def as_json(self) -> dict[str, Any]:
        facts = asdict(self.report) | {"cap": self.plan.cap, "kept": len(self.ring), "accepted": self.baseline}
        return {name: round(value, 6) if isinstance(value, float) else value for name, value in facts.items()}

    # ------------------------------------------------------------ one update, in slices

    def _advance(self) -> None:
        if self._job is None:
            self.waiting, self._job, self._next = 0, self._update(), "take"
        self._doing = self._next
        try:
            self._next = next(self._job)
        except StopIteration:
            self._job, self._next = None, "take"

    def _update(self) -> Iterator[str]:
        """Yields the name of the slice that comes next."""
        while self._take():
            yield "take"
        yield "choose"
        records = self.ring.sample(self.plan.batch, self._dice, self.plan.judged)
        compared, mix = self._compared(records), self.plan.schedule.at(self.report.updates)
        at, count = 0, records.state.shape[0]
        while at < count:
            yield "learn"
            part = records.part(slice(at, at + self.slice))
            at += part.state.shape[0]
            said = self.frozen.scores(self.trained, part.state, part.beside, compared.rows)
            value = loss(said, self._lesson(part, compared), mix, self.baseline)
            (value * (part.state.shape[0] / count)).backward()
        yield "norm"
        norm = torch.nn.utils.clip_grad_norm_(self.trained.values(), 1.0)
        yield "apply"
        if not math.isfinite(float(norm)):
            raise ArithmeticError("an update's gradient is not a number")
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        self.report.updates += 1
        if self.report.updates % self.plan.judge_every == 0:
            yield from self._judge()
        self._failed = 0

    def _take(self) -> bool:
        """A handful of nodes from the inbox into the ring; False if there were none."""
        some: list[Seen] = []
        while self.inbox and sum(map(len, some)) < _HANDFUL:
            some.append(self.inbox.popleft())
        if some:
            records = digested(some, self.ring.top)
            self.ring.add(records)
            self.pending -= records.state.shape[0]
            self.report.records += records.state.shape[0]
        return bool(some)

    def _compared(self, records: Records) -> Compared:
        """The words that these records are likely to confuse; on a GPU all of them, because counting would wait."""
        vocabulary, place = self.frozen.place.shape[0], self.frozen.place
        if place.device.type == "cpu":
            words = torch.cat([records.words[:, : self.plan.words].flatten(), records.drafted.clamp(min=0)])
            chosen = torch.unique(place[words])
            chosen = chosen[chosen >= 0]  # [m]
            rows, ids = self.frozen.table[chosen], self.frozen.ids[chosen]
        else:
            rows, ids = self.frozen.table, self.frozen.ids.to(place.device)
        m = rows.shape[0]
        where = torch.full((vocabulary + 1,), m, device=place.device)
        where[ids] = torch.arange(m, device=place.device)
        return Compared(rows, where)

    def _lesson(self, records: Records, compared: Compared) -> Lesson:
        return lesson(compared.where, compared.rows.shape[0], records, self.plan.schedule.temperature)

    # ------------------------------------------------------------ better or worse

    def _judge(self) -> Iterator[str]:
        """Which of the latest records the trained weights get right, and which of them what drafts."""
        ours, theirs = yield from self._hits(self.ring.latest(self.plan.judged))
        yield "compare"
        self._compare(ours, theirs)

    @torch.no_grad()
    def _hits(self, records: Records) -> Generator[str, None, tuple[Tensor, Tensor]]:
        """[n] each, by all words: an update compares a few, and may have raised others unseen.

        In slices of words, because the table is larger than a cache; each is read once for all records and both.
        """
        pair = (self.trained, self._drafting)
        normed = torch.cat([self.frozen.adapted(w, records.state, records.beside).normed for w in pair])  # [2n, H]
        normed = normed.to(self.frozen.table.dtype)
        tops, ids, start = [], [], 0
        while start < self.frozen.table.shape[0]:
            yield "judge"
            top = (normed @ self.frozen.table[start : start + self.words].T).max(-1)
            tops.append(top.values)
            ids.append(top.indices + start)
            start += self.words
        piece = torch.stack(tops).argmax(0)  # [2n]
        said = torch.stack(ids).gather(0, piece[None])[0].view(2, -1)  # [2, n]
        right = self.frozen.place[records.words[:, 0]]  # [n] -1 where no draft can be right
        return said[0] == right, said[1] == right

    @property
    def _drafting(self) -> Weights:
        """What drafts from the next step on."""
        return self.live if self._ready is None else self._ready

    def _compare(self, ours: Tensor, theirs: Tensor) -> None:
        """A sign test on the same records: a change of text cannot pass for a change of weights."""
        better, worse = int((ours & ~theirs).sum()), int((theirs & ~ours).sum())
        doubt = math.sqrt(better + worse)
        if worse - better > _WORSE * doubt:
            self._roll_back("acceptance fell")
        elif better - worse > _BETTER * doubt:
            self._ready = copied(self.trained)

    def _roll_back(self, why: str) -> None:
        self.report.rollbacks += 1
        self.report.why = why
        self._start_over(self._drafting)

    def _fail(self, why: str) -> None:
        self.report.failures += 1
        self._failed += 1
        self._roll_back(f"an update failed ({why})")
        if self._failed >= _FAILURES:
            self.stop("stopped", f"{self._failed} updates in a row failed; the last one said: {why}")

    def _start_over(self, weights: Weights) -> None:
        """Training begins with these, and with nothing half done."""
        self._job = None
        self._next = self._doing = "take"
        self.costs.pop("apply", None)  # the first time an optimiser makes its memory
        self.trained = copied(weights, trained=True)
        self.optimiser = torch.optim.AdamW(
            self.trained.values(), self.plan.rate, (0.9, 0.99), weight_decay=self.plan.decay, fused=True
        )

    # ------------------------------------------------------------ the clock

    def _took(self, seconds: float) -> float:
        """Remember what a slice cost; one that does not fit is made smaller. Returns the time that was used.

        What counts is the processor's time: on a busy machine everything takes longer, and smaller slices do not help.
        """
        known = self.costs.get(self._doing, seconds)
        self.costs[self._doing] = 0.7 * known + 0.3 * seconds
        if self._doing == "learn":
            self._fit_slice()
        self.fit_judging()
        return self.used()

    def _fit_slice(self) -> None:
        """As many records as fit under the cap: half of them often take nearly as long, so a moment's load must not
        keep slices small. What twice as many took is remembered, and forgotten slowly."""
        usual, cap = self.costs["learn"], self.plan.cap
        self._slow = self._slow + 1 if usual > cap and self.slice <= _LEAST else 0
        self._larger = max(_FORGET * self._larger, usual)
        if _CAREFUL * usual > cap and self.slice > _LEAST:
            self.slice, self.costs["learn"], self._larger = self.slice // 2, usual / 2, usual
        elif _CAREFUL * self._larger < cap and self.slice < self.plan.slice:
            self.slice, self.costs["learn"], self._larger = self.slice * 2, self._larger, 2 * self._larger
        if self._slow > _TOO_SLOW:
            text = f"{_LEAST} records take {usual * 1e3:.1f} ms here, and the cap is {cap * 1e3:g} ms"
            self.stop("stopped", f"learning is too slow: {text}; raise learn_cap_ms")

    def fit_judging(self) -> None:
        """A slice of a comparison that does not fit under the cap is made smaller, too."""
        while self.words > _FEWEST and _CAREFUL * self.costs.get("judge", 0.0) > self.plan.cap:
            self.words, self.costs["judge"] = self.words // 2, self.costs["judge"] / 2


def warm(learner: Learner) -> None:
    """Run one update of another learner on nothing: the first takes long, and nobody should wait for it."""
    plan = replace(learner.plan, cap=math.inf, judge_every=1, share=math.inf)
    other = Learner(learner.frozen, learner.live, plan)
    other.ring.added, other.report.served = plan.batch, 1.0
    for _ in range(_WARM):
        other.waiting = plan.every
        other.work()
        if other.aside.stream is not None:
            other.aside.stream.synchronize()
        if other.report.updates > 2 or other.report.failures:
            break
    learner.costs = {name: cost for name, cost in other.costs.items() if name != "apply"}  # see `_start_over`
    learner.fit_judging()
