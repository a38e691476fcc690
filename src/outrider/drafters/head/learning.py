"""A trained head that learns while it serves, from what the target emits: a memory of phrases, a low-rank correction.

    scores = W (h + up down h)        h [H]: the head's output after its norm;  W [D, H]: its output rows, frozen

The memory (`phrases`) chooses between the head's token and the one that followed before; on a GPU, where passes are
recorded and tokens are chosen on the device, there is none. The correction is trained on a GPU, and on a CPU with the
option `learn_correction`: there its updates take more time than its drafts save.

Every emitted token is a label for the state that the head would have proposed it from. Only `down` and `up` are
trained, in slices beside the target's passes (`_learning.learner`). On a CPU the correction is applied to states; on a
GPU it is folded into the output rows in place, so that recorded passes stay as they are and take no longer.

Promise: a new correction changes nothing; it drafts only after it has predicted more of the latest tokens than what
drafts, and no longer once it predicts fewer than the bare head. What one kind of text has taught is kept apart from the
others; sequences of several kinds in one batch are drafted for by the bare head. A request with `learn=False` leaves no
trace. It knows states and tokens, not text.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...backends.loaded_weights import product_rows, row_reader
from ...errors import ConfigError
from ...types import Sequence, Step
from .. import Workspace
from .._learning import store
from .._learning.adapter import SAMPLE, Adapted, Candidates, Schedule, Weights, unit
from .._learning.buffer import Records, likeliest
from .._learning.learner import Learner, LearningPlan, warm
from .._learning.options import plan_of
from .network import Head
from .phrases import PhraseMemory, Phrases
from .rollout import HeadRollout

KINDS = 8  # kinds of text with weights of their own; others share those of requests that name none
_LONGEST = 0.25  # seconds from one step to the next that count as serving; more is idleness
_NEVER = 1 << 62  # updates
_GATHERED = 32  # rows that are read from a GPU's slots together
# A trained head has more to lose than an untrained one: weights must prove more, and are given up sooner.
PLAN = LearningPlan(
    rate=7e-4, rank=64, kept=8, top=8, holdout=96, proof=1.5, memory=0.7, patience=1.0, schedule=Schedule(warm=_NEVER)
)


class HeadOutput:
    """The part of a head that is not trained, as `_learning` reads it (see `FrozenOutput`)."""

    def __init__(self, head: Head, rows: Callable[[Tensor], Tensor]) -> None:
        """rows: the output rows of target ids [n] -> [n, H]."""
        self.head, self.rows, self.norm, self.vocabulary = head, rows, head.norm, head.vocab_size
        self.trained_ids = head.ids.clone()  # the vocabulary may follow the text
        self.table: Tensor | None = None  # [D, H] on a GPU: the output rows without a correction
        if head.folds:
            self.table = head.keep_output_rows()

    def initial(self, rank: int) -> Weights:
        size, generator = self.norm.shape[0], torch.Generator().manual_seed(0)
        down = torch.randn(rank, size, generator=generator) * size**-0.5
        return {"down": down.to(self.norm), "up": self.norm.new_zeros(size, rank)}

    def adapt(self, w: Weights, state: Tensor, previous: Tensor) -> Adapted:
        h = unit(state.to(self.norm.dtype), self.head.config.norm_eps) * self.norm  # [n, H]
        return Adapted(state, h + (h @ w["down"].T) @ w["up"].T)

    def scores(self, w: Weights, state: Tensor, previous: Tensor, rows: Tensor) -> Tensor:
        return (self.adapt(w, state, previous).normed.to(rows.dtype) @ rows.T).to(self.norm.dtype)

    def candidates(self, records: Records, top: int) -> Candidates:
        if self.table is not None:
            return Candidates.of(self.table, self.head.device_ids, self.vocabulary)
        known = torch.zeros(self.vocabulary, dtype=torch.bool)
        known[self.head.ids] = True
        likely = torch.unique(torch.cat([records.top_ids[:, :top].flatten(), records.drafted.clamp(min=0)]))
        likely = likely[known[likely]]  # [m]
        return Candidates.of(self.rows(likely).to(self.norm), likely, self.vocabulary)

    def predicted(self, normed: Tensor, rows: Callable[[], int]) -> Generator[str, None, Tensor]:
        if self.table is not None:
            yield "judge"
            return self.head.device_ids[(normed.to(self.table.dtype) @ self.table.T).argmax(-1)]
        best, start = list[Tensor](), 0
        while start < normed.shape[0]:
            yield "judge"
            part = normed[start : start + max(rows() // 32, 1)]
            best.append(self.head.ids[self.head.output_scores(part).argmax(-1)])
            start += part.shape[0]
        return torch.cat(best)

    def identity(self) -> tuple[tuple[object, ...], Tensor, Tensor]:
        ids = self.trained_ids
        facts = ("head", self.norm.shape[0], self.vocabulary, self.head.config.taps)
        return facts, ids, self.rows(ids[:: max(1, len(ids) // SAMPLE)])[:, :SAMPLE]

    def use(self, weights: Weights | None) -> None:
        """Draft with these weights from now on; None: with the bare head."""
        if self.table is None:
            self.head.correction = None if weights is None else (weights["down"], weights["up"])
        elif weights is None:
            self.head.fold_output_rows(None)
        else:
            self.head.fold_output_rows((weights["down"].to(self.table.dtype), weights["up"].to(self.table.dtype)))


class HeadNodes(NamedTuple):
    """Emitted tokens of one step, each with the state that the head predicted it from."""

    states: Tensor  # [n, H]
    labels: list[int]  # [n] what the target emitted
    drafted: list[int]  # [n] what the head had proposed; -1: unknown
    accepted: list[bool]
    scores: list[Tensor]  # n of [D], the head's; none on a GPU
    ids: Tensor  # [D] the target's id of each draft id

    @property
    def size(self) -> int:
        return len(self.labels)

    @staticmethod
    def records(steps: list[HeadNodes], top: int) -> Records:
        """Labels come first, then the head's likeliest tokens, which must become less likely where they are wrong."""
        states, labels = torch.cat([step.states for step in steps]), [token for step in steps for token in step.labels]
        device, scores = states.device, [row for step in steps for row in step.scores]
        ids = torch.tensor(labels, device=device)[:, None]  # [n, 1]
        if top > 1 and scores:
            ids = torch.cat([ids, steps[0].ids[likeliest(torch.stack(scores), top - 1)[0]]], 1)  # [n, top]
        logits = torch.full(ids.shape, -torch.inf, device=device)
        logits[:, 0] = 0.0  # the target's distribution is its choice
        drafted = torch.tensor([token for step in steps for token in step.drafted])
        accepted = torch.tensor([each for step in steps for each in step.accepted])
        return Records(states, torch.zeros(len(labels), dtype=torch.long), drafted, accepted, ids, logits)


