"""The device's own loop: rounds say what plain decoding on a CPU says, whatever is drafted, cut or in flight.

Without a GPU the same code runs uncaptured, with its kernels in triton's interpreter (`support.device_engine`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import inf
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings, strategies as st

from outrider.backends import ops
from outrider.backends.cuda.capture import Driver
from outrider.backends.cuda.kernels import adjusting, rounds as kernels
from outrider.backends.cuda.lines import Lines
from outrider.backends.cuda.rounds import Rounds, RoundShape
from outrider.backends.cuda.state import DeviceState
from outrider.backends.loaded_weights import embedding_of
from outrider.backends.toy import RandomWeights, toy_config
from outrider.backends.transformer import Transformer
from outrider.config import Config
from outrider.drafters import Drafter, DraftRequest, Traits, Workspace, make
from outrider.engine.cache import Cache, Row
from outrider.engine.sampling import adjust
from outrider.engine.step import Engine
from outrider.errors import ModelError
from outrider.llm import build_engine
from outrider.models.speculators import random_head
from outrider.types import Draft, SamplingParams, Sequence, chain

from support.device_engine import device_engine
from support.kernels import DEVICE, GPU, exact_products as exact_products, ordered_products as ordered_products

PROMPTS = [[1, 2, 3], [5, 6, 7, 8, 9, 5, 6, 7], [11] * 14]
TOKENS = 24 if GPU else 6
WARM: dict[str, Any] = {"temperature": 0.9}
SEVEN = torch.tensor([7])


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    if not GPU:
        monkeypatch.setattr(ops, "on_gpu", lambda tensor: True)


def model(blur: float = 0.0) -> Transformer:
    """Two heads instead of four: the interpreter runs a program for each head of each row."""
    config = replace(toy_config(1, context=128), heads=2, kv_heads=1)
    return Transformer(config, RandomWeights(config, 1, blur), torch.float32, DEVICE)


def head_of(target: Transformer) -> Any:
    network = pytest.importorskip("outrider.drafters.head.network")  # a method's folder may be deleted
    config, tensors = random_head(target.config)
    return network.Head(config, tensors, embedding_of(target), target.compute, target.device)


def engine(drafter: str | type[Drafter] = "off", k: int = 0, slots: int = 600, **options: Any) -> Engine:
    return device_engine(model(), Cache(slots, 8, 96, DEVICE), drafter, k, **options)


Drafts = dict[tuple[int, int], list[int]]  # (sequence, tokens before it) -> the draft that was verified there


def run(engine: Engine, drafts: Drafts | None = None, **params: object) -> list[list[int]]:
    seqs = [
        Sequence(i + 1, prompt, SamplingParams(max_tokens=TOKENS + i, **params), seed=40 + i)  # type: ignore[arg-type]
        for i, prompt in enumerate(PROMPTS)
    ]
    for seq in seqs:
        engine.add(seq)
    while engine.busy:
        step = engine.step()
        assert not step.failure, step.failure
        engine.cache.check()
        for turn, tree, verdict in zip(step.turns, step.draft.trees, step.verdicts, strict=True):
            if verdict is not None and tree.tokens and drafts is not None:
                drafts[turn.seq.id, len(turn.seq.tokens) - len(verdict.tokens)] = tree.tokens
    assert not engine.failures
    return [seq.generated for seq in seqs]


@pytest.fixture(scope="module")
def plain() -> dict[str, list[list[int]]]:
    """The target alone, without rounds. The interpreter is slow: instead of it the CPU's own runner."""
    if GPU:
        return {"greedy": run(engine(rounds=False)), "warm": run(engine(rounds=False), **WARM)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "on_gpu", lambda tensor: False)
        alone, config = model(), Config(drafter="off", max_length=96)
        return {"greedy": run(build_engine(alone, config)), "warm": run(build_engine(alone, config), **WARM)}


def test_plain_rounds(plain: dict[str, list[list[int]]]) -> None:
    assert run(engine()) == plain["greedy"]


