"""Attention over slots: a few query rows of each sequence against a long context.

The promise: a row's result depends on its own query and its own keys in their order, and on nothing else: neither on
rows that share its block, nor on how many blocks of threads share the work. Keys are taken in spans that begin at
multiples of SPAN positions; each span is one sum, and spans are merged from the first to the last. A span in which a
row may see nothing changes none of its bits. A drafted node's ancestors count as the positions they would have, so
chains, trees and plain decoding add the same numbers in the same order.

Rows come in blocks of one sequence (`Blocks`): key p of a block is slot table[line, p], or tail[p - base] from the base
on. Heads that share keys are packed beside each other. Padding may hold anything, NaN included.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

QUERIES = 16  # rows times the heads that share a key head, in one block
SPAN = 128  # keys of one sum
SCRATCH_NUMBERS = 1 << 26  # and no more memory than this for unmerged sums, whatever the context
PROGRAMS = 1024  # blocks of threads that one call is spread over; those without work are gone at once
WARPS = 8
SCRATCH_ROWS = 256  # passes with more rows than this keep every sum in registers


@dataclass(frozen=True)
class Blocks:
    """Which rows go together: consecutive rows, each of which sees one key more than the one before it.

    A block's numbers lie side by side, so that one access brings them all. Blocks of no rows are padding.
    """

    info: Tensor  # [N, 8] int32: first row, rows, line in the table, base, keys of the first row; the rest is unused
    tail: Tensor  # [N, D] int32 slots of the keys from the base on
    table: Tensor  # [lines, length] int32
    scratch: Scratch


def rows_per_block(heads: int, kv_heads: int) -> int:
    return max(QUERIES // (heads // kv_heads), 1)


class Scratch:
    """Unmerged sums, and how many of a block have arrived. Passes that run at the same time need one each."""

    def __init__(self, rows: int, heads: int, dim: int, length: int, device: torch.device) -> None:
        spans = triton.cdiv(length, SPAN)
        rows = max(min(rows, SCRATCH_ROWS, SCRATCH_NUMBERS // (heads * spans * dim)), 1)
        self.rows, self.spans = rows, spans
        self.sums = torch.empty((rows, heads, spans, dim), dtype=torch.float32, device=device)
        self.marks = torch.empty((rows, heads, spans, 2), dtype=torch.float32, device=device)  # highest score, weight
        self.arrived = torch.zeros((rows * heads,), dtype=torch.int32, device=device)


@triton.jit
def _merge(high, weight, total, new_high, new_weight, new_total):
    """Add a span's sum. An empty span (high = -inf) leaves the bits as they are, as does merging into nothing."""
    top = tl.maximum(high, new_high)
    anchor = tl.where(top == float("-inf"), 0.0, top)
    old, new = tl.exp2(high - anchor), tl.exp2(new_high - anchor)
    return top, weight * old + new_weight * new, total * old[:, None] + new_total * new[:, None]


