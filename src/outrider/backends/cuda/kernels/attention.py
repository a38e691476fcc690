"""Attention over slots: a few query rows of each sequence against a long context.

Promise: a row's result depends on its own query and its own keys in their order, and on nothing else: neither on the
rows that share its block nor on how many programs share the work. Keys are taken in spans that begin at multiples of
SPAN positions; each span is one sum, and spans are merged from the first to the last. A span in which a row sees no key
changes none of its bits. A drafted node's ancestors count as the positions they would have, so chains, trees and plain
decoding add the same numbers in the same order. Query heads that share a key head are processed together. Padding may
hold anything, NaN included.

Rows of an encoder, and decoders' rows on their source, see all keys of their line, whatever their position. A bias by
distance (T5) is looked up in a table: the same number in any pass.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import fused
from .fused import packed_index
from .launching import begin, launch_options

QUERIES = 16  # of one block: its rows times the heads that share a key head
SPAN = 128  # keys of one sum
SCRATCH_NUMBERS = 1 << 26  # the most floats of unmerged sums, whatever the context
PROGRAMS = 1024  # that one call is spread over; those without work end at once
WARPS = 8
SCRATCH_ROWS = 256  # passes with more rows than this keep every sum in registers


@dataclass(frozen=True)
class Blocks:
    """Which rows are computed together: consecutive rows, each of which sees one key more than the one before it.

    Key p of a block is slot table[line, p], or tail[p - base] from `base` on. Blocks of no rows are padding.
    With `lengths` every row sees the first lengths[line] keys of the table instead, which may be none.
    """

    info: Tensor  # [N, 8] int32: first row, rows, line in the table, base, keys of the first row; the rest is unused
    tail: Tensor  # [N, D] int32 slots of the keys from the base on
    table: Tensor  # [lines, length] int32
    scratch: Scratch
    lengths: Tensor | None = None  # [lines] int32
    sources: tuple[Tensor, Tensor] | None = None  # slots [lines, length] and lengths [lines] of each line's source

    @property
    def on_sources(self) -> Blocks:
        """The same rows on the sources of their lines; on nothing, where there are none."""
        slots, lengths = self.sources or (self.table, self.table.new_zeros(self.table.shape[0]))
        return replace(self, table=slots, lengths=lengths)


def rows_per_block(heads: int, kv_heads: int) -> int:
    return max(QUERIES // (heads // kv_heads), 1)


class Scratch:
    """Unmerged sums, and how many programs of a block have finished. Concurrent passes need one each."""

    def __init__(self, rows: int, heads: int, dim: int, length: int, device: torch.device) -> None:
        spans = triton.cdiv(length, SPAN)
        rows = max(min(rows, SCRATCH_ROWS, SCRATCH_NUMBERS // (heads * spans * dim)), 1)
        self.rows, self.spans = rows, spans
        self.sums = torch.empty((rows, heads, spans, dim), dtype=torch.float32, device=device)
        self.stats = torch.empty((rows, heads, spans, 2), dtype=torch.float32, device=device)  # highest score, weight
        self.finished = torch.zeros((rows * heads,), dtype=torch.int32, device=device)


@triton.jit
def _merge(high, weight, total, new_high, new_weight, new_total):
    """Add a span's sum. An empty span (high = -inf) changes no bits, nor does merging into an empty sum."""
    top = tl.maximum(high, new_high)
    anchor = tl.where(top == float("-inf"), 0.0, top)
    old, new = tl.exp2(high - anchor), tl.exp2(new_high - anchor)
    return top, weight * old + new_weight * new, total * old[:, None] + new_total * new[:, None]


@triton.jit
def _slots(slots, tail, base, start, max_keys, SPAN: tl.constexpr):
    """Where the keys of a span are [SPAN]."""
    p = start + tl.arange(0, SPAN)
    exists = p < max_keys
    slot = tl.load(slots + p, mask=exists & (p < base), other=0, cache_modifier=".cg")
    return slot + tl.load(tail + p - base, mask=exists & (p >= base), other=0, cache_modifier=".cg")


