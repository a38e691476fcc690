"""Attention over slots: a few query rows of each sequence against a long context, or many rows of a prompt.

Promise: a row's result depends on its own query and its own keys in their order, and on nothing else: neither on the
rows that share its block nor on how many programs share the work. Keys are taken in spans that begin at multiples of
SPAN positions; each span is one sum, and spans are merged from the first to the last. A span in which a row sees no key
changes none of its bits. A drafted node's ancestors count as the positions they would have, so chains, trees and plain
decoding add the same numbers in the same order. Query heads that share a key head are processed together. Padding may
hold anything, NaN included.

With a few rows, programs share a context, and the last one merges their sums. A prompt's blocks, which follow each
other, become tiles of many queries: a tile reads each key once for all of them, and keeps its sums in registers.

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

from .. import compiling
from . import attend_few, fused
from .fused import packed_index
from .launching import begin, launch_options
from .wide import shared_memory

QUERIES = 16  # of one block, at least: its rows times the heads that share a key head
SPAN = 128  # keys of one sum
LOG2_E = 1.4426950408889634
SCRATCH_NUMBERS = 1 << 26  # the most floats of unmerged sums, whatever the context, for each 24 GiB of a GPU
PROGRAMS = 1024  # that one call is spread over; those without work end at once
PROMPT_PROGRAMS = 8192  # the same beside a prompt, most of whose blocks are computed in tiles
WARPS = 8
SCRATCH_ROWS = 256  # of a pass; later ones keep every sum in registers


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
    prompts: bool = False  # whether there may be prompts among them

    @property
    def on_sources(self) -> Blocks:
        """The same rows on the sources of their lines; on nothing, where there are none."""
        slots, lengths = self.sources or (self.table, self.table.new_zeros(self.table.shape[0]))
        return replace(self, table=slots, lengths=lengths)


@dataclass(frozen=True)
class Tile:
    """How a prompt's blocks are computed together. Nothing of this changes a bit."""

    queries: int
    warps: int
    stages: int
    registers: int | None = None  # of a thread, at most: fewer let more tiles share a processor


def tile_of(dim: int, memory: int) -> Tile | None:
    """The tile for heads of this dimension, a power of two, with so many bytes of shared memory; None: none fits."""
    if dim <= 64:
        return Tile(64, 4, 2, 168)
    if dim <= 128:
        return Tile(128, 8, 3) if memory >= 200_000 else Tile(64, 4, 1)
    return Tile(64, 8, 1) if dim <= 256 and memory >= 200_000 else None


