"""The judge: which drafted tokens are kept, and which token the target adds itself.

Why the text cannot change (rule `match`, the default): the judge walks from the root and lets the target make its
own choice at each node. The choice is emitted whatever was drafted. If a child holds that very token, its row has
already been computed in this pass, so the walk goes on there; otherwise the step ends. The draft decides how far one
pass reaches, never what is emitted.

`reject` (Leviathan, Chen) and `block` (arXiv 2403.10444) preserve the *distribution* instead of the exact text: they
verify drawn chains with their q and accept more of them at high temperature. At temperature 0 all three agree.

Where a guide allows no token, the target's choice is -1, and the step ends without a token of the target's own.

Pure functions over ids and distributions; the judge knows no models, caches or text.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from ..types import ACCEPTED, PRUNED, REJECTED, UNREACHED, Tree, Verdict


class TargetRows(Protocol):
    """The target over one tree. Row 0 follows the root, row i+1 follows node i."""

    def choose(self, row: int, emitted: list[int]) -> int: ...

    def distribution(self, row: int, emitted: list[int]) -> Tensor: ...  # p [V] float64


class RandomSource(Protocol):
    """Independent randomness: one coin (True with this chance) and one draw (a token from weights p) for each depth."""

    def flip(self, depth: int, chance: float) -> bool: ...

    def draw(self, depth: int, p: Tensor) -> int: ...


def match(tree: Tree, target: TargetRows, coins: RandomSource | None = None) -> Verdict:
    """Follow the target's own choices through the tree."""
    fates = [UNREACHED] * len(tree.tokens)
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(tree.parents):
        children.setdefault(parent, []).append(node)
    accepted: int | None = -1
    path: list[int] = []
    emitted: list[int] = []
    while accepted is not None:
        choice = target.choose(accepted + 1, emitted)
        if choice < 0:
            break
        emitted.append(choice)
        node, accepted = accepted, None
        for child in children.get(node, ()):
            if accepted is None and tree.tokens[child] == choice:
                accepted = child
                path.append(child)
            fates[child] = ACCEPTED if child == accepted else REJECTED
    return Verdict(path, emitted, "".join(fates))


def fates_of(tree: Tree, path: list[int]) -> str:
    """The fates of a tree's nodes where this path was accepted under `match`."""
    reached = {-1, *path}
    return "".join(
        UNREACHED if parent not in reached else ACCEPTED if node in reached else REJECTED
        for node, parent in enumerate(tree.parents)
    )


def reject(tree: Tree, target: TargetRows, coins: RandomSource) -> Verdict:
    """Accept each token with chance min(1, p/q); at the first rejection draw from the residual."""
    tree, fates = _trunk(tree)
    emitted: list[int] = []
    for depth, token in enumerate(tree.tokens):
        p = target.distribution(depth, emitted)
        q = _drawn_from(tree, depth, p)
        if not coins.flip(depth, float(p[token] / q[token])):
            emitted.append(coins.draw(depth, residual(p, q)))
            fates[depth] = REJECTED
            return _verdict(depth, emitted, fates)
        emitted.append(token)
        fates[depth] = ACCEPTED
    last = len(tree.tokens)
    emitted.append(coins.draw(last, target.distribution(last, emitted)))
    return _verdict(last, emitted, fates)


def block(tree: Tree, target: TargetRows, coins: RandomSource) -> Verdict:
    """Verify the whole chain jointly. Never accepts fewer tokens than `reject` in expectation."""
    tree, fates = _trunk(tree)
    n = len(tree.tokens)
    p = [target.distribution(i, tree.tokens[:i]) for i in range(n + 1)]  # [n+1][V]
    kept, weight, weight_kept = 0, 1.0, 1.0  # weight is P_i, the clipped running product of p/q
    for i, token in enumerate(tree.tokens, start=1):
        q = _drawn_from(tree, i - 1, p[i - 1])
        weight = min(weight * float(p[i - 1][token] / q[token]), 1.0)
        chance = weight if i == n else _block_chance(weight, p[i], _drawn_from(tree, i, p[i]))
        if coins.flip(i - 1, chance):
            kept, weight_kept = i, weight
    bonus = p[n] if kept == n else residual(p[kept], _drawn_from(tree, kept, p[kept]), weight_kept)  # [V]
    emitted = [*tree.tokens[:kept], coins.draw(kept, bonus)]
    for depth in range(min(kept + 1, n)):
        fates[depth] = ACCEPTED if depth < kept else REJECTED
    return _verdict(kept, emitted, fates)


RULES: dict[str, Callable[[Tree, TargetRows, RandomSource], Verdict]] = {
    "match": match,
    "reject": reject,
    "block": block,
}


def _verdict(accepted: int, emitted: list[int], fates: list[str]) -> Verdict:
    """The verdict on a chain; -1 as the last emitted token is none."""
    return Verdict(list(range(accepted)), emitted if emitted[-1] >= 0 else emitted[:-1], "".join(fates))


def residual(p: Tensor, q: Tensor, weight: float = 1.0) -> Tensor:
    """The target's mass that q did not cover: max(weight * p - q, 0), unnormalised. [V]"""
    uncovered = torch.clamp(weight * p - q, min=0)
    # p == q up to rounding: nothing is left, and this branch has chance zero; p itself keeps the draw defined.
    return uncovered if uncovered.sum() > 0 else p


def _block_chance(weight: float, p_next: Tensor, q_next: Tensor) -> float:
    """h_i: the chance to stop no earlier than here, given that the chain is at weight P_i."""
    uncovered = float(torch.clamp(weight * p_next - q_next, min=0).sum())
    return 1.0 if weight >= 1 else uncovered / (uncovered + 1 - weight)


def _drawn_from(tree: Tree, node: int, p: Tensor) -> Tensor:
    """q of a node [V]. Without q the token was proposed deterministically: all mass is on it."""
    if tree.q is not None:
        return tree.q[node].to(p.dtype)
    q = torch.zeros_like(p)
    q[tree.tokens[node]] = 1
    return q


def _trunk(tree: Tree) -> tuple[Tree, list[str]]:
    """The leading chain of a tree, and the fates so far: `reject` and `block` verify chains; branches are pruned."""
    length = next((i for i, parent in enumerate(tree.parents) if parent != i - 1), len(tree.tokens))
    return tree.cut(length), [UNREACHED] * length + [PRUNED] * (len(tree.tokens) - length)
