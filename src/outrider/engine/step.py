"""START HERE. One step of lossless speculative decoding.

A step is one target pass over a packed forest of drafted tokens; the target makes its own choice at every node, and
the longest drafted path that agrees with those choices is kept. Prefill, plain decoding and verification are the same
step with different forests.

A step has two halves: `_issue` starts it, `_collect` reads it. On a CPU one follows the other. A device that keeps the
sequences' state itself runs *rounds*: the next one is started before the last one is read. Depth never changes a text.

The engine knows token ids, not text; it knows that there is a drafter, not which. Whatever the drafter does (nothing,
nonsense, an exception), the emitted tokens are those of the target alone.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence as Listing
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Protocol

import torch

from ..control import Controller
from ..errors import ConfigError, ModelError
from ..types import (
    REQUEST_DRAFTS,
    Batch,
    Draft,
    Listener,
    Output,
    Sequence,
    Step,
    Tree,
    Turn,
    Verdict,
    chain,
)
from .batch import pack
from .cache import Cache, Plane
from .drafter import Drafter, DraftRequest
from .judge import RULES, fates_of
from .request_drafts import propose
from .rounds import HostPace, RoundResult, Rounds, is_asked
from .sampling import KeyedRandom, Target, log_probabilities, token_logprobs
from .scheduler import Scheduler
from .watchdog import Watchdog

log = logging.getLogger("outrider.engine")
NO_DRAFT, NO_COINS = Tree([], []), SimpleNamespace(flips={}, draws={})  # under the rule `match` nothing is drawn


class Pending(Protocol):
    """A running pass."""

    def wait(self) -> Output: ...


class Runner(Protocol):
    """A backend that runs the target's passes."""

    plane: Plane
    rounds: Rounds | None  # the backend's own loop, where it has one

    def launch(self, batch: Batch, taps: tuple[int, ...], overlapped: bool) -> Pending:
        """Start a pass. `overlapped`: the drafter works meanwhile."""
        ...

    def encode(self, sources: list[tuple[list[int], torch.Tensor]]) -> None:
        """An encoder reads new sources (ids, and slots of their K/V) before the pass that needs them, where it can."""
        ...