@pytest.mark.slow
@pytest.mark.usefixtures("ordered_products")
def test_a_prompt_as_one_chunk_and_as_many() -> None:
    """In one round, whose attention has tiles, beside a sequence that decodes; and sixteen rows at a time."""

    def say(rows: int) -> tuple[list[list[int]], list[Any]]:
        one, at_once = engine(rows=rows), RoundShape(4, 96, 64)
        prompts = {1: [1, 8, 15], 2: [(7 * j) % 41 for j in range(86)]}
        seqs = [Sequence(i, prompt, SamplingParams(max_tokens=5)) for i, prompt in prompts.items()]
        for seq in seqs:
            one.add(seq)
            one.step()
        slots = one.cache.rows[2].slots
        while one.busy:
            slots = one.cache.rows[2].slots[:86] if 2 in one.cache.rows else slots
            one.step()
        assert (at_once in one.target.rounds._recorded) == (rows > 16)
        return [seq.generated for seq in seqs], [kv[0][slots] for kv in (one.target.plane.k, one.target.plane.v)]

    (few, few_kv), (many, many_kv) = say(16), say(96)
    assert few == many
    assert all(map(torch.equal, few_kv, many_kv))


SOURCES = [
    "ngram",
    "suffix",
    "layerskip",
    "head",
    *(pytest.param(n, marks=pytest.mark.slow) for n in ("model", "tree")),
]


@pytest.mark.parametrize("drafter", SOURCES)
def test_every_source_of_drafts(plain: dict[str, list[list[int]]], drafter: str) -> None:
    """The text is the target's own, and a recorded drafter drafts what it drafts between passes on the host."""
    options: dict[str, object] = {"ngram_min": 1} if drafter == "ngram" else {}
    shape = {"tree": True, "tree_width": 2, "tree_depth": 3} if drafter == "tree" else {}
    if drafter in ("model", "head", "tree"):
        options = (
            {"draft_model": model(0.15)} if drafter == "model" else {"head": head_of(model()), "tree": False} | shape
        )
    if drafter == "layerskip":
        options = {"skip_mlp": [0]}
    drafts: Drafts = {}
    name, k = ("head", 5) if drafter == "tree" else (drafter, 3)
    assert run(engine(name, k, **options), drafts, **WARM) == plain["warm"]
    assert drafts
    if drafter in ("model", "head"):  # for trees, test_the_walk_through_a_tree
        expected: Drafts = {}
        run(engine(name, k, rounds=False, **options), expected, **WARM)
        both = drafts.keys() & expected.keys()
        assert both
        assert {at: drafts[at] for at in both} == {at: expected[at] for at in both}


# ------------------------------------------------------------ what went wrong in other overlapped loops


@pytest.mark.slow
def test_a_head_learns_from_rounds(plain: dict[str, list[list[int]]]) -> None:
    """Its rows' outputs stay in their slots, what it learns goes into rows that recorded passes read: no other text."""
    eager = {"learn": True, "learn_every": 1, "learn_share": 1e9, "learn_cap_ms": 1e6}
    made = engine("head", 3, head=head_of(model()), tree=False, **eager)
    drafter: Any = made.drafter
    learner, heard = drafter.learning.learners[""], list[Any]()
    add = learner.add
    learner.add = lambda nodes: (heard.append(nodes), add(nodes))[1]
    assert run(made) == plain["greedy"]
    labels = [label for nodes in heard for label in nodes.labels]
    assert labels
    assert set(labels) <= {token for text in plain["greedy"] for token in text}
    assert all(nodes.states.isfinite().all() and nodes.states.abs().sum() > 0 for nodes in heard)
    learner.live = {name: w + 0.3 * torch.randn_like(w) for name, w in learner.live.items()}
    learner.differs = True
    assert run(made) == plain["greedy"]
    assert drafter.learning.active is learner.live


