"""The data of a step, with a shape on every tensor.

This module knows ids, shapes and fates. It knows neither text nor models nor where a draft came from.

    B sequences in the step   N drafted nodes   T rows of the target pass   R rows that need logits   V vocabulary
    p is the target's distribution, q the drafter's, as in the paper.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence as Listing
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from torch import Tensor

from .params import SamplingParams as SamplingParams

ACCEPTED, REJECTED, UNREACHED, PRUNED = "a", "r", "u", "p"  # a node's fate
BONUS = "b"  # a token that the target added itself; emitted tokens have the origin ACCEPTED or BONUS
REQUEST_DRAFTS = PREDICTION, FORCED = "prediction", "forced"  # sources of drafts that come with the request


class Tree(NamedTuple):
    """One sequence's part of a draft. Parents come before children; -1 is the root, the last committed token."""

    tokens: list[int]  # [n]
    parents: list[int]  # [n]
    survival: list[float] | None = None  # [n] estimated chance that the whole path to the node is accepted
    q: Tensor | None = None  # [n, V] the distribution each node was drawn from; only `reject` and `block` read it
    source: str = ""  # the drafter's name
    guesses: dict[int, Callable[[], list[tuple[int, float]]]] | None = None  # by parent: likeliest first; for traces

    @property
    def is_chain(self) -> bool:
        return self.parents == list(range(-1, len(self.parents) - 1))

    def cut(self, n: int) -> Tree:
        """The first n nodes: a tree too, because parents precede children. Drafters list nodes best first."""
        if n >= len(self.tokens):
            return self
        survival = None if self.survival is None else self.survival[:n]
        q = None if self.q is None else self.q[:n]
        return self._replace(tokens=self.tokens[:n], parents=self.parents[:n], survival=survival, q=q)


def chain(
    tokens: Iterable[int], survival: list[float] | None = None, q: Tensor | None = None, source: str = ""
) -> Tree:
    """A draft without branches."""
    tokens = list(tokens)
    return Tree(tokens, list(range(-1, len(tokens) - 1)), survival, q, source)


class Draft(NamedTuple):
    """One tree for each sequence of the step.

    A draft may be *unread*: its shape is known, but its tokens are still on the device, and copying them to the host
    would stall it. The negative token -1 - i stands for unread[i]. The pass that verifies such tokens reads them on the
    device and returns their ids (`Output.tokens`).
    """

    trees: tuple[Tree, ...]  # [B]
    unread: Tensor | None = None  # [M] on the device
    failures: tuple[str, ...] = ()  # "name: error" for each member drafter that raised

    @staticmethod
    def pack(trees: Iterable[Tree], unread: Tensor | None = None, failures: Iterable[str] = ()) -> Draft:
        return Draft(tuple(trees), unread, tuple(failures))

    @staticmethod
    def empty(batch: int) -> Draft:
        return Draft.pack(chain([]) for _ in range(batch))


class Turn(NamedTuple):
    """One sequence's part in a step: how many of its pending tokens are fed, and how many nodes may be drafted."""

    seq: Sequence
    feed: int  # pending tokens of this step; the rest of a long prompt waits for the next one
    whole: bool  # True when nothing stays pending: the sequence gets logits, a draft and a verdict
    budget: int = 0
    request_only: bool = False  # only request drafts are verified; the drafter is not called

    def allow(self, budget: int, request_only: bool = False) -> Turn:
        if budget == self.budget and request_only == self.request_only:
            return self
        return Turn(self.seq, self.feed, self.whole, budget, request_only)

    def room(self, k: int, block: int = 1) -> int:
        """At most k nodes, within the request's limit and the tokens that it may still emit before the bonus.

        Where the target runs whole blocks of positions, no draft reaches into the next block: that would take a second
        pass, which the next step makes anyway, with one more token and a new draft.
        """
        seq = self.seq
        if not (self.whole and seq.speculate):
            return 0
        most = min(k, seq.room - 1, k if seq.most_drafted is None else seq.most_drafted)
        return max(most if block == 1 else min(most, block - 1 - (len(seq.tokens) - 1) % block), 0)

    @property
    def asks_drafter(self) -> bool:
        return self.budget > 0 and not self.request_only


