"""Learning in slices: one update every few verifications, within a cap on the time of one step.

Promise: the weights that draft (`live`) change only in `swap`, as a whole, and only to weights that predict more of the
held-out latest records; weights that predict fewer are reset to the live ones, and live ones that predict fewer than
the initial ones are switched off. While nothing better is found, learning takes less and less time. An update that
fails, meets NaN or is interrupted leaves only a count and a reason; after a few failures in a row learning stops.
Nothing here raises, except an interruption of the program. It knows records and weights, not where they come from.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ...backends.machine import gc_paused
from .adapter import Output, Schedule, Weights, copied, loss
from .buffer import TOP, Nodes, Records, Ring

_FAILURES = 3  # in a row, until learning stops
_INBOX = 64  # nodes that wait to become records
_HANDFUL = 16  # nodes of one "take" slice
_TOO_SLOW = 64  # slices of the smallest size in a row that exceed the cap, until learning stops
_SMALLEST = 4  # records of the smallest slice
_FORGET = 0.98  # decay per slice of the remembered time of a larger one
_MARGIN = 3.0  # times the mean time of a slice: an occasional one takes this long
_WORSE = 2.0  # standard deviations by which trained weights must be worse to be reset
_ROWS, _FEWEST_ROWS = 512, 32  # table rows of the largest and the smallest slice of a comparison
_WARM = 64  # upper bound on the calls that one update needs
_SMOOTH = 0.99  # weight of the past in the baseline
_RECENT = 0.7  # weight of the past in the comparison with the initial weights
_TIRE, _TIRED = 0.8, 8  # without progress each comparison lowers the share of time, to an eighth at most


@dataclass(frozen=True)
class LearningPlan:
    """When, how long and how fast to learn."""

    every: int = 8  # verifications between two updates, at least
    cap: float = 0.010  # seconds that one step may spend on learning; usually it is half of that
    share: float = 0.04  # of the serving time, at most
    batch: int = 64  # records of one update
    slice: int = 32  # records of one slice of it
    rate: float = 7e-4
    rank: int = 128
    capacity: int = 2048  # records that are kept
    kept: int = TOP  # ids of the target's distribution that a record has
    top: int = 16  # of those, candidates of an update
    judge_every: int = 8  # updates between two comparisons with the live weights
    holdout: int = 64  # records of such a comparison, the latest: nothing was learnt from them before
    proof: float = 1.0  # standard deviations by which trained weights must be better to draft
    memory: float = 0.0  # weight of earlier comparisons in that
    patience: float = 2.0  # standard deviations by which the initial weights must be better to draft again
    decay: float = 0.01
    schedule: Schedule = field(default_factory=Schedule)


@dataclass
class LearningReport:
    """What has been learnt so far."""

    state: str = "on"  # on, off, stopped
    why: str = ""  # the last reason for a rollback or a stop
    records: int = 0
    missed: int = 0  # verifications dropped for lack of time
    updates: int = 0
    adopted: int = 0  # times that trained weights began to draft
    rollbacks: int = 0
    failures: int = 0
    seconds: float = 0.0  # CPU time of learning, including the collection of records
    slowest: float = 0.0  # seconds of the longest work in one step, wall clock
    busiest: float = 0.0  # the same in CPU time: the difference is the load of the machine
    served: float = 0.0  # seconds of serving, learning included


class SideStream:
    """Work beside a busy device: a CUDA stream on a GPU, nothing on a CPU. The host never waits for it."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.inputs = torch.cuda.Event() if self.stream else None
        self.done = torch.cuda.Event() if self.stream else None

    @property
    def idle(self) -> bool:
        """Whether all work up to the last `mark` is complete."""
        return self.done is None or self.done.query()

    def inputs_written(self) -> None:
        """The main stream has written what the work may read."""
        if self.inputs is not None:
            self.inputs.record()

    @contextmanager
    def active(self) -> Iterator[None]:
        """Launch work here; it waits for the last `inputs_written`, not for passes launched after it."""
        if self.stream is None or self.inputs is None:
            yield
            return
        self.stream.wait_event(self.inputs)
        with torch.cuda.stream(self.stream):
            yield

    def mark(self) -> None:
        if self.done is not None:
            self.done.record(self.stream)


