"""Draft the next round while the target verifies this one (speculative speculative decoding, arXiv 2603.03251).

While the target verifies a draft, a draft model prepares for its possible outcomes: a number of accepted tokens, then
one token of the target. If the verdict is one of these, the next draft is ready and took no time. Otherwise the
sequence (not the batch) gets a draft from a free fallback drafter, or one made just in time.

Besides the promises of every drafter: no step waits for the draft model longer than a deadline. A model that hangs is
bypassed, one that dies is restarted, and decoding continues meanwhile. Where the model runs is decided in `setup`.

Under `reject` and `block` the sampled tokens depend on the position alone, so a prepared draft equals one made just in
time, and the same seed gives the same text. A head has more hidden states just in time, so there it only drafts then.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from ...errors import ConfigError
from ...types import Draft, Sequence, Step, Tree, chain
from .. import Drafter, DraftRequest, Memory, Traits, Workspace, register
from ..cascade import Cascade
from .forks import Tilt, needs_q
from .setup import draft_source, number_option, trial_options
from .shared_queue import MAX_DEPTH, MAX_TRUNK, Channel, OutcomeRequest, SentRequest
from .statistics import AheadStatistics, OutcomeFacts, Profitability, RoundTimes, smoothed

LOAD_WAIT = 30.0  # seconds that the first request waits for the draft model to be read
FORKS = 8  # outcomes prepared for, per sequence
MIN_DEADLINE, MAX_DEADLINE = 0.1, 2.0  # seconds
DEADLINE_FACTOR = 8.0  # a deadline is this many times the usual response time
WEAK = 0.35  # a fallback's draft whose first token is less likely than this is replaced by the draft model's


@register("ahead")
class Ahead(Drafter):
    """Options: draft_model, draft_dtype, draft_device, skip_layers; or head; ahead_place (process, thread),
    ahead_forks, ahead_depth, ahead_threads, ahead_fallback (drafters used on a miss), ahead_wait, ahead_always,
    ahead_noise, ahead_c (Saguaro's C, under `reject` and `block`)."""

    traits = Traits(
        options=(
            "draft_model", "assistant_model", "draft_dtype", "draft_device", "skip_layers", "head", "ahead_place",
            "ahead_forks", "ahead_depth", "ahead_threads", "ahead_fallback", "ahead_wait", "ahead_always",
            "ahead_noise", "ahead_c",
        ),
        trial=trial_options,
    )  # fmt: skip

    def __init__(self, space: Workspace) -> None:
        super().__init__(space)
        self.max_forks = number_option(space, "ahead_forks", FORKS, 1, 64)
        self.fixed_depth = number_option(space, "ahead_depth", 0, 0, MAX_DEPTH)  # 0: as deep as pays
        self.fork_share = number_option(space, "ahead_c", 1.0, 0, 1)
        names = space.option("ahead_fallback", default="suffix,ngram")
        names = [name.strip() for name in names.split(",") if name.strip()] if isinstance(names, str) else list(names)
        if "ahead" in names:
            raise ConfigError("ahead_fallback names 'ahead' itself; choose drafters that are ready at once.")
        options = space.options | {"cascade": names}
        self.fallback: Drafter | None = Cascade(replace(space, options=options)) if names else None
        self.source = draft_source(space)
        self.host, self.inline = self.source.host, self.source.inline
        if self.source.features is not None and "head" in names:
            raise ConfigError("ahead_fallback names 'head', which drafts ahead itself; choose another, or none.")
        self.inner = [drafter for drafter in (self.fallback, self.inline) if drafter is not None]
        self.own_sources = ("ahead", "ahead:now", *([self.inline.name] if self.inline else ()))
        always = bool(space.option("ahead_always", default=False))
        self.statistics = AheadStatistics()
        self.profitability = Profitability(always, first=always or self.inline is None)
        self.channel = Channel(self.host.queue)
        self.clock: Callable[[], float] = time.perf_counter
        self.in_flight: dict[int, SentRequest] = {}  # by sequence id: what is being prepared for
        self.request = DraftRequest([], [])  # of the current step
        self.requested: set[int] = set()  # ids of its sequences
        self.rounds: list[RoundTimes] = []  # used for the current step's draft
        self.k, self.tilt = 0, Tilt()  # its largest budget; how q is adapted
        self.verify = 0.0  # seconds of a target pass, recently
        self.load_wait = float(space.option("ahead_wait", default=LOAD_WAIT))
        self.last_step, self.recorded = (-2, 0.0), 0  # its index and end; passes that the worker has recorded
        if self.inline is None:  # else the worker shares the target's device, and the target's passes are timed first
            self.host.supervise()
        taps = {*self.source.taps, *(self.fallback.traits.taps if self.fallback else ())}
        self.traits = replace(self.traits, taps=tuple(sorted(taps)), memory=self._memory)
        self._update_traits()

    def _update_traits(self) -> None:
        """`overlaps` only while it prepares: a pass in a thread of its own is slower than one that is waited for."""
        overlaps = bool(self.fallback and self.fallback.traits.overlaps) or (bool(self.requested) and self._prepares)
        mode = "ahead" if self._prepares else "just in time"
        if (overlaps, mode) != (self.traits.overlaps, self.traits.mode):
            self.traits = replace(self.traits, overlaps=overlaps, mode=mode)

    @property
    def _prepares(self) -> bool:
        return self.profitability.ahead and self.host.ready

    def _memory(self) -> Memory:
        weights, kv = map(int, self.host.queue["bytes"])
        fallback = self.fallback.traits.memory() if self.fallback else Memory()
        inline = self.inline.traits.memory() if self.inline else Memory()  # with the same weights
        return Memory(weights + fallback.weights, kv + fallback.kv + inline.kv)

    def begin(self, seq: Sequence) -> None:
        if self.load_wait:  # only before the first sequence
            self.host.wait_ready(self.load_wait, deaths=1)
            self.load_wait = 0.0
            self._update_traits()
        for drafter in self.inner:
            drafter.begin(seq)

    def draft(self, request: DraftRequest) -> Draft:
        self.host.supervise()
        self.request, self.k = request, max(request.budgets, default=0)
        self.requested, self.rounds = {seq.id for seq in request.seqs}, []
        self.tilt = Tilt(max(round(self.max_forks / (self.k + 1)), 1), self.fork_share)
        trees = [Tree([], [])] * len(request.seqs)
        self._take_prepared(trees)
        unread = self._fall_back(trees)
        unread = self._draft_inline(trees, unread)
        self._draft_by_worker(trees)
        self.statistics.fallbacks += sum(bool(t.tokens) and t.source not in self.own_sources for t in trees)
        self._update_traits()
        return Draft.pack(trees, unread)

    def overlap(self, seqs: list[Sequence], draft: Draft) -> None:
        """Request preparations for the draft under verification, without waiting for them."""
        requested, self.requested, self.in_flight = self.requested, set(), {}
        if self.fallback and self.fallback.traits.overlaps:
            self.fallback.overlap(seqs, draft)
        if not self._prepares:
            return
        trunks = [(seq, trunk(tree)) for seq, tree in zip(seqs, draft.trees, strict=True) if seq.id in requested]
        requests = [
            OutcomeRequest(seq, tokens, self.statistics.forks(len(tokens), self.max_forks))
            for seq, tokens in trunks
            if (self.source.features is None or not needs_q(seq)) and tokens is not None
            and seq.room > 2 and self._has_features(seq)
        ]  # fmt: skip
        if requests:
            depth = min(self.k, MAX_DEPTH)
            if not any(needs_q(request.seq) for request in requests):  # a sampled draft must not depend on times
                limit = max(depth, 1)
                depth = min(limit, self.fixed_depth or self.statistics.best_depth(self.verify, limit) or 2)
            self.in_flight = self.channel.request(requests, depth, tilt=self.tilt)
            self.host.submit()

    def observe(self, step: Step) -> None:
        now = self.clock()  # before the inner drafters, whose time belongs to the next step
        if self.source.features is not None:
            self.source.features.observe(step)
            self.source.features.retain(self.space.cache.rows.keys())
        for drafter in self.inner:
            drafter.observe(step)
        for tree, verdict in zip(step.draft.trees, step.verdicts, strict=True):
            if verdict is not None and tree.is_chain:
                accepted = len(verdict.path)
                self.statistics.add_verdict(accepted, min(accepted + 1, len(tree.tokens)))
        decoded = [verdict for verdict in step.verdicts if verdict is not None]
        if decoded and all(turn.feed == 1 for turn in step.turns):
            self.verify = smoothed(self.verify, step.clock["verify"])
            recorded, self.recorded = self.recorded, self.host.queue.scalar("recorded")
            if step.index == self.last_step[0] + 1 and recorded == self.recorded:
                tokens = sum(len(verdict.tokens) for verdict in decoded)
                seconds = now - self.last_step[1] - step.clock.get("record", 0.0)  # wall time, without recordings
                self.profitability.add_step(len(decoded), self._prepares, tokens, seconds, bool(self.in_flight))
        self.last_step = step.index, now
        self._update_traits()

    def end(self, seq: Sequence) -> None:
        self.in_flight.pop(seq.id, None)
        self.channel.drop(seq.id)
        if self.source.features is not None:
            self.source.features.drop(seq.id)
        for drafter in self.inner:
            drafter.end(seq)

    def inherit(self, old: Drafter) -> None:
        """Keep statistics and a loaded draft model; a head's worker has seen the old engine's states and is ended."""
        if isinstance(old, Ahead):
            self.statistics, self.profitability = old.statistics, old.profitability
            unused = old.host if self.source.features is not None else self.host
            unused.close()
            if unused is self.host:
                self.host, self.channel = old.host, Channel(old.host.queue)
                self.channel.version = old.channel.version
            if self.fallback and old.fallback:
                self.fallback.inherit(old.fallback)

    def notes(self) -> dict[str, Any]:
        host = self.host
        facts = {
            "place": host.kind, "ready": host.ready, "starts": host.starts, "deaths": host.deaths,
            "bypassed": host.bypassed, "trouble": host.trouble, "pays": self.profitability.ahead, "why": self.why,
        }  # fmt: skip
        return {"ahead": facts | self.statistics.as_json()}

    @property
    def why(self) -> str:
        """The current mode and its reason."""
        if self.host.ready:
            return self.profitability.why
        state = "it is starting or late" if self.host.to_worker else "it ended"
        reason = f": {self.host.trouble}" if self.host.trouble else ""
        instead = "only the fallback drafts" if self.inline is None else "drafts are made just in time"
        return f"the draft model is not available ({state}{reason}): {instead}"

    def _take_prepared(self, trees: list[Tree]) -> None:
        """Drafts that were prepared for the outcomes that occurred."""
        # In the other mode a draft that took no time would distort the measured cost of drafting just in time.
        in_flight, self.in_flight = self.in_flight if self._prepares else {}, {}
        occurred = {
            i: (sent, outcome)
            for i, seq in enumerate(self.request.seqs)
            if (sent := in_flight.get(seq.id)) and (outcome := sent.outcome(seq.tokens))
        }
        if not occurred:
            return
        queue, budgets, begin = self.host.queue, self.request.budgets, self.clock()
        rows, outcomes = dict[int, int](), []
        if not self._wait(0):
            self.statistics.late += len(occurred)
        else:
            for i, (sent, outcome) in occurred.items():
                row, rank, forks = queue.find(outcome)
                self.statistics.add_outcome(outcome.accepted, len(sent.trunk), rank, forks)
                outcomes.append((outcome.accepted, len(sent.trunk), row is not None))
                if row is not None:
                    rows[i] = row
            self._wait(min(queue.scalar("depth"), max(budgets[i] for i in rows)) if rows else 0)
        self.statistics.exposed += self.clock() - begin
        self._record_round(begin, outcomes)
        published = 0
        if self.host.has(0):
            published = queue.scalar("published")
            seconds, first, deeper = queue["seconds"].tolist()
            self.statistics.add_round(seconds, first, deeper, published)
        for i, row in rows.items():
            trees[i] = self._chain(self.request.seqs[i], row, min(published, budgets[i]))

    def _fall_back(self, trees: list[Tree]) -> Any:
        """Drafts of the fallback for sequences without one; returns its unread tokens."""
        seqs = self.request.seqs
        missing = [i for i, tree in enumerate(trees) if not tree.tokens and not (needs_q(seqs[i]) and self.host.ready)]
        if not missing or self.fallback is None:
            return None
        draft = self.fallback.draft(self.request.select(missing))
        for i, tree in zip(missing, draft.trees, strict=True):
            trees[i] = tree
        return draft.unread

    def _draft_inline(self, trees: list[Tree], unread: Any) -> Any:
        """Drafts of the same model in the engine's own stream, in the mode `just in time`; returns the unread tokens.

        Not while it prepares: tokens drafted on a GPU are unread, so nothing could be prepared for them. Not under
        rules that need q: sampled drafts must not depend on the mode.
        """
        if self.inline is None or self._prepares:
            return unread
        seqs, budgets = self.request.seqs, self.request.budgets
        missing = [i for i, tree in enumerate(trees) if weak(tree) and budgets[i] and not needs_q(seqs[i])]
        if not missing:
            return unread
        begin = self.clock()
        draft = self.inline.draft(self.request.select(missing))
        for i, tree in zip(missing, draft.trees, strict=True):
            trees[i] = tree if tree.tokens else trees[i]
            self.statistics.jits += bool(tree.tokens)
        self.statistics.jit += self.clock() - begin
        return unread if draft.unread is None else draft.unread

    def _draft_by_worker(self, trees: list[Tree]) -> None:
        """Drafts just in time by the worker, for decoding sequences that have no good draft yet."""
        seqs, budgets = self.request.seqs, self.request.budgets
        missing = [
            i
            for i, (seq, tree) in enumerate(zip(seqs, trees, strict=True))
            if weak(tree) and budgets[i] and seq.generated and self._has_features(seq)
            and (self.inline is None or self._prepares or needs_q(seq))
        ]  # fmt: skip
        if not missing or not self.host.ready:
            return
        begin, depth = self.clock(), min(max(budgets[i] for i in missing) - 1, MAX_DEPTH)
        if self._prepares and self.request.prices is not None and not any(needs_q(seqs[i]) for i in missing):
            # The controller's budgets are for prepared drafts, which are cheaper.
            depth = min(depth, self.statistics.best_just_in_time_depth(self.verify, depth))
        requests = [OutcomeRequest(seqs[i], [], [1]) for i in missing]
        sent = self.channel.request(requests, depth, just_in_time=True, tilt=self.tilt)
        self.host.submit()
        if sent and self._wait(depth):
            queue = self.host.queue
            rows = {int(key[0]): row for row, key in enumerate(queue["keys"][: queue.scalar("count")])}
            for i in missing:
                row = rows.get(sent[seqs[i].id].lane) if seqs[i].id in sent else None
                if row is not None:
                    trees[i] = self._chain(seqs[i], row, min(depth, budgets[i] - 1), just_in_time=True)
                    self.statistics.jits += 1
        self._record_round(begin, just_in_time=True)
        self.statistics.add_just_in_time(self.clock() - begin, depth + 1)

    def _record_round(self, begin: float, outcomes: Iterable[OutcomeFacts] = (), just_in_time: bool = False) -> None:
        queue = self.host.queue
        times = tuple(queue["times"][: queue.scalar("published") + 2].tolist()) if self.host.has(0) else ()
        waited, depth = (begin, self.clock()), queue.scalar("depth")
        self.rounds.append(RoundTimes(self.host.submitted, times, waited, depth, tuple(outcomes), just_in_time))

    def _chain(self, seq: Sequence, row: int, length: int, just_in_time: bool = False) -> Tree:
        """A row's chain; the outcome's own token precedes it in a draft made just in time."""
        queue, start = self.host.queue, 0 if just_in_time else 1
        tokens, survival = queue["chains"][row, :length].tolist(), queue["survival"][row, :length].tolist()
        if just_in_time:
            probability = float(queue["probability"][row])
            tokens = [int(queue["keys"][row, 2]), *tokens]
            survival = [probability, *(probability * later for later in survival)]
        q = None
        if needs_q(seq):
            q = queue.read_q(row, range(start, length + 1), self.space.target.config.vocab_size)  # [n, V]
        return chain(tokens, survival, q, "ahead:now" if just_in_time else "ahead")

    def _has_features(self, seq: Sequence) -> bool:
        """Whether a head has the hidden states that it starts from: those of the token before the last."""
        features, position = self.source.features, len(seq.tokens) - 2
        held = position >= 0 and self.space.plane.holds(seq.id) > position
        return features is None or (held and features.has(seq.id, position))

    def _wait(self, depth: int) -> bool:
        usual = self.statistics.first + depth * self.statistics.deeper
        deadline = min(max(DEADLINE_FACTOR * usual, MIN_DEADLINE), MAX_DEADLINE) if usual else MAX_DEADLINE
        return self.host.wait(depth, deadline)


def weak(tree: Tree) -> bool:
    """Whether a draft is empty or unlikely. A prepared draft is never weak: it is paid for already."""
    if not tree.tokens or tree.source == "ahead":
        return not tree.tokens
    return tree.survival is not None and tree.survival[0] < WEAK


def trunk(tree: Tree) -> list[int] | None:
    """The tokens of the draft's leading path, the most likely one; None where they are unread."""
    path, last = [], -1
    for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
        if token < 0:
            return None
        if parent == last:
            path.append(token)
            last = node
    return path[:MAX_TRUNK]
