"""Drafts whose tokens are still on the device: wrappers pass them on, and the text stays the same.

A GPU leaves drafted tokens where they were chosen. Here a list stands in for it: a drafter that writes into it, and a
runner that looks there and returns the tokens with its output.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from outrider.config import Config
from outrider.drafters import Drafter, DraftRequest, Workspace, register
from outrider.engine.step import Engine
from outrider.llm import build_engine
from outrider.testing import Scenario, decode
from outrider.types import Batch, Draft, Listener, Output, SamplingParams, Sequence, Step, Tree, chain

from support.toys import reference, toy

PLACES = 64
TARGET = toy()
SCENARIO = Scenario("together", batch=3)


class Shut(Drafter):
    """An oracle whose tokens are unread: each is an index on the device. Now and then one is wrong."""

    name = "shut"
    wrong_every = 0

    def __init__(self, space: Workspace) -> None:
        super().__init__(space)
        self.state: torch.Tensor = space.options["state"]
        self.calls = 0

    def draft(self, request: DraftRequest) -> Draft:
        seqs, budget = request.seqs, request.budgets
        self.calls += 1
        trees, at = [], 0
        for seq, k in zip(seqs, budget, strict=True):
            tokens = self.space.options["future"][seq.id][len(seq.generated) :][:k]
            if self.wrong_every and self.calls % self.wrong_every == 0:
                tokens = [(token + 1) % TARGET.config.vocab_size for token in tokens]
            self.state[at : at + len(tokens)] = torch.tensor(tokens, dtype=torch.long)
            trees.append(chain([-1 - at - j for j in range(len(tokens))]))
            at += len(tokens)
        return Draft.pack(trees, self.state)


class Telling:
    """A runner that reads unread tokens where they are, and returns them with its output."""

    rounds = None

    def __init__(self, inner: Any, state: torch.Tensor) -> None:
        self.inner, self.state, self.plane = inner, state, inner.plane
        self.unread = 0

    def launch(self, packing: Batch, taps: tuple[int, ...], overlapped: bool) -> Any:
        unread = min(packing.tokens) < 0
        packing.tokens = [token if token >= 0 else int(self.state[-1 - token]) for token in packing.tokens]
        pending = self.inner.launch(packing, taps, overlapped)
        self.unread += unread

        class Told:
            def wait(self) -> Output:
                output: Output = pending.wait()
                return replace(output, tokens=list(packing.tokens)) if unread else output

        return Told()


class Listening(Listener):
    """What listeners see of drafts."""

    def __init__(self) -> None:
        self.trees: list[Tree] = []

    def observe(self, step: Step) -> None:
        self.trees += step.draft.trees


@pytest.fixture(params=[0.0, 0.8])
def params(request: pytest.FixtureRequest) -> SamplingParams:
    return SamplingParams(temperature=request.param, max_tokens=30)


@pytest.fixture(autouse=True)
def shut() -> Iterator[None]:
    register("shut")(Shut)
    yield
    Shut.wrong_every = 0


def engine_with(drafter: str, texts: list[list[int]], listener: Listening, k: int | str = 4, **options: Any) -> Engine:
    state = torch.zeros(PLACES, dtype=torch.long)
    options |= {"state": state, "future": dict(enumerate(texts))}
    engine = build_engine(TARGET, Config(drafter=drafter, k=k, options=options), listeners=(listener,))
    engine.target = Telling(engine.target, state)
    return engine


@pytest.mark.parametrize("wrong_every", [0, 3])
@pytest.mark.parametrize(
    ("drafter", "options"),
    [
        ("shut", {}),
        ("cascade", {"cascade": "shut"}),
        ("cascade", {"cascade": "ngram,shut"}),  # some trees of a step are read, others are not
        ("auto", {"auto": "suffix,ngram,shut"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value.values()) or "alone",
)
def test_the_text_is_the_same_and_listeners_see_tokens(
    drafter: str, options: dict[str, str], wrong_every: int, params: SamplingParams
) -> None:
    Shut.wrong_every = wrong_every
    expected = reference(TARGET, SCENARIO, params)
    listener = Listening()
    engine = engine_with(drafter, expected, listener, **options)
    assert decode(engine, SCENARIO, params) == expected
    assert engine.target.unread > 0
    assert not engine.failures
    assert all(token >= 0 for tree in listener.trees for token in tree.tokens)
    if drafter == "shut" and not wrong_every:
        assert engine.index < 0.4 * len(expected[0])  # everything was accepted without being read


def test_k_auto_draws_no_conclusion_from_a_place(params: SamplingParams) -> None:
    expected = reference(TARGET, SCENARIO, params)
    engine = engine_with("shut", expected, Listening(), k="auto")
    assert decode(engine, SCENARIO, params) == expected


def test_auto_scores_what_was_drafted_and_not_its_places(params: SamplingParams) -> None:
    expected = reference(TARGET, SCENARIO, params)
    engine = engine_with("auto", expected, Listening(), auto="shut")
    for i, prompt in enumerate([[1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4, 5, 9, 3, 4, 5, 6, 9]]):
        engine.add(Sequence(i, prompt, params, seed=1000 + i, ends=frozenset({0})))
    for _ in range(4):
        engine.step()
    assert engine.drafter.trust[0, "shut"].share > 1  # right every time; indices would never have been


@pytest.mark.parametrize("beyond", [True, False])
def test_a_place_that_does_not_exist_is_not_believed(beyond: bool) -> None:
    """Negative tokens without anything unread, or behind its end, are cut off like any nonsense."""

    class Lying(Shut):
        name = "lying"

        def draft(self, request: DraftRequest) -> Draft:
            budget = request.budgets
            tokens = [5, -1 - (PLACES if beyond else 0), 6]
            return Draft.pack([chain(tokens[:k]) for k in budget], self.state if beyond else None)

    params = SamplingParams(max_tokens=20)
    expected = reference(TARGET, SCENARIO, params)
    listener = Listening()
    options = {"state": torch.zeros(PLACES, dtype=torch.long)}
    engine = build_engine(TARGET, Config(drafter=Lying, k=3, options=options), listeners=(listener,))
    assert decode(engine, SCENARIO, params) == expected
    assert {tuple(tree.tokens) for tree in listener.trees} <= {(), (5,)}