@dataclass
class Batch:
    """The rows of one pass: pending tokens and drafted nodes of all sequences, packed (`engine.batch`)."""

    table: Tensor  # [lines, length] int32, contiguous: slot of each committed position
    tokens: list[int] = field(default_factory=list)  # [T] negative: unread, see `Draft`
    positions: list[int] = field(default_factory=list)  # [T] root position + depth for nodes
    slots: list[int] = field(default_factory=list)  # [T] where each row's K/V goes
    lines: list[int] = field(default_factory=list)  # [T] the sequence's line in the table
    context: list[int] = field(default_factory=list)  # [T] table entries that a row reads: itself too, if pending
    tails: list[list[int]] = field(default_factory=list)  # [T] slots of drafted ancestors, self last; empty if pending
    owners: list[Sequence] = field(default_factory=list)  # [T]
    want: list[int] = field(default_factory=list)  # [R] rows whose logits are needed
    sources: Tensor | None = None  # [lines, length] int32, slots of each line's source; None: there are no sources
    logits: Tensor | None = None  # [R, V] memory that the runner lends for them; None: a pass takes its own

    @property
    def count(self) -> int:
        """T"""
        return len(self.tokens)

    @property
    def choosers(self) -> list[Sequence]:
        """[R] the sequence that each wanted row belongs to."""
        return [self.owners[i] for i in self.want]


@dataclass
class Output:
    """The result of a pass; only the backend that runs it changes it."""

    logits: Tensor  # [R, V] float32
    hidden: dict[int, Tensor] = field(default_factory=dict)  # layer -> [T, H], only the requested taps
    highest: list[float] = field(default_factory=list)  # [R] each row's largest logit; NaN if a row contains one
    choices: list[int] = field(default_factory=list)  # [R] the token chosen there; -1 where that is open
    tokens: list[int] | None = None  # [T] the ids that ran, if some were unread
    seconds: dict[str, float] = field(default_factory=dict)  # by phase, if a device measured them itself
    leaders: list[int] = field(default_factory=list)  # [R] the first index of `highest`, where the pass has found it


class Verdict(NamedTuple):
    """The result of judging one sequence's tree."""

    path: list[int]  # accepted nodes, root to leaf
    tokens: list[int]  # emitted: the path, then one token that the target chose itself, if its guide allows any
    fates: str  # one letter per node

    @property
    def origins(self) -> str:
        """One letter per emitted token: accepted from the draft, or the target's own bonus."""
        return ACCEPTED * len(self.path) + BONUS * (len(self.tokens) - len(self.path))

    def cut(self, n: int, tree: Tree) -> Verdict:
        """The verdict as if the text had ended after n emitted tokens: nodes beyond are unreached."""
        if n >= len(self.tokens):
            return self
        chosen_at = {-1, *self.path[: n - 1]}  # nodes at which the target's choice is still emitted
        fates = [
            fate if fate == PRUNED or parent in chosen_at else UNREACHED
            for fate, parent in zip(self.fates, tree.parents, strict=True)
        ]
        return Verdict(self.path[:n], self.tokens[:n], "".join(fates))

    @property
    def rows(self) -> list[int]:
        """For each emitted token, the row (0 is the root, node i is row i+1) whose logits chose it."""
        return [0, *(node + 1 for node in self.path)][: len(self.tokens)]


