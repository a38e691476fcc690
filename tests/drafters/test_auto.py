"""`auto` picks the drafter with the best recent acceptance, and scores the others too."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.config import Config
from outrider.drafters.auto import Trust, agreement, claims
from outrider.errors import ConfigError
from outrider.llm import build_engine
from outrider.testing import Scenario, decode
from outrider.types import SamplingParams, Sequence, Tree, Verdict, chain

from support.toys import reference, toy


def test_agreement_walks_the_tree() -> None:
    tree = Tree([5, 6, 7, 8], [-1, -1, 1, 2])
    assert agreement(tree, [6, 7, 8, 9]) == 3
    assert agreement(tree, [6, 7]) == 2
    assert agreement(tree, [5, 7]) == 1
    assert agreement(tree, [9]) == 0
    assert agreement(chain([]), [1]) == 0


def test_claims_default_to_halves() -> None:
    assert claims(chain([1, 2, 3])) == [0.5, 0.25, 0.125]
    assert claims(chain([1], survival=[0.9])) == [0.9]


def test_trust_follows_acceptance() -> None:
    trust = Trust()
    for _ in range(50):
        trust.add(claimed=2.0, accepted=0)
    assert trust.share < 0.1
    for _ in range(100):
        trust.add(claimed=2.0, accepted=2)
    assert trust.share == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_costly_drafter_drafts_where_the_free_ones_find_nothing(temperature: float) -> None:
    target = toy()
    params = SamplingParams(temperature=temperature, max_tokens=40)
    scenario = Scenario("together")
    options = {"draft_model": toy(blur=0.05)}
    engine = build_engine(target, Config(drafter="auto", k=5, options=options))
    assert [drafter.name for drafter in engine.drafter.drafters] == ["suffix", "ngram", "model"]
    assert decode(engine, scenario, params) == reference(target, scenario, params)
    alone = build_engine(target, Config(drafter="auto", k=5))
    decode(alone, scenario, params)
    assert engine.index < alone.index  # the model saved steps


def test_auto_cannot_contain_itself() -> None:
    with pytest.raises(ConfigError, match="none that chooses"):
        build_engine(toy(), Config(drafter="auto", options={"auto": "suffix,auto"}))


def test_a_new_sequence_starts_with_the_trust_that_others_have_left() -> None:
    engine = build_engine(toy(), Config(drafter="auto", k=5))
    auto: Any = engine.drafter
    first, second = (Sequence(i, [1, 2, 3]) for i in (1, 2))
    before = auto._trust(first, "suffix").share
    for _ in range(40):
        auto._score(first, "suffix", chain([7], survival=[0.9]), [8], chain([]), Verdict([], [8], ""))
    assert auto._trust(second, "suffix").share < 0.2 < before