def rows_per_block(heads: int, kv_heads: int) -> int:
    return max(QUERIES // (heads // kv_heads), 1)


class Scratch:
    """Unmerged sums, and how many programs of a block have finished. Concurrent passes need one each."""

    def __init__(self, rows: int, heads: int, dim: int, length: int, device: torch.device) -> None:
        spans = triton.cdiv(length, SPAN)
        memory = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0
        numbers = SCRATCH_NUMBERS * max(memory // (24 << 30), 1)
        rows = max(min(rows, SCRATCH_ROWS, numbers // (heads * spans * dim)), 1)
        self.rows, self.spans = rows, spans
        self.sums = torch.empty((rows, heads, spans, dim), dtype=torch.float32, device=device)
        self.stats = torch.empty((rows, heads, spans, 2), dtype=torch.float32, device=device)  # highest score, weight
        self.finished = torch.zeros((rows * heads,), dtype=torch.int32, device=device)


@triton.jit
def _rows_together(info, group, blocks, PER_TILE: tl.constexpr, PER_BLOCK: tl.constexpr):
    """The number of rows of PER_TILE blocks, if they follow each other in one sequence and have no tails; else 0.

    The last ones may be padding. A single block is no tile.
    """
    j = tl.arange(0, 16)
    at = group * PER_TILE + j
    inside = (j < PER_TILE) & (at < blocks)
    rows = tl.load(info + at * 8 + 1, mask=inside, other=0)
    used = rows > 0
    first = tl.load(info + at * 8, mask=used, other=0)
    line = tl.load(info + at * 8 + 2, mask=used, other=0)
    base = tl.load(info + at * 8 + 3, mask=used, other=0)
    keys = tl.load(info + at * 8 + 4, mask=used, other=0)
    start = tl.sum(tl.where(j == 0, first, 0), 0)
    follows = (line == tl.sum(tl.where(j == 0, line, 0), 0)) & (first == start + j * PER_BLOCK)
    follows = follows & (keys == tl.sum(tl.where(j == 0, keys, 0), 0) + j * PER_BLOCK) & (keys + rows - 1 <= base)
    count, end = tl.sum(rows, 0), tl.max(tl.where(used, first + rows, 0), 0)
    several = tl.sum(used.to(tl.int32), 0) > 1
    gapless = (end - start == count) & (tl.sum(tl.where(j == 0, rows, 0), 0) > 0)
    return tl.where(several & gapless & (tl.min((follows | ~used).to(tl.int32), 0) > 0), count, 0)


@triton.jit
def _merge(high, weight, total, new_high, new_weight, new_total):
    """Add a span's sum. An empty span (high = -inf) changes no bits, nor does merging into an empty sum."""
    top = tl.maximum(high, new_high)
    anchor = tl.where(top == float("-inf"), 0.0, top)
    old, new = tl.exp2(high - anchor), tl.exp2(new_high - anchor)
    weight = tl.fma(new_weight, new, weight * old)
    return top, weight, tl.fma(new_total, new[:, None], total * old[:, None])


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
def _tile_keys(
    k_plane, v_plane, slots, head, start, max_keys,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, SPAN: tl.constexpr, SEEN: tl.constexpr,
):  # fmt: skip
    """The same for a tile, whose keys are all in the table. SEEN: all keys of the span exist."""
    p = start + tl.arange(0, SPAN)
    d = tl.arange(0, DIM_PAD)
    if SEEN:
        slot = tl.load(slots + p)
    else:
        slot = tl.load(slots + p, mask=p < max_keys, other=0)
    offset = (slot.to(tl.int64) * KV_HEADS + head)[:, None] * DIM + d[None, :]  # [SPAN, d]
    if SEEN and DIM == DIM_PAD:
        k, v = tl.load(k_plane + offset), tl.load(v_plane + offset)
    else:
        ok = (p < max_keys)[:, None] & (d < DIM)[None, :]
        k, v = tl.load(k_plane + offset, mask=ok, other=0.0), tl.load(v_plane + offset, mask=ok, other=0.0)
    return k, v


@triton.jit
def _span(
    q, k, v, start, keys, bias, shift, scale, window, cap,
    SPAN: tl.constexpr, PRECISION: tl.constexpr, CAPPED: tl.constexpr, BIASED: tl.constexpr, SEEN: tl.constexpr,
):  # fmt: skip
    """One span's sum for every query [M, d], with its highest score [M] and its weight [M].

    bias [M]: where each query's row of the table begins; shift [M]: key p adds number shift - p of it.
    SEEN: every query sees every key of the span.
    """
    p = start + tl.arange(0, SPAN)
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # [M, SPAN]
    if CAPPED:
        scores = cap - 2.0 * cap / (1.0 + tl.exp2(scores * scale * (2.0 * 1.4426950408889634 / cap)))
        scale = 1.0
    sees = p[None, :] < keys[:, None]
    if BIASED:
        column = shift[:, None] - p[None, :]
        scores = scores * scale + tl.load(bias[:, None] + column, mask=sees, other=0.0) * 1.4426950408889634
        scale = 1.0
    if not SEEN:
        if window > 0:
            sees = sees & (p[None, :] >= keys[:, None] - window)
        scores = tl.where(sees, scores, float("-inf"))
    high = tl.max(scores, 1) * scale
    anchor = tl.where(high == float("-inf"), 0.0, high)
    weights = tl.exp2(tl.fma(scores, scale, -anchor[:, None])).to(v.dtype)  # 0 for keys that are not seen
    # The weights' sum is a product too: a reduction's order would depend on the size of the block.
    ones = tl.full((SPAN, 8), 1.0, v.dtype)
    weight = tl.max(tl.dot(weights, ones, input_precision=PRECISION), 1)  # eight times the same
    return high, weight, tl.dot(weights, v, input_precision=PRECISION)


@triton.jit(do_not_specialize=["pending"])
def _attend(
    q, k_plane, v_plane, out, table, info, tail, sums, stats, finished, sinks, lengths, bias, shift,
    scale, length, depth, max_spans, scratch_rows, window, cap, distances, pending,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    QUERIES: tl.constexpr, SPAN: tl.constexpr, SPLITS: tl.constexpr, PRECISION: tl.constexpr, CAPPED: tl.constexpr,
    SINKS: tl.constexpr, WHOLE: tl.constexpr, BIASED: tl.constexpr, TILES: tl.constexpr, PDL: tl.constexpr,
    PER_TILE: tl.constexpr, PER_BLOCK: tl.constexpr,
):  # fmt: skip
    """One block and key head; its spans in turn by SPLITS programs. PER_TILE > 0: tiles are computed elsewhere."""
    block, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    every, info = info, info + block * 8
    first, rows = tl.load(info, cache_modifier=".cg"), tl.load(info + 1, cache_modifier=".cg")
    line, base = tl.load(info + 2, cache_modifier=".cg"), tl.load(info + 3, cache_modifier=".cg")
    min_keys = tl.load(info + 4, cache_modifier=".cg")
    max_keys = tl.where(rows > 0, min_keys + rows - 1, 0)  # padding may describe anything
    if WHOLE:  # a line may have no keys: its rows are zeros
        max_keys = tl.load(lengths + line, mask=rows > 0, other=0, cache_modifier=".cg")
        base = max_keys
        min_keys = max_keys
    earliest = tl.maximum(min_keys - window, 0) // SPAN if window > 0 else 0  # before it no row sees a key
    end = tl.cdiv(max_keys, SPAN)
    unsplit = (SPLITS == 1) | (end - earliest <= 1) | (first + rows > scratch_rows)
    stride = 1 if unsplit else SPLITS
    initial = (earliest + split) * SPAN  # the first key of this program
    slots_of_line = table + line.to(tl.int64) * length
    tail_of_block = tail + block.to(tl.int64) * depth
    slot = _slots(slots_of_line, tail_of_block, base, initial, max_keys, SPAN)
    nothing = tl.zeros((SPAN, DIM_PAD), k_plane.dtype.element_ty)
    # Of a row's keys at most `pending` were written by this pass, and they are its last ones.
    settled = max_keys - pending
    k, v = _keys(k_plane, v_plane, slot, head, initial, 0, settled, nothing, nothing, KV_HEADS, DIM, DIM_PAD, SPAN)
    begin(PDL)
    if (rows == 0) | (split >= (1 if unsplit else end - earliest)):
        return
    if PER_TILE > 0:  # noqa: SIM102 -- of a constant, so that the other kernel has none of it
        if _rows_together(every, block // PER_TILE, tl.num_programs(0), PER_TILE, PER_BLOCK) > 0:
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
    k, v = _keys(k_plane, v_plane, slot, head, initial, settled, max_keys, k, v, KV_HEADS, DIM, DIM_PAD, SPAN)
    for span in range(earliest + split, end, stride):
        new_high, new_weight, new_total = _span(
            query, k, v, span * SPAN, keys, bias_of_head, shift_of_row, scale, window, cap,
            SPAN, PRECISION, CAPPED, BIASED, False,
        )  # fmt: skip
        following = (span + stride) * SPAN
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
        before = tl.atomic_add(finished + first * KV_HEADS + head, 1, sem="acq_rel")
        if before + 1 < tl.minimum(end - earliest, SPLITS):
            return
        tl.store(finished + first * KV_HEADS + head, 0)  # the last program merges in order, and resets the count
        for some in range(earliest, end, 8):
            for i in tl.static_range(8):  # their loads wait together; beyond the end spans are empty
                span, here = some + i, some + i < end
                at = index * max_spans + span
                new_high = tl.load(stats + at * 2, mask=valid & here, other=float("-inf"), cache_modifier=".cg")
                new_weight = tl.load(stats + at * 2 + 1, mask=valid & here, other=0.0, cache_modifier=".cg")
                values = sums + at[:, None] * DIM + d[None, :]
                new_total = tl.load(values, mask=ok & here, other=0.0, cache_modifier=".cg")
                high, weight, total = _merge(high, weight, total, new_high, new_weight, new_total)
    if WHOLE:
        weight = tl.where(end == 0, 1.0, weight)
    at = index[:, None] * DIM + d[None, :]
    if TILES > 0:
        at = packed_index(row[:, None], (head * GROUP + m % GROUP)[:, None] * DIM + d[None, :], TILES)
    tl.store(out + at, (total / weight[:, None]).to(out.dtype.element_ty), mask=ok)


@triton.jit
def _attend_tile(
    q, k_plane, v_plane, out, table, info, sinks, blocks, scale, length, window, cap,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    QUERIES: tl.constexpr, SPAN: tl.constexpr, PRECISION: tl.constexpr, CAPPED: tl.constexpr, SINKS: tl.constexpr,
    PER_TILE: tl.constexpr, PER_BLOCK: tl.constexpr,
):  # fmt: skip
    """PER_TILE blocks and one key head, as `_attend` computes each of them; nothing, where they are no tile."""
    group, head = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)  # the longest contexts first
    rows = _rows_together(info, group, blocks, PER_TILE, PER_BLOCK)
    if rows == 0:
        return
    entry = info + group * PER_TILE * 8
    first, line, min_keys = tl.load(entry), tl.load(entry + 2), tl.load(entry + 4)
    max_keys = min_keys + rows - 1
    GROUP: tl.constexpr = HEADS // KV_HEADS
    m, d = tl.arange(0, QUERIES), tl.arange(0, DIM_PAD)
    valid = m // GROUP < rows
    keys = tl.where(valid, min_keys + m // GROUP, 0)
    index = (first + m // GROUP).to(tl.int64) * HEADS + head * GROUP + m % GROUP  # [M] among rows and heads
    ok = valid[:, None] & (d < DIM)[None, :]
    query = tl.load(q + index[:, None] * DIM + d[None, :], mask=ok, other=0.0)
    slots = table + line.to(tl.int64) * length
    high = tl.full((QUERIES,), float("-inf"), tl.float32)
    weight = tl.zeros((QUERIES,), tl.float32)
    if SINKS:
        high = tl.load(sinks + head * GROUP + m % GROUP) * 1.4426950408889634
        weight += 1.0
    total = tl.zeros((QUERIES, DIM_PAD), tl.float32)
    earliest = tl.maximum(min_keys - window, 0) // SPAN if window > 0 else 0
    whole = earliest if window > 0 else min_keys // SPAN  # where spans end that every row sees
    for span in range(earliest, whole):
        k, v = _tile_keys(k_plane, v_plane, slots, head, span * SPAN, max_keys, KV_HEADS, DIM, DIM_PAD, SPAN, True)
        new_high, new_weight, new_total = _span(
            query, k, v, span * SPAN, keys, m, m, scale, window, cap, SPAN, PRECISION, CAPPED, False, True
        )
        high, weight, total = _merge(high, weight, total, new_high, new_weight, new_total)
    for span in tl.range(whole, tl.cdiv(max_keys, SPAN), num_stages=1):
        k, v = _tile_keys(k_plane, v_plane, slots, head, span * SPAN, max_keys, KV_HEADS, DIM, DIM_PAD, SPAN, False)
        new_high, new_weight, new_total = _span(
            query, k, v, span * SPAN, keys, m, m, scale, window, cap, SPAN, PRECISION, CAPPED, False, False
        )
        high, weight, total = _merge(high, weight, total, new_high, new_weight, new_total)
    tl.store(out + index[:, None] * DIM + d[None, :], (total / weight[:, None]).to(out.dtype.element_ty), mask=ok)


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
    packed = fused.tiles(rows) if packs else 0
    out = torch.empty((8 * packed if packs else rows, heads * dim), dtype=q.dtype, device=q.device)
    plain, shape = sinks is None and bias is None and not cap, attend_few.Heads(heads, k_plane.shape[1], dim)
    if plain and attend_few.suits(q, shape, blocks) and few_agree(shape, q.device):
        programs = attend_few.splits(shape, blocks, q.device)
        attend_few.attend(q, k_plane, v_plane, blocks, scale * LOG2_E, window, out, packed, programs)
    else:
        _launch(q, k_plane, v_plane, out, blocks, scale, window, cap, sinks, bias, packed)
    return out


def _launch(
    q: Tensor, k_plane: Tensor, v_plane: Tensor, out: Tensor, blocks: Blocks, scale: float, window: int = 0,
    cap: float = 0.0, sinks: Tensor | None = None, bias: tuple[Tensor, Tensor] | None = None, packed: int = 0,
) -> None:  # fmt: skip
    """`attend` in triton, into `out`. packed: tiles of the result, if it is packed."""
    rows, heads, dim = q.shape
    kv_heads, n, scratch = k_plane.shape[1], blocks.info.shape[0], blocks.scratch
    per_block, width = rows_per_block(heads, kv_heads), max(16, triton.next_power_of_2(dim))
    causal = blocks.lengths is None and bias is None
    fits = blocks.prompts and causal and not packed and q.element_size() == 2
    tile = tile_of(width, shared_memory(q.device)) if fits else None
    per_tile = 0 if tile is None else tile.queries // (per_block * (heads // kv_heads))
    sinks_ = q if sinks is None else sinks
    scale_, length, limits = scale * LOG2_E, blocks.table.shape[1], (window, cap * LOG2_E)
    constants = {
        "HEADS": heads, "KV_HEADS": kv_heads, "DIM": dim, "DIM_PAD": width, "SPAN": SPAN, "PRECISION": "ieee",
        "CAPPED": cap > 0, "SINKS": sinks is not None, "PER_TILE": per_tile, "PER_BLOCK": per_block,
        "enable_fp_fusion": False,
    }  # fmt: skip
    if tile is not None and per_tile:
        launch: Any = _attend_tile[(triton.cdiv(n, per_tile), kv_heads)]
        launch(
            q, k_plane, v_plane, out, blocks.table, blocks.info, sinks_, n, scale_, length, *limits,
            QUERIES=tile.queries, num_warps=tile.warps, num_stages=tile.stages, maxnreg=tile.registers, **constants,
        )  # fmt: skip
    splits = min(scratch.spans, max(1, (PROMPT_PROGRAMS if per_tile else PROGRAMS) // (n * kv_heads)))
    added, shift = bias or (q, q)
    lengths = blocks.info if blocks.lengths is None else blocks.lengths
    launch = _attend[(n, kv_heads, splits)]
    launch(
        q, k_plane, v_plane, out, blocks.table, blocks.info, blocks.tail, scratch.sums, scratch.stats, scratch.finished,
        sinks_, lengths, added, shift, scale_, length, blocks.tail.shape[1], scratch.spans, scratch.rows, *limits,
        added.shape[1], rows,
        QUERIES=max(QUERIES, triton.next_power_of_2(heads // kv_heads)), SPLITS=splits,
        WHOLE=blocks.lengths is not None, BIASED=bias is not None, TILES=packed,
        num_warps=WARPS, num_stages=1, **constants, **launch_options("attend", rows),
    )  # fmt: skip


_known: dict[tuple[attend_few.Heads, torch.device], bool] = {}  # what `few_agree` has found


def few_agree(shape: attend_few.Heads, device: torch.device) -> bool:
    """Whether `attend_few` has the bits of triton's kernel for such heads on this device; tried once."""
    if (shape, device) not in _known:
        if torch.cuda.is_current_stream_capturing():
            return False
        with compiling.live():
            _known[shape, device] = _compare(shape, device)
    return _known[shape, device]


def _compare(shape: attend_few.Heads, device: torch.device) -> bool:
    """Contexts of one span and of several, in one program and in many, whose last keys are in a tail."""
    most, length = rows_per_block(shape.heads, shape.kv_heads), 1280
    dice = torch.Generator(device).manual_seed(1)
    k, v, q = (
        torch.randn(n, heads, shape.dim, generator=dice, device=device).to(torch.bfloat16)
        for n, heads in ((length, shape.kv_heads), (length, shape.kv_heads), (2 * most, shape.heads))
    )
    scratch, scale = Scratch(2 * most, shape.heads, shape.dim, length, device), shape.dim**-0.5
    table = torch.stack([torch.randperm(length, generator=dice, device=device) for _ in range(2)]).int()
    tail = torch.arange(7, 23, dtype=torch.int32, device=device).repeat(2, 1)
    alike = True
    for contexts in ((1, 100), (128, 1050)):
        info = [[i * most, most, i, n, n + 1, 0, 0, 0] for i, n in enumerate(contexts)]
        blocks = Blocks(torch.tensor(info, dtype=torch.int32, device=device), tail, table, scratch)
        ours, other = (torch.empty(2 * most, shape.heads * shape.dim, dtype=q.dtype, device=device) for _ in range(2))
        attend_few.attend(q, k, v, blocks, scale * LOG2_E, 0, ours, 0, attend_few.splits(shape, blocks, device))
        _launch(q, k, v, other, blocks, scale)
        alike = alike and torch.equal(ours, other)
    return alike
