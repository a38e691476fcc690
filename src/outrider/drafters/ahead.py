"""Draft the next round while the target verifies this one (speculative speculative decoding, arXiv 2603.03251).

While the target is busy with a draft, a draft model prepares for what may become of it: so many tokens accepted, then
this token of the target's own. When the verdict is an outcome that was prepared for, the next draft is there at once,
and drafting has cost no time. Else the sequence (not the batch) falls back: to a free drafter that has something to
say, or to a draft made just in time.

It promises what every drafter does. Besides, it never waits for a draft model longer than a deadline: one that hangs is
bypassed, one that dies is started anew, and the text goes on meanwhile. The model runs in a process of its own (on
other cores, or another GPU), or in a thread; it sees ids, never the target's states, so trained heads cannot be
wrapped: they can be the fallback. Forks are for the rule `match`; under `reject` and `block` what is drafted must not
depend on what took how long, so drafts are made just in time there.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ..ahead.account import Account
from ..ahead.forks import Forker
from ..ahead.lines import Asked, Lines, Wish
from ..ahead.mail import DEPTH, TRUNK, Outcome, Sizes, find, rank
from ..ahead.place import Place, Process, Thread
from ..ahead.worth import Worth
from ..errors import ConfigError
from ..models import Model, Part, device_of
from ..models.weigh import weigh
from ..types import Draft, Sequence, Step, Tree, chain
from . import Drafter, Memory, Workspace, register
from .cascade import Cascade
from .model import load_draft_model, opened

WAIT = 30.0  # seconds to wait for the draft model to be read, before the first request
FORKS = 8  # outcomes prepared for, for each sequence
ROWS = 24  # outcomes of an answer for each line of the table, at most
SOONEST, LATEST = 0.1, 2.0  # seconds of a deadline
WEAK = 0.35  # a fallback's draft whose first token is less likely than this gives way to the draft model's
LENIENT = 8.0  # times what an answer usually takes


@register("ahead")
class Ahead(Drafter):
    """Options: draft_model, draft_dtype, draft_device, skip_layers; ahead_place (process, thread), ahead_forks,
    ahead_depth, ahead_threads, ahead_fallback (drafters to ask on a miss), ahead_wait, ahead_always, ahead_noise."""

    takes = (
        "draft_model", "assistant_model", "draft_dtype", "draft_device", "skip_layers", "ahead_place", "ahead_forks",
        "ahead_depth", "ahead_threads", "ahead_fallback", "ahead_wait", "ahead_always", "ahead_noise",
    )  # fmt: skip

    def __init__(self, space: Workspace) -> None:
        super().__init__(space)
        self.most = _whole(space, "ahead_forks", FORKS, 1, 64)
        self.fixed = _whole(space, "ahead_depth", 0, 0, DEPTH)  # 0: as deep as pays
        names = space.option("ahead_fallback", default="suffix,ngram")
        names = [name.strip() for name in names.split(",") if name.strip()] if isinstance(names, str) else list(names)
        if "ahead" in names:
            raise ConfigError("ahead_fallback names 'ahead' itself; choose drafters that are ready at once.")
        space_for = replace(space, options=space.options | {"cascade": names})
        self.fallback: Drafter | None = Cascade(space_for) if names else None
        self.taps = self.fallback.taps if self.fallback else ()
        self.account, self.worth = Account(), Worth(bool(space.option("ahead_always", default=False)))
        self.place = _place(space)
        self.lines = Lines(self.place.mail)
        self.clock: Callable[[], float] = time.perf_counter
        self.flight: dict[int, Asked] = {}  # by sequence: what is being prepared for
        self.asked: set[int] = set()  # sequences that a draft was asked for in this step
        self.k = 0  # the largest budget of late
        self.verify = 0.0  # seconds of a pass of the target
        self.patience = float(space.option("ahead_wait", default=WAIT))  # before the first request, and only there
        self.heard = (-2, 0.0)  # the last step, and when
        self.place.tend()

    @classmethod
    def trial_options(cls, target: Model) -> dict[str, Any]:
        return {"draft_model": target}  # the target as its own drafter, in a thread

    @property
    def overlaps(self) -> bool:
        """Only in steps that prepare something: a pass in a thread of its own is slower than one that is waited for."""
        return bool(self.fallback and self.fallback.overlaps) or (bool(self.asked) and self._prepares)

    @property
    def _prepares(self) -> bool:
        return self.worth.ahead and self.place.ready

    @property
    def added_memory(self) -> Memory:
        own = self.fallback.added_memory if self.fallback else Memory()
        weights, kv = map(int, self.place.mail["bytes"])
        return Memory(own.weights + weights, own.kv + kv)

    # ------------------------------------------------------------ the verbs

    def load(self) -> None:
        self.place.ready_within(self.patience, deaths=1)

    def begin(self, seq: Sequence) -> None:
        if self.fallback:
            self.fallback.begin(seq)

    def draft(self, seqs: list[Sequence], budget: list[int]) -> Draft:
        self.place.tend()
        self.asked, self.k = {seq.id for seq in seqs}, max(budget, default=0)
        trees = [Tree([], [])] * len(seqs)
        self._take(seqs, budget, trees)
        unread = self._fall_back(seqs, budget, trees)
        self._just_in_time(seqs, budget, trees)
        self.account.fallbacks += sum(bool(tree.tokens) and not tree.source.startswith("ahead") for tree in trees)
        return Draft.pack(trees, unread)

    def overlap(self, seqs: list[Sequence], draft: Draft) -> None:
        """Ask for preparations; nobody waits for them here."""
        asked, self.asked, self.flight = self.asked, set(), {}
        if self.fallback and self.fallback.overlaps:
            self.fallback.overlap(seqs, draft)
        if not self._prepares:
            return
        pairs = [(seq, trunk(tree)) for seq, tree in zip(seqs, draft.trees, strict=True) if seq.id in asked]
        wishes = [
            Wish(seq, drafted, self.account.forks(len(drafted), self.most))
            for seq, drafted in pairs
            if seq.rule == "match" and drafted is not None and seq.room > 2
        ]
        if wishes:
            self.flight = self.lines.ask(wishes, self.depth)
            self.place.post()

    def observe(self, step: Step) -> None:
        if self.fallback:
            self.fallback.observe(step)
        now, decoded = self.clock(), [verdict for verdict in step.verdicts if verdict is not None]
        for tree, verdict in zip(step.draft.trees, step.verdicts, strict=True):
            if verdict is not None and tree.is_chain:
                accepted = len(verdict.path)
                self.account.verdict(accepted, min(accepted + 1, len(tree.tokens)))
        if decoded and all(turn.feed == 1 for turn in step.turns):
            took = step.clock["verify"]
            self.verify += 0.1 * (min(took, 3 * self.verify) - self.verify) if self.verify else took
            if step.index == self.heard[0] + 1:  # by the wall: it alone knows all that a step took, on every device
                tokens = sum(len(verdict.tokens) for verdict in decoded)
                self.worth.took(len(decoded), bool(self.flight), tokens, now - self.heard[1])
        self.heard = step.index, now

    def end(self, seq: Sequence) -> None:
        self.flight.pop(seq.id, None)
        self.lines.drop(seq.id)
        if self.fallback:
            self.fallback.end(seq)

    def inherit(self, old: Drafter) -> None:
        """Keep what was learnt, and the draft model that is in memory already."""
        if isinstance(old, Ahead):
            self.place.close()
            self.place, self.account, self.worth = old.place, old.account, old.worth
            self.lines = Lines(self.place.mail)
            self.lines.edition = old.lines.edition
            if self.fallback and old.fallback:
                self.fallback.inherit(old.fallback)

    def notes(self) -> dict[str, Any]:
        place = self.place
        where = {"place": place.kind, "ready": place.ready, "starts": place.starts, "deaths": place.deaths}
        return {
            "ahead": where
            | {"bypassed": place.bypassed, "trouble": place.trouble, "why": self.why}
            | self.account.as_json()
        }

    @property
    def why(self) -> str:
        """Whether it pays, in words."""
        if not self.place.ready:
            trouble = f": {self.place.trouble}" if self.place.trouble else ""
            state = "it starts or is late" if self.place.bell else "it ended"
            return f"the draft model is not there ({state}{trouble}): only the fallback drafts"
        return self.worth.why

    # ------------------------------------------------------------ where drafts come from

    def _take(self, seqs: list[Sequence], budget: list[int], trees: list[Tree]) -> None:
        """What was prepared for what has come true."""
        flight, self.flight = self.flight, {}
        due: dict[int, tuple[Asked, Outcome]] = {}
        for i, seq in enumerate(seqs):
            asked = flight.get(seq.id)
            outcome = asked.outcome(seq.tokens) if asked else None
            if asked and outcome:
                due[i] = asked, outcome
        if not due:
            return
        mail, rows, waited = self.place.mail, {}, self.clock()
        if not self._wait(0):
            self.account.late += len(due)
        else:
            for i, (asked, outcome) in due.items():
                self.account.outcome(outcome.accepted, len(asked.trunk), *rank(mail, outcome))
                row = find(mail, outcome)
                if row is not None:
                    rows[i] = row
            self._wait(min([mail.one("depth"), *(max(budget[i] for i in rows) for _ in rows)]) if rows else 0)
        self.account.exposed += self.clock() - waited
        deep = mail.one("published") if self.place.has(0) else 0
        if self.place.has(0):
            seconds, first, deeper = mail["seconds"].tolist()
            self.account.round(seconds, first, deeper, deep)
        for i, row in rows.items():
            trees[i] = self._chain(row, min(deep, budget[i]), "ahead")

    def _fall_back(self, seqs: list[Sequence], budget: list[int], trees: list[Tree]) -> Any:
        """Drafters that are ready at once, for those who have nothing; what they left unread."""
        open_ = [i for i, tree in enumerate(trees) if not tree.tokens]
        if not open_ or self.fallback is None:
            return None
        self.fallback.stop_below = self.stop_below
        answer = self.fallback.draft([seqs[i] for i in open_], [budget[i] for i in open_])
        for i, tree in zip(open_, answer.trees, strict=True):
            trees[i] = tree
        return answer.unread

    def _just_in_time(self, seqs: list[Sequence], budget: list[int], trees: list[Tree]) -> None:
        """A chain for those who have nothing good yet, now. A prompt is read while the target reads it, not before."""
        open_ = [i for i, tree in enumerate(trees) if weak(tree) and budget[i] and seqs[i].generated]
        if not open_ or not self.place.ready:
            return
        begin, depth = self.clock(), min(max(budget[i] for i in open_) - 1, DEPTH)
        asked = self.lines.ask([Wish(seqs[i], [], [1]) for i in open_], depth)
        self.place.post()
        if asked and self._wait(depth):
            mail = self.place.mail
            rows = {int(key[0]): row for row, key in enumerate(mail["keys"][: mail.one("count")])}
            for i in open_:
                row = rows.get(asked[seqs[i].id].line) if seqs[i].id in asked else None
                if row is not None:
                    trees[i] = self._whole_chain(row, min(depth, budget[i] - 1))
                    self.account.jits += 1
        self.account.jit += self.clock() - begin

    def _chain(self, row: int, length: int, source: str) -> Tree:
        mail = self.place.mail
        survival = mail["survival"][row, :length].tolist()
        return chain(mail["chains"][row, :length].tolist(), survival, source=source)

    def _whole_chain(self, row: int, length: int) -> Tree:
        """The outcome's own token, too: nobody has said it yet."""
        mail, after = self.place.mail, self._chain(row, length, "ahead:now")
        odds = float(mail["odds"][row])
        survival = [odds, *(odds * chance for chance in after.survival or ())]
        return chain([int(mail["keys"][row, 2]), *after.tokens], survival, source=after.source)

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