@dataclass
class Flight:
    """A step between `issue` and `collect`."""

    turns: list[Turn]
    draft: Draft
    pending: Any  # a Pending, or a PendingRound
    seconds: dict[str, float]
    starts: dict[str, float]
    why: str
    failure: str
    batch: Batch | None = None  # None: a round
    first: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)  # of a round: tokens of each sequence that the host had read
    offered: tuple[Tree, ...] = ()  # not of a round: the draft before it was pruned


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
        self._logits_are_read = any(listener.reads_logits for listener in listeners)
        self.index = 0
        self.flights: deque[Flight] = deque()  # steps between `_issue` and `_collect`, oldest first
        self.pace = HostPace()
        self._need_host: set[int] = set()  # sequences that the device alone cannot continue
        self._in_rounds = False  # whether they are rounds of the backend's own loop
        if target.rounds is not None:
            drafter.record(target.rounds)
        self.failures: Counter[str] = Counter()  # "drafter: error" or "verb: error" -> how often it was raised
        self._first_failures: dict[str, str] = {}  # by kind
        self._latest_failure = ""  # of the latest call of `draft`
        self.clock = Clock(now)
        self.watchdog = Watchdog()  # over the drafter's calls: another thread may give up one that hangs

    def add(self, seq: Sequence) -> None:
        if not seq.tokens:
            raise ConfigError("The prompt is empty; a text is continued from at least one token.")
        if self.target.rounds is not None and not self.target.rounds.drives(seq):
            self._need_host.add(seq.id)
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
        """Keep as many steps in flight as the sequences allow, and take the oldest."""
        self._drop_flights()
        while len(self.flights) < self._depth() and self._issue():
            pass
        return self._collect()

    def _depth(self) -> int:
        """Steps in flight: two where the device alone can go on, else one. A flight is landed before that changes."""
        if self.target.rounds is None:
            return 1
        deep = self.drafter.traits.late and not (self._logits_are_read or self._need_host)
        if deep != self._in_rounds and not self.flights:
            self._in_rounds = deep
            self.target.rounds.forget_lines()
        return 2 if deep and self._in_rounds else 1 if not deep and not self._in_rounds else 0

    def _drop_flights(self) -> None:
        """Nobody waits for a step in flight whose sequences have all ended."""
        while self.flights and all(turn.seq.finish is not None for turn in self.flights[0].turns):
            self.scheduler.landed(self.flights.popleft().turns)

    def _issue(self) -> bool:
        """Pick, budget, draft, launch. False: no sequence takes a turn before a step in flight is read."""
        clock, traits = self.clock.start(), self.drafter.traits
        hidden = bool(self.flights)  # the device runs meanwhile
        turns, plans = self.scheduler.pick(), not self._in_rounds or (hidden and self.pace.plans)
        begin = clock.now()
        turns = self.controller.budget(turns, traits) if plans else turns
        clock.add("draft", begin)  # deciding is a part of drafting
        turns = self.scheduler.fit(turns)
        if not turns:
            return False
        if self.cache.sources is not None and not self._in_rounds:
            self._encode(turns)
        begin_drafting = clock.now()
        draft, failure = self._draft(turns)
        offered = draft.trees
        if self._in_rounds:
            turns = self._shorten(turns, draft) if plans and self.controller.prices is not None else turns
        elif any(tree.tokens for tree in offered):
            draft = self.controller.prune(turns, draft)._replace(unread=draft.unread)
        clock.add("draft", begin_drafting)
        if self._in_rounds and plans and any(turn.budget for turn in turns):
            self.pace.planned(clock.now() - begin)
        why = self._reason(draft) if plans else self._unplanned(turns, hidden)
        flight = Flight(turns, draft, None, clock.seconds, clock.starts, why, failure, offered=offered)
        if self._in_rounds:
            assert self.target.rounds is not None
            flight.lengths = [len(turn.seq.tokens) for turn in turns]
            flight.pending = self.target.rounds.start(turns, draft.trees)
        else:
            self._launch(flight)
        self.scheduler.launched(turns)
        self.flights.append(flight)
        return True

    def _encode(self, turns: list[Turn]) -> None:
        """Read new sources before anything is drafted: a drafter that shares the encoder is not charged for them."""
        rows, known = [(turn.seq.source, self.cache.rows[turn.seq.id].source) for turn in turns], self.target.plane
        new = [(ids, torch.tensor(slots)) for ids, slots in rows if slots and not known.has_source(slots[0])]
        if new:
            begin = self.clock.now()
            self.target.encode(new)
            self.clock.add("encode", begin)

    def _reason(self, draft: Draft) -> str:
        """For what is drafted, in words."""
        if self._latest_failure and not any(tree.tokens for tree in draft.trees):
            return f"the drafter failed ({self._latest_failure}): plain decoding"
        return self.controller.why

    def _unplanned(self, turns: list[Turn], hidden: bool) -> str:
        if not hidden:
            return "the device is idle: a round starts before drafts are planned"
        return f"{len(turns)} sequences: a round is over before drafts are planned: plain decoding"

    def _launch(self, flight: Flight) -> None:
        clock, turns, traits = self.clock, flight.turns, self.drafter.traits  # drafting may have changed them
        begin = clock.now()
        flight.batch, flight.first = pack(self.cache, turns, flight.draft, self.target.plane)
        flight.pending = self.target.launch(flight.batch, traits.taps, traits.overlaps)
        launched = clock.now()
        self._notify("overlap", [turn.seq for turn in turns], flight.draft)
        clock.add("overlap", launched)
        clock.add("verify", begin)

    def _collect(self) -> Step:
        """Wait for the oldest step in flight; judge, commit, observe."""
        flight = self.flights.popleft()
        self.scheduler.landed(flight.turns)
        if flight.batch is None:
            return self._publish(self._read_round(flight))
        clock, turns, batch, first = self.clock, flight.turns, flight.batch, flight.first
        begin = clock.now()
        output = flight.pending.wait()
        clock.add("verify", begin)
        clock.adjust(output.seconds)
        draft = _read(flight.draft, batch, first, output)
        begin = clock.now()
        coins: list[Any] = [NO_COINS if turn.seq.rule == "match" else KeyedRandom(turn.seq) for turn in turns]
        targets = self._targets(turns, output, first)
        verdicts = [self._settle(*each) for each in zip(turns, draft.trees, targets, coins, strict=True)]
        clock.add("judge", begin)
        untaken = [_refused(*each) for each in zip(flight.offered, draft.trees, verdicts, strict=True)]
        return self._publish(Step(
            self.index, turns, draft, batch, output, verdicts, clock.seconds, clock.starts, first, coins,
            flight.why, flight.failure, untaken=untaken,
        ))  # fmt: skip

    def _read_round(self, flight: Flight) -> Step:
        """What a device has decided, as a step."""
        begin = self.clock.now()
        results = flight.pending.wait()
        device = flight.pending.seconds
        if all(turn.feed == 1 for turn in flight.turns):  # with a prompt it took longer than the next one will
            self.pace.waited(self.clock.now() - begin, device)
        turns, trees, verdicts, untaken = list[Turn](), list[Tree](), list[Verdict | None](), list[Any]()
        begin = self.clock.now()
        for turn, result, late, at in zip(flight.turns, results, flight.draft.trees, flight.lengths, strict=True):
            if self._is_current(turn, result):
                tree = _tree_of(result, late) if result.drafted else NO_DRAFT
                turns.append(turn)
                trees.append(tree)
                verdicts.append(self._take(turn, tree, result))
                untaken.append(_untaken(turn, result, late, at) if late.tokens else None)
        self.clock.add("judge", begin)
        seconds = {"draft": 0.0, "verify": 0.0, "judge": 0.0} | device  # the host works meanwhile
        return Step(
            self.index, turns, Draft.pack(trees), Batch(self.cache.table), Output(torch.empty(0), seconds=device),
            verdicts, seconds,
            flight.starts | self.clock.starts, [-1] * len(turns), [NO_COINS] * len(turns),
            flight.why, flight.failure, True, untaken, len(turns) < len(flight.turns),
        )  # fmt: skip

    def _is_current(self, turn: Turn, result: RoundResult) -> bool:
        """Whether the sequence still has the slots that the round used: it may have ended or been preempted since."""
        return turn.seq.finish is None and self.cache.rows.get(turn.seq.id) is result.row

    def _take(self, turn: Turn, tree: Tree, result: RoundResult) -> Verdict | None:
        """Commit what a round has emitted for one sequence."""
        seq, length = turn.seq, len(turn.seq.tokens)
        seq.stats.passes += 1
        if not result.sound:
            _require_finite([math.nan])
        if not turn.whole:
            return None
        if result.length != length:
            raise ModelError(
                f"The device continued a sequence of {result.length} tokens where the host has {length}: a bug. "
                "Please report it with the command that led here."
            )
        if len(result.row.slots) < length:  # the last tokens' slots were reserved with the round
            self.cache.reserve(seq, length, 0)
        fates = fates_of(tree, result.path) if tree.tokens else ""
        verdict = seq.extend(Verdict(result.path, result.tokens, fates), tree)
        self._commit(seq, length, tree, verdict, on_device=True)
        if result.logprobs is not None:
            seq.logprobs += [result.logprobs[row] for row in verdict.rows]
        return verdict

    # ------------------------------------------------------------ the parts of a step

    def _draft(self, turns: list[Turn]) -> tuple[Draft, str]:
        """A tree for every turn with a budget, and the drafter's errors. Nothing about the drafted trees is trusted.

        In rounds a draft follows what the host has read, so it is longer by what the steps in flight may emit.
        """
        if not any(turn.budget for turn in turns):
            return Draft.pack([NO_DRAFT] * len(turns)), ""
        begin = self.clock.now()
        ahead = [self.scheduler.ahead(turn.seq)[1] if self._in_rounds else 0 for turn in turns]
        budgets = [turn.budget and turn.budget + more for turn, more in zip(turns, ahead, strict=True)]
        open_ = [i for i, budget in enumerate(budgets) if budget]
        open_ = self.pace.affordable(open_) if self._in_rounds else open_
        trees, failures, unread = [Tree([], [])] * len(turns), [], None
        if open_:
            try:
                drafted = self._request([turns[i] for i in open_], [budgets[i] for i in open_])
                unread, failures = drafted.unread, list(drafted.failures)
                for i, tree in zip(open_, drafted.trees, strict=True):
                    if self._in_rounds and is_asked(tree):
                        trees[i] = tree.cut(budgets[i])
                        continue
                    trees[i] = _sound(tree, budgets[i], 0 if unread is None else len(unread), self.vocabulary)
                    if len(trees[i].tokens) < min(len(tree.tokens), budgets[i]) and tree.source not in REQUEST_DRAFTS:
                        failures.append(f"{self._drafter_name}: {_fault(tree, len(trees[i].tokens))}")
                self.pace.drafted(len(open_), self.clock.now() - begin)
            except Exception as error:  # a drafter costs speed, never an answer
                failures.append(f"{self._drafter_name}: {_describe(error)}")
                trees, unread = [Tree([], [])] * len(turns), None
            self._latest_failure = "; ".join(failures)
        for failure in failures:
            self._count_failure(failure)
        return Draft.pack(trees, unread), "; ".join(failures)

    def _request(self, turns: list[Turn], budgets: list[int]) -> Draft:
        seqs, controller = [turn.seq for turn in turns], self.controller
        request = DraftRequest(seqs, budgets, controller.prices, controller.stop_below, self._in_rounds)
        with self.watchdog("draft"):
            return propose(self.drafter, turns, request)

    @property
    def _drafter_name(self) -> str:
        return self.drafter.name or type(self.drafter).__name__

    def _shorten(self, turns: list[Turn], draft: Draft) -> list[Turn]:
        """Budgets of a round by what is drafted after the tokens that the steps in flight emit at least. Recorded
        passes were asked for by a budget that was weighed already, unless the drafter chooses among several sources."""
        pairs = zip(turns, draft.trees, strict=True)
        rest = [_after(tree, self.scheduler.ahead(turn.seq)[0]).cut(turn.budget) for turn, tree in pairs]
        weighed = not self.drafter.traits.weighs_cost and all(is_asked(tree) for tree in rest if tree.tokens)
        pruned = rest if weighed else self.controller.prune(turns, Draft.pack(rest)).trees
        return [turn.allow(len(tree.tokens), turn.request_only) for turn, tree in zip(turns, pruned, strict=True)]

    def _targets(self, turns: list[Turn], output: Output, first: list[int]) -> list[Target | None]:
        """The target over each sequence's rows; None where part of a prompt is still pending."""
        _require_finite(output.highest)
        pairs = zip(turns, first, strict=True)
        return [Target(turn.seq, output, at) if turn.whole else None for turn, at in pairs]

    def _settle(self, turn: Turn, tree: Tree, target: Target | None, coins: KeyedRandom) -> Verdict | None:
        """Judge one tree and commit: tokens first, then the cache, because tokens are the truth."""
        seq, fed = turn.seq, len(turn.seq.tokens)
        seq.stats.passes += 1
        if target is None:
            return None
        verdict = seq.extend(RULES[seq.rule](tree, target, coins), tree)
        self._commit(seq, fed, tree, verdict)
        if seq.params.logprobs is not None:
            logits, top = target.logits(verdict.rows), seq.params.logprobs
            ids, values = log_probabilities(logits, torch.tensor(verdict.tokens, device=logits.device), top)
            seq.logprobs += token_logprobs(ids.tolist(), values.tolist(), top)
        return verdict

    def _commit(self, seq: Sequence, fed: int, tree: Tree, verdict: Verdict, on_device: bool = False) -> None:
        """The target holds the `fed` tokens before the verdict, and every drafted node."""
        self.target.plane.advance(seq.id, fed)
        if verdict.path or not on_device:  # in rounds nobody else has written nodes
            self.target.plane.wrote(seq.id, range(len(tree.tokens)))
            self.cache.commit(seq, fed, verdict.path, on_device)
        seq.stats.count(tree, verdict)

    def _publish(self, step: Step) -> Step:
        self.index += 1
        spent, failed = [(phase, seconds) for phase, seconds in step.clock.items() if seconds], bool(step.failure)
        for stats in (turn.seq.stats for turn in step.turns):
            for phase, seconds in spent:
                stats.seconds[phase] = stats.seconds.get(phase, 0.0) + seconds
            stats.why, stats.failures = step.why, stats.failures + failed
        if self.drafter.traits.watches or any(turn.budget for turn in step.turns):
            self._notify("observe", step)
        self.controller.observe(step)
        for listener in self.listeners:
            listener.observe(step)
        for seq in step.seqs:
            if seq.finish:
                self._close(seq)
        return step

    # ------------------------------------------------------------ details

    def _close(self, seq: Sequence) -> None:
        self._need_host.discard(seq.id)
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

    def add(self, phase: str, begin: float) -> None:
        """A part of a phase ends that began then. No context manager: after a pass, which leaves nothing of Python in
        the caches, one takes 30 µs."""
        self.starts.setdefault(phase, begin - self.zero)
        self.seconds[phase] = self.seconds.get(phase, 0.0) + self.now() - begin


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _after(tree: Tree, n: int) -> Tree:
    """The rest of a chain after its first n tokens; nothing of a tree with branches, which no round can take up.

    Unread tokens are drafted in the round itself, after what was emitted meanwhile.
    """
    if is_asked(tree):
        return tree
    if not tree.is_chain or n >= len(tree.tokens):
        return Tree([], [])
    return chain(tree.tokens[n:], tree.survival and tree.survival[n:], source=tree.source)


