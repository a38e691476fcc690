"""A tree that a trained head grows level by level, as one graph: who is fed and who sees whom is decided on the device.

Each level's `width` likeliest nodes are fed, each going on from its parent's output and seeing its own ancestors, and
get `width` children. Nodes are numbered as they are found, so that the host only picks the best of them:

    0 … w-1 after the root, then w² for each level: w children of each fed node, in the order of their numbers.

The node of rank r that is fed at level s lives in scratch slot (s - 1) w + r of its sequence's lane.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...backends.cuda.capture import Field, PinnedBuffer
from ...backends.cuda.state import DEPTHS, F64, I32, I64
from ...types import Sequence
from .passes import First, HeadShape, fill_guesses, fill_noise, likeliest, lines_of, received

if TYPE_CHECKING:
    from .recorded import Heads


class Grown(NamedTuple):
    """All nodes of one tree, as `types.Tree` has them."""

    tokens: list[int]
    parents: list[int]
    survival: list[float]


class Level(NamedTuple):
    """The nodes that were found last, M of each of B sequences, and the fed ones that they come from."""

    tokens: Tensor  # [B, M]
    survival: Tensor  # [B, M] float64
    outputs: Tensor  # [B, w, H] of the nodes that they are children of
    tails: Tensor  # [B, w, s] int32 slots of those nodes and their ancestors, root's child first


class Growing(First):
    """Levels of a tree, brought back in one copy."""

    def __init__(self, heads: Heads, shape: HeadShape) -> None:
        nodes = (shape.wanted, shape.width + (shape.length - 1) * shape.width**2)
        self.reply = PinnedBuffer(
            heads.state.driver, {"tokens": (I64, nodes), "parents": (I64, nodes), "survival": (F64, nodes)}
        )
        super().__init__(heads, shape)

    def more(self) -> dict[str, Field]:
        b, w, d = self.shape.wanted, self.shape.width, self.shape.length
        fields: dict[str, Field] = {"later_info": (I32, (d, b * w, 8)), "later_positions": (I64, (d, b * w))}
        return fields | {"key": (I64, (d, b)), "temperature": (F64, (b,))}

    def _fill_more(self, a: dict[str, Any], seqs: list[Sequence], lengths: list[int]) -> None:
        b, w, d = len(seqs), self.shape.width, self.shape.length
        for name in ("later_info", "later_positions"):
            a[name].fill(0)
        lengths = [len(seq.tokens) for seq in seqs]
        for level, keys in enumerate(a["key"]):  # all nodes of a level stand at the same position
            fill_noise(a | {"key": keys}, seqs, [n + level for n in lengths])
        n, lines = np.repeat(np.array(lengths, dtype=np.int64), w), np.repeat(lines_of(self.heads, seqs), w)  # [B * w]
        info, positions = a["later_info"][:, : b * w], a["later_positions"][:, : b * w]
        fill_guesses(info, positions, self.heads, np.arange(d)[:, None], n, lines)

    def _work(self) -> None:
        b, w = self.shape.wanted, self.shape.width
        scores, outputs = self._first()
        tokens, chances = self._ranked(scores, 0)  # [B, w]
        root = outputs[self.form.device["want"]][:, None].expand(b, w, -1)  # [B, w, H]
        level = Level(tokens, chances, root, torch.empty(b, w, 0, dtype=I32, device=tokens.device))
        self._found(0, level, torch.full_like(tokens, -1))
        for s in range(1, self.shape.length):
            fed = level.survival.topk(w).indices.sort().values  # [B, w] the likeliest, in the order of their numbers
            start = 0 if s == 1 else w + (s - 2) * w * w  # the number of the first of them
            level = self._grow(level, fed, s)
            self._found(w + (s - 1) * w * w, level, each_times(start + fed, w))

    def _grow(self, level: Level, fed: Tensor, s: int) -> Level:
        """Feed these nodes of the last level [B, w]; their children are the next one."""
        d, heads, (b, w) = self.form.device, self.heads, fed.shape
        parents = fed if s == 1 else fed // w  # [B, w] rank of each one's parent among those that were fed before
        features = level.outputs.gather(1, parents[..., None].expand(b, w, level.outputs.shape[2]))  # [B, w, H]
        own = heads.lanes[:b, (s - 1) * w : s * w]  # [B, w] slots
        seen = level.tails.gather(1, parents[..., None].expand(b, w, s - 1))  # [B, w, s - 1]
        tails = torch.cat([seen, own[..., None].int()], 2)  # [B, w, s]
        deep = next(depth for depth in DEPTHS if depth >= s)
        padded = torch.nn.functional.pad(tails, (0, deep - s)).view(b * w, deep)
        tokens, every = level.tokens.gather(1, fed).view(-1), heads.every[: b * w]  # [B * w]
        where = (d["later_positions"][s], own.reshape(-1), every, d["later_info"][s], padded)
        scores, outputs = heads.run(tokens, *where, features.reshape(b * w, -1))
        children, chances = self._ranked(scores, s)  # [B * w, w]
        survival = chances.view(b, w, w) * level.survival.gather(1, fed)[..., None]
        return Level(children.view(b, w * w), survival.view(b, w * w), outputs.view(b, w, -1), tails)

    def _ranked(self, scores: Tensor, level: int) -> tuple[Tensor, Tensor]:
        """Tokens [R, w] and chances [R, w] float64 after these nodes, R / B for each sequence. scores [R, D]."""
        d, each = self.form.device, scores.shape[0] // self.shape.wanted
        noise = None
        if self.shape.drawn:
            noise = (each_times(d["key"][level], each), each_times(d["temperature"], each))
        tokens, chances = likeliest(scores, self.heads.ids, self.shape.width, noise)
        return tokens, chances.double()

    def _found(self, at: int, level: Level, parents: Tensor) -> None:
        """These nodes have the numbers from `at` on. parents [B, M]."""
        for name, values in (("tokens", level.tokens), ("parents", parents), ("survival", level.survival)):
            self.reply.device[name][:, at : at + values.shape[1]].copy_(values)

    def read(self, sequences: int) -> list[Grown]:
        """Wait for the first sequences' trees."""
        a = received(self.reply, self.heads)
        columns = (a[name][:sequences].tolist() for name in Grown._fields)
        return [Grown(*tree) for tree in zip(*columns, strict=True)]


def each_times(values: Tensor, times: int) -> Tensor:
    """[..., N] -> [..., N * times]. `repeat_interleave` may look at its numbers from the host, which no graph can."""
    return values[..., None].expand(*values.shape, times).flatten(-2)