@triton.jit
def _keys(
    k_plane, v_plane, slot, head, start, first, last, k, v,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """K and V of a span [SPAN, d]: of keys from `first` on and before `last`; the others stay as they are."""
    p = start + tl.arange(0, SPAN)
    d = tl.arange(0, DIM_PAD)
    offset = (slot.to(tl.int64) * KV_HEADS + head)[:, None] * DIM + d[None, :]
    ok = ((p >= first) & (p < last))[:, None] & (d < DIM)[None, :]
    return (
        tl.load(k_plane + offset, mask=ok, other=k, cache_modifier=".cg"),
        tl.load(v_plane + offset, mask=ok, other=v, cache_modifier=".cg"),
    )


@triton.jit
def _span(
    q, k, v, start, keys, bias, shift, scale, window, cap,
    SPAN: tl.constexpr, PRECISION: tl.constexpr, CAPPED: tl.constexpr, BIASED: tl.constexpr,
):  # fmt: skip
    """One span's sum for every query [M, d], with its highest score [M] and its weight [M].

    bias [M]: where each query's row of the table begins; shift [M]: key p adds number shift - p of it.
    """
    p = start + tl.arange(0, SPAN)
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale  # [M, SPAN]
    if CAPPED:
        scores = cap - 2.0 * cap / (1.0 + tl.exp2(scores * (2.0 * 1.4426950408889634 / cap)))
    sees = p[None, :] < keys[:, None]
    if BIASED:
        column = shift[:, None] - p[None, :]
        scores += tl.load(bias[:, None] + column, mask=sees, other=0.0) * 1.4426950408889634
    if window > 0:
        sees = sees & (p[None, :] >= keys[:, None] - window)
    scores = tl.where(sees, scores, float("-inf"))
    high = tl.max(scores, 1)
    anchor = tl.where(high == float("-inf"), 0.0, high)
    weights = tl.exp2(scores - anchor[:, None])  # 0 for keys that are not seen
    return high, tl.sum(weights, 1), tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)


