"""START HERE. One step of lossless speculative decoding.

A step is one target pass over a packed forest of drafted tokens; the target makes its own choice at every node, and
the longest drafted path that agrees with those choices is kept. Prefill, plain decoding and verification are the same
step with different forests.

The engine knows ids, not text; it knows that there is a drafter, not which. Whatever the drafter does (nothing,
nonsense, an exception), the emitted tokens are those of the target alone.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence as Listing
from contextlib import contextmanager
from dataclasses import replace
from typing import Protocol

from ..control.adaptive import Controller
from ..drafters import Drafter
from ..errors import ConfigError, ModelError
from ..types import Draft, Output, Rows, Sequence, Step, Tree, Turn, Verdict
from .cache import Cache, Plane
from .judge import RULES
from .request_drafts import propose
from .sampling import Dice, Target, logprob
from .scheduler import Scheduler
from .watchdog import Watch


class Pending(Protocol):
    def wait(self) -> Output: ...


class Runner(Protocol):
    plane: Plane

    def launch(self, rows: Rows, taps: tuple[int, ...], overlapped: bool, steady: bool = False) -> Pending:
        """Start a pass. `overlapped`: somebody works meanwhile; `steady`: one token each, and no end of it in sight."""
        ...


class Listener(Protocol):
    """One that sets `reads_logits` to False lets a runner go on without it: it finds no logits in what it hears."""

    def observe(self, step: Step) -> None: ...


class Engine:
    """Runs sequences to their end, several tokens per target pass where the drafter guesses well."""

    def __init__(
        self,
        target: Runner,
        cache: Cache,
        drafter: Drafter,
        controller: Controller,
        scheduler: Scheduler,
        vocabulary: int,
        listeners: Listing[Listener] = (),
    ) -> None:
        self.target, self.cache, self.drafter = target, cache, drafter
        self.controller, self.scheduler, self.listeners = controller, scheduler, listeners
        self.vocabulary = vocabulary
        self._logits_are_read = any(getattr(listener, "reads_logits", True) for listener in listeners)
        self.index = 0
        self.last_failure = ""  # what the drafter's optional verbs last raised
        self.clock = Clock()
        self.watch = Watch()  # over the drafter's calls, for whoever cannot wait for ever

    def add(self, seq: Sequence) -> None:
        if not seq.tokens:
            raise ConfigError("The prompt is empty: a text is continued from at least one token. Give a first one.")
        self.scheduler.add(seq)
        self._ask("begin", seq)

    def cancel(self, seq: Sequence) -> None:
        """Forget a sequence between two steps; its slots are free at once."""
        if seq.finish is None:
            seq.finish = "cancelled"
            self._close(seq)

    @property
    def busy(self) -> bool:
        return self.scheduler.busy

    def step(self) -> Step:
        """Pick, budget, draft or glance, launch, overlap, judge, commit, observe."""
        clock = self.clock.start()
        turns = self.scheduler.fit(self.controller.budget(self.scheduler.pick()))
        with clock.time("draft"):
            draft, failure = self._draft(turns)
        self._glance(turns)
        with clock.time("verify"):
            rows, first = self.cache.plan(turns, draft, self.target.plane)
            steady = self.controller.steady and not self._logits_are_read
            pending = self.target.launch(rows, self.drafter.taps, self.drafter.overlaps, steady)
            with clock.time("overlap"):
                self._ask("overlap", [t.seq for t in turns], draft)
            output = pending.wait()
        clock.adjust(output.seconds)
        draft = _read(draft, rows, first, output)
        with clock.time("judge"):
            coins = [Dice(turn.seq) for turn in turns]
            voices = self._voices(turns, draft, output, first)
            verdicts = [self._settle(*each) for each in zip(turns, draft.trees, voices, coins, strict=True)]
        step = Step(
            self.index, turns, draft, rows, output, verdicts, clock.seconds, clock.starts, first, coins,
            self.controller.why, failure,
        )  # fmt: skip
        self._publish(step)
        return step

    # ------------------------------------------------------------ the parts of a step

    def _draft(self, turns: list[Turn]) -> tuple[Draft, str]:
        """Ask for every turn with a budget, and believe nothing that is said about shapes."""
        asked = [i for i, turn in enumerate(turns) if turn.budget]
        trees, failure, unread = [Tree([], [])] * len(turns), "", None
        if asked:
            try:
                self.drafter.stop_below = self.controller.stop_below
                with self.watch("draft"):
                    answer = propose(self.drafter, [turns[i] for i in asked])
                unread = answer.unread
                for i, tree in zip(asked, answer.trees, strict=True):
                    trees[i] = _sound(tree, turns[i].budget, 0 if unread is None else len(unread), self.vocabulary)
            except Exception as error:  # a drafter costs speed, never an answer
                failure = f"{type(error).__name__}: {error}"
                trees, unread = [Tree([], [])] * len(turns), None
        pruned = self.controller.prune(turns, Draft.pack(trees))
        return replace(pruned, unread=unread), failure

    def _glance(self, turns: list[Turn]) -> None:
        """This step's pass may be under way already: had the next one better wait for a draft?"""
        looked = self.controller.glance(turns)
        if looked:
            try:
                with self.watch("glance"):
                    seen = self.drafter.glance([turn.seq for turn in looked], [turn.budget for turn in looked])
                self.controller.glanced(looked, seen)
            except Exception as error:
                self.last_failure = f"glance: {type(error).__name__}: {error}"

    def _voices(self, turns: list[Turn], draft: Draft, output: Output, first: list[int]) -> list[Target | None]:
        """The target over each sequence's rows; None where part of a prompt still waits."""
        _insist_on_numbers(output.highest)
        spans = [slice(at, at + 1 + len(tree.tokens)) for at, tree in zip(first, draft.trees, strict=True)]
        return [
            Target(turn.seq, output.logits[span], output.choices[span]) if turn.whole else None
            for turn, span in zip(turns, spans, strict=True)
        ]

    def _settle(self, turn: Turn, tree: Tree, voice: Target | None, coins: Dice) -> Verdict | None:
        """Judge one tree and commit: tokens first, then the cache, because tokens are the truth."""
        seq, plane = turn.seq, self.target.plane
        fed = plane.held[seq.id] = plane.held.get(seq.id, 0) + turn.feed
        seq.stats.passes += 1
        if voice is None:
            return None
        verdict = seq.extend(RULES[seq.rule](tree, voice, coins), tree)
        plane.nodes[seq.id] = frozenset(range(len(tree.tokens)))
        self.cache.commit(seq, fed, verdict.path)
        seq.stats.count(tree, verdict)
        if seq.params.logprobs is not None:
            emitted = zip(verdict.rows, verdict.tokens, strict=True)
            seq.logprobs += [logprob(voice.logits[row], token, seq.params.logprobs) for row, token in emitted]
        return verdict

    def _publish(self, step: Step) -> None:
        self.index += 1
        for seq in step.seqs:
            for phase, seconds in step.clock.items():
                seq.stats.seconds[phase] = seq.stats.seconds.get(phase, 0.0) + seconds
            seq.stats.why = step.why
            seq.stats.failures += bool(step.failure)
        self._ask("observe", step)
        for listener in (self.controller, *self.listeners):
            listener.observe(step)
        for seq in step.seqs:
            if seq.finish:
                self._close(seq)

    # ------------------------------------------------------------ small print

    def _close(self, seq: Sequence) -> None:
        self.scheduler.remove(seq, keep=True)
        self.controller.end(seq)
        self._ask("end", seq)

    def _ask(self, verb: str, *arguments: object) -> None:
        """Call one of the drafter's optional verbs; if it fails, the text goes on without it."""
        try:
            with self.watch(verb):
                getattr(self.drafter, verb)(*arguments)
        except Exception as error:
            self.last_failure = f"{verb}: {type(error).__name__}: {error}"