class ScriptedDrafter(Drafter):
    """Proposes what it was told: texts by sequence id, wrong where `spoil` says so. Its drafts are taken late."""

    traits = Traits(late=True)
    texts: ClassVar[dict[int, list[int]]] = {}
    spoil: ClassVar[Callable[[int], bool]] = staticmethod(lambda position: False)

    def draft(self, request: DraftRequest) -> Draft:
        trees = []
        for seq, budget in zip(request.seqs, request.budgets, strict=True):
            at = len(seq.tokens) - seq.prompt_len
            tokens = self.texts[seq.id][at : at + budget]
            trees.append(
                chain([(t + 1) % 48 if self.spoil(at + i) else t for i, t in enumerate(tokens)], source="scripted")
            )
        return Draft.pack(trees)


def scripted(
    texts: list[list[int]], k: int = 3, spoil: Callable[[int], bool] = lambda at: False, **more: Any
) -> Engine:
    drafter = type(
        "ScriptedDrafter", (ScriptedDrafter,), {"texts": dict(enumerate(texts, start=1)), "spoil": staticmethod(spoil)}
    )
    return engine(drafter, k, **more)


def test_late_drafts_are_accepted_and_stale_ones_cost_nothing_but_speed(plain: dict[str, list[list[int]]]) -> None:
    right: Drafts = {}
    assert run(scripted(plain["greedy"]), right) == plain["greedy"]
    text = {i + 1: prompt + plain["greedy"][i] for i, prompt in enumerate(PROMPTS)}
    assert all(text[seq][at : at + len(tokens)] == tokens for (seq, at), tokens in right.items())
    assert any(len(tokens) == 3 for tokens in right.values())  # the rest of one whose beginning was emitted
    wrong: Drafts = {}
    assert run(scripted(plain["greedy"], spoil=lambda at: at % 3 == 1), wrong) == plain["greedy"]
    assert any(text[seq][at : at + len(tokens)] != tokens for (seq, at), tokens in wrong.items())


def test_an_end_inside_an_accepted_run(plain: dict[str, list[list[int]]]) -> None:
    """An end id on the device, a ninth that only the host knows, a stop string, the length: the same cut as alone, for
    logprobs too."""
    text = plain["greedy"][1]
    at = next(i for i in range(2, len(text)) if text[i] not in text[:i])
    for ends in ({text[at]}, {*range(200, 208), text[at]}):
        seq = Sequence(1, PROMPTS[1], SamplingParams(max_tokens=TOKENS), ends=frozenset(ends))
        finish(scripted([text]), seq)
        assert (seq.generated, seq.finish) == (text[: at + 1], "stop")
    params = SamplingParams(max_tokens=TOKENS, logprobs=1)
    stopped = Sequence(1, PROMPTS[1], params, on_token=lambda token: token == text[at])
    finish(scripted([text]), stopped)
    assert (stopped.generated, stopped.finish) == (text[: at + 1], "stop")
    assert [each.token for each in stopped.logprobs] == [each.top[0][0] for each in stopped.logprobs] == text[: at + 1]
    assert len(stopped.origins) == stopped.stats.emitted == at + 1
    short = Sequence(1, PROMPTS[1], SamplingParams(max_tokens=at + 1))
    finish(scripted([text]), short)
    assert (short.generated, short.finish) == (text[: at + 1], "length")


def finish(engine: Engine, *seqs: Sequence) -> None:
    for seq in seqs:
        engine.add(seq)
    while engine.busy:
        engine.step()
        engine.cache.check()


def test_members_come_and_go_while_rounds_fly(plain: dict[str, list[list[int]]]) -> None:
    """One is cancelled while its round flies; another takes its line and slots; a third is preempted and resumes."""
    texts = plain["greedy"]
    loop = scripted(texts, slots=40)
    first, second, third = (
        Sequence(i + 1, prompt, SamplingParams(max_tokens=TOKENS)) for i, prompt in enumerate(PROMPTS)
    )
    loop.add(first)
    loop.add(second)
    loop.step()
    assert len(loop.flights) == 1  # one more round has been started than was read
    loop.cancel(first)
    loop.cache.check()
    loop.add(third)
    finish(loop)
    assert first.generated == texts[0][: len(first.generated)]
    assert [second.generated, third.generated] == [texts[1][:TOKENS], texts[2][:TOKENS]]