@triton.jit(do_not_specialize=["pending"])
def _attend(
    q, k_plane, v_plane, out, table, info, tail, sums, stats, finished, sinks, lengths, bias, shift,
    scale, length, depth, max_spans, window, cap, distances, pending,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    QUERIES: tl.constexpr, SPAN: tl.constexpr, SPLITS: tl.constexpr, PRECISION: tl.constexpr, CAPPED: tl.constexpr,
    SINKS: tl.constexpr, WHOLE: tl.constexpr, BIASED: tl.constexpr, TILES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    block, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    info += block * 8
    first, rows = tl.load(info, cache_modifier=".cg"), tl.load(info + 1, cache_modifier=".cg")
    line, base = tl.load(info + 2, cache_modifier=".cg"), tl.load(info + 3, cache_modifier=".cg")
    min_keys = tl.load(info + 4, cache_modifier=".cg")
    max_keys = tl.where(rows > 0, min_keys + rows - 1, 0)  # padding may describe anything
    if WHOLE:  # a line may have no keys: its rows are zeros
        max_keys = tl.load(lengths + line, mask=rows > 0, other=0, cache_modifier=".cg")
        base = max_keys
    spans = tl.cdiv(max_keys, SPAN)
    programs = tl.maximum(spans, 1) if WHOLE else spans
    slots_of_line = table + line.to(tl.int64) * length
    tail_of_block = tail + block.to(tl.int64) * depth
    slot = _slots(slots_of_line, tail_of_block, base, split * SPAN, max_keys, SPAN)
    nothing = tl.zeros((SPAN, DIM_PAD), k_plane.dtype.element_ty)
    # Of a row's keys at most `pending` were written by this pass, and they are its last ones.
    settled = max_keys - pending
    k, v = _keys(k_plane, v_plane, slot, head, split * SPAN, 0, settled, nothing, nothing, KV_HEADS, DIM, DIM_PAD, SPAN)
    begin(PDL)
    if (rows == 0) | (split >= programs):
        return
    GROUP: tl.constexpr = HEADS // KV_HEADS
    m, d = tl.arange(0, QUERIES), tl.arange(0, DIM_PAD)
    row = first + m // GROUP
    valid = m // GROUP < rows
    keys = tl.where(valid, max_keys if WHOLE else min_keys + m // GROUP, 0)
    index = row.to(tl.int64) * HEADS + head * GROUP + m % GROUP  # [M] among rows and heads
    ok = valid[:, None] & (d < DIM)[None, :]
    query = tl.load(q + index[:, None] * DIM + d[None, :], mask=ok, other=0.0)
    bias_of_head, shift_of_row = bias + m * 0, m * 0
    if BIASED:
        bias_of_head += (head * GROUP + m % GROUP) * distances
        shift_of_row = tl.load(shift + row, mask=valid, other=0).to(tl.int32)
    high = tl.full((QUERIES,), float("-inf"), tl.float32)
    weight = tl.zeros((QUERIES,), tl.float32)
    if SINKS:  # as if it were a span before the first
        high = tl.load(sinks + head * GROUP + m % GROUP) * 1.4426950408889634
        weight += 1.0
    total = tl.zeros((QUERIES, DIM_PAD), tl.float32)
    unsplit = (SPLITS == 1) | (spans <= 1)
    k, v = _keys(k_plane, v_plane, slot, head, split * SPAN, settled, max_keys, k, v, KV_HEADS, DIM, DIM_PAD, SPAN)
    for span in range(split, spans, SPLITS):
        new_high, new_weight, new_total = _span(
            query,
            k,
            v,
            span * SPAN,
            keys,
            bias_of_head,
            shift_of_row,
            scale,
            window,
            cap,
            SPAN,
            PRECISION,
            CAPPED,
            BIASED,
        )
        following = (span + SPLITS) * SPAN
        slot = _slots(slots_of_line, tail_of_block, base, following, max_keys, SPAN)
        k, v = _keys(
            k_plane, v_plane, slot, head, following, 0, max_keys, nothing, nothing, KV_HEADS, DIM, DIM_PAD, SPAN
        )
        if unsplit:
            high, weight, total = _merge(high, weight, total, new_high, new_weight, new_total)
        else:
            at = index * max_spans + span  # [M]
            tl.store(stats + at * 2, new_high, mask=valid)
            tl.store(stats + at * 2 + 1, new_weight, mask=valid)
            tl.store(sums + at[:, None] * DIM + d[None, :], new_total, mask=ok)
    if not unsplit:
        tl.debug_barrier()  # all threads have written before the program counts as finished
        before = tl.atomic_add(finished + block * KV_HEADS + head, 1, sem="acq_rel")
        if before + 1 < tl.minimum(spans, SPLITS):
            return
        tl.store(finished + block * KV_HEADS + head, 0)  # the last program merges in order, and resets the count
        for span in range(spans):
            at = index * max_spans + span
            new_high = tl.load(stats + at * 2, mask=valid, other=float("-inf"), cache_modifier=".cg")
            new_weight = tl.load(stats + at * 2 + 1, mask=valid, other=0.0, cache_modifier=".cg")
            new_total = tl.load(sums + at[:, None] * DIM + d[None, :], mask=ok, other=0.0, cache_modifier=".cg")
            high, weight, total = _merge(high, weight, total, new_high, new_weight, new_total)
    if WHOLE:
        weight = tl.where(spans == 0, 1.0, weight)
    at = index[:, None] * DIM + d[None, :]
    if TILES > 0:
        at = packed_index(row[:, None], (head * GROUP + m % GROUP)[:, None] * DIM + d[None, :], TILES)
    tl.store(out + at, (total / weight[:, None]).to(out.dtype.element_ty), mask=ok)


def attend(
    q: Tensor, k_plane: Tensor, v_plane: Tensor, blocks: Blocks, scale: float, window: int = 0, cap: float = 0.0,
    sinks: Tensor | None = None, bias: tuple[Tensor, Tensor] | None = None, packs: bool = False,
) -> Tensor:  # fmt: skip
    """Each row over its own keys: q [T, heads, d] and planes [S, kv_heads, d] -> [T, heads * d] in q's type.

    packs: the result's rows are packed (`fused.packed_index`).
    cap > 0: scores s become cap * tanh(s / cap). The kernel's scores are logarithms to the base 2, and so is its cap.
    sinks [heads] float32: a score of each head that takes its share of the weights and adds nothing.
    bias: [heads, distances] float32 and shift [T]; key j of a row adds column shift - j to its score.
    """
    rows, heads, dim = q.shape
    kv_heads, n, scratch = k_plane.shape[1], blocks.info.shape[0], blocks.scratch
    tiles = fused.tiles(rows) if packs else 0
    out = torch.empty((8 * tiles if packs else rows, heads * dim), dtype=q.dtype, device=q.device)
    splits = 1 if rows > scratch.rows else min(scratch.spans, max(1, PROGRAMS // (n * kv_heads)))
    added, shift = bias or (q, q)
    lengths = blocks.info if blocks.lengths is None else blocks.lengths
    launch: Any = _attend[(n, kv_heads, splits)]
    launch(
        q, k_plane, v_plane, out, blocks.table, blocks.info, blocks.tail, scratch.sums, scratch.stats, scratch.finished,
        q if sinks is None else sinks, lengths, added, shift,
        scale * 1.4426950408889634, blocks.table.shape[1], blocks.tail.shape[1], scratch.spans, window,
        cap * 1.4426950408889634, added.shape[1], rows,
        HEADS=heads, KV_HEADS=kv_heads, DIM=dim, DIM_PAD=max(16, triton.next_power_of_2(dim)),
        QUERIES=QUERIES, SPAN=SPAN, SPLITS=splits, PRECISION="ieee", CAPPED=cap > 0,
        SINKS=sinks is not None, WHOLE=blocks.lengths is not None, BIASED=bias is not None, TILES=tiles,
        **launch_options("attend", rows),
        num_warps=WARPS, num_stages=1, enable_fp_fusion=False,
    )  # fmt: skip
    return out
