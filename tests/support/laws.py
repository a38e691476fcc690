"""Distributions small enough to enumerate: a toy target, a toy drafter, and the exact law of what is emitted."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator

import torch

from outrider.types import Tree, Verdict, chain

V = 3


Law = dict[tuple[int, ...], float]


Rule = Callable[..., Verdict]


class Toy:
    """Target p and drafter q over a tiny vocabulary: random laws for every context."""

    def __init__(self, seed: int, sharp: float = 1.0) -> None:
        self.seed, self.sharp = seed, sharp

    def p(self, context: tuple[int, ...]) -> torch.Tensor:
        return self._law(context, 1)

    def q(self, context: tuple[int, ...]) -> torch.Tensor:
        return self._law(context, 2)

    def _law(self, context: tuple[int, ...], salt: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(hash((self.seed, salt, *context)) % 2**31)
        return torch.softmax(self.sharp * torch.randn(V, generator=generator, dtype=torch.float64), 0)


class Enumerator:
    """Coins that fall in every possible way. Each coin is a uniform number, known so far only to lie in an interval:
    flipping the same coin twice narrows one interval, exactly as reusing a random number would."""

    def __init__(self) -> None:
        self.script: list[int] = []  # which branch to take at each decision
        self.weight = 1.0

    def runs(self, rule: Callable[[], object]) -> Iterator[tuple[object, float]]:
        pending: list[list[int]] = [[]]
        while pending:
            self.script, self.made, self.widths = pending.pop(), 0, []
            self.weight, self.coins = 1.0, defaultdict(lambda: (0.0, 1.0))
            prefix = len(self.script)
            result = rule()
            for i in range(prefix, len(self.widths)):  # branches not taken on the way
                pending += [[*self.script[:i], b] for b in range(1, self.widths[i])]
            yield result, self.weight

    def _decide(self, chances: list[float]) -> int:
        if self.made == len(self.script):
            self.script.append(0)
        branch = self.script[self.made]
        self.made += 1
        self.widths.append(len(chances))
        self.weight *= chances[branch]
        return branch

    def flip(self, depth: object, chance: float) -> bool:
        low, high = self.coins[depth]
        chance = min(max(chance, 0.0), 1.0)
        if chance >= high:
            return True
        if chance <= low:
            return False
        below = (chance - low) / (high - low)
        fell = self._decide([below, 1 - below]) == 0
        self.coins[depth] = (low, chance) if fell else (chance, high)
        return fell

    def draw(self, depth: object, p: torch.Tensor) -> int:
        total = float(p.sum())
        return self._decide([float(x) / total for x in p])


class ToyRows:
    def __init__(self, toy: Toy) -> None:
        self.toy = toy

    def distribution(self, row: int, emitted: list[int]) -> torch.Tensor:
        return self.toy.p(tuple(emitted))


Drafting = Callable[[Toy, int], Iterator[tuple[Tree, float]]]


def drawn(toy: Toy, k: int) -> Iterator[tuple[Tree, float]]:
    """Every chain of k tokens with its chance under q."""
    for tokens in itertools.product(range(V), repeat=k):
        q = torch.stack([toy.q(tokens[:i]) for i in range(k)])
        chance = 1.0
        for i, token in enumerate(tokens):
            chance *= float(q[i, token])
        yield chain(tokens, q=q), chance


def emitted_law(rule: Rule, drafting: Drafting, toy: Toy, k: int) -> Law:
    """The law of the first k+1 tokens: one judged step, then plain draws where the step gave fewer."""
    law: Law = defaultdict(float)
    for tree, chance in drafting(toy, k):
        coins = Enumerator()
        for verdict, weight in coins.runs(lambda tree=tree, coins=coins: rule(tree, ToyRows(toy), coins)):
            for rest in itertools.product(range(V), repeat=k + 1 - len(verdict.tokens)):
                text, tail = list(verdict.tokens), 1.0
                for token in rest:
                    tail *= float(toy.p(tuple(text))[token])
                    text.append(token)
                law[tuple(text)] += chance * weight * tail
    return law


def target_law(toy: Toy, length: int) -> Law:
    law = {}
    for text in itertools.product(range(V), repeat=length):
        chance = 1.0
        for i, token in enumerate(text):
            chance *= float(toy.p(text[:i])[token])
        law[text] = chance
    return law


def worst_error(rule: Rule, drafting: Drafting = drawn, ks: tuple[int, ...] = (1, 2, 3)) -> float:
    worst = 0.0
    for k in ks:
        for seed, sharp in ((1, 0.5), (2, 1.0), (3, 2.5)):
            toy = Toy(seed, sharp)
            law, expected = emitted_law(rule, drafting, toy, k), target_law(toy, k + 1)
            worst = max(worst, *(abs(law[text] - expected[text]) for text in expected))
            worst = max(worst, abs(sum(law.values()) - 1))
    return worst