@dataclass
class Stats:
    """Counters of one sequence, after the cut at the end of the text."""

    steps: int = 0  # target passes that gave a verdict
    drafts: int = 0  # those that verified a draft
    passes: int = 0  # target passes in all, prefill chunks included
    drafted: int = 0
    reached: int = 0
    accepted: int = 0
    emitted: int = 0
    reached_at: list[int] = field(default_factory=list)  # by depth
    accepted_at: list[int] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)  # draft, verify, overlap, judge: shared by the batch
    preempted: int = 0
    reused: int = 0  # prompt tokens whose K/V was in the cache already
    failures: int = 0  # steps in which the drafter raised
    accepted_prediction_tokens: int = 0  # of the request's prediction, as OpenAI counts them
    rejected_prediction_tokens: int = 0
    why: str = ""  # the controller's last reason

    @property
    def alpha(self) -> float | None:
        """Accepted ÷ reached: how often the target agrees with a node that its walk reaches."""
        return self.accepted / self.reached if self.reached else None

    @property
    def tau(self) -> float | None:
        """Emitted tokens per verdict, bonus included."""
        return self.emitted / self.steps if self.steps else None

    @property
    def alpha_by_position(self) -> list[float]:
        return [a / r for a, r in zip(self.accepted_at, self.reached_at, strict=True) if r]

    def count(self, tree: Tree, verdict: Verdict) -> None:
        if not tree.tokens:
            self.steps, self.emitted = self.steps + 1, self.emitted + len(verdict.tokens)
            return
        # One node per depth is "reached" by the walk: the accepted one, or the step's first rejected one.
        walked = len(verdict.path) + (REJECTED in verdict.fates)
        self.add(len(tree.tokens), len(verdict.path), len(verdict.tokens), walked)

    def add(self, drafted: int, accepted: int, emitted: int, walked: int) -> None:
        """Count one verdict, whose walk reached `walked` drafted nodes."""
        self.steps += 1
        self.emitted += emitted
        if not drafted:
            return
        self.drafts += 1
        self.drafted += drafted
        self.accepted += accepted
        self.reached += walked
        while len(self.reached_at) < walked:
            self.reached_at.append(0)
            self.accepted_at.append(0)
        for depth in range(walked):
            self.reached_at[depth] += 1
            self.accepted_at[depth] += depth < accepted


class Prediction(Protocol):
    """The tokens that a request expects as its answer, and the answer's position in them (`engine.request_drafts`)."""

    tokens: list[int]
    position: int | None  # of the next predicted token; None: the answer has left the prediction
    run: int  # how many tokens before the position equal the answer's last ones
    matched: int  # predicted tokens that the answer has at their position

    def advance(self, tokens: list[int]) -> Prediction: ...

    def ahead(self, most: int) -> list[int]: ...  # the next predicted tokens


class Matcher(Protocol):
    """What a guide allows after the generated tokens (`engine.guides`): a function of these tokens alone.

    `follow`, `forced` and `mask(guess=True)` are for drafting; they use a state of their own.
    """

    def allows(self, generated: list[int], token: int) -> bool: ...

    def mask(self, generated: list[int], guess: bool = False) -> Tensor: ...  # [V] bool: tokens that may follow

    def complete(self, generated: list[int]) -> bool: ...  # may the text end here?

    def follow(self, generated: list[int], tokens: list[int]) -> int: ...  # how many of these may follow in turn

    def forced(self, generated: list[int], most: int) -> list[int]: ...  # the only continuation, if any


