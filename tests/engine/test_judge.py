"""The judge, exactly: the law of what `reject` and `block` emit is enumerated, not sampled.

`Enumerator` runs a rule once for every way its coins can fall and adds up the probabilities, in float64. A rule is
right when the law of the first K+1 tokens (a step, then plain draws) is the target's own. The planted bugs at the end
show that the check can fail.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings, strategies as st

from outrider.engine.judge import RULES, block, match, reject, residual
from outrider.types import ACCEPTED, PRUNED, REJECTED, UNREACHED, Tree, Verdict, chain

from support.laws import Drafting, Enumerator, Rule, Toy, ToyRows, V, drawn, worst_error


class Exhausted(Exception):
    pass


def certain(toy: Toy, k: int) -> Iterator[tuple[Tree, float]]:
    """A drafter without q: always the same chain."""
    yield chain([i % V for i in range(k)]), 1.0


@pytest.mark.parametrize("rule", [reject, block])
@pytest.mark.parametrize("drafting", [drawn, certain])
def test_emitted_law_is_the_targets(rule: Rule, drafting: Drafting) -> None:
    assert worst_error(rule, drafting) < 1e-9


@pytest.mark.parametrize("seed", range(20))
def test_block_accepts_at_least_as_many(seed: int) -> None:
    def mean(rule: Rule) -> float:
        toy, total = Toy(seed, 1.5), 0.0
        for tree, chance in drawn(toy, 3):
            coins = Enumerator()
            runs = coins.runs(lambda tree=tree, coins=coins: rule(tree, ToyRows(toy), coins))
            total += sum(chance * weight * len(verdict.path) for verdict, weight in runs)
        return total

    assert mean(block) >= mean(reject) - 1e-12


# ---------------------------------------------------------------- planted bugs: the check must fail on each


def wrong_residual(tree: Tree, target: ToyRows, coins: Enumerator) -> Verdict:
    """After a miss, draws from p itself instead of what p has more than q."""
    emitted: list[int] = []
    for depth, token in enumerate(tree.tokens):
        p, q = target.distribution(depth, emitted), tree.q[depth]
        if not coins.flip(depth, float(p[token] / q[token])):
            return Verdict(list(range(depth)), [*emitted, coins.draw(depth, p)], "")
        emitted.append(token)
    return Verdict([], [*emitted, coins.draw(9, target.distribution(len(emitted), emitted))], "")


def reused_coin(tree: Tree, target: ToyRows, coins: Enumerator) -> Verdict:
    """One random number decides every position."""
    emitted: list[int] = []
    for depth, token in enumerate(tree.tokens):
        p, q = target.distribution(depth, emitted), tree.q[depth]
        if not coins.flip("the only coin", float(p[token] / q[token])):
            return Verdict(list(range(depth)), [*emitted, coins.draw(depth, residual(p, q))], "")
        emitted.append(token)
    return Verdict([], [*emitted, coins.draw(9, target.distribution(len(emitted), emitted))], "")


def greedy_acceptance(tree: Tree, target: ToyRows, coins: Enumerator) -> Verdict:
    """Accepts a drafted token if it is the target's likeliest, otherwise draws from p."""
    emitted: list[int] = []
    for depth, token in enumerate(tree.tokens):
        p = target.distribution(depth, emitted)
        if token != int(p.argmax()):
            return Verdict(list(range(depth)), [*emitted, coins.draw(depth, p)], "")
        emitted.append(token)
    return Verdict([], [*emitted, coins.draw(9, target.distribution(len(emitted), emitted))], "")


def discards_by_value(tree: Tree, target: ToyRows, coins: Enumerator) -> Verdict:
    """A pruner that throws away drawn tokens because they look unlikely, before the judge sees them."""
    keep = next((i for i, t in enumerate(tree.tokens) if tree.q[i, t] < 0.3), len(tree.tokens))
    return reject(tree.cut(keep), target, coins)


def block_stops_early(tree: Tree, target: ToyRows, coins: Enumerator) -> Verdict:
    """`block` that gives up at the first failed coin instead of looking for the last success."""
    full = block(tree, target, coins)
    first = next((i for i in range(len(tree.tokens)) if not coins.flip(i, 0.5)), len(tree.tokens))
    return full.cut(max(first, 1), tree)


@pytest.mark.parametrize("bug", [wrong_residual, reused_coin, greedy_acceptance, discards_by_value, block_stops_early])
def test_planted_bugs_are_caught(bug: Rule) -> None:
    assert worst_error(bug) > 1e-3


# ---------------------------------------------------------------- the walk


class Says:
    """A target whose choice is a function of what was emitted."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def choose(self, row: int, emitted: list[int]) -> int:
        return hash((self.seed, *emitted)) % V


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    n = draw(st.integers(0, 10))
    tokens = draw(st.lists(st.integers(0, V - 1), min_size=n, max_size=n))
    return Tree(tokens, [draw(st.integers(-1, i - 1)) for i in range(n)])


@given(tree=trees(), seed=st.integers(0, 100))
@settings(max_examples=300, deadline=None)
def test_match_emits_the_targets_own_choices(tree: Tree, seed: int) -> None:
    verdict = match(tree, Says(seed))
    for i, token in enumerate(verdict.tokens):
        assert token == Says(seed).choose(0, verdict.tokens[:i])
    assert [tree.tokens[node] for node in verdict.path] == verdict.tokens[:-1]
    assert [tree.parents[node] for node in verdict.path] == [-1, *verdict.path][:-1]
    assert [i for i, fate in enumerate(verdict.fates) if fate == ACCEPTED] == sorted(verdict.path)
    spoke = {-1, *verdict.path}
    for node, fate in enumerate(verdict.fates):
        assert (fate == UNREACHED) == (tree.parents[node] not in spoke)
    last = verdict.path[-1] if verdict.path else -1
    missed = [tree.tokens[c] for c, parent in enumerate(tree.parents) if parent == last]
    assert verdict.tokens[-1] not in missed  # the walk goes as far as the tree allows


@given(tree=trees(), seed=st.integers(0, 100), data=st.data())
@settings(max_examples=200, deadline=None)
def test_a_cut_verdict_is_that_of_a_text_that_ended_there(tree: Tree, seed: int, data: st.DataObject) -> None:
    verdict = match(tree, Says(seed))
    n = data.draw(st.integers(1, len(verdict.tokens)))
    cut = verdict.cut(n, tree)
    assert cut.tokens == verdict.tokens[:n]
    assert cut.fates.count(ACCEPTED) == len(cut.path) == min(len(verdict.path), n)
    assert len(cut.origins) == len(cut.rows) == n


def test_rules_for_chains_prune_branches() -> None:
    class Sure:
        def distribution(self, row: int, emitted: list[int]) -> torch.Tensor:
            return torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)

    class Coins:
        def flip(self, depth: int, chance: float) -> bool:
            return chance > 0.5

        def draw(self, depth: int, p: torch.Tensor) -> int:
            return int(p.argmax())

    tree = Tree([0, 0, 1], [-1, 0, 0])
    for name in ("reject", "block"):
        verdict = RULES[name](tree, Sure(), Coins())
        assert verdict.path == [0, 1]
        assert verdict.tokens == [0, 0, 0]
        assert verdict.fates == ACCEPTED * 2 + PRUNED
    assert RULES["reject"](chain([1]), Sure(), Coins()).fates == REJECTED