def _place(space: Workspace) -> Place:
    """A process where the draft model is a file, a thread where it is in memory already."""
    wanted = space.option("draft_model", "assistant_model", default=None)
    if wanted is None:
        raise ConfigError("The drafter 'ahead' needs a draft model: give --draft-model PATH (or draft_model=…).")
    in_memory = not isinstance(wanted, str) and hasattr(wanted, "forward")
    kind = space.option("ahead_place", default="thread" if in_memory else "process")
    skip = frozenset(int(number) for number in space.option("skip_layers", default=()))
    lines, length, slots = space.cache.table.shape[0], space.cache.length, space.cache.slots
    sizes = Sizes(lines, length, lines * ROWS)
    noised = bool(space.option("ahead_noise", default=True))
    if kind == "process":
        if in_memory:
            raise ConfigError(
                "A process reads its draft model from a file: give draft_model=PATH, or ahead_place=thread."
            )
        checkpoint = opened(space, wanted)
        spec = {
            "model": str(wanted), "dtype": str(space.option("draft_dtype", default="auto")),
            "device": str(space.option("draft_device", default="cpu")), "threads": _threads(space), "slots": slots,
            "lines": lines, "length": min(length, checkpoint.config.context_length), "skip_layers": sorted(skip),
            "noised": noised,
        }  # fmt: skip
        return Process(sizes, spec)
    if kind != "thread":
        raise ConfigError(f"There is no ahead_place '{kind}'; choose process or thread.")
    model, part = load_draft_model(space), Part(skip_attention=skip, skip_mlp=skip)
    if device_of(model).type != "cpu":
        raise ConfigError("A draft model on a GPU drafts ahead from a process of its own: leave ahead_place out.")

    def make() -> Forker:
        forker = Forker(model, slots, lines, length, part)
        forker.noised = noised
        return forker

    place = Thread(sizes, make)
    place.mail["bytes"][0] = weigh(model, beside=space.target)
    return place


def _threads(space: Workspace) -> int:
    """Beside a target on the CPU one core, beside one on a GPU half of them."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return _whole(space, "ahead_threads", 1 if device_of(space.target).type == "cpu" else max(cores // 2, 1), 1, 1024)


def _whole(space: Workspace, name: str, default: int, low: int, high: int) -> int:
    value = space.option(name, default=default)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(f"{name} is {value!r}, but it must be a whole number from {low} to {high}.")
    return value