_PAUSE = 0.002  # seconds between two steps that are longer than this were somebody else's


class Clock:
    """Seconds of each phase of a step, and when each began since the engine was made."""

    def __init__(self) -> None:
        self.zero = self.begin = self.told = time.perf_counter()
        self.seconds: dict[str, float] = {}
        self.starts: dict[str, float] = {}

    def start(self) -> Clock:
        self.seconds, self.starts, self.begin = {}, {}, time.perf_counter()
        return self

    def adjust(self, device: dict[str, float]) -> None:
        """A device has told what phases really took; what lies between them since its last word is the host's."""
        if device:
            now, since = time.perf_counter(), max(self.told, self.begin - _PAUSE)
            self.seconds |= device | {"host": max(now - since - sum(device.values()), 0.0)}
            self.starts = dict.fromkeys(self.seconds, since - self.zero) | self.starts
            self.told = now

    @contextmanager
    def time(self, phase: str) -> Iterator[None]:
        begin = time.perf_counter()
        self.starts[phase] = begin - self.zero
        try:
            yield
        finally:
            self.seconds[phase] = time.perf_counter() - begin


def _sound(tree: Tree, budget: int, unread: int, vocabulary: int) -> Tree:
    """As much of a tree as is well-formed and affordable: every prefix of one is a tree again."""
    sound = 0
    for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
        if not (-unread <= token < vocabulary and -1 <= parent < node):
            break
        sound += 1
    return tree.cut(min(sound, budget))


def _read(draft: Draft, rows: Rows, first: list[int], output: Output) -> Draft:
    """The draft with the tokens that the pass has told us: a tree's rows follow its root's."""
    if output.tokens is None:
        return draft
    want, trees = rows.packing.want, []
    for tree, at in zip(draft.trees, first, strict=True):
        start = want[at] + 1 if tree.tokens else 0
        trees.append(tree._replace(tokens=output.tokens[start : start + len(tree.tokens)]))
    return Draft.pack(trees)


def _insist_on_numbers(highest: list[float]) -> None:
    """Each row's largest logit [R]. A NaN anywhere in a row surfaces here."""
    if not all(map(math.isfinite, highest)):
        raise ModelError(
            "The target produced NaN or infinite logits, so no token can be chosen. The weights may be damaged or "
            "overflow in this dtype: try dtype float32, or fetch the model again."
        )
