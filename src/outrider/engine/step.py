"""START HERE. One step of lossless speculative decoding.

A step is one target pass over a packed forest of drafted tokens; the target makes its own choice at every node, and
the longest drafted path that agrees with those choices is kept. Prefill, plain decoding and verification are the same
step with different forests.

The engine knows token ids, not text; it knows that there is a drafter, not which. Whatever the drafter does (nothing,
nonsense, an exception), the emitted tokens are those of the target alone.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence as Listing
from contextlib import contextmanager
from dataclasses import replace
from typing import Protocol

from ..control import Controller
from ..errors import ConfigError, ModelError
from ..types import Batch, Draft, Listener, Output, Sequence, Step, Tree, Turn, Verdict
from .batch import pack
from .cache import Cache, Plane
from .drafter import Drafter, DraftRequest
from .judge import RULES
from .request_drafts import propose
from .sampling import KeyedRandom, Target, logprob
from .scheduler import Scheduler
from .watchdog import Watchdog

log = logging.getLogger("outrider.engine")


class Pending(Protocol):
    """A running pass."""

    def wait(self) -> Output: ...


class Runner(Protocol):
    """A backend that runs the target's passes."""

    plane: Plane

    def launch(self, batch: Batch, taps: tuple[int, ...], overlapped: bool, steady: bool = False) -> Pending:
        """Start a pass. `overlapped`: the drafter works meanwhile; `steady`: the next pass is expected to have one row
        per sequence too, so that it may be started before this one is read."""
        ...