@triton.jit
def _span(
    q, k_plane, v_plane, slots_at, tail_at, base, head, start, most, keys, scale, window,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, SPAN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One span's sum for every query [M, d], with its highest score [M] and its weight [M]."""
    p = start + tl.arange(0, SPAN)
    d = tl.arange(0, DIM_PAD)
    exists = p < most
    slot = tl.load(slots_at + p, mask=exists & (p < base), other=0)
    slot += tl.load(tail_at + p - base, mask=exists & (p >= base), other=0)
    at = (slot.to(tl.int64) * KV_HEADS + head)[:, None] * DIM + d[None, :]  # [SPAN, d]
    ok = exists[:, None] & (d < DIM)[None, :]
    k = tl.load(k_plane + at, mask=ok, other=0.0)
    v = tl.load(v_plane + at, mask=ok, other=0.0)
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale  # [M, SPAN]
    sees = p[None, :] < keys[:, None]
    if window > 0:
        sees = sees & (p[None, :] >= keys[:, None] - window)
    scores = tl.where(sees, scores, float("-inf"))
    high = tl.max(scores, 1)
    anchor = tl.where(high == float("-inf"), 0.0, high)
    chance = tl.exp2(scores - anchor[:, None])  # 0 where nothing is seen
    return high, tl.sum(chance, 1), tl.dot(chance.to(v.dtype), v, input_precision=PRECISION)


@triton.jit
def _attend(
    q, k_plane, v_plane, out, table, info, tail, sums, marks, arrived,
    scale, length, depth, spans_kept, window,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    QUERIES: tl.constexpr, SPAN: tl.constexpr, SHARES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    block, head, share = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first, rows = tl.load(info + block * 8), tl.load(info + block * 8 + 1)
    line, base = tl.load(info + block * 8 + 2), tl.load(info + block * 8 + 3)
    fewest = tl.load(info + block * 8 + 4)
    most = fewest + rows - 1
    spans = tl.cdiv(most, SPAN)
    if (rows == 0) | (share >= spans):
        return
    GROUP: tl.constexpr = HEADS // KV_HEADS
    m, d = tl.arange(0, QUERIES), tl.arange(0, DIM_PAD)
    row = first + m // GROUP
    mine = m // GROUP < rows
    keys = tl.where(mine, fewest + m // GROUP, 0)
    place = row.to(tl.int64) * HEADS + head * GROUP + m % GROUP  # [M] among rows and heads
    ok = mine[:, None] & (d < DIM)[None, :]
    query = tl.load(q + place[:, None] * DIM + d[None, :], mask=ok, other=0.0)
    slots_at = table + line.to(tl.int64) * length
    tail_at = tail + block.to(tl.int64) * depth
    high = tl.full((QUERIES,), float("-inf"), tl.float32)
    weight = tl.zeros((QUERIES,), tl.float32)
    total = tl.zeros((QUERIES, DIM_PAD), tl.float32)
    alone = (SHARES == 1) | (spans == 1)
    for span in range(share, spans, SHARES):
        new_high, new_weight, new_total = _span(
            query, k_plane, v_plane, slots_at, tail_at, base, head, span * SPAN, most, keys, scale, window,
            KV_HEADS, DIM, DIM_PAD, SPAN, PRECISION,
        )  # fmt: skip
        if alone:
            high, weight, total = _merge(high, weight, total, new_high, new_weight, new_total)
        else:
            kept = place * spans_kept + span  # [M]
            tl.store(marks + kept * 2, new_high, mask=mine)
            tl.store(marks + kept * 2 + 1, new_weight, mask=mine)
            tl.store(sums + kept[:, None] * DIM + d[None, :], new_total, mask=ok)
    if not alone:
        tl.debug_barrier()  # every thread's part is written before the block says so
        before = tl.atomic_add(arrived + block * KV_HEADS + head, 1, sem="acq_rel")
        if before + 1 < tl.minimum(spans, SHARES):
            return
        tl.store(arrived + block * KV_HEADS + head, 0)  # the last to arrive merges, in order, and leaves it ready
        for span in range(spans):
            kept = place * spans_kept + span
            new_high = tl.load(marks + kept * 2, mask=mine, other=float("-inf"), cache_modifier=".cg")
            new_weight = tl.load(marks + kept * 2 + 1, mask=mine, other=0.0, cache_modifier=".cg")
            new_total = tl.load(sums + kept[:, None] * DIM + d[None, :], mask=ok, other=0.0, cache_modifier=".cg")
            high, weight, total = _merge(high, weight, total, new_high, new_weight, new_total)
    tl.store(out + place[:, None] * DIM + d[None, :], (total / weight[:, None]).to(out.dtype.element_ty), mask=ok)


def attend(q: Tensor, k_plane: Tensor, v_plane: Tensor, blocks: Blocks, scale: float, window: int = 0) -> Tensor:
    """Each row over its own keys: q [T, heads, d] and planes [S, kv_heads, d] -> [T, heads * d] in q's type."""
    rows, heads, dim = q.shape
    kv_heads, n, scratch = k_plane.shape[1], blocks.info.shape[0], blocks.scratch
    out = torch.empty((rows, heads * dim), dtype=q.dtype, device=q.device)
    shares = 1 if rows > scratch.rows else min(scratch.spans, max(1, PROGRAMS // (n * kv_heads)))
    launch: Any = _attend[(n, kv_heads, shares)]
    launch(
        q, k_plane, v_plane, out, blocks.table, blocks.info, blocks.tail, scratch.sums, scratch.marks, scratch.arrived,
        scale * 1.4426950408889634, blocks.table.shape[1], blocks.tail.shape[1], scratch.spans, window,
        HEADS=heads, KV_HEADS=kv_heads, DIM=dim, DIM_PAD=max(16, triton.next_power_of_2(dim)),
        QUERIES=QUERIES, SPAN=SPAN, SHARES=shares, PRECISION="ieee",
        num_warps=WARPS, num_stages=1, enable_fp_fusion=False,
    )  # fmt: skip
    return out