class Proposal(NamedTuple):
    """What the head proposed after a sequence of this length."""

    length: int
    tokens: list[int]  # of a chain
    states: dict[int, Tensor]  # node -> [H]; -1 is the root
    scores: dict[int, Tensor]  # node -> [D]


class HeadLearning:
    """Everything that one head learns, by kind of text."""

    def __init__(self, head: Head, rollout: HeadRollout, space: Workspace) -> None:
        self.output, self.rollout, self.cache = output_of(head, space), rollout, space.cache
        self.plan = plan_of(space, PLAN if self.output.table is None else replace(PLAN, kept=1))
        self.on = bool(space.option("learn", default=True))
        self.learners: dict[str, Learner] = {}
        self.active: Weights | None = None  # what drafts; None: the bare head
        self.proposals: dict[int, Proposal] = {}
        self.observed = time.perf_counter()  # the latest step
        self.gathered: dict[int, int] = {}  # sequence -> rows of it that were read from a GPU's slots
        self.memory: PhraseMemory | None = None  # on a GPU tokens are chosen on the device
        if rollout.graphs is None and space.option("learn_phrases", default=True):
            self.memory = rollout.memory = PhraseMemory(self.kind_of, lambda seq: self.on and _learns(seq))
        self.corrects = self.on and bool(space.option("learn_correction", default=self.memory is None))
        initial = self.output.initial(self.plan.rank)
        folder = space.option("learn_from", default=None)
        for kind, weights in (store.load_kinds(folder, self.output, initial) if folder else {"": initial}).items():
            self._add(kind, weights)
        if folder and self.memory is not None:
            self.memory.kinds = {kind: Phrases.of(each) for kind, each in store.load_phrases(folder).items()}
        if self.corrects:
            warm(next(iter(self.learners.values())))
            rollout.keep_states(_learns)

    def _add(self, kind: str, weights: Weights) -> Learner:
        self.learners[kind] = made = Learner(self.output, weights, self.plan)
        if not self.on:
            made.stop("off", "learning is switched off")
        return made

    def kind_of(self, seq: Sequence) -> str:
        """The sequence's kind of text; empty where that kind has no weights of its own and may not get any."""
        kind = seq.params.kind
        return "" if kind not in self.learners and (len(self.learners) > KINDS or not _learns(seq)) else kind

    def learner_of(self, seq: Sequence) -> Learner:
        """The learner of the sequence's kind of text. A request with learn=False does not create one."""
        kind = self.kind_of(seq)
        if kind not in self.learners:
            costs = next(iter(self.learners.values())).costs
            self._add(kind, self.output.initial(self.plan.rank)).costs = dict(costs)
        return self.learners[kind]

    # ------------------------------------------------------------ drafting

    def choose(self, seqs: Iterable[Sequence]) -> None:
        """Draft for these with what their kind of text has taught; with the bare head, if they are of several kinds."""
        kinds = {id(learner): learner for learner in map(self.learner_of, seqs)}
        weights = None
        for learner in kinds.values():
            learner.swap()
        if len(kinds) == 1:
            (learner,) = kinds.values()
            weights = learner.live if learner.differs else None
        if weights is not self.active:
            self.output.use(weights)
            self.active = weights

    def proposed(self, seqs: list[Sequence], chains: list[list[int]]) -> None:
        """The head has drafted these chains (of a tree: none)."""
        for seq, tokens in zip(seqs, chains, strict=True):
            if self.corrects and _learns(seq) and seq.id in self.rollout.outputs:
                states, scores = self.rollout.outputs[seq.id], self.rollout.node_scores.get(seq.id, {})
                self.proposals[seq.id] = Proposal(len(seq.tokens), tokens, states, scores)

    # ------------------------------------------------------------ learning

    @property
    def due(self) -> bool:
        return any(learner.due for learner in self.learners.values())

    def work(self) -> None:
        """One kind's next slices: that which has waited longest."""
        due = [learner for learner in self.learners.values() if learner.due]
        if due:
            max(due, key=lambda learner: learner.waiting).work()

    def observe(self, step: Step) -> None:
        begin, taught = time.thread_time(), list[tuple[Learner, HeadNodes]]()
        turns = [turn for turn, verdict in zip(step.turns, step.verdicts, strict=True) if verdict is not None]
        if self.memory is not None:
            for turn in turns:
                self.memory.observe(turn.seq)
        if not self.on:
            return
        for seq in (turn.seq for turn in turns if self.corrects and _learns(turn.seq)):
            learner, nodes = self.learner_of(seq), None
            if learner.within_share:
                nodes = self._drafted(seq) if self.output.table is None else self._gathered(seq)
            self.proposals.pop(seq.id, None)
            if nodes is not None:
                taught.append((learner, nodes))
        for learner, nodes in taught:
            learner.add(nodes)
        now, own = time.perf_counter(), time.thread_time() - begin
        seconds, self.observed = min(now - self.observed, _LONGEST), now
        for turn in step.turns:  # each kind may spend its share of the time that its own sequences took
            self.learner_of(turn.seq).account(seconds / len(step.turns), own / len(step.turns))
        if self.output.table is not None:
            self.work()  # launches on a stream of its own: nothing waits for it

    def end(self, seq: Sequence) -> None:
        self.proposals.pop(seq.id, None)
        self.gathered.pop(seq.id, None)
        if self.memory is not None:
            self.memory.end(seq)

    def _drafted(self, seq: Sequence) -> HeadNodes | None:
        """Emitted tokens, as far as the head's own chain agrees with them."""
        proposal = self.proposals.get(seq.id)
        if proposal is None or proposal.length >= len(seq.tokens):
            return None
        nodes: list[tuple[Tensor, int, int, bool, Tensor]] = []
        for depth, label in enumerate(seq.tokens[proposal.length :]):
            if depth - 1 not in proposal.scores:
                break
            guess = proposal.tokens[depth] if depth < len(proposal.tokens) else -1
            nodes.append((proposal.states[depth - 1], label, guess, guess == label, proposal.scores[depth - 1]))
            if guess != label:
                break
        if not nodes:
            return None
        states, labels, drafted, accepted, scores = (list(field) for field in zip(*nodes, strict=True))
        return HeadNodes(torch.stack(states), labels, drafted, accepted, scores, self.output.head.ids)

    def _gathered(self, seq: Sequence) -> HeadNodes | None:
        """On a GPU: an answer's committed rows, whose outputs recorded passes leave in their slots."""
        graphs, row = self.rollout.graphs, self.cache.rows.get(seq.id)
        if graphs is None or graphs.outputs is None or row is None:
            return None
        start = self.gathered.get(seq.id, seq.prompt_len - 1)
        stop = min(self.rollout.plane.holds(seq.id), len(seq.tokens) - 2, len(row.slots))
        if stop <= start or (stop - start < _GATHERED and not seq.done):
            return None
        self.gathered[seq.id] = stop
        slots = _on_device(row.slots[start:stop], graphs.outputs.device)
        labels = seq.tokens[start + 2 : stop + 2]
        states = graphs.outputs[slots].to(self.output.norm.dtype)  # [n, H]
        return HeadNodes(states, labels, [-1] * len(labels), [False] * len(labels), [], self.output.head.ids)

    # ------------------------------------------------------------ what is learnt

    def report(self) -> dict[str, Any]:
        """State, reason, counts and times over all kinds, and by kind."""
        each = {kind: learner.as_json() for kind, learner in self.learners.items()}
        if self.memory is not None:
            each = {kind: facts | self.memory.as_json(kind) for kind, facts in each.items()}
        summed = ["records", "missed", "updates", "adopted", "rollbacks", "failures", "seconds", "served", "kept"]
        summed += ["phrases", "phrases_proposed", "phrases_accepted"] if self.memory is not None else []
        total = each[""] | {name: round(sum(facts[name] for facts in each.values()), 6) for name in summed}
        total |= {name: max(facts[name] for facts in each.values()) for name in ("slowest", "busiest")}
        total["accepted"] = max(facts["accepted"] for facts in each.values())
        return {"drafter": "head", "vocabulary": len(self.output.trained_ids)} | total | {"kinds": each}

    def save(self, folder: Path | str, **facts: Any) -> None:
        """Write the weights that draft and the confirmed phrases, by kind, and these facts."""
        weights = {kind: learner.weights() for kind, learner in self.learners.items()}
        facts |= {"identity": store.identity(self.output), "learning": self.report()}
        phrases = {} if self.memory is None else {kind: each.as_tensors() for kind, each in self.memory.kinds.items()}
        store.save_kinds(folder, weights, facts, phrases)

    def inherit(self, old: HeadLearning) -> None:
        """Go on from what another engine's drafter has learnt, if it is of the same head."""
        if self.on and old.on and store.same(store.identity(self.output), store.identity(old.output)):
            self.learners = old.learners
            if self.memory is not None and old.memory is not None:
                self.memory.kinds = old.memory.kinds
            for learner in self.learners.values():
                learner.frozen = self.output


def _on_device(numbers: list[int], device: torch.device) -> Tensor:
    """As a tensor there; the host does not wait for the copy."""
    tensor = torch.tensor(numbers)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def _learns(seq: Sequence) -> bool:
    return seq.params.learn and seq.speculate


def output_of(head: Head, space: Workspace) -> HeadOutput:
    """The frozen part of a head; ConfigError for a head that cannot learn."""
    config = head.config
    product = head.norm is not None and not config.norm_output and config.logit_scale == 1.0
    if not product or config.kind == "block" or (head.folds and head.shares_output):
        raise ConfigError(
            "This head cannot learn while it serves: only chains whose output is a norm and a product of its own can. "
            "Leave learn out, or choose --drafter auto."
        )
    own = config.own_output or config.draft_vocab_size == config.vocab_size
    reader = None if own else row_reader(space.target)
    if reader is not None:
        return HeadOutput(head, reader)
    table = product_rows(head.head, config.hidden_size, head.compute, head.device, None)  # [D, H]
    index = torch.full((head.vocab_size,), 0)
    index[head.ids] = torch.arange(len(head.ids))
    return HeadOutput(head, lambda ids: table[index[ids.cpu()].to(table.device)])