class Engine:
    """Runs sequences to their end, with several tokens per target pass where drafts are accepted."""

    def __init__(
        self,
        target: Runner,
        cache: Cache,
        drafter: Drafter,
        controller: Controller,
        scheduler: Scheduler,
        vocabulary: int,
        listeners: Listing[Listener] = (),
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`now` is the clock that everything is timed by, in seconds."""
        self.target, self.cache, self.drafter = target, cache, drafter
        self.controller, self.scheduler, self.listeners = controller, scheduler, listeners
        self.vocabulary = vocabulary
        self.index = 0
        self.failures: Counter[str] = Counter()  # "drafter: error" or "verb: error" -> how often it was raised
        self._first_failures: dict[str, str] = {}  # by kind
        self.clock = Clock(now)
        self.watchdog = Watchdog()  # over the drafter's calls: another thread may give up one that hangs

    def add(self, seq: Sequence) -> None:
        if not seq.tokens:
            raise ConfigError("The prompt is empty; a text is continued from at least one token.")
        self.scheduler.add(seq)
        self._notify("begin", seq)

    def cancel(self, seq: Sequence) -> None:
        """Drop a sequence between two steps; its slots are free at once."""
        if seq.finish is None:
            seq.finish = "cancelled"
            self._close(seq)

    @property
    def busy(self) -> bool:
        return self.scheduler.busy

    def step(self) -> Step:
        """Pick, budget, draft, launch, overlap, judge, commit, observe."""
        clock, traits = self.clock.start(), self.drafter.traits
        turns = self.scheduler.fit(self.controller.budget(self.scheduler.pick(), traits))
        with clock.time("draft"):
            draft, failure = self._draft(turns)
        with clock.time("verify"):
            batch, first = pack(self.cache, turns, draft, self.target.plane)
            traits = self.drafter.traits  # drafting may have changed them
            pending = self.target.launch(batch, traits.taps, traits.overlaps)
            with clock.time("overlap"):
                self._notify("overlap", [t.seq for t in turns], draft)
            output = pending.wait()
        clock.adjust(output.seconds)
        draft = _read(draft, batch, first, output)
        with clock.time("judge"):
            coins = [KeyedRandom(turn.seq) for turn in turns]
            targets = self._targets(turns, draft, output, first)
            verdicts = [self._settle(*each) for each in zip(turns, draft.trees, targets, coins, strict=True)]
        step = Step(
            self.index, turns, draft, batch, output, verdicts, clock.seconds, clock.starts, first, coins,
            self.controller.why, failure,
        )  # fmt: skip
        self._publish(step)
        return step

    # ------------------------------------------------------------ the parts of a step

    def _draft(self, turns: list[Turn]) -> tuple[Draft, str]:
        """A tree for every turn with a budget, and the drafter's errors. Nothing about the drafted trees is trusted."""
        open_ = [i for i, turn in enumerate(turns) if turn.budget]
        trees, failures, unread = [Tree([], [])] * len(turns), [], None
        if open_:
            try:
                drafted = self._request([turns[i] for i in open_])
                unread, failures = drafted.unread, list(drafted.failures)
                for i, tree in zip(open_, drafted.trees, strict=True):
                    trees[i] = _sound(tree, turns[i].budget, 0 if unread is None else len(unread), self.vocabulary)
            except Exception as error:  # a drafter costs speed, never an answer
                failures.append(f"{self.drafter.name or type(self.drafter).__name__}: {_describe(error)}")
                trees, unread = [Tree([], [])] * len(turns), None
        for failure in failures:
            self._count_failure(failure)
        pruned = self.controller.prune(turns, Draft.pack(trees))
        return replace(pruned, unread=unread), "; ".join(failures)

    def _request(self, turns: list[Turn]) -> Draft:
        seqs, budgets = [turn.seq for turn in turns], [turn.budget for turn in turns]
        request = DraftRequest(seqs, budgets, self.controller.prices, self.controller.stop_below)
        with self.watchdog("draft"):
            return propose(self.drafter, turns, request)

    def _targets(self, turns: list[Turn], draft: Draft, output: Output, first: list[int]) -> list[Target | None]:
        """The target over each sequence's rows; None where part of a prompt is still pending."""
        _require_finite(output.highest)
        spans = [slice(at, at + 1 + len(tree.tokens)) for at, tree in zip(first, draft.trees, strict=True)]
        return [
            Target(turn.seq, output.logits[span], output.choices[span]) if turn.whole else None
            for turn, span in zip(turns, spans, strict=True)
        ]

    def _settle(self, turn: Turn, tree: Tree, target: Target | None, coins: KeyedRandom) -> Verdict | None:
        """Judge one tree and commit: tokens first, then the cache, because tokens are the truth."""
        seq, plane = turn.seq, self.target.plane
        fed = plane.holds(seq.id) + turn.feed
        plane.advance(seq.id, fed)
        seq.stats.passes += 1
        if target is None:
            return None
        verdict = seq.extend(RULES[seq.rule](tree, target, coins), tree)
        plane.wrote(seq.id, range(len(tree.tokens)))
        self.cache.commit(seq, fed, verdict.path)
        seq.stats.count(tree, verdict)
        if seq.params.logprobs is not None:
            emitted = zip(verdict.rows, verdict.tokens, strict=True)
            seq.logprobs += [logprob(target.logits[row], token, seq.params.logprobs) for row, token in emitted]
        return verdict

    def _publish(self, step: Step) -> None:
        self.index += 1
        for seq in step.seqs:
            for phase, seconds in step.clock.items():
                seq.stats.seconds[phase] = seq.stats.seconds.get(phase, 0.0) + seconds
            seq.stats.why = step.why
            seq.stats.failures += bool(step.failure)
        self._notify("observe", step)
        self.controller.observe(step)
        for listener in self.listeners:
            listener.observe(step)
        for seq in step.seqs:
            if seq.finish:
                self._close(seq)

    # ------------------------------------------------------------ details

    def _close(self, seq: Sequence) -> None:
        self.scheduler.remove(seq, keep=True)
        self.controller.end(seq)
        self._notify("end", seq)

    def _notify(self, verb: str, *arguments: object) -> None:
        """Call one of the drafter's optional verbs; a failure is counted."""
        try:
            with self.watchdog(verb):
                getattr(self.drafter, verb)(*arguments)
        except Exception as error:
            self._count_failure(f"{verb}: {_describe(error)}")

    def _count_failure(self, failure: str) -> None:
        """Count a failure under the first message of its kind (who failed, with which exception), and log that one."""
        kind = ": ".join(failure.split(": ")[:2])
        first = self._first_failures.setdefault(kind, failure)  # messages may differ each time: kinds are few
        if not self.failures[first]:
            log.warning("The drafter failed (%s). The text is not affected; plain decoding continues.", failure)
        self.failures[first] += 1


_PAUSE = 0.002  # seconds between two steps; the rest of a longer pause is the caller's


class Clock:
    """Seconds of each phase of a step, and when each began since the engine was made."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.now = now
        self.zero = self.begin = self.reported = now()  # reported: when a device last reported its phases
        self.seconds: dict[str, float] = {}
        self.starts: dict[str, float] = {}

    def start(self) -> Clock:
        self.seconds, self.starts, self.begin = {}, {}, self.now()
        return self

    def adjust(self, device: dict[str, float]) -> None:
        """Take over phases that a device measured itself; what remains since its last report is the host's time."""
        if device:
            now, since = self.now(), max(self.reported, self.begin - _PAUSE)
            self.seconds |= device | {"host": max(now - since - sum(device.values()), 0.0)}
            self.starts = dict.fromkeys(self.seconds, since - self.zero) | self.starts
            self.reported = now

    @contextmanager
    def time(self, phase: str) -> Iterator[None]:
        begin = self.now()
        self.starts[phase] = begin - self.zero
        try:
            yield
        finally:
            self.seconds[phase] = self.now() - begin


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _sound(tree: Tree, budget: int, unread: int, vocabulary: int) -> Tree:
    """The longest prefix of a tree that is well-formed and within its budget."""
    survival = tree.survival
    if survival is not None and (len(survival) != len(tree.tokens) or any(chance < 0 for chance in survival)):
        raise ValueError("a tree's survival must be one probability for each node")
    for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
        if not (-unread <= token < vocabulary and -1 <= parent < node):
            return tree.cut(min(node, budget))
    return tree.cut(budget)


def _read(draft: Draft, batch: Batch, first: list[int], output: Output) -> Draft:
    """The draft with the token ids that the pass read on the device: a tree's rows follow its root's."""
    if output.tokens is None:
        return draft
    trees = []
    for tree, at in zip(draft.trees, first, strict=True):
        start = batch.want[at] + 1 if tree.tokens else 0
        trees.append(tree._replace(tokens=output.tokens[start : start + len(tree.tokens)]))
    return Draft.pack(trees)


def _require_finite(highest: list[float]) -> None:
    """Each row's largest logit [R]; a NaN anywhere in a row makes it NaN."""
    if not all(map(math.isfinite, highest)):
        raise ModelError(
            "The target produced NaN or infinite logits, so no token can be chosen. The weights may be damaged or "
            "overflow in this dtype: try dtype float32, or fetch the model again."
        )