@dataclass
class Evidence:
    """How many records only the one, or only the other of two weights predicts, recent comparisons first."""

    better: float = 0.0
    worse: float = 0.0

    def add(self, one: Tensor, other: Tensor, memory: float) -> None:
        """Which records [n] each of them predicts."""
        self.better = memory * self.better + int((one & ~other).sum())
        self.worse = memory * self.worse + int((other & ~one).sum())

    @property
    def deviations(self) -> float:
        """By how many standard deviations the one is better; a sign test."""
        return (self.better - self.worse) / math.sqrt(max(self.better + self.worse, 1.0))


class Learner:
    """Trains a copy of the live weights."""

    def __init__(
        self,
        frozen: Output,
        weights: Weights,
        plan: LearningPlan,
        clock: Callable[[], float] = time.perf_counter,  # wall clock
        used: Callable[[], float] = time.thread_time,  # CPU time of the calling thread
    ) -> None:
        self.frozen, self.plan, self.clock, self.used, self.report = frozen, plan, clock, used, LearningReport()
        self.live, self.initial = copied(weights), copied(frozen.initial(weights["up"].shape[1]))
        self.unchanged = all(torch.equal(w, self.initial[name]) for name, w in weights.items())  # what drafts next
        self.differs = not self.unchanged  # whether the live weights differ from the initial ones
        self.gain, self.lead = Evidence(), Evidence()  # of trained over drafting, of drafting over initial weights
        self.share = plan.share  # less while nothing new is learnt
        self.ring = Ring(plan.capacity, frozen.norm.shape[0], frozen.norm, min(plan.kept, frozen.vocabulary))
        self.side = SideStream(frozen.norm.device)
        self.slice, self.judge_rows = plan.slice, _ROWS
        self._larger = math.inf  # seconds of a slice of twice as many records
        self.baseline = 0.0  # of rewards: the recent acceptance
        self.waiting = 0  # verifications since the last update
        self.inbox: deque[Nodes] = deque()
        self.pending = 0  # nodes in the inbox
        self.costs: dict[str, float] = {}  # seconds by kind of slice
        self._generator = torch.Generator().manual_seed(0)
        self._failed = self._slow = 0  # in a row
        self._allowed = 0.0  # seconds that learning may have taken
        self._ready: Weights | None = None
        self._job: Iterator[str] | None = None
        self._restart(weights)

    @property
    def due(self) -> bool:
        """Whether there is work for the time in which the target is busy."""
        enough = self.waiting >= self.plan.every and len(self.ring) + self.pending >= self.plan.batch
        return self.report.state == "on" and (self._job is not None or (enough and self.within_share))

    @property
    def within_share(self) -> bool:
        """Whether learning is on and has not used up its share of the serving time."""
        return self.report.state == "on" and self.report.seconds <= self._allowed

    def account(self, seconds: float, learning: float = 0.0) -> None:
        """A step took so many seconds, `learning` of them for the collection of records."""
        self.report.served += seconds
        self._allowed += self.share * seconds
        self.report.seconds += learning

    def add(self, nodes: Nodes) -> None:
        """One verification, for a later slice; if too many wait, the oldest are dropped."""
        if self.report.state != "on":
            return
        self.inbox.append(nodes)
        self.side.inputs_written()
        self.pending += nodes.size
        self.waiting += 1
        while self.pending > _INBOX and len(self.inbox) > 1:
            self.pending -= self.inbox.popleft().size
            self.report.missed += 1
        for drafted, accepted in zip(nodes.drafted, nodes.accepted, strict=True):
            if drafted >= 0:
                self.baseline = _SMOOTH * self.baseline + (1 - _SMOOTH) * accepted

    def swap(self) -> None:
        """Between two steps: newly learnt weights become the live ones."""
        if self._ready is not None and self.side.idle:
            self.live, self._ready, self.differs = self._ready, None, not self.unchanged

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
            with torch.inference_mode(False), torch.enable_grad(), self.side.active(), gc_paused():
                while self.due and self.side.idle:
                    expected = _MARGIN * self.costs.get(self._next, self.plan.cap)  # an untimed slice runs alone
                    elapsed = self.clock() - begin
                    if now > own and (2 * elapsed > self.plan.cap or elapsed + expected > self.plan.cap):
                        break
                    self._advance()
                    self.side.mark()
                    now = self._timed(self.used() - now)
        except Exception as error:
            self._fail(f"{type(error).__name__}: {error}")
        except BaseException:  # the program is interrupted: no half update may stay
            self._roll_back("an update was interrupted")
            raise
        spent = self.used() - own
        self.report.seconds += spent
        self.report.slowest = max(self.report.slowest, self.clock() - begin)
        self.report.busiest = max(self.report.busiest, spent)

    def weights(self) -> Weights:
        """A copy of the weights that draft from the next step on."""
        return copied(self._drafting)

    def as_json(self) -> dict[str, Any]:
        facts = asdict(self.report) | {"cap": self.plan.cap, "kept": len(self.ring), "accepted": self.baseline}
        return {name: round(value, 6) if isinstance(value, float) else value for name, value in facts.items()}

    # ------------------------------------------------------------ one update, in slices

    def _advance(self) -> None:
        if self._job is None:
            self.waiting, self._job, self._next = 0, self._update(), "take"
        self._running = self._next
        try:
            self._next = next(self._job)
        except StopIteration:
            self._job, self._next = None, "take"

    def _update(self) -> Iterator[str]:
        """Yields the name of the next slice."""
        while self._take():
            yield "take"
        yield "choose"
        records = self.ring.sample(self.plan.batch, self._generator, self.plan.holdout)
        candidates = self.frozen.candidates(records, self.plan.top)
        mix = self.plan.schedule.at(self.report.updates)
        at, count = 0, records.state.shape[0]
        while at < count:
            yield "learn"
            part = records.part(slice(at, at + self.slice))
            at += part.state.shape[0]
            scores = self.frozen.scores(self.trained, part.state, part.previous, candidates.rows)
            value = loss(scores, candidates.labels(part, self.plan.schedule.temperature), mix, self.baseline)
            (value * (part.state.shape[0] / count)).backward()
        yield "norm"
        norm = torch.nn.utils.clip_grad_norm_(self.trained.values(), 1.0)
        yield "apply"
        if not math.isfinite(float(norm)):
            raise ArithmeticError("the gradient of an update is not finite")
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        self.report.updates += 1
        if self.report.updates % self.plan.judge_every == 0:
            hits = yield from self._hits(self.ring.latest(self.plan.holdout))
            yield "compare"
            self._compare(*hits)
        self._failed = 0

    def _take(self) -> bool:
        """Move a handful of nodes from the inbox into the ring; False if there were none."""
        steps: list[Nodes] = []
        while self.inbox and sum(step.size for step in steps) < _HANDFUL:
            steps.append(self.inbox.popleft())
        if steps:
            records = steps[0].records(steps, self.ring.top)
            self.ring.add(records)
            self.pending -= records.state.shape[0]
            self.report.records += records.state.shape[0]
        return bool(steps)

    # ------------------------------------------------------------ better or worse

    @torch.no_grad()
    def _hits(self, records: Records) -> Generator[str, None, Tensor]:
        """Which records the trained, the drafting and, where it is another one, the initial weights predict. [2-3, n]

        Over the whole vocabulary: an update compares only candidates, and may have raised other tokens.
        """
        each = [self.trained, self._drafting, *([] if self.unchanged else [self.initial])]
        normed = torch.cat([self.frozen.adapt(w, records.state, records.previous).normed for w in each])  # [2-3 n, H]
        predicted = yield from self.frozen.predicted(normed, lambda: self.judge_rows)
        return predicted.view(len(each), -1) == records.top_ids[:, 0]

    @property
    def _drafting(self) -> Weights:
        """The weights that draft from the next step on."""
        return self.live if self._ready is None else self._ready

    def _compare(self, trained: Tensor, drafting: Tensor, initial: Tensor | None = None) -> None:
        """Sign tests on the same records, so that a change of text does not count as a change of weights."""
        plan, adopts = self.plan, False
        self.gain.add(trained, drafting, plan.memory)
        if initial is not None:
            self.lead.add(drafting, initial, _RECENT)
        if self.lead.deviations < -plan.patience:
            self._switch_off()
        elif self.gain.deviations < -_WORSE:
            self._roll_back("acceptance fell")
        elif self.gain.deviations > plan.proof:
            self._ready, self.unchanged, adopts = copied(self.trained), False, True
            self.report.adopted += 1
            self.gain, self.lead = Evidence(), Evidence()
        self.share = self.plan.share if adopts else max(_TIRE * self.share, self.plan.share / _TIRED)

    def _switch_off(self) -> None:
        """On recent text what was learnt is accepted less often than what there was before: draft with that."""
        self._ready, self.unchanged, self.lead = copied(self.initial), True, Evidence()
        self._roll_back("what was learnt does not suit the recent text")

    def _roll_back(self, why: str) -> None:
        self.report.rollbacks += 1
        self.report.why = why
        self.gain = Evidence()
        self._restart(self._drafting)

    def _fail(self, why: str) -> None:
        self.report.failures += 1
        self._failed += 1
        self._roll_back(f"an update failed ({why})")
        if self._failed >= _FAILURES:
            self.stop("stopped", f"{self._failed} updates in a row failed, the last one with: {why}")

    def _restart(self, weights: Weights) -> None:
        """Train from these weights, without an unfinished update."""
        self._job = None
        self._next = self._running = "take"
        self.costs.pop("apply", None)  # the first one allocates the optimiser's state
        self.trained = copied(weights, trained=True)
        self.optimiser = torch.optim.AdamW(
            self.trained.values(), self.plan.rate, (0.9, 0.99), weight_decay=self.plan.decay, fused=True
        )

    # ------------------------------------------------------------ the size of slices

    def _timed(self, seconds: float) -> float:
        """Record the time of a slice and resize slices to the cap. Returns the CPU time used so far.

        CPU time, because on a loaded machine everything takes longer and smaller slices do not help.
        """
        known = self.costs.get(self._running, seconds)
        self.costs[self._running] = 0.7 * known + 0.3 * seconds
        if self._running == "learn":
            self._fit_slice()
        self.fit_judging()
        return self.used()

    def _fit_slice(self) -> None:
        """As many records as fit under the cap. Half of them often take nearly as long, so slices grow again: the time
        of twice as many is remembered, and decays."""
        usual, cap = self.costs["learn"], self.plan.cap
        self._slow = self._slow + 1 if usual > cap and self.slice <= _SMALLEST else 0
        self._larger = max(_FORGET * self._larger, usual)
        if _MARGIN * usual > cap and self.slice > _SMALLEST:
            self.slice, self.costs["learn"], self._larger = self.slice // 2, usual / 2, usual
        elif _MARGIN * self._larger < cap and self.slice < self.plan.slice:
            self.slice, self.costs["learn"], self._larger = self.slice * 2, self._larger, 2 * self._larger
        if self._slow > _TOO_SLOW:
            text = f"{_SMALLEST} records take {usual * 1e3:.1f} ms here, and the cap is {cap * 1e3:g} ms"
            self.stop("stopped", f"learning is too slow: {text}; raise learn_cap_ms")

    def fit_judging(self) -> None:
        """Shrink slices of a comparison that exceed the cap."""
        while self.judge_rows > _FEWEST_ROWS and _MARGIN * self.costs.get("judge", 0.0) > self.plan.cap:
            self.judge_rows, self.costs["judge"] = self.judge_rows // 2, self.costs["judge"] / 2


def warm(learner: Learner) -> None:
    """Run updates of another learner on empty records: the first one is slow, and no request should wait for it."""
    plan = replace(learner.plan, cap=math.inf, judge_every=1, share=math.inf)
    other = Learner(learner.frozen, learner.live, plan)
    other.ring.added, other._allowed = plan.batch, math.inf
    for _ in range(_WARM):
        other.waiting = plan.every
        other.work()
        if other.side.stream is not None:
            other.side.stream.synchronize()
        if other.report.updates > 2 or other.report.failures:
            break
    learner.costs = {name: cost for name, cost in other.costs.items() if name != "apply"}  # see `_restart`
    learner.fit_judging()