def test_a_pool_that_is_exactly_full(plain: dict[str, list[list[int]]]) -> None:
    need = sum(len(prompt) + TOKENS + i - 1 for i, prompt in enumerate(PROMPTS))
    assert run(scripted(plain["greedy"], slots=need)) == plain["greedy"]
    tight = scripted(plain["greedy"], slots=need - 12)
    seqs = [Sequence(i + 1, p, SamplingParams(max_tokens=TOKENS + i)) for i, p in enumerate(PROMPTS)]
    finish(tight, *seqs)
    assert [seq.generated for seq in seqs] == plain["greedy"]
    assert sum(seq.stats.preempted for seq in seqs) > 0


def test_poison_shows_what_was_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence that counts a token as read that no pass has read: without poison its text would be another one."""
    join = Lines.join
    monkeypatch.setattr(Lines, "join", lambda self, seq, line, held, read: join(self, seq, line, held + 1, read))
    with pytest.raises(ModelError, match="NaN"):
        finish(engine(), Sequence(1, PROMPTS[0], SamplingParams(max_tokens=3)))


def test_logits_that_somebody_looks_at_are_those_of_the_step(plain: dict[str, list[list[int]]]) -> None:
    loop = engine()
    seq = Sequence(1, PROMPTS[0], SamplingParams(max_tokens=3), shows_logits=True)
    loop.add(seq)
    while loop.busy:
        step = loop.step()
        assert not loop.flights
        assert int(step.output.logits[0].argmax()) == seq.tokens[-1]
    assert seq.generated == plain["greedy"][0][:3]


def test_a_sequence_that_needs_the_host_joins_the_batch(plain: dict[str, list[list[int]]]) -> None:
    """Functions of logits and grammars run at depth one; the others say the same before, meanwhile and afterwards."""
    texts = plain["greedy"]
    biased = SamplingParams(
        max_tokens=3, logits_processors=(lambda ids, logits: logits.index_fill(0, SEVEN, 100.0),), logprobs=2
    )
    loop = scripted(texts)
    free = Sequence(2, PROMPTS[1], SamplingParams(max_tokens=TOKENS))
    loop.add(free)
    loop.step()
    guest = Sequence(1, PROMPTS[0], biased)
    finish(loop, guest)
    assert (guest.generated, len(guest.logprobs)) == ([7, 7, 7], 3)
    assert free.generated == texts[1][:TOKENS]


ADJUSTED: list[dict[str, Any]] = [
    {"presence_penalty": 0.6, "frequency_penalty": 0.9, "logit_bias": {9: 2.5, 11: -inf}, "logprobs": 2, **WARM},
    {"repetition_penalty": 1.3, "min_tokens": 3, "logprobs": 0},
]


def adjusted(prompts: list[list[int]], tokens: int = TOKENS - 1) -> list[Sequence]:
    """Answers to the first prompts with penalties, bias, bans and logprobs."""
    return [
        Sequence(i + 1, p, SamplingParams(max_tokens=tokens, **params), 40 + i, frozenset({9}), bad_words=((30 + i,),))
        for i, (p, params) in enumerate(zip(prompts, ADJUSTED, strict=False))
    ]


@pytest.mark.usefixtures("exact_products")
def test_penalties_bias_and_logprobs_stay_in_rounds() -> None:
    """Tokens and logprobs are those of one step at a time, bit for bit, however many drafted tokens are accepted:
    penalties count these. One of the two is preempted."""
    expected = adjusted(PROMPTS)
    finish(engine(rounds=False), *expected)
    slots = sum(len(seq.tokens) - 1 for seq in expected) - 2
    loop = scripted([seq.generated for seq in expected], slots=slots, spoil=lambda at: at == 3)
    seqs, deepest = adjusted(PROMPTS), 0
    for seq in seqs:
        loop.add(seq)
    while loop.busy:
        step = loop.step()
        assert step.in_round
        deepest = max(deepest, *(len(verdict.path) for verdict in step.verdicts if verdict is not None), 0)
        loop.cache.check()
    assert [seq.generated for seq in seqs] == [seq.generated for seq in expected]
    assert [seq.logprobs for seq in seqs] == [seq.logprobs for seq in expected]
    assert [len(seq.logprobs) for seq in seqs] == [len(seq.generated) for seq in seqs]
    assert deepest >= 2
    assert max(seq.stats.preempted for seq in seqs) > 0


def test_what_the_device_leaves_to_the_host() -> None:
    rounds = engine().target.rounds
    assert rounds is not None
    hosted: list[dict[str, Any]] = [
        {"logprobs": 21}, {"logit_bias": {3: inf}}, {"logit_bias": dict.fromkeys(range(48), -inf), **WARM},
        {"logits_processors": (lambda ids, logits: logits,)},
    ]  # fmt: skip
    for params in hosted:
        assert not rounds.drives(Sequence(1, [1], SamplingParams(**params)))
    assert not rounds.drives(Sequence(1, [1], bad_words=((3, 4),)))
    assert not rounds.drives(Sequence(1, [1], SamplingParams(min_tokens=2), ends=frozenset(range(9))))
    assert rounds.drives(Sequence(1, [1], SamplingParams(logprobs=20, logit_bias={3: -inf}, presence_penalty=1)))


@settings(max_examples=15 if not GPU else 200, deadline=None)
@given(data=st.data())
def test_adjusted_rows_have_the_bits_of_the_host(data: st.DataObject) -> None:
    """Every row of chains and trees, against `engine.sampling.adjust` after the tokens on its path."""
    vocabulary, generator = 60, torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    token, number = st.integers(0, vocabulary - 1), st.floats(-2, 2, width=16)
    params = SamplingParams(
        repetition_penalty=data.draw(st.floats(0.5, 2)), presence_penalty=data.draw(number),
        frequency_penalty=data.draw(number), min_tokens=data.draw(st.integers(0, 6)),
        logit_bias=data.draw(st.dictionaries(token, st.floats(-9, 9) | st.just(-inf), max_size=4)),
    )  # fmt: skip
    prompt, emitted = data.draw(st.lists(token, min_size=1, max_size=6)), data.draw(st.lists(token, max_size=6))
    drafted, tree = data.draw(st.lists(token, max_size=6)), data.draw(st.booleans())
    parents = [data.draw(st.integers(-1, i - 1)) if tree else i - 1 for i in range(len(drafted))]
    banned = tuple((each,) for each in data.draw(st.lists(token, max_size=2)))
    seq = Sequence(1, prompt + emitted, params, ends=frozenset(data.draw(st.sets(token, max_size=3))), bad_words=banned)
    seq.prompt_len = len(prompt)
    lines = Lines(
        SimpleNamespace(table=torch.zeros(3, 32), device=DEVICE, driver=Driver(DEVICE, poisons=True)), vocabulary
    )  # type: ignore[arg-type]
    lines.join(seq, 1, 0, 0)
    lines.add_adjustments()
    lines.draft[1, : len(drafted)], lines.parents[1, : len(drafted)] = torch.tensor(drafted), torch.tensor(parents)
    paths: dict[int, list[int]] = {-1: []}
    for node, (parent, each) in enumerate(zip(parents, drafted, strict=True)):
        paths[node] = [*paths[parent], each]
    logits = torch.randn(len(paths) + 1, vocabulary, generator=generator) * 3  # the last row is padding
    rows = {
        "owner": torch.tensor([1] * len(paths) + [-1], dtype=torch.int32),
        "node": torch.tensor([*paths, -1], dtype=torch.int32), "temperature": torch.zeros(1, dtype=torch.float64),
        "position": torch.tensor([len(seq.tokens) + len(path) for path in paths.values()] + [0]),
    }  # fmt: skip
    out, state = torch.empty_like(logits, device=DEVICE), (lines.numbers, lines.draft, lines.parents)
    on_device = {name: each.to(DEVICE) for name, each in rows.items()}
    adjusting.adjust(logits.to(DEVICE), out, on_device, *state, lines.counts, lines.bias, tree)
    host = [adjust(row, seq, path) for row, path in zip(logits, paths.values(), strict=False)]
    assert torch.equal(out.cpu(), torch.stack([*host, logits[-1]]))


class Branches:
    """Recorded drafts that are trees with the right path among wrong ones (`RecordedDrafts`)."""

    source = "scripted"

    def __init__(self, rounds: Rounds, texts: dict[int, list[int]]) -> None:
        self.lines, self.texts, rounds.drafts, rounds.trees = rounds.lines, texts, self, True
        self.owners: dict[int, int] = {}  # line -> sequence

    def join(self, seq: Sequence, row: Row) -> int:
        self.owners[row.line] = seq.id
        return 0

    def has_read(self, seq: Sequence, tokens: int) -> None:
        pass

    def warm(self, lanes: int) -> None:
        pass

    def passes(self, turns: object, rows: object, asks: object) -> list[tuple[str, Any, int]]:
        return [("draft", self, 1)]

    def replay(self) -> None:
        for line, seq in self.owners.items():
            at = int(self.lines.numbers[line, kernels.LENGTH])
            right = self.texts[seq][at : at + 3]
            if len(right) == 3:
                tokens = [(right[0] + 1) % 48, right[0], right[1], (right[1] + 1) % 48, right[1], right[2]]
                self.lines.draft[line, :6] = torch.tensor(tokens)
                self.lines.parents[line, :6] = torch.tensor([-1, -1, 0, 1, 1, 4])
                self.lines.numbers[line, kernels.DRAFTED] = 6


class Asking(Drafter):
    traits = Traits(late=True)

    def draft(self, request: DraftRequest) -> Draft:
        return request.asked(torch.zeros(64), "scripted")


def test_the_walk_through_a_tree_moves_slots_as_the_host_does(plain: dict[str, list[list[int]]]) -> None:
    loop = engine(Asking, 6)
    rounds = loop.target.rounds
    assert isinstance(rounds, Rounds)
    Branches(rounds, {i + 1: prompt + plain["warm"][i] for i, prompt in enumerate(PROMPTS)})
    seqs = [
        Sequence(i + 1, p, SamplingParams(max_tokens=TOKENS + i, **WARM), seed=40 + i) for i, p in enumerate(PROMPTS)
    ]
    for seq in seqs:
        loop.add(seq)
    paths = []
    while loop.busy:
        step = loop.step()
        loop.cache.check()
        for turn, verdict in zip(step.turns, step.verdicts, strict=True):
            paths += [verdict.path] if verdict is not None and verdict.path else []
            row = loop.cache.rows.get(turn.seq.id)
            if row is not None and not loop.flights:  # nothing is in flight: both tables are at the same point
                assert rounds.state.table[row.line, : len(row.slots)].tolist() == row.slots
    assert [seq.generated for seq in seqs] == plain["warm"]
    assert [1, 4, 5] in paths


@pytest.mark.slow
@pytest.mark.usefixtures("exact_products")
def test_penalties_and_logprobs_along_the_paths_of_trees() -> None:
    """A row counts the tokens on its own path, not those of other branches."""
    expected = adjusted(PROMPTS, 12)
    finish(engine(rounds=False), *expected)
    loop = engine(Asking, 6)
    assert isinstance(loop.target.rounds, Rounds)
    Branches(loop.target.rounds, {seq.id: seq.tokens for seq in expected})
    seqs, deepest = adjusted(PROMPTS, 12), 0
    for seq in seqs:
        loop.add(seq)
    while loop.busy:
        step = loop.step()
        deepest = max(deepest, *(len(verdict.path) for verdict in step.verdicts if verdict is not None), 0)
    assert [seq.generated for seq in seqs] == [seq.generated for seq in expected]
    assert [seq.logprobs for seq in seqs] == [seq.logprobs for seq in expected]
    assert deepest == 3


class AskingForTheSecond(ScriptedDrafter):
    """Asks recorded passes for the second sequence; the others get long chains of the host's."""

    def draft(self, request: DraftRequest) -> Draft:
        chains, asked = super().draft(request), request.asked(torch.zeros(64), "scripted")
        pairs = zip(request.seqs, chains.trees, asked.trees, strict=True)
        return Draft.pack((unread if seq.id == 2 else late for seq, late, unread in pairs), asked.unread)


