"""Where a search for a skip set begins: for every number of blocks left out, a set that keeps the stream's direction.

Layer by layer, for every number of blocks left out so far, the better of two ways is gone on with: to run this layer's
block, or to leave it out of the best way with one less (CLaSp's dynamic programme, over a whole text at once). Better
is what lies closer to the whole model's stream, by cosine. It costs about as many passes as blocks may be left out,
and no logits. It knows streams and blocks; what a set is worth is the search's business.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

KINDS: dict[str, tuple[str, ...]] = {"layer": ("attention", "mlp"), "mlp": ("mlp",), "attention": ("attention",)}
Run = Callable[[int, "Tensor | None", frozenset[str]], Tensor]


@dataclass(frozen=True)
class Way:
    """The stream after some layers, and which of them lacked their block."""

    x: Tensor | None  # [T, H]; None before the first layer
    out: tuple[int, ...] = ()


def seeds(run: Run, layers: int, kind: str, most: int) -> Iterator[tuple[int, ...]]:
    """The layers that do without their `kind` (see KINDS), for 1 to `most` of them; the ends are never without.

    run(layer, stream before it, blocks left out) gives the stream after a layer.
    """
    left = frozenset(KINDS[kind])
    ways = [Way(None)]  # by how many lack it; the first is the whole model
    for layer in range(layers):
        ran = [Way(run(layer, way.x, frozenset()), way.out) for way in ways]
        if 0 < layer < layers - 1:
            lacking = [Way(_without(run, layer, way.x, left), (*way.out, layer)) for way in ways[:most]]
            ran = [_nearest(ran[n : n + 1] + lacking[max(n - 1, 0) : n], ran[0]) for n in range(len(lacking) + 1)]
        ways = ran
    for way in ways[1:]:
        yield way.out


def _without(run: Run, layer: int, x: Tensor | None, left: frozenset[str]) -> Tensor:
    assert x is not None
    return x if len(left) == 2 else run(layer, x, left)


def _nearest(ways: list[Way], whole: Way) -> Way:
    return ways[0] if len(ways) == 1 else max(ways, key=lambda way: _likeness(way, whole))


def _likeness(way: Way, whole: Way) -> float:
    assert way.x is not None
    assert whole.x is not None
    return float(torch.nn.functional.cosine_similarity(way.x.float(), whole.x.float(), dim=-1).mean())
