"""The stop threshold: it follows acceptance, and stopping early changes no text."""

from __future__ import annotations

import random
from typing import Any

import pytest

from outrider import SamplingParams
from outrider.backends.toy import toy
from outrider.config import Config
from outrider.control.adaptive import Adaptive, Fixed
from outrider.control.costs import PassCosts
from outrider.drafters import Traits, lookup, names
from outrider.llm import build_engine
from outrider.testing import SCENARIOS, decode, reference
from outrider.types import Draft, Sequence, Tree, Turn, chain

TARGET = toy()


class DraftLog:
    """A listener that records drafts."""

    def __init__(self) -> None:
        self.trees: list[Tree] = []

    def observe(self, step: Any) -> None:
        self.trees += step.draft.trees


class FixedThreshold(Fixed):
    """K tokens, with a given threshold."""

    def __init__(self, k: int, stop_below: float) -> None:
        super().__init__(k)
        self.stop_below = stop_below


# ---------------------------------------------------------------- speed: a simulation without models


def speed(stops: bool, claim: Any, steps: int = 1500, price: float = 0.25, seed: int = 5) -> float:
    """Tokens per plain pass of a drafter whose tokens have survival 0.95 or 0.15; `claim(chance)` is what it claims."""
    dice, costs = random.Random(seed), {n: 1.0 + 0.03 * (n - 1) for n in range(1, 20)}
    controller = Adaptive(PassCosts(costs))
    seq = Sequence(1, [1], SamplingParams(max_tokens=10**6))
    tokens = seconds = 0.0
    for _ in range(steps):
        (turn,) = controller.budget([Turn(seq, 1, True)], Traits())
        chances: list[float] = []
        survival: list[float] = []
        while len(chances) < turn.budget and not (stops and survival and survival[-1] < controller.stop_below):
            chances.append(0.95 if dice.random() < 0.7 else 0.15)
            survival.append(claim(chances[-1]) * (survival[-1] if survival else 1.0))
        taken = price * len(chances)
        draft = controller.prune([turn], Draft.pack([chain([1] * len(chances), survival)]))
        n = len(draft.trees[0].tokens)
        path = 0
        while path < n and dice.random() < chances[path]:
            path += 1
        clock = {"draft": taken + 1e-9, "verify": costs[n + 1], "judge": 0.0}
        controller.observe(_step(turn, draft, path, clock))
        tokens, seconds = tokens + path + 1, seconds + sum(clock.values())
    return tokens / seconds


def _step(turn: Turn, draft: Draft, path: int, clock: dict[str, float]) -> Any:
    from types import SimpleNamespace

    from outrider.types import ACCEPTED, REJECTED, UNREACHED, Verdict

    n = len(draft.trees[0].tokens)
    fates = ACCEPTED * path + (REJECTED + UNREACHED * n)[: n - path]
    verdict = Verdict(list(range(path)), [1] * (path + 1), fates)
    return SimpleNamespace(
        turns=[turn], draft=draft, verdicts=[verdict], clock=clock, rows=n + 1, draft_rows=[n], in_round=False,
        partial=False, untaken=[None], output=SimpleNamespace(seconds={}),
    )  # fmt: skip


CLAIMS = {"calibrated": lambda c: c, "overconfident": lambda c: c**0.3, "underconfident": lambda c: 0.8 * c}
# To stop by exaggerated claims gains nothing.
LEAST = {"calibrated": 1.04, "overconfident": 0.95, "underconfident": 1.04}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", CLAIMS)
def test_a_drafter_that_knows_its_survival_gains_by_stopping(kind: str) -> None:
    claim, seeds = CLAIMS[kind], range(16)
    ignoring, stopping = (sum(speed(stops, claim, seed=seed) for seed in seeds) / 16 for stops in (False, True))
    assert stopping > LEAST[kind] * ignoring
    assert ignoring > 1.15
    assert stopping > 1.3  # plain decoding is 1


# ---------------------------------------------------------------- drafters


@pytest.mark.one_in(3)
@pytest.mark.parametrize("drafter", [n for n in ("model", "layerskip", "exit", "head") if n in names()])
def test_chains_end_below_the_threshold_and_the_text_is_the_same(drafter: str) -> None:
    options = lookup(drafter).traits.trial(TARGET) or {"skip_layers": [1]}
    if drafter == "model":
        options = {"draft_model": toy(blur=0.3)}
    config, params = Config(drafter=drafter, k=5, options=options), SamplingParams(max_tokens=30)
    lengths = {}
    for stop_below in (0.0, 0.6, 1.1):
        one = build_engine(TARGET, config)
        one.controller = FixedThreshold(5, stop_below)
        log = DraftLog()
        one.listeners = (log,)
        assert decode(one, SCENARIOS[1], params) == reference(TARGET, SCENARIOS[1], params)
        for tree in log.trees:
            assert tree.survival is None or all(s >= stop_below for s in tree.survival[:-1])
        lengths[stop_below] = max(len(tree.tokens) for tree in log.trees)
    assert lengths[0.0] == 5
    assert lengths[1.1] == 1  # the first token is always drafted


def test_trees_are_not_extended_below_the_threshold() -> None:
    options = {"draft_model": toy(blur=0.3), "tree": True, "tree_width": 2, "tree_depth": 4}
    one = build_engine(TARGET, Config(drafter="model", k=8, options=options))
    one.controller = FixedThreshold(8, 1.1)
    log = DraftLog()
    one.listeners = (log,)
    params = SamplingParams(max_tokens=20)
    assert decode(one, SCENARIOS[0], params) == reference(TARGET, SCENARIOS[0], params)
    assert all(set(tree.parents) <= {-1} for tree in log.trees)


@pytest.mark.parametrize("rule", ["reject", "block"])
def test_rules_that_draw_ignore_the_threshold(rule: str) -> None:
    one = build_engine(TARGET, Config(drafter="model", k=5, options={"draft_model": toy(blur=0.3)}))
    one.controller = FixedThreshold(5, 1.1)
    seq = Sequence(1, [1, 2, 3], SamplingParams(temperature=1.0, max_tokens=30), seed=3, rule=rule)
    one.add(seq)
    one.step()
    assert len(one.step().draft.trees[0].tokens) == 5
