"""Whatever drafts, the text is the target's: every registered drafter, every scenario, exact equality.

Parametrised over the registry: a new drafter is tested by existing.
"""

from __future__ import annotations

import random
import time

import pytest
import torch

from outrider import drafters
from outrider.backends.rows import rows_of
from outrider.backends.toy import VOCABULARY
from outrider.config import Config
from outrider.drafters import Drafter, DraftRequest, Traits, Workspace, lookup
from outrider.llm import build_engine
from outrider.testing import SCENARIOS, Scenario, check_drafter, decode, meddled, prompts
from outrider.types import Draft, SamplingParams, Sequence, Step, Tree, chain

from support.toys import reference, toy

TARGET = toy()
NAMES = drafters.names()
SHAPES = {"chain": {}, "tree": {"tree": True}}
CASES = [
    (n, shape) for n in NAMES for shape in SHAPES if shape == "chain" or "tree" in (lookup(n).traits.options or ())
]
PARAMS = {
    "greedy": {},
    "warm": {"temperature": 0.8},
    "penalties": {"temperature": 0.7, "repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2},
    "filters": {"temperature": 1.2, "top_k": 12, "top_p": 0.9, "min_p": 0.02},
    "bias": {"logit_bias": {5: 2.0, 7: -3.0}, "min_tokens": 20},
    "greedy penalties": {"repetition_penalty": 1.5, "min_tokens": 5},
}


def plain(scenario: Scenario, params: SamplingParams) -> list[list[int]]:
    """What the target says by itself: it does not depend on the drafter."""
    return reference(TARGET, scenario, params)


def options_of(name: str, shape: str) -> dict:
    blurred = {"draft_model": toy(blur=0.08)} if name == "model" else {}
    return lookup(name).traits.trial(TARGET) | SHAPES[shape] | blurred


def scenarios_of(name: str, shape: str) -> list[Scenario]:
    """`test_conformance_kit` runs every scenario with chains, and with a draft model that is always right."""
    return [s for s in SCENARIOS if shape == "tree" or name == "model" or s.stagger]


@pytest.mark.one_in(5, 0, 2)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(
    ("name", "shape", "scenario"),
    [pytest.param(n, s, x, id=f"{n}-{s}-{x.name}") for n, s in CASES for x in scenarios_of(n, s)],
)
def test_text_is_the_targets(name: str, temperature: float, shape: str, scenario: Scenario) -> None:
    params = SamplingParams(temperature=temperature, max_tokens=24)
    config = Config(drafter=name, k=6, options=options_of(name, shape), **scenario.config)
    engine = build_engine(TARGET, config)
    assert decode(engine, scenario, params) == plain(scenario, params)
    assert not engine.failures


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_means_the_same(name: str) -> None:
    """Requests with all kinds of parameters, more of them than run at once."""
    engine = build_engine(TARGET, Config(drafter=name, k=5, options=options_of(name, "chain")))
    seqs, expected, given = [], [], prompts(4)
    for params in (SamplingParams(max_tokens=40, **some) for some in PARAMS.values()):
        expected += plain(Scenario("together"), params)
        first = len(seqs)
        seqs += [Sequence(first + i, p, params, 1000 + i, frozenset({0})) for i, p in enumerate(given)]
    for seq in seqs:
        engine.add(seq)
    while engine.busy:
        engine.step()
        engine.cache.check()
    assert [seq.generated for seq in seqs] == expected
    assert not engine.failures


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", NAMES)
def test_adaptive_k_changes_nothing(name: str) -> None:
    params = SamplingParams(temperature=0.8, max_tokens=40)
    engine = build_engine(TARGET, Config(drafter=name, options=options_of(name, "chain")))
    scenario = Scenario("together")
    assert decode(engine, scenario, params) == plain(scenario, params)


@pytest.mark.parametrize("name", NAMES)
def test_conformance_kit(name: str) -> None:
    assert check_drafter(name, target=TARGET, tokens=20) > 0


@pytest.mark.one_in(5)
@pytest.mark.parametrize("rule", ["reject", "block"])
@pytest.mark.parametrize("name", NAMES)
def test_other_rules_are_greedy_identical_and_repeatable(name: str, rule: str) -> None:
    scenario = Scenario("together")
    config = Config(drafter=name, k=4, rule=rule, options=options_of(name, "chain"))
    greedy = SamplingParams(max_tokens=30)
    assert decode(build_engine(TARGET, config), scenario, greedy, rule) == plain(scenario, greedy)
    warm = SamplingParams(temperature=0.9, max_tokens=30)
    first = decode(build_engine(TARGET, config), scenario, warm, rule)
    assert first == decode(build_engine(TARGET, config), scenario, warm, rule)


# ---------------------------------------------------------------- adversaries


class Adversary(Drafter):
    def __init__(self, space: Workspace) -> None:
        super().__init__(space)
        self.dice = random.Random(7)


class Liar(Adversary):
    """Always proposes something the target is not choosing."""

    name = "liar"

    def draft(self, request: DraftRequest) -> Draft:
        seqs, budget = request.seqs, request.budgets
        return Draft.pack(chain([(seq.tokens[-1] + 1) % VOCABULARY] * k) for seq, k in zip(seqs, budget, strict=True))


class Ragged(Adversary):
    """Random trees of random sizes, duplicate siblings included, often larger than the budget."""

    name = "ragged"

    def draft(self, request: DraftRequest) -> Draft:
        seqs = request.seqs
        return Draft.pack(self._tree() for _ in seqs)

    def _tree(self) -> Tree:
        n = self.dice.randrange(12)
        tokens = [self.dice.choice((3, 4, 5, self.dice.randrange(VOCABULARY))) for _ in range(n)]
        return Tree(tokens, [self.dice.randrange(-1, i) if i else -1 for i in range(n)])


class EndSpam(Adversary):
    """Proposes the end of the text at every opportunity."""

    name = "endspam"

    def draft(self, request: DraftRequest) -> Draft:
        budget = request.budgets
        return Draft.pack(Tree([0] * k, [-1] * k) for k in budget)


class Malformed(Adversary):
    """Tokens outside the vocabulary, parents that do not exist, wrong lengths, wrong batch sizes."""

    name = "malformed"

    def draft(self, request: DraftRequest) -> Draft:
        seqs = request.seqs
        kind = self.dice.randrange(5)
        if kind == 0:
            return Draft.pack([])
        if kind == 1:
            return Draft.pack(Tree([3, VOCABULARY + 5, -2], [-1, 0, 1]) for _ in seqs)
        if kind == 2:
            return Draft.pack(Tree([3, 4, 5], [-1, 2, 0]) for _ in seqs)
        if kind == 3:
            return None  # type: ignore[return-value]
        return Draft.pack(Tree([3, 4], [-1]) for _ in seqs)


class Crashes(Adversary):
    """Raises in every verb."""

    name = "crashes"

    def begin(self, seq: Sequence) -> None:
        raise RuntimeError("begin")

    def draft(self, request: DraftRequest) -> Draft:
        raise RuntimeError("draft")

    def overlap(self, seqs: list[Sequence], draft: Draft) -> None:
        raise RuntimeError("overlap")

    def observe(self, step: Step) -> None:
        raise RuntimeError("observe")

    def end(self, seq: Sequence) -> None:
        raise RuntimeError("end")


class Slow(Adversary):
    """Still busy when the target is done."""

    name = "slow"

    def draft(self, request: DraftRequest) -> Draft:
        budget = request.budgets
        return Draft.pack(chain([3] * k) for k in budget)

    def overlap(self, seqs: list[Sequence], draft: Draft) -> None:
        time.sleep(0.002)


class Oracle(Adversary):
    """An oracle whose right tokens are hidden in a forest of wrong ones."""

    name = "oracle"

    def draft(self, request: DraftRequest) -> Draft:
        seqs, budget = request.seqs, request.budgets
        return Draft.pack(self._tree(seq, k) for seq, k in zip(seqs, budget, strict=True))

    def _tree(self, seq: Sequence, k: int) -> Tree:
        text = self.space.options["texts"].get(tuple(seq.tokens[: seq.prompt_len]), [])
        ahead = text[len(seq.generated) :][: k // 2]
        tokens, parents, last = [], [], -1
        for token in ahead:
            tokens += [(token + 1) % VOCABULARY, token]
            parents += [last, last]
            last = len(tokens) - 1
        return Tree(tokens, parents)


class Corrupts(Adversary):
    """Overwrites what is not its own: the spare slots of the target's plane."""

    name = "corrupts"

    def draft(self, request: DraftRequest) -> Draft:
        seqs = request.seqs
        for seq in seqs:
            spare = self.space.cache.spare(seq)
            for layer in self.space.plane.k:
                layer[spare] = float("nan")
        return Draft.pack(chain([3, 4]) for _ in seqs)


ADVERSARIES = [Liar, Ragged, EndSpam, Malformed, Crashes, Slow, Corrupts]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.name)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("adversary", ADVERSARIES)
def test_adversaries_cannot_change_the_text(adversary: type[Drafter], temperature: float, scenario: Scenario) -> None:
    params = SamplingParams(temperature=temperature, max_tokens=30)
    engine = build_engine(TARGET, Config(drafter=adversary, k=6, **scenario.config))
    assert decode(engine, scenario, params) == plain(scenario, params)


@pytest.mark.parametrize("survival", [[], [0.9], [None] * 3, "abc", [-1.0] * 3], ids=str)
def test_a_malformed_survival_cannot_change_the_text(survival: object) -> None:
    """The controller reads survival where K is chosen at every step."""

    class Claims(Drafter):
        name = "claims"

        def draft(self, request: DraftRequest) -> Draft:
            return Draft.pack(chain([3, 4, 5], survival) for _ in request.seqs)  # type: ignore[arg-type]

    params, scenario = SamplingParams(max_tokens=10), Scenario("together")
    engine = build_engine(TARGET, Config(drafter=Claims))
    assert decode(engine, scenario, params) == plain(scenario, params)
    assert all(failure.startswith("claims: ") for failure in engine.failures)
    assert engine.failures


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_an_oracle_is_fast_and_right(temperature: float) -> None:
    params = SamplingParams(temperature=temperature, max_tokens=40)
    scenario = Scenario("together")
    expected = plain(scenario, params)
    texts = {tuple(prompt): text for prompt, text in zip(prompts(4), expected, strict=True)}
    engine = build_engine(TARGET, Config(drafter=Oracle, k=8, options={"texts": texts}))
    assert decode(engine, scenario, params) == expected
    assert engine.index < 16  # 40 tokens at up to five a step


def test_the_kit_catches_a_drafter_that_changes_text() -> None:
    class Cheats(Drafter):
        """Rewrites the truth itself, which no drafter may."""

        name = "cheats"

        def draft(self, request: DraftRequest) -> Draft:
            seqs = request.seqs
            for seq in seqs:
                if len(seq.generated) == 5:
                    seq.tokens[-1] = (seq.tokens[-1] + 1) % VOCABULARY
            return Draft.empty(len(seqs))

    with pytest.raises(AssertionError, match="changed request"):
        check_drafter(Cheats, target=TARGET, tokens=12)


def test_meddling_is_real() -> None:
    """The kit's meddled drafter does skip, repeat and crash."""
    calls: list[str] = []

    class Counted(Drafter):
        name = "counted"

        def draft(self, request: DraftRequest) -> Draft:
            seqs = request.seqs
            return Draft.empty(len(seqs))

        def observe(self, step: Step) -> None:
            calls.append("observe")

    engine = build_engine(TARGET, Config(drafter=meddled(Counted, 3), k=2))
    decode(engine, Scenario("alone", batch=1), SamplingParams(max_tokens=40))
    assert len(calls) != engine.index
    assert any("may crash" in failure for failure in engine.failures)


@pytest.mark.parametrize("watches", [True, False])
@pytest.mark.parametrize("k", [0, 2])
def test_a_drafter_that_need_not_watch_sees_only_steps_with_a_budget(watches: bool, k: int) -> None:
    calls: list[int] = []

    class Counted(Drafter):
        name = "counted"
        traits = Traits(watches=watches)

        def draft(self, request: DraftRequest) -> Draft:
            return Draft.empty(len(request.seqs))

        def observe(self, step: Step) -> None:
            calls.append(step.index)

    engine = build_engine(TARGET, Config(drafter=Counted, k=k))
    decode(engine, Scenario("alone", batch=1), SamplingParams(max_tokens=8))
    if watches:
        assert len(calls) == engine.index
    else:
        assert bool(calls) == bool(k)
        assert len(calls) < engine.index  # the last token has no room for a draft


def test_nan_logits_are_a_sentence() -> None:
    from outrider.errors import ModelError

    broken = toy()
    broken.norm = broken.norm * float("nan")
    engine = build_engine(broken, Config(drafter="off"))
    engine.add(Sequence(1, [1, 2, 3]))
    with pytest.raises(ModelError, match="NaN"):
        engine.step()


def test_float32_rows_do_not_depend_on_their_company() -> None:
    """The real promise, on the real kernels: logits of one pass over many rows equal one-row passes, bit for bit."""
    from outrider.engine.batch import BatchBuilder
    from outrider.engine.cache import Cache

    for dtype in (torch.float32, torch.bfloat16):
        model = toy(dtype=dtype)
        cache = Cache(256, 4, 128)
        plane = cache.add_plane(*model.plane_shape)
        seq = Sequence(1, [(7 * i) % VOCABULARY for i in range(60)])
        cache.open(seq)
        cache.reserve(seq, 60, 0)
        logits = {}
        for chunk in (1, 2, 3, 7, 60):
            got = []
            for start in range(0, 60, chunk):
                packed = BatchBuilder(cache)
                packed.pending(seq, start, min(start + chunk, 60), want=False)
                packed.want = list(range(len(packed.tokens)))
                got.append(model.forward(rows_of(packed), plane).logits)
            logits[chunk] = torch.cat(got)
        assert all(torch.equal(logits[1], other) for other in logits.values()), dtype