@pytest.mark.slow
def test_a_chain_that_is_deeper_than_any_tree_is_cut_in_a_round_with_trees() -> None:
    """A tree's paths have a largest depth; the sequence that asks is not the first, and drafts are for the first."""
    tokens, prompts = kernels.DEPTH + 6, PROMPTS[:2]
    params = SamplingParams(max_tokens=tokens)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "on_gpu", lambda tensor: GPU)
        alone = build_engine(model(), Config(drafter="off", max_length=96))
        expected = [Sequence(i + 1, prompt, params) for i, prompt in enumerate(prompts)]
        for seq in expected:
            alone.add(seq)
        while alone.busy:
            alone.step()
    AskingForTheSecond.texts = {seq.id: seq.generated for seq in expected}
    loop = engine(AskingForTheSecond, tokens - 1)
    assert isinstance(loop.target.rounds, Rounds)
    Branches(loop.target.rounds, {seq.id: seq.tokens for seq in expected})
    seqs = [Sequence(i + 1, prompt, params) for i, prompt in enumerate(prompts)]
    for seq in seqs:
        loop.add(seq)
    accepted: dict[int, int] = {}
    while loop.busy:
        step = loop.step()
        loop.cache.check()
        for turn, verdict in zip(step.turns, step.verdicts, strict=True):
            if verdict is not None:
                accepted[turn.seq.id] = max(accepted.get(turn.seq.id, 0), len(verdict.path))
    assert [seq.generated for seq in seqs] == [seq.generated for seq in expected]
    assert accepted[1] == kernels.DEPTH
    assert accepted[2] == 3