def _tree_of(result: RoundResult, late: Tree) -> Tree:
    """What a round verified; of a host draft that it took up late, with the survival that the drafter claimed."""
    tokens = result.drafted
    if result.late_from is not None:
        claims = late.survival and late.survival[result.late_from : result.late_from + len(tokens)]
        return chain(tokens, claims, source=late.source)
    if result.parents is None:
        return chain(tokens, result.survival, source=result.source)
    return Tree(tokens, result.parents, result.survival, source=result.source)


def _untaken(turn: Turn, result: RoundResult, late: Tree, at: int) -> tuple[Tree, int] | None:
    """A host draft that follows the first `at` tokens and was not verified, and the token that came there."""
    if result.drafted or is_asked(late) or len(turn.seq.tokens) <= at:
        return None
    return late, turn.seq.tokens[at]


def _refused(offered: Tree, kept: Tree, verdict: Verdict | None) -> tuple[Tree, int] | None:
    """A draft of which nothing was verified, and the token that came there; what is unread stays unknown."""
    if verdict is None or not verdict.tokens or kept.tokens or not offered.tokens or min(offered.tokens) < 0:
        return None
    return offered, verdict.tokens[0]


def _sound(tree: Tree, budget: int, unread: int, vocabulary: int) -> Tree:
    """The longest prefix of a tree that is well-formed and within its budget."""
    survival = tree.survival
    if survival is not None and (len(survival) != len(tree.tokens) or any(chance < 0 for chance in survival)):
        raise ValueError("a tree's survival must be one probability for each node")
    for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
        if not (-unread <= token < vocabulary and -1 <= parent < node):
            return tree.cut(min(node, budget))
    return tree.cut(budget)


def _fault(tree: Tree, node: int) -> str:
    """What is wrong with a node that `_sound` has cut off."""
    return f"ValueError: node {node} of a drafted tree has token {tree.tokens[node]} and parent {tree.parents[node]}"


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