@dataclass
class Sequence:
    """One request and its answer so far. Its tokens are the truth; every cache reconciles to them."""

    id: int
    tokens: list[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    seed: int = 0
    ends: frozenset[int] = frozenset()  # ids that end the text
    bad_words: tuple[tuple[int, ...], ...] = ()
    rule: str = "match"
    speculate: bool = True  # False: plain decoding for this sequence, in the same batch
    most_drafted: int | None = None  # upper limit of its budget per step
    only: str = ""  # the one of several member drafters that drafts for it; empty: any of them
    shows_logits: bool = False  # a listener reads its rows' logits after each step, so they must still be there
    on_token: Callable[[int], bool] | None = None  # called once with each emitted token; True ends the text with it
    matcher: Matcher | None = None  # what its guide allows; None: anything
    prediction: Prediction | None = None  # the expected answer
    source: list[int] = field(default_factory=list)  # the encoder's input, where the target has an encoder
    prompt_len: int = -1
    finish: str | None = None  # stop, length, guide, cancelled
    origins: str = ""  # one letter per generated token
    logprobs: list[TokenLogprob] = field(default_factory=list)
    stats: Stats = field(default_factory=Stats)

    def __post_init__(self) -> None:
        self.tokens = list(self.tokens)  # a copy: it grows
        if self.prompt_len < 0:
            self.prompt_len = len(self.tokens)
        self._limit = self.params.limit  # asked for many times a step

    @property
    def generated(self) -> list[int]:
        return self.tokens[self.prompt_len :]

    @property
    def is_plain(self) -> bool:
        """Whether its choice is the largest of the unchanged logits."""
        return self.params.plain and self.matcher is None and not self.bad_words

    @property
    def has_request_drafts(self) -> bool:
        """Whether the request itself may have something to draft."""
        return self.matcher is not None or (self.prediction is not None and self.prediction.position is not None)

    @property
    def done(self) -> bool:
        return self.finish is not None

    @property
    def room(self) -> int:
        """How many tokens may still be emitted."""
        return self._limit - (len(self.tokens) - self.prompt_len)

    def extend(self, verdict: Verdict, tree: Tree) -> Verdict:
        """Append what is emitted, cut after the first end token and at max_tokens; returns what was kept."""
        kept, room, finish = verdict, self.room, None
        may_end = self.on_token is not None or not self.ends.isdisjoint(verdict.tokens)
        end = self._first_end(verdict.tokens[:room]) if may_end else None
        if end is not None:
            kept, finish = verdict.cut(end + 1, tree), "stop"
        elif len(verdict.tokens) >= room:
            kept, finish = verdict.cut(room, tree), "length"
        self.tokens += kept.tokens
        self.origins += kept.origins
        if self.prediction is not None:
            matched = self.prediction.advance(kept.tokens).matched
            self.stats.accepted_prediction_tokens = matched
            self.stats.rejected_prediction_tokens = len(self.prediction.tokens) - matched
        if finish is None and len(kept.tokens) == len(kept.path):  # none of the target's own: the guide allows no more
            finish = "stop" if self.matcher is not None and self.matcher.complete(self.generated) else "guide"
        self.finish = finish or self.finish
        return kept

    def _first_end(self, tokens: list[int]) -> int | None:
        """The first of these tokens that ends the text."""
        for i, token in enumerate(tokens):
            stops = self.on_token is not None and self.on_token(token)  # also called with an end token
            if stops or token in self.ends:
                return i
        return None


class TokenLogprob(NamedTuple):
    """log p of an emitted token under the target's unadjusted logits, with the likeliest alternatives."""

    token: int
    logprob: float
    top: list[tuple[int, float]]


@dataclass
class Step:
    """All of one step, for listeners, who change nothing. Valid until the next step: copy what you keep."""

    index: int
    turns: Listing[Turn]  # [B]
    draft: Draft
    batch: Batch
    output: Output
    verdicts: Listing[Verdict | None]  # [B] None where part of a prompt is still pending
    clock: dict[str, float]  # seconds: draft, verify, overlap, judge
    starts: dict[str, float]  # seconds since the engine started, same keys
    first: Listing[int]  # [B] index into output.logits of each sequence's root row; -1 without verdict
    coins: Listing[object]  # [B] the randomness each verdict used
    why: str = ""  # the controller's reason for this budget
    failure: str = ""  # the drafter's errors, "name: error"
    in_round: bool = False  # a device's own loop ran it: `output` has no logits, `batch` no rows
    untaken: Listing[tuple[Tree, int] | None] = ()  # [B] a draft of which no node was verified, for want of worth or
    # because a device had gone another way, and the token that came where it begins
    partial: bool = False  # a round ran for more sequences than these: some had ended before it was read

    @property
    def draft_rows(self) -> list[int]:
        """Rows of the pass that each turn's draft took. A round has as many as its budget, drafted or not."""
        if self.in_round:
            return [turn.budget for turn in self.turns]
        return [len(tree.tokens) for tree in self.draft.trees]

    @property
    def rows(self) -> int:
        """T, padding left out."""
        return sum(turn.feed for turn in self.turns) + sum(self.draft_rows)

    @property
    def seqs(self) -> list[Sequence]:
        return [turn.seq for turn in self.turns]


class Listener:
    """Sees every step."""

    reads_logits = True  # False: the step's logits may be gone when `observe` is called
    reads_guesses = False  # True: drafters fill `Tree.guesses`

    def observe(self, step: Step) -> None:
        raise NotImplementedError


def common_prefix(a: list[int], b: list[int]) -> int:
    """Length of the longest common prefix, by bisection: comparing slices is much faster than a loop."""
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:  # the usual case
        return high
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
