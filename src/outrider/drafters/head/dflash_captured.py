"""Captured drafts of a DFlash head: the context's rows and whole blocks behind them, all in one graph.

Context rows read the target's states from their slots, as in `captured`; block rows live in their sequence's lane of
scratch slots. A block at the end of the longest sequence is cut, so that no position lies outside the table. It knows a
head, its plane and the cache; the caller tells which rows the plane lacks.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...backends.cuda.capture import Field
from ...backends.cuda.graphs import Graphs
from ...backends.cuda.kernels.attention import Blocks
from ...backends.cuda.state import I32, I64, lanes_for
from ...backends.rows import Rows
from ...engine.cache import Plane
from ...types import Sequence
from .._rollout import Ranking
from .captured import LANE, HeadGraphs, HeadPass, HeadShape, MaskPass, RankingPass, feed_size, lines_of


class BlockGraphs(HeadGraphs):
    """Captured drafts of one DFlash head over its plane."""

    def __init__(self, graphs: Graphs, target_plane: Plane, source: str) -> None:
        super().__init__(graphs, target_plane, source)
        self.size: int = self.head.config.block_rows
        self.each: int = self.head.config.block  # tokens that a block predicts
        assert self.size <= LANE

    def suits_trees(self, seqs: list[Sequence], width: int, depth: int) -> bool:
        return not self.head.term.in_order and super().suits_trees(seqs, width, depth)

    def _block(self, seqs: list[Sequence], starts: list[int], budget: list[int], filtered: bool) -> list[list[int]]:
        packed, each = self._rows(seqs, starts), self.each
        shape = HeadShape("blocks", feed_size(len(packed.tokens)), lanes_for(len(seqs)), drawn=filtered)
        self._replay(shape, BlockPass, packed, seqs, budget)
        return [[self.at + i * each + j for j in range(k)] for i, k in enumerate(budget)]

    def rankings(self, seqs: list[Sequence], starts: list[int], lengths: list[int], width: int) -> list[list[Ranking]]:
        packed, each = self._rows(seqs, self._read_ahead(seqs, starts)), self.each
        drawn, width = any(not seq.params.greedy for seq in seqs), min(width, self.ids.shape[0])
        shape = HeadShape(
            "block rankings", feed_size(len(packed.tokens)), lanes_for(len(seqs)), width=width, drawn=drawn
        )
        rows = self._replay(shape, BlockRankingPass, packed, seqs, lengths).read(len(seqs) * each)
        return [rows[i * each : i * each + k] for i, k in enumerate(lengths)]


class _Blocks(HeadPass):
    """Context rows, then a block for each of `shape.wanted` sequences, whose masks choose, or all of its rows."""

    heads: BlockGraphs

    def __init__(self, heads: BlockGraphs, shape: HeadShape) -> None:
        b, s = shape.wanted, heads.size
        every = torch.arange(b * s, device=heads.state.device)
        self.places = every % s  # [b s] each row's in its block
        self.want = every if heads.head.config.anchored else self.places.nonzero().flatten()  # [b each]
        self.slots = heads.lanes[:b, :s].flatten().contiguous()  # [b s]
        self.tails = heads.tails[:b].repeat_interleave(s, 0).contiguous()  # [b s, LANE]
        super().__init__(heads, shape)

    def more(self) -> dict[str, Field]:
        n = self.shape.wanted * self.heads.size
        fields: dict[str, Field] = {"block_tokens": (I64, (n,)), "block_positions": (I64, (n,))}
        return fields | {"block_info": (I32, (n, 8)), "block_last": (I64, (self.shape.wanted, 2))}

    def _fill_more(self, a: dict[str, Any], seqs: list[Sequence], lengths: list[int]) -> None:
        s, length = self.heads.size, self.heads.state.cache.length
        for name in ("block_tokens", "block_positions", "block_info", "block_last"):
            a[name].fill(0)
        for i, (seq, line) in enumerate(zip(seqs, lines_of(self.heads, seqs), strict=True)):
            at, first = len(seq.tokens) - 1, i * s
            rows = min(s, length - at)
            a["block_tokens"][first], here = seq.tokens[-1], np.arange(rows)
            a["block_last"][i] = seq.tokens[-2:]
            a["block_positions"][first : first + rows] = at + here
            a["block_info"][first : first + rows, 1:5] = (1, line, at, at + rows)
            a["block_info"][first : first + rows, 0] = first + here

    @property
    def choices(self) -> int:
        return self.shape.wanted * self.heads.each

    def _scores(self) -> Tensor:
        d, heads, b = self.form.device, self.heads, self.shape.wanted
        self._first()  # the context
        upto = d["block_info"].clone()  # each row sees the block up to itself
        upto[:, 4] = torch.minimum(upto[:, 4], upto[:, 3] + 1 + self.places)
        whole, causal = (self._rows(info) for info in (d["block_info"], upto))
        scores, hidden = heads.head.blocks(whole, causal, heads.graphs.plane, self.places)  # [R, D], [b s, H]
        each, self.hidden = (rows.view(b, -1, rows.shape[1]) for rows in (scores, hidden))  # [b, each, D], [b, s, H]
        corrected: Tensor = heads.head.term.whole(each, self.hidden, d["block_last"])
        return corrected.flatten(0, 1)

    def _rows(self, info: Tensor) -> Rows:
        d, state, at = self.form.device, self.heads.state, self.slots
        blocks = Blocks(info, self.tails, state.table, state.scratch(self.heads.head))
        tokens, positions = d["block_tokens"], d["block_positions"]
        return Rows(tokens, positions, at, at, at, state.table, None, self.want, blocks=blocks)

    def _positions(self, seqs: list[Sequence], lengths: list[int]) -> tuple[list[Sequence], list[int]]:
        return super()._positions(seqs, [self.heads.each] * len(seqs))


class BlockPass(MaskPass, _Blocks):
    """A choice for each position; with a term for the tokens before, from left to right."""

    def _chosen(self, scores: Tensor, laws: list[Tensor]) -> Tensor:
        term, b = self.heads.head.term, self.shape.wanted
        if not term.in_order:
            return super()._chosen(scores, laws)
        each = scores.view(b, -1, scores.shape[1])  # [b, each, D]
        hidden = self.hidden[:, -each.shape[1] :]  # [b, each, H]
        tokens, chain, state = self.form.device["block_tokens"].view(b, -1)[:, 0], [], None  # [b]
        for j in range(each.shape[1]):
            given, state = term.step(each[:, j], hidden[:, j], tokens, state, j)
            tokens = super()._chosen(given, [law.view(b, -1)[:, j].contiguous() for law in laws])
            chain.append(tokens)
        return torch.stack(chain, 1).flatten()


class BlockRankingPass(RankingPass, _Blocks):
    """The likeliest tokens at each position, read back."""