def test_a_draft_that_comes_too_late_is_known_to_have_been_wrong() -> None:
    """A draft whose first token is wrong is never verified in a round: the device has gone another way by then."""
    ScriptedDrafter.texts, ScriptedDrafter.spoil = {1: list(range(20))}, staticmethod(lambda position: False)
    loop, seen = engine(ScriptedDrafter, 3), list[tuple[list[int], int]]()
    seq = Sequence(1, PROMPTS[0], SamplingParams(max_tokens=TOKENS))
    loop.add(seq)
    while loop.busy:
        for missed in loop.step().untaken:
            if missed is not None:
                tree, token = missed
                assert tree.tokens[0] != token
                assert token in seq.generated
                seen.append((tree.tokens, token))
    assert seen


IDS = st.lists(st.integers(1, 3), min_size=1, max_size=12)


@settings(max_examples=15, deadline=None)
@given(st.lists(st.tuples(IDS, IDS), min_size=1, max_size=3))
def test_lookups_in_a_text_and_its_source_are_those_of_the_drafter(pairs: list[tuple[list[int], list[int]]]) -> None:
    """The same matches as the host's n-grams find, and the same tokens after them."""
    cache = Cache(200, 4, 24, DEVICE, source_length=16)
    state = DeviceState(cache, Driver(DEVICE, poisons=True), 4)
    lines, drafter = Lines(state, 8), make("ngram", Workspace(model(), cache, None, {}, None))  # type: ignore[arg-type]
    assert state.sources is not None
    seqs = [Sequence(i, tokens, source=source) for i, (tokens, source) in enumerate(pairs)]
    for seq in seqs:
        cache.open(seq)
        state.sources.write(cache.rows[seq.id])
        lines.join(seq, cache.rows[seq.id].line, len(seq.tokens) - 1, 0)
    listed = torch.tensor([cache.rows[seq.id].line for seq in seqs], dtype=torch.int32, device=DEVICE)
    texts = state.sources.ids, state.sources.lengths
    kernels.look_up(lines.numbers, lines.tokens, lines.draft, lines.parents, listed, 2, 4, texts)
    wanted = drafter.draft(DraftRequest(seqs, [kernels.DRAFT] * len(seqs))).trees
    for line, tree in zip(listed.tolist(), wanted, strict=True):
        drafted = int(lines.numbers[line, kernels.DRAFTED])
        assert lines.draft[line, :drafted].tolist() == tree.tokens
