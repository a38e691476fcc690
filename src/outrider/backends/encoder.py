"""The encoder of an encoder–decoder: a source is read once, and its K/V for every decoder layer goes into the plane.

A source has slots of its own in the cache (`engine.cache`), in which layer i of the decoder keeps the K/V that its
cross-attention reads. Promise: a source's K/V is the same bits whichever sources are read with it, so a source that was
evicted and is read again changes no text. It knows sources, slots and planes; it does not know what is decoded.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..engine.cache import Plane
from ..models.config import ModelConfig
from . import Part, ops
from .linear import summed
from .rows import Rows

MOST_ROWS = 4096  # that are read together, if no source is longer
Source = tuple[list[int], Tensor]  # its ids, and the slots of its K/V [n]


class _Scratch:
    """The encoder's own K/V, dropped layer by layer: nobody reads it after its pass."""

    def __init__(self, rows: int, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        shape = (rows, config.kv_heads, config.head_dim)
        one = torch.empty(2, *shape, dtype=dtype, device=device)
        self.k, self.v = [one[0]] * config.layers, [one[1]] * config.layers
        self.streams: dict[int, Tensor] = {}

    def count_pass(self) -> None:
        """It belongs to no cache."""


def bidirectional(sources: list[list[int]], device: torch.device) -> Rows:
    """Rows in which every token of a source reads all of it."""
    lengths = [len(source) for source in sources]
    longest, total = max(lengths), sum(lengths)
    tokens = torch.tensor([token for source in sources for token in source])
    positions = torch.cat([torch.arange(n) for n in lengths])
    lines = torch.repeat_interleave(torch.arange(len(sources)), torch.tensor(lengths))
    starts = torch.tensor([sum(lengths[:i]) for i in range(len(lengths))])
    table = (starts[:, None] + torch.arange(longest)).clamp(max=total - 1).int()  # [sources, longest]
    context, slots = torch.tensor(lengths)[lines], torch.arange(total)
    tokens, positions, slots, lines, context, table = (
        tensor.to(device) for tensor in (tokens, positions, slots, lines, context, table)
    )
    none = torch.empty(0, dtype=torch.long, device=device)
    return Rows(tokens, positions, slots, lines, context, table, None, none)


def grouped(rows: Rows, lengths: list[int], config: ModelConfig) -> Rows:
    """The same rows for a GPU's kernels."""
    from .cuda.kernels.attention import Blocks, Scratch

    device = rows.tokens.device
    info, each = (torch.tensor(x, dtype=torch.int32).to(device) for x in (blocks_of(lengths, config), lengths))
    scratch = Scratch(1, config.heads, config.head_dim, 1, device)  # one program takes all keys of a block
    tail = torch.zeros(1, 1, dtype=torch.int32, device=device)
    return replace(rows, blocks=Blocks(info, tail, rows.table, scratch, each))


def blocks_of(lengths: list[int], config: ModelConfig) -> list[list[int]]:
    """Which rows of sources of these lengths are computed together: `attention.Blocks.info`."""
    from .cuda.kernels.attention import rows_per_block

    most, info, first = rows_per_block(config.heads, config.kv_heads), list[list[int]](), 0
    for line, length in enumerate(lengths):
        info += [[first + at, min(most, length - at), line, 0, 0, 0, 0, 0] for at in range(0, length, most)]
        first += length
    return info


class Encoder:
    """Runs a bidirectional network of the same layers as a decoder's, and projects its output for the decoder."""

    def __init__(self, network: Any, layers: Any) -> None:
        """network: a `Transformer` without a head; layers: the decoder's, each with the product `cross.kv`."""
        self.network, self.layers = network, layers
        self.recent: OrderedDict[tuple[int, ...], Tensor] | None = None  # states of the last sources, where shared

    def share(self, other: Encoder) -> None:
        """Read with another model's network, each source once for both."""
        self.network = other.network
        other.recent = self.recent = OrderedDict() if other.recent is None else other.recent

    @torch.inference_mode()
    def read(self, sources: Iterable[Source], plane: Plane) -> None:
        """Read the sources that the plane does not hold yet."""
        firsts = ((int(slots[0]), (ids, slots)) for ids, slots in sources if ids)
        missing = {first: source for first, source in firsts if not plane.has_source(first)}
        for some in together(list(missing.values())):
            states = self._shared_states([ids for ids, _ in some])  # [n, H]
            self.write(states, plane, torch.cat([slots for _, slots in some]).to(states.device, torch.long))
        for first in missing:
            plane.keep_source(first)

    def _shared_states(self, sources: list[list[int]]) -> Tensor:
        """As `states`; those that the other model has read are not computed again."""
        if self.recent is None:
            return self.states(sources)
        keys = [tuple(source) for source in sources]
        if missing := [list(key) for key in dict.fromkeys(keys) if key not in self.recent]:
            each = self.states(missing).split([len(source) for source in missing])
            self.recent.update((tuple(source), states) for source, states in zip(missing, each, strict=True))
        states = torch.cat([self.recent[key] for key in keys])
        while sum(map(len, self.recent)) > MOST_ROWS:
            self.recent.popitem(last=False)
        return states

    def states(self, sources: list[list[int]]) -> Tensor:
        """The encoder's output for each token of each source: [n, H]."""
        network, rows = self.network, bidirectional(sources, self.network.device)
        if ops.on_gpu(rows.tokens):
            rows = grouped(rows, [len(source) for source in sources], network.config)
        return self.states_of(rows)

    def states_of(self, rows: Rows) -> Tensor:
        network = self.network
        scratch: Any = _Scratch(rows.count, network.config, network.plane_shape.dtype, network.device)
        last = network.config.layers - 1
        output = network.forward(rows, scratch, Part(head=False), taps=(last,))
        states: Tensor = network.closing(output.hidden[last], None)
        return states

    def write(self, states: Tensor, plane: Plane, slots: Tensor) -> None:
        """The K/V of every decoder layer: states [n, H] into slots [n]."""
        for i in range(len(plane.k)):
            self.project(i, states, plane.k[i], plane.v[i], slots)

    def project(self, i: int, states: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> None:
        """Write the K/V of decoder layer i: states [n, H] into slots [n] of the planes."""
        both = summed(self.layers[i].cross.kv(states)).to(k.dtype).view(len(slots), 2, *k.shape[1:])
        k[slots], v[slots] = both[:, 0], both[:, 1]


def together(sources: list[Source]) -> Iterator[list[Source]]:
    """Those that are read in one pass."""
    some, rows = list[Source](), 0
    for source in sources:
        if some and rows + len(source[0]) > MOST_ROWS:
            yield some
            some, rows = [], 0
        some.append(source)
        rows += len(source[0])
    if some:
        yield some


def distance_bias(weight: Tensor, config: ModelConfig, length: int, both_ways: bool) -> Tensor:
    """What each distance adds to a head's scores: [heads, distances], with 0 first, or in the middle if `both_ways`.

    weight [buckets, heads]. Short distances have buckets of their own, longer ones share them, by logarithm (T5).
    """
    distance = torch.arange(-(length - 1) if both_ways else 0, length)  # query - key
    buckets = config.distance_buckets // 2 if both_ways else config.distance_buckets
    far, exact = distance.abs(), buckets // 2
    ratio = torch.log(far.clamp(min=1).float() / exact) / math.log(config.distance_limit / exact)
    shared = (exact + (ratio * (buckets - exact)).long()).clamp(max=buckets - 1)
    index = torch.where(far < exact, far, shared) + buckets * (distance < 0)
    return weight[index.to(weight.device)].T.contiguous()
