"""Attention over slots: a few query rows of each sequence against a long context.

Promise: a row's result depends on its own query and its own keys in their order, and on nothing else: neither on the
rows that share its block nor on how many programs share the work. Keys are taken in spans that begin at multiples of
SPAN positions; each span is one sum, and spans are merged from the first to the last. A span in which a row sees no key
changes none of its bits. A drafted node's ancestors count as the positions they would have, so chains, trees and plain
decoding add the same numbers in the same order. Query heads that share a key head are processed together. Padding may
hold anything, NaN included.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

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
    """

    info: Tensor  # [N, 8] int32: first row, rows, line in the table, base, keys of the first row; the rest is unused
    tail: Tensor  # [N, D] int32 slots of the keys from the base on
    table: Tensor  # [lines, length] int32
    scratch: Scratch


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
def _span(
    q, k_plane, v_plane, slots, tail, base, head, start, max_keys, keys, scale, window, cap,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, SPAN: tl.constexpr, PRECISION: tl.constexpr,
    CAPPED: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """One span's sum for every query [M, d], with its highest score [M] and its weight [M].

    WHOLE: every query sees every key of the span, and all of them are in the table.
    """
    p = start + tl.arange(0, SPAN)
    d = tl.arange(0, DIM_PAD)
    if WHOLE:
        slot = tl.load(slots + p)
    else:
        slot = tl.load(slots + p, mask=(p < max_keys) & (p < base), other=0)
        slot += tl.load(tail + p - base, mask=(p < max_keys) & (p >= base), other=0)
    offset = (slot.to(tl.int64) * KV_HEADS + head)[:, None] * DIM + d[None, :]  # [SPAN, d]
    if WHOLE and DIM == DIM_PAD:
        k = tl.load(k_plane + offset)
        v = tl.load(v_plane + offset)
    else:
        ok = (p < max_keys)[:, None] & (d < DIM)[None, :]
        k = tl.load(k_plane + offset, mask=ok, other=0.0)
        v = tl.load(v_plane + offset, mask=ok, other=0.0)
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale  # [M, SPAN]
    if CAPPED:
        scores = cap - 2.0 * cap / (1.0 + tl.exp2(scores * (2.0 * 1.4426950408889634 / cap)))
    if not WHOLE:
        sees = p[None, :] < keys[:, None]
        if window > 0:
            sees = sees & (p[None, :] >= keys[:, None] - window)
        scores = tl.where(sees, scores, float("-inf"))
    high = tl.max(scores, 1)
    anchor = tl.where(high == float("-inf"), 0.0, high)
    weights = tl.exp2(scores - anchor[:, None]).to(v.dtype)  # 0 for keys that are not seen
    # The weights' sum is a product too: a reduction's order would depend on the size of the block.
    ones = tl.full((SPAN, 16), 1.0, v.dtype)
    weight = tl.max(tl.dot(weights, ones, input_precision=PRECISION), 1)  # sixteen times the same
    return high, weight, tl.dot(weights, v, input_precision=PRECISION)


@triton.jit
def _attend(
    q, k_plane, v_plane, out, table, info, tail, sums, stats, finished, sinks,
    scale, length, depth, max_spans, window, cap,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    QUERIES: tl.constexpr, SPAN: tl.constexpr, SPLITS: tl.constexpr, PRECISION: tl.constexpr, CAPPED: tl.constexpr,
    SINKS: tl.constexpr,
):  # fmt: skip
    block, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first, rows = tl.load(info + block * 8), tl.load(info + block * 8 + 1)
    line, base = tl.load(info + block * 8 + 2), tl.load(info + block * 8 + 3)
    min_keys = tl.load(info + block * 8 + 4)
    max_keys = min_keys + rows - 1
    spans = tl.cdiv(max_keys, SPAN)
    if (rows == 0) | (split >= spans):
        return
    GROUP: tl.constexpr = HEADS // KV_HEADS
    m, d = tl.arange(0, QUERIES), tl.arange(0, DIM_PAD)
    row = first + m // GROUP
    valid = m // GROUP < rows
    keys = tl.where(valid, min_keys + m // GROUP, 0)
    index = row.to(tl.int64) * HEADS + head * GROUP + m % GROUP  # [M] among rows and heads
    ok = valid[:, None] & (d < DIM)[None, :]
    query = tl.load(q + index[:, None] * DIM + d[None, :], mask=ok, other=0.0)
    slots_of_line = table + line.to(tl.int64) * length
    tail_of_block = tail + block.to(tl.int64) * depth
    high = tl.full((QUERIES,), float("-inf"), tl.float32)
    weight = tl.zeros((QUERIES,), tl.float32)
    if SINKS:  # as if it were a span before the first
        high = tl.load(sinks + head * GROUP + m % GROUP) * 1.4426950408889634
        weight += 1.0
    total = tl.zeros((QUERIES, DIM_PAD), tl.float32)
    unsplit = (SPLITS == 1) | (spans == 1)
    for span in range(split, spans, SPLITS):
        new_high, new_weight, new_total = _span(
            query, k_plane, v_plane, slots_of_line, tail_of_block, base, head, span * SPAN, max_keys, keys, scale,
            window, cap, KV_HEADS, DIM, DIM_PAD, SPAN, PRECISION, CAPPED, False,
        )  # fmt: skip
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
    tl.store(out + index[:, None] * DIM + d[None, :], (total / weight[:, None]).to(out.dtype.element_ty), mask=ok)


@triton.jit
def _attend_prompt(
    q, k_plane, v_plane, out, table, info, tail, sinks, scale, length, depth, window, cap,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    QUERIES: tl.constexpr, SPAN: tl.constexpr, PRECISION: tl.constexpr, CAPPED: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Blocks of many rows, one program for each block and key head. Every sum stays in registers."""
    block, head = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)  # the longest contexts first
    first, rows = tl.load(info + block * 8), tl.load(info + block * 8 + 1)
    line, base = tl.load(info + block * 8 + 2), tl.load(info + block * 8 + 3)
    min_keys = tl.load(info + block * 8 + 4)
    max_keys = min_keys + rows - 1
    if rows == 0:
        return
    GROUP: tl.constexpr = HEADS // KV_HEADS
    m, d = tl.arange(0, QUERIES), tl.arange(0, DIM_PAD)
    valid = m // GROUP < rows
    keys = tl.where(valid, min_keys + m // GROUP, 0)
    index = (first + m // GROUP).to(tl.int64) * HEADS + head * GROUP + m % GROUP  # [M] among rows and heads
    ok = valid[:, None] & (d < DIM)[None, :]
    query = tl.load(q + index[:, None] * DIM + d[None, :], mask=ok, other=0.0)
    slots_of_line = table + line.to(tl.int64) * length
    tail_of_block = tail + block.to(tl.int64) * depth
    high = tl.full((QUERIES,), float("-inf"), tl.float32)
    weight = tl.zeros((QUERIES,), tl.float32)
    if SINKS:  # as if it were a span before the first
        high = tl.load(sinks + head * GROUP + m % GROUP) * 1.4426950408889634
        weight += 1.0
    total = tl.zeros((QUERIES, DIM_PAD), tl.float32)
    begin = tl.maximum(min_keys - window, 0) // SPAN if window > 0 else 0
    whole = begin if window > 0 else tl.minimum(min_keys, base) // SPAN  # spans that every row sees
    for span in range(begin, whole):
        new_high, new_weight, new_total = _span(
            query, k_plane, v_plane, slots_of_line, tail_of_block, base, head, span * SPAN, max_keys, keys, scale,
            window, cap, KV_HEADS, DIM, DIM_PAD, SPAN, PRECISION, CAPPED, True,
        )  # fmt: skip
        high, weight, total = _merge(high, weight, total, new_high, new_weight, new_total)
    for span in range(whole, tl.cdiv(max_keys, SPAN)):
        new_high, new_weight, new_total = _span(
            query, k_plane, v_plane, slots_of_line, tail_of_block, base, head, span * SPAN, max_keys, keys, scale,
            window, cap, KV_HEADS, DIM, DIM_PAD, SPAN, PRECISION, CAPPED, False,
        )  # fmt: skip
        high, weight, total = _merge(high, weight, total, new_high, new_weight, new_total)
    tl.store(out + index[:, None] * DIM + d[None, :], (total / weight[:, None]).to(out.dtype.element_ty), mask=ok)


def attend_prompt(
    q: Tensor, k_plane: Tensor, v_plane: Tensor, blocks: Blocks, scale: float, window: int = 0, cap: float = 0.0,
    sinks: Tensor | None = None, queries: int = 128, warps: int = 8, stages: int = 3,
) -> Tensor:  # fmt: skip
    rows, heads, dim = q.shape
    out = torch.empty((rows, heads * dim), dtype=q.dtype, device=q.device)
    launch: Any = _attend_prompt[(blocks.info.shape[0], k_plane.shape[1])]
    launch(
        q, k_plane, v_plane, out, blocks.table, blocks.info, blocks.tail, q if sinks is None else sinks,
        scale * 1.4426950408889634, blocks.table.shape[1], blocks.tail.shape[1], window, cap * 1.4426950408889634,
        HEADS=heads, KV_HEADS=k_plane.shape[1], DIM=dim, DIM_PAD=max(16, triton.next_power_of_2(dim)),
        QUERIES=queries, SPAN=SPAN, PRECISION="ieee", CAPPED=cap > 0, SINKS=sinks is not None,
        num_warps=warps, num_stages=stages, enable_fp_fusion=False,
    )  # fmt: skip
    return out


def attend(
    q: Tensor, k_plane: Tensor, v_plane: Tensor, blocks: Blocks, scale: float, window: int = 0, cap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Each row over its own keys: q [T, heads, d] and planes [S, kv_heads, d] -> [T, heads * d] in q's type.

    cap > 0: scores s become cap * tanh(s / cap). The kernel's scores are logarithms to the base 2, and so is its cap.
    sinks [heads] float32: a score of each head that takes its share of the weights and adds nothing.
    """
    rows, heads, dim = q.shape
    kv_heads, n, scratch = k_plane.shape[1], blocks.info.shape[0], blocks.scratch
    out = torch.empty((rows, heads * dim), dtype=q.dtype, device=q.device)
    splits = 1 if rows > scratch.rows else min(scratch.spans, max(1, PROGRAMS // (n * kv_heads)))
    launch: Any = _attend[(n, kv_heads, splits)]
    launch(
        q, k_plane, v_plane, out, blocks.table, blocks.info, blocks.tail, scratch.sums, scratch.stats, scratch.finished,
        q if sinks is None else sinks, scale * 1.4426950408889634, blocks.table.shape[1], blocks.tail.shape[1],
        scratch.spans, window,
        cap * 1.4426950408889634,
        HEADS=heads, KV_HEADS=kv_heads, DIM=dim, DIM_PAD=max(16, triton.next_power_of_2(dim)),
        QUERIES=QUERIES, SPAN=SPAN, SPLITS=splits, PRECISION="ieee", CAPPED=cap > 0,
        SINKS=sinks is not None,
        num_warps=WARPS, num_stages=1, enable_fp_fusion=False,
    )  # fmt: skip
    return out
