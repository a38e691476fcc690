"""Draft the next round while the target verifies this one (speculative speculative decoding, arXiv 2603.03251).

While the target is busy with a draft, a draft model prepares for what may become of it: so many tokens accepted, then
this token of the target's own. When the verdict is an outcome that was prepared for, the next draft is there at once,
and drafting has cost no time. Else the sequence (not the batch) falls back: to a free drafter that has something to
say, or to a draft made just in time.

It promises what every drafter does. Besides, it never waits for a draft model longer than a deadline: one that hangs is
bypassed, one that dies is started anew, and the text goes on meanwhile. A draft model runs in a process of its own (on
other cores, or another GPU), in a thread, or in a second stream of the target's GPU; a trained head in a thread or such
a stream, where it finds what the target saw (`_ahead` decides).

Under `reject` and `block`, drafts are drawn and q comes along. What is drawn depends on the place in the text alone,
so what was prepared is what would be drafted just in time, and the same seed gives the same text whatever was ready
when. A head knows more just in time than ahead, so there it is only asked then.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from torch import Tensor

from ...errors import ConfigError
from ...types import Draft, Sequence, Step, Tree, chain
from .. import Drafter, DraftRequest, Memory, Traits, Workspace, register
from ..cascade import Cascade
from .account import Account, Round
from .channel import Asked, Lines, Wish
from .forks import draws
from .laws import Tilt
from .setup import posted, share, trial_options, whole
from .shared_queue import DEPTH, TRUNK, Outcome, find, rank, read_laws
from .worth import Worth

WAIT = 30.0  # seconds to wait for the draft model to be read, before the first request
FORKS = 8  # outcomes prepared for, for each sequence
SOONEST, LATEST = 0.1, 2.0  # seconds of a deadline
WEAK = 0.35  # a fallback's draft whose first token is less likely than this gives way to the draft model's
LENIENT = 8.0  # times what an answer usually takes


@register("ahead")
class Ahead(Drafter):
    """Options: draft_model, draft_dtype, draft_device, skip_layers; or head; ahead_place (process, thread),
    ahead_forks, ahead_depth, ahead_threads, ahead_fallback (drafters to ask on a miss), ahead_wait, ahead_always,
    ahead_noise, ahead_c (Saguaro's C, under `reject` and `block`)."""

    traits = Traits(
        options=(
            "draft_model", "assistant_model", "draft_dtype", "draft_device", "skip_layers", "head", "ahead_place",
            "ahead_forks", "ahead_depth", "ahead_threads", "ahead_fallback", "ahead_wait", "ahead_always",
            "ahead_noise", "ahead_c",
        ),
        trial=lambda target: trial_options(target),
    )  # fmt: skip

    def __init__(self, space: Workspace) -> None:
        self.space = space
        self.most = whole(space, "ahead_forks", FORKS, 1, 64)
        self.fixed = whole(space, "ahead_depth", 0, 0, DEPTH)  # 0: as deep as pays
        names = space.option("ahead_fallback", default="suffix,ngram")
        names = [name.strip() for name in names.split(",") if name.strip()] if isinstance(names, str) else list(names)
        if "ahead" in names:
            raise ConfigError("ahead_fallback names 'ahead' itself; choose drafters that are ready at once.")
        space_for = replace(space, options=space.options | {"cascade": names})
        self.fallback: Drafter | None = Cascade(space_for) if names else None
        self.post = posted(space)
        if self.post.features is not None and "head" in names:
            raise ConfigError("ahead_fallback names 'head', which drafts ahead itself; choose another, or none.")
        self.taps = tuple(sorted({*self.post.taps, *(self.fallback.traits.taps if self.fallback else ())}))
        self.own, always = self.post.own, bool(space.option("ahead_always", default=False))
        self.account, self.worth = Account(), Worth(always, first=always or self.own is None)
        self.share = share(space, "ahead_c")
        self.place = self.post.place
        self.helpers = [drafter for drafter in (self.fallback, self.own) if drafter is not None]
        self.sources = ("ahead", "ahead:now", *([self.own.name] if self.own else ()))  # of drafts that are our own
        self.lines = Lines(self.place.mail)
        self.clock: Callable[[], float] = time.perf_counter
        self.flight: dict[int, Asked] = {}  # by sequence: what is being prepared for
        self.asked: set[int] = set()  # sequences that a draft was asked for in this step
        self.request = DraftRequest([], [])  # of the step at hand
        self.rounds: list[Round] = []  # that were taken for this step's draft
        self.k = 0  # the largest budget of late
        self.verify = 0.0  # seconds of a pass of the target
        self.patience = float(space.option("ahead_wait", default=WAIT))  # before the first request, and only there
        self.heard, self.recorded = (-2, 0.0), 0  # the last step, and when; passes that the worker has recorded
        if self.own is None:  # else it is beside the target, whose passes are timed first
            self.place.tend()
        self.traits = replace(self.traits, taps=self.taps, memory=self._memory)
        self._update_traits()

    def _update_traits(self) -> None:
        """Whether it prepares now: a pass in a thread of its own is slower than one that is waited for."""
        overlaps = bool(self.fallback and self.fallback.traits.overlaps) or (bool(self.asked) and self._prepares)
        mode = "ahead" if self._prepares else "just in time"
        if (overlaps, mode) != (self.traits.overlaps, self.traits.mode):
            self.traits = replace(self.traits, overlaps=overlaps, mode=mode)

    @property
    def _prepares(self) -> bool:
        return self.worth.ahead and self.place.ready

    def _memory(self) -> Memory:
        weights, kv = map(int, self.place.mail["bytes"])
        if self.fallback:
            more = self.fallback.traits.memory()
            weights, kv = weights + more.weights, kv + more.kv
        return Memory(weights, kv + (self.own.traits.memory().kv if self.own else 0))

    # ------------------------------------------------------------ the verbs

    def begin(self, seq: Sequence) -> None:
        if self.patience:  # the first request of all waits until the draft model is read
            self.place.ready_within(self.patience, deaths=1)
            self.patience = 0.0
            self._update_traits()
        for drafter in self.helpers:
            drafter.begin(seq)

    def draft(self, request: DraftRequest) -> Draft:
        self.place.tend()
        self.request, seqs, budget = request, request.seqs, request.budgets
        self.asked, self.k = {seq.id for seq in seqs}, max(budget, default=0)
        trees, self.rounds = [Tree([], [])] * len(seqs), []
        self._take(seqs, budget, trees)
        unread = self._fall_back(seqs, budget, trees)
        unread = self._ordinary(seqs, budget, trees, unread)
        self._just_in_time(seqs, budget, trees)
        self.account.fallbacks += sum(bool(tree.tokens) and tree.source not in self.sources for tree in trees)
        self._update_traits()
        return Draft.pack(trees, unread)

    def overlap(self, seqs: list[Sequence], draft: Draft) -> None:
        """Ask for preparations; nobody waits for them here."""
        asked, self.asked, self.flight = self.asked, set(), {}
        if self.fallback and self.fallback.traits.overlaps:
            self.fallback.overlap(seqs, draft)
        if not self._prepares:
            return
        pairs = [(seq, trunk(tree)) for seq, tree in zip(seqs, draft.trees, strict=True) if seq.id in asked]
        wishes = [
            Wish(seq, drafted, self.account.forks(len(drafted), self.most))
            for seq, drafted in pairs
            if (self.post.repeats or not draws(seq)) and drafted is not None and seq.room > 2 and self._shown(seq)
        ]
        if wishes:  # what is drawn must not depend on what takes how long, nor may its length
            fixed = any(draws(wish.seq) for wish in wishes)
            self.flight = self.lines.ask(wishes, min(self.k, DEPTH) if fixed else self.depth, tilt=self._tilt)
            self.place.post()

    def observe(self, step: Step) -> None:
        now = self.clock()  # before anybody goes on: what that takes is the next step's
        if self.post.features is not None:
            self.post.features.observe(step)
            self.post.features.tidy(self.space.cache.rows.keys())
        for drafter in self.helpers:
            drafter.observe(step)
        decoded = [verdict for verdict in step.verdicts if verdict is not None]
        for tree, verdict in zip(step.draft.trees, step.verdicts, strict=True):
            if verdict is not None and tree.is_chain:
                accepted = len(verdict.path)
                self.account.verdict(accepted, min(accepted + 1, len(tree.tokens)))
        if decoded and all(turn.feed == 1 for turn in step.turns):
            took = step.clock["verify"]
            self.verify += 0.1 * (min(took, 3 * self.verify) - self.verify) if self.verify else took
            recorded, self.recorded = self.recorded, self.place.mail.one("recorded")
            if step.index == self.heard[0] + 1 and recorded == self.recorded:  # by the wall: it alone knows all
                tokens = sum(len(verdict.tokens) for verdict in decoded)
                seconds = now - self.heard[1] - step.clock.get("record", 0.0)  # what happens once is no price
                self.worth.took(len(decoded), self._prepares, tokens, seconds, bool(self.flight))
        self.heard = step.index, now
        self._update_traits()

    def end(self, seq: Sequence) -> None:
        self.flight.pop(seq.id, None)
        self.lines.drop(seq.id)
        if self.post.features is not None:
            self.post.features.drop(seq.id)
        for drafter in self.helpers:
            drafter.end(seq)

    def inherit(self, old: Drafter) -> None:
        """Keep what was learnt, and the draft model in memory; a head's thread has seen the old engine, so it goes."""
        if isinstance(old, Ahead):
            self.account, self.worth = old.account, old.worth
            unused = old.place if self.post.features is not None else self.place
            unused.close()
            if unused is self.place:
                self.place, self.lines = old.place, Lines(old.place.mail)
                self.lines.edition = old.lines.edition
            if self.fallback and old.fallback:
                self.fallback.inherit(old.fallback)

    def notes(self) -> dict[str, Any]:
        place = self.place
        where = {"place": place.kind, "ready": place.ready, "starts": place.starts, "deaths": place.deaths}
        return {
            "ahead": where
            | {"bypassed": place.bypassed, "trouble": place.trouble, "pays": self.worth.ahead, "why": self.why}
            | self.account.as_json()
        }

    @property
    def why(self) -> str:
        """Whether it pays, in words."""
        if not self.place.ready:
            trouble = f": {self.place.trouble}" if self.place.trouble else ""
            state = "it starts or is late" if self.place.bell else "it ended"
            instead = "only the fallback drafts" if self.own is None else "drafts are made just in time"
            return f"the draft model is not there ({state}{trouble}): {instead}"
        return self.worth.why

    # ------------------------------------------------------------ where drafts come from

    def _take(self, seqs: list[Sequence], budget: list[int], trees: list[Tree]) -> None:
        """What was prepared for what has come true."""
        flight, self.flight = self.flight if self._prepares else {}, {}  # what is free must not pass for just in time
        due: dict[int, tuple[Asked, Outcome]] = {}
        for i, seq in enumerate(seqs):
            asked = flight.get(seq.id)
            outcome = asked.outcome(seq.tokens) if asked else None
            if asked and outcome:
                due[i] = asked, outcome
        if not due:
            return
        mail, rows, waited, became = self.place.mail, {}, self.clock(), []
        if not self._wait(0):
            self.account.late += len(due)
        else:
            for i, (asked, outcome) in due.items():
                self.account.outcome(outcome.accepted, len(asked.trunk), *rank(mail, outcome))
                row = find(mail, outcome)
                became.append((outcome.accepted, len(asked.trunk), row is not None))
                if row is not None:
                    rows[i] = row
            self._wait(min([mail.one("depth"), *(max(budget[i] for i in rows) for _ in rows)]) if rows else 0)
        self.account.exposed += self.clock() - waited
        self._note(waited, became)
        deep = mail.one("published") if self.place.has(0) else 0
        if self.place.has(0):
            seconds, first, deeper = mail["seconds"].tolist()
            self.account.round(seconds, first, deeper, deep)
        for i, row in rows.items():
            trees[i] = self._chain(seqs[i], row, min(deep, budget[i]))

    def _fall_back(self, seqs: list[Sequence], budget: list[int], trees: list[Tree]) -> Any:
        """Drafters that are ready at once, for those who have nothing; what they left unread."""
        open_ = [i for i, tree in enumerate(trees) if not tree.tokens and not (draws(seqs[i]) and self.place.ready)]
        if not open_ or self.fallback is None:
            return None
        answer = self.fallback.draft(self.request.select(open_))
        for i, tree in zip(open_, answer.trees, strict=True):
            trees[i] = tree
        return answer.unread

    def _ordinary(self, seqs: list[Sequence], budget: list[int], trees: list[Tree], unread: Any) -> Any:
        """The same drafter in the engine's own stream, as if nobody had ever thought of drafting ahead.

        Only where nothing is being prepared: what it drafts on a GPU is unread, and nobody could prepare for it. And
        only where tokens are matched: what is drawn must not depend on what pays.
        """
        if self.own is None or self._prepares:
            return unread
        open_ = [i for i, tree in enumerate(trees) if weak(tree) and budget[i] and not draws(seqs[i])]
        if not open_:
            return unread
        begin = self.clock()
        answer = self.own.draft(self.request.select(open_))
        for i, tree in zip(open_, answer.trees, strict=True):
            trees[i] = tree if tree.tokens else trees[i]
            self.account.jits += bool(tree.tokens)
        self.account.jit += self.clock() - begin
        return unread if answer.unread is None else answer.unread

    def _just_in_time(self, seqs: list[Sequence], budget: list[int], trees: list[Tree]) -> None:
        """A chain for those who have nothing good yet, now. A prompt is read while the target reads it, not before."""
        open_ = [i for i, tree in enumerate(trees) if weak(tree) and budget[i] and seqs[i].generated]
        open_ = [i for i in open_ if self._shown(seqs[i]) and (self.own is None or self._prepares or draws(seqs[i]))]
        if not open_ or not self.place.ready:
            return
        begin, depth = self.clock(), min(max(budget[i] for i in open_) - 1, DEPTH)
        if self._prepares and self.request.prices is not None and not any(draws(seqs[i]) for i in open_):
            depth = min(depth, self.account.now_depth(self.verify, depth))  # budgets are for what is prepared
        asked = self.lines.ask([Wish(seqs[i], [], [1]) for i in open_], depth, now=True, tilt=self._tilt)
        self.place.post()
        if asked and self._wait(depth):
            mail = self.place.mail
            rows = {int(key[0]): row for row, key in enumerate(mail["keys"][: mail.one("count")])}
            for i in open_:
                row = rows.get(asked[seqs[i].id].line) if seqs[i].id in asked else None
                if row is not None:
                    trees[i] = self._whole_chain(seqs[i], row, min(depth, budget[i] - 1))
                    self.account.jits += 1
        self._note(begin, now=True)
        self.account.just_in_time(self.clock() - begin, depth + 1)

    def _note(self, waited: float, became: Iterable[tuple[int, int, bool]] = (), now: bool = False) -> None:
        mail = self.place.mail
        times = tuple(mail["times"][: mail.one("published") + 2].tolist()) if self.place.has(0) else ()
        span = (waited, self.clock())
        self.rounds.append(Round(self.place.posted, times, span, mail.one("depth"), tuple(became), now))

    def _chain(self, seq: Sequence, row: int, length: int) -> Tree:
        mail = self.place.mail
        survival = mail["survival"][row, :length].tolist()
        q = self._laws(row, range(1, length + 1)) if draws(seq) else None
        return chain(mail["chains"][row, :length].tolist(), survival, q, "ahead")

    def _whole_chain(self, seq: Sequence, row: int, length: int) -> Tree:
        """The outcome's own token, too: nobody has said it yet."""
        mail, after = self.place.mail, self._chain(seq, row, length)
        odds = float(mail["odds"][row])
        survival = [odds, *(odds * chance for chance in after.survival or ())]
        q = self._laws(row, range(length + 1)) if draws(seq) else None
        return chain([int(mail["keys"][row, 2]), *after.tokens], survival, q, "ahead:now")

    def _laws(self, row: int, places: range) -> Tensor:
        """What these tokens were drawn from. [n, V]"""
        return read_laws(self.place.mail, row, places, self.space.target.config.vocab_size)

    def _shown(self, seq: Sequence) -> bool:
        """Whether a head has seen what it begins with: what the target saw at the token before the last."""
        features, last = self.post.features, len(seq.tokens) - 2
        seen = last >= 0 and self.space.plane.holds(seq.id) > last
        return features is None or (seen and features.known(seq.id, last))

    @property
    def _tilt(self) -> Tilt:
        return Tilt(max(round(self.most / (self.k + 1)), 1), self.share)

    def _wait(self, depth: int) -> bool:
        usual = self.account.first + depth * self.account.deeper
        return self.place.wait(depth, min(max(LENIENT * usual, SOONEST), LATEST) if usual else LATEST)

    @property
    def depth(self) -> int:
        """As deep as pays, and as anybody asks for; at least one."""
        wanted = max(min(self.k, DEPTH), 1)
        return min(wanted, self.fixed or self.account.depth(self.verify, wanted) or 2)


def weak(tree: Tree) -> bool:
    """Nothing, or next to nothing. What was prepared is never weak: it has been paid for."""
    if not tree.tokens or tree.source == "ahead":
        return not tree.tokens
    return tree.survival is not None and tree.survival[0] < WEAK


def trunk(tree: Tree) -> list[int] | None:
    """The draft's leading path: what is most likely accepted. None where nobody here knows its tokens."""
    path, at = [], -1
    for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
        if token < 0:
            return None
        if parent == at:
            path.append(token)
            at = node
    return path[:TRUNK]
