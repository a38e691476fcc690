"""The parts of a round that are neither a pass nor a choice: take a draft, lay out rows, compare, append, look up.

A sequence has one line of device state for its lifetime: its numbers (`LENGTH` …), its tokens, its slots and its draft.
Every kernel reads what a sequence is from there, so a round can be started before the host has read the last one.

Promise: a line changes only in rounds that name it, and only as far as its limit; rows that are not used are padding,
which reads and writes a slot without an owner. The kernels know ids and numbers, neither layers nor laws of sampling.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from .sampling import _key

# Columns of a line's numbers (int64; temperature, top_p, min_p and penalties are float64 in the same eight bytes).
LENGTH, HELD, LIMIT, LIVE = 0, 1, 2, 3  # tokens; of them in the target's plane; the most there may be; whether it runs
SEED, TEMPERATURE, TOP_K, TOP_P, MIN_P = 4, 5, 6, 7, 8
DRAFTED, SOURCE, MATCH = 9, 10, 11  # tokens of its draft, where that is from, tokens of the match that it rests on
READ = 12  # leading tokens that the draft model's plane holds
REPETITION, PRESENCE, FREQUENCY = 13, 14, 15  # penalties
MIN_LENGTH = 16  # tokens before which no end id is chosen
ADJUSTS = 17  # whether it has bias, penalties or bans
ENDS = 18  # the first of its end ids; unused ones are -1
MOST_ENDS = 8
COLUMNS = ENDS + MOST_ENDS
NONE, LATE, LOOKUP, MODEL, HEAD = 0, 1, 2, 3, 4  # sources of drafts
DRAFT = 64  # tokens of the longest draft
DEPTH = 16  # of the deepest tree
REPORT = 8 + 4 * DRAFT + 1 + DEPTH  # numbers reported for a sequence: see `_settle`

_LENGTH, _HELD, _LIMIT, _LIVE = (tl.constexpr(c) for c in (LENGTH, HELD, LIMIT, LIVE))
_SEED, _TEMPERATURE, _TOP_K = (tl.constexpr(c) for c in (SEED, TEMPERATURE, TOP_K))
_TOP_P, _MIN_P = tl.constexpr(TOP_P), tl.constexpr(MIN_P)
_DRAFTED, _SOURCE, _MATCH, _READ, _ENDS = (tl.constexpr(c) for c in (DRAFTED, SOURCE, MATCH, READ, ENDS))
_COLUMNS, _MOST_ENDS = tl.constexpr(COLUMNS), tl.constexpr(MOST_ENDS)
_NONE, _LATE, _LOOKUP, _MODEL, _HEAD = (tl.constexpr(c) for c in (NONE, LATE, LOOKUP, MODEL, HEAD))
_DRAFT, _REPORT, _DEPTH = tl.constexpr(DRAFT), tl.constexpr(REPORT), tl.constexpr(DEPTH)


@triton.jit
def _get(numbers, line, column):
    return tl.load(numbers + line.to(tl.int64) * _COLUMNS + column)


@triton.jit
def _set(numbers, line, column, value):
    tl.store(numbers + line.to(tl.int64) * _COLUMNS + column, value.to(tl.int64))


# ------------------------------------------------------------ the beginning of a round


@triton.jit
def _patch(place, slot, table, patches, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    index = tl.load(place + i, mask=i < patches, other=-1)
    tl.store(table + index, tl.load(slot + i, mask=i < patches, other=0), mask=index >= 0)


def patch(place: Tensor, slot: Tensor, table: Tensor) -> None:
    """table.flat[place[i]] = slot[i] where place[i] >= 0. place [P] int64, slot [P] int32."""
    launch: Any = _patch[(triton.cdiv(place.shape[0], 256),)]
    launch(place, slot, table, place.shape[0], BLOCK=256)


@triton.jit
def _take_late(numbers, tokens, draft, parents, lines, at, count, late, length, LATE_WIDTH: tl.constexpr):
    i = tl.program_id(0)
    line, start, most = tl.load(lines + i), tl.load(at + i), tl.load(count + i)
    n = _get(numbers, line, _LENGTH).to(tl.int32)
    skip = n - start
    if (start >= 0) & (skip >= 0) & (skip < most):
        j = tl.arange(0, LATE_WIDTH)
        ahead = tl.load(late + i * LATE_WIDTH + j)
        emitted = tl.load(tokens + line.to(tl.int64) * length + start + j, mask=j < skip, other=-1)
        if tl.sum(((emitted != ahead) & (j < skip)).to(tl.int32), 0) == 0:
            node = line.to(tl.int64) * _DRAFT + j - skip
            tl.store(draft + node, ahead, mask=(j >= skip) & (j < most))
            tl.store(parents + node, j - skip - 1, mask=(j >= skip) & (j < most))
            _set(numbers, line, _DRAFTED, most - skip)
            _set(numbers, line, _SOURCE, tl.full((), _LATE, tl.int32))


def take_late(
    numbers: Tensor, tokens: Tensor, draft: Tensor, parents: Tensor, lines: Tensor, late: dict[str, Tensor]
) -> None:
    """Take a draft of the host where it still fits: late["tokens"][i] from position late["at"][i] on (-1: none).

    What the sequence has emitted meanwhile must be the draft's beginning, which is skipped.
    """
    launch: Any = _take_late[(lines.shape[0],)]
    launch(
        numbers, tokens, draft, parents, lines, late["at"], late["count"], late["tokens"], tokens.shape[1],
        LATE_WIDTH=late["tokens"].shape[1], num_warps=1,
    )  # fmt: skip


# ------------------------------------------------------------ rows


@triton.jit
def _counts(numbers, lines, feeds, budgets, i, ok, TREE: tl.constexpr):
    """Of sequences i [B]: tokens n, held tokens, fed rows and drafted rows of this round."""
    line = tl.load(lines + i, mask=ok, other=0).to(tl.int64) * _COLUMNS
    n = tl.load(numbers + line + _LENGTH, mask=ok, other=0).to(tl.int32)
    held = tl.load(numbers + line + _HELD, mask=ok, other=0).to(tl.int32)
    limit = tl.load(numbers + line + _LIMIT, mask=ok, other=0).to(tl.int32)
    live = tl.load(numbers + line + _LIVE, mask=ok, other=0) > 0
    feed = tl.where(live, tl.minimum(tl.load(feeds + i, mask=ok, other=0), n - held), 0)
    drafted = tl.load(numbers + line + _DRAFTED, mask=ok, other=0).to(tl.int32)
    if TREE:  # no path is deeper than DEPTH; a recorded tree has no such paths, a chain is cut
        source = tl.load(numbers + line + _SOURCE, mask=ok, other=0)
        drafted = tl.where(source == _HEAD, drafted, tl.minimum(drafted, _DEPTH))
    drafted = tl.minimum(tl.minimum(drafted, tl.load(budgets + i, mask=ok, other=0)), limit - n - 1)
    drafted = tl.where((feed > 0) & (held + feed == n), tl.maximum(drafted, 0), 0)
    return n, held, feed, drafted


@triton.jit
def _lay_out(
    numbers, floats, tokens, table, draft, parents, lines, feeds, budgets,
    out_tokens, positions, slots, info, tail, want, plan, owner, node,
    seed, position, temperature, top_k, top_p, min_p,
    batch, rows, wanted, blocks, length, padding, per_block,
    BATCH: tl.constexpr, WIDTH: tl.constexpr, ALL: tl.constexpr, TREE: tl.constexpr,
):  # fmt: skip
    """Program i < batch lays out sequence i; the last one lays out padding."""
    i = tl.program_id(0)
    every = tl.arange(0, BATCH)
    n, held, feed, drafted = _counts(numbers, lines, feeds, budgets, every, every < batch, TREE)  # [B] each
    size = feed + drafted
    chosen = tl.where((feed > 0) & (held + feed == n), drafted + 1, 0)  # rows whose logits are needed
    groups = (feed + per_block - 1) // per_block + drafted if TREE else (size + per_block - 1) // per_block
    before, own = every < i, every == i
    first, first_wanted = tl.sum(tl.where(before, size, 0), 0), tl.sum(tl.where(before, chosen, 0), 0)
    first_block = tl.sum(tl.where(before, groups, 0), 0)
    j = tl.arange(0, WIDTH)
    if i == batch:  # padding
        for start in range(first, rows, WIDTH):
            row = start + j
            tl.store(out_tokens + row, tl.zeros((WIDTH,), tl.int64), mask=row < rows)
            tl.store(positions + row, tl.zeros((WIDTH,), tl.int64), mask=row < rows)
            tl.store(slots + row, tl.zeros((WIDTH,), tl.int64) + padding, mask=row < rows)
        for start in range(first_block, blocks, WIDTH):
            tl.store(info + (start + j) * 8 + 1, tl.zeros((WIDTH,), tl.int32), mask=start + j < blocks)
        for start in range(first if ALL else first_wanted, wanted, WIDTH):
            at, ok = start + j, start + j < wanted
            tl.store(want + at, tl.zeros((WIDTH,), tl.int64), mask=ok)
            tl.store(temperature + at, tl.zeros((WIDTH,), tl.float64), mask=ok)
            tl.store(owner + at, tl.full((WIDTH,), -1, tl.int32), mask=ok)
    else:
        n_, held_ = tl.sum(tl.where(own, n, 0), 0), tl.sum(tl.where(own, held, 0), 0)
        feed_, drafted_ = tl.sum(tl.where(own, feed, 0), 0), tl.sum(tl.where(own, drafted, 0), 0)
        chosen_ = tl.sum(tl.where(own, chosen, 0), 0)
        line = tl.load(lines + i).to(tl.int64)
        count = feed_ + drafted_
        for start in range(0, count, WIDTH):
            r = start + j
            known = tl.load(tokens + line * length + held_ + r, mask=r < feed_, other=0)
            ahead = tl.load(draft + line * _DRAFT + r - feed_, mask=(r >= feed_) & (r < count), other=0)
            tl.store(out_tokens + first + r, (known + ahead).to(tl.int64), mask=r < count)
            tl.store(positions + first + r, (held_ + r).to(tl.int64), mask=r < count)
            slot = tl.load(table + line * length + held_ + r, mask=r < count, other=0)
            tl.store(slots + first + r, slot.to(tl.int64), mask=r < count)
        grouped = feed_ if TREE else count  # rows that see those before them
        for start in range(0, (grouped + per_block - 1) // per_block, WIDTH):
            b = start + j
            at, ok = info + (first_block + b) * 8, b * per_block < grouped
            tl.store(at, first + b * per_block, mask=ok)
            tl.store(at + 1, tl.minimum(grouped - b * per_block, per_block), mask=ok)
            tl.store(at + 2, tl.zeros((WIDTH,), tl.int32) + line.to(tl.int32), mask=ok)
            tl.store(at + 3, tl.zeros((WIDTH,), tl.int32) + length, mask=ok)  # every key is in the table
            tl.store(at + 4, held_ + b * per_block + 1, mask=ok)
        skipped = 0 if ALL else feed_ - 1  # rows before the first wanted one
        several = count if ALL else chosen_
        base = first if ALL else first_wanted
        at_line = line * _COLUMNS
        for start in range(0, several, WIDTH):
            r = start + j
            at, ok = base + r, r < several
            tl.store(want + at, (first + skipped + r).to(tl.int64), mask=ok)
            tl.store(owner + at, tl.zeros((WIDTH,), tl.int32) + line.to(tl.int32), mask=ok)
            tl.store(node + at, skipped + r - feed_, mask=ok)
            tl.store(position + at, (held_ + skipped + r + 1).to(tl.int64), mask=ok)
            tl.store(seed + at, tl.zeros((WIDTH,), tl.int64) + tl.load(numbers + at_line + _SEED), mask=ok)
            tl.store(top_k + at, tl.zeros((WIDTH,), tl.int64) + tl.load(numbers + at_line + _TOP_K), mask=ok)
            heat = tl.load(floats + at_line + _TEMPERATURE)
            tl.store(temperature + at, tl.zeros((WIDTH,), tl.float64) + heat, mask=ok)
            tl.store(top_p + at, tl.zeros((WIDTH,), tl.float64) + tl.load(floats + at_line + _TOP_P), mask=ok)
            tl.store(min_p + at, tl.zeros((WIDTH,), tl.float64) + tl.load(floats + at_line + _MIN_P), mask=ok)
        if TREE:
            tl.debug_barrier()  # a node's position replaces that of its number, which other threads may have written
            number = tl.arange(0, _DRAFT)
            inside = number < drafted_
            depth = tl.zeros((_DRAFT,), tl.int32)
            up = number
            for _ in range(_DEPTH):
                depth += (up >= 0).to(tl.int32)
                up = tl.load(parents + line * _DRAFT + up, mask=inside & (up >= 0), other=-1)
            row, block = first + feed_ + number, first_block + (feed_ + per_block - 1) // per_block + number
            tl.store(positions + row, (n_ - 1 + depth).to(tl.int64), mask=inside)
            tl.store(position + base + (feed_ if ALL else 1) + number, (n_ + depth).to(tl.int64), mask=inside)
            tl.store(info + block * 8, row, mask=inside)
            tl.store(info + block * 8 + 1, tl.full((_DRAFT,), 1, tl.int32), mask=inside)
            tl.store(info + block * 8 + 2, tl.zeros((_DRAFT,), tl.int32) + line.to(tl.int32), mask=inside)
            tl.store(info + block * 8 + 3, tl.zeros((_DRAFT,), tl.int32) + n_, mask=inside)
            tl.store(info + block * 8 + 4, n_ + depth, mask=inside)
            up = number
            for back in range(_DEPTH):
                here = inside & (up >= 0)
                slot = tl.load(table + line * length + n_ + up, mask=here, other=0)
                tl.store(tail + block * _DEPTH + depth - 1 - back, slot, mask=here)
                up = tl.load(parents + line * _DRAFT + up, mask=here, other=-1)
        tl.store(plan + i * 8, n_)
        tl.store(plan + i * 8 + 1, feed_)
        tl.store(plan + i * 8 + 2, drafted_)
        tl.store(plan + i * 8 + 3, chosen_)
        tl.store(plan + i * 8 + 4, base + (feed_ - 1 if ALL else 0))  # the root's index among the wanted rows


def lay_out(
    numbers: Tensor, tokens: Tensor, table: Tensor, draft: Tensor, parents: Tensor,
    inputs: dict[str, Tensor], out: dict[str, Tensor], padding: int, per_block: int, tree: bool,
) -> None:  # fmt: skip
    """The rows of a round, from each sequence's pending tokens and its draft: a chain, or with `tree` a tree.

    inputs: lines, feeds, budgets [B] int32. out: tokens, positions, slots [T] int64; info [N, 8] int32
    (`attention.Blocks`); want [R] int64; the six fields of `sampling.Laws` [R]; owner [R] int32, the line of a wanted
    row (-1: padding), and node [R] int32, what is drafted there (negative: nothing); plan [B, 8] int32: tokens before
    the round, fed rows, drafted rows, wanted rows, index of the root among the wanted rows.
    """
    batch, rows, wanted = inputs["lines"].shape[0], out["tokens"].shape[0], out["want"].shape[0]
    launch: Any = _lay_out[(batch + 1,)]
    laws = (out[name] for name in ("seed", "position", "temperature", "top_k", "top_p", "min_p"))
    launch(
        numbers, numbers.view(out["temperature"].dtype), tokens, table, draft, parents,
        inputs["lines"], inputs["feeds"], inputs["budgets"],
        out["tokens"], out["positions"], out["slots"], out["info"], out["tail"], out["want"], out["plan"],
        out["owner"], out["node"], *laws,
        batch, rows, wanted, out["info"].shape[0], tokens.shape[1], padding, per_block,
        BATCH=triton.next_power_of_2(batch), WIDTH=64, ALL=rows == wanted, TREE=tree, num_warps=2,
    )  # fmt: skip


# ------------------------------------------------------------ compare, append, stop


@triton.jit
def _settle(
    numbers, tokens, draft, parents, survival, table, lines, plan, choices, highest, report, length,
    WIDTH: tl.constexpr, TREE: tl.constexpr,
):  # fmt: skip
    """Report: tokens before, tokens that the draft model has read, drafted, accepted, flags (1 verdict, 2 NaN), source,
    the length of the match that a lookup rests on, the root's index among the wanted rows; then the target's choices
    along its walk [DRAFT + 1], the draft [DRAFT], the nodes' parents [DRAFT], the accepted path [DEPTH], and the nodes'
    survival [DRAFT] as float32."""
    i = tl.program_id(0)
    line = tl.load(lines + i).to(tl.int64)
    n, feed = tl.load(plan + i * 8), tl.load(plan + i * 8 + 1)
    drafted, chosen, root = tl.load(plan + i * 8 + 2), tl.load(plan + i * 8 + 3), tl.load(plan + i * 8 + 4)
    j = tl.arange(0, WIDTH)  # [WIDTH], more than DRAFT
    choice = tl.load(choices + root + j, mask=j < chosen, other=0).to(tl.int32)
    ahead = tl.load(draft + line * _DRAFT + j, mask=j < drafted, other=-1)
    if TREE:  # walk from the root as long as a child holds the target's choice
        parent = tl.load(parents + line * _DRAFT + j, mask=j < drafted, other=-2)
        tl.store(report + i * _REPORT + 9 + 2 * _DRAFT + j, parent, mask=j < _DRAFT)
        claim = tl.load(survival + line * _DRAFT + j, mask=j < drafted, other=0.0)
        claims_at = report + i * _REPORT + 9 + 3 * _DRAFT + _DEPTH
        tl.store(claims_at + j, claim.to(tl.int32, bitcast=True), mask=j < _DRAFT)
        node, accepted, order = -1 + 0 * drafted, 0 * drafted, tl.full((WIDTH,), WIDTH, tl.int32)  # order on the path
        walked = tl.zeros((WIDTH,), tl.int32)  # the target's choices along the walk
        going = drafted * 0 + 1
        for depth in range(_DEPTH + 1):
            here = tl.sum(tl.where(j == node + 1, choice, 0), 0)
            walked = tl.where((j == depth) & (going > 0), here, walked)
            child = tl.min(tl.where((parent == node) & (ahead == here) & (j < drafted), j, WIDTH), 0)
            going = tl.where(child < WIDTH, going, 0)
            order = tl.where((j == child) & (going > 0), accepted, order)
            node = tl.where(going > 0, child, node)
            accepted += going
        path_at = report + i * _REPORT + 9 + 3 * _DRAFT
        tl.store(path_at + order, j, mask=order < _DEPTH)
        choice = walked
    else:
        accepted = tl.min(tl.where((j < drafted) & (choice == ahead), WIDTH, j), 0)
        accepted = tl.minimum(accepted, drafted)
    high = tl.load(highest + root + j, mask=j < chosen, other=0.0)
    unsound = tl.max(((high != high) | (tl.abs(high) == float("inf"))).to(tl.int32), 0)
    here = report + i * _REPORT
    tl.store(here, n)
    tl.store(here + 1, _get(numbers, line, _READ).to(tl.int32))
    tl.store(here + 2, drafted)
    tl.store(here + 3, accepted)
    tl.store(here + 4, (chosen > 0).to(tl.int32) + 2 * unsound)
    tl.store(here + 5, tl.where(drafted > 0, _get(numbers, line, _SOURCE), 0).to(tl.int32))
    tl.store(here + 6, _get(numbers, line, _MATCH).to(tl.int32))
    tl.store(here + 7, root)
    tl.store(here + 8 + j, choice, mask=j <= _DRAFT)
    tl.store(here + 9 + _DRAFT + j, ahead, mask=j < _DRAFT)
    if TREE:  # the accepted nodes' slots come first, then the others in their order, as in `Cache.commit`
        slot = tl.load(table + line * length + n + j, mask=j < drafted, other=0)
        others = ((order == WIDTH) & (j < drafted)).to(tl.int32)
        place = tl.where(order < WIDTH, order, accepted + tl.cumsum(others, 0) - others)
        tl.debug_barrier()
        tl.store(table + line * length + n + place, slot, mask=j < drafted)
    if feed > 0:
        held = _get(numbers, line, _HELD).to(tl.int32) + feed
        if chosen > 0:
            emitted = tl.minimum(accepted + 1, _get(numbers, line, _LIMIT).to(tl.int32) - n)
            ends = tl.zeros((WIDTH,), tl.int32)
            for e in tl.static_range(_MOST_ENDS):
                ends = ends | (choice == _get(numbers, line, _ENDS + e).to(tl.int32)).to(tl.int32)
            end = tl.min(tl.where((ends > 0) & (j < emitted), j, WIDTH), 0)  # of the first end id
            emitted = tl.minimum(emitted, end + 1)
            tl.store(tokens + line * length + n + j, choice, mask=j < emitted)
            goes_on = (end == WIDTH) & (n + emitted < _get(numbers, line, _LIMIT).to(tl.int32))
            _set(numbers, line, _LENGTH, n + emitted)
            _set(numbers, line, _LIVE, goes_on.to(tl.int32))
            if (drafted > 0) & (_get(numbers, line, _SOURCE) == _MODEL):
                # The model has read its own tokens but the last; those that were accepted stay.
                read = n + tl.minimum(accepted, drafted - 1)
                _set(numbers, line, _READ, read)
                tl.store(here + 1, read)
            held = n + tl.minimum(accepted, emitted - 1)
            _set(numbers, line, _DRAFTED, tl.full((), 0, tl.int32))
        _set(numbers, line, _HELD, held)


def settle(
    numbers: Tensor, tokens: Tensor, draft: Tensor, parents: Tensor, survival: Tensor, table: Tensor, lines: Tensor,
    plan: Tensor, choices: Tensor, highest: Tensor, report: Tensor, tree: bool,
) -> None:  # fmt: skip
    """Keep the drafted tokens that equal the target's choices, append what is emitted, and report it. Slots of a tree's
    accepted nodes move to the positions that these have now.

    choices [R] int64 and highest [R] float32 from `sampling.choose`; report [B, REPORT] int32.
    """
    launch: Any = _settle[(lines.shape[0],)]
    width = 2 * DRAFT
    launch(
        numbers, tokens, draft, parents, survival, table, lines, plan, choices, highest, report, tokens.shape[1],
        WIDTH=width, TREE=tree, num_warps=1,
    )  # fmt: skip


# ------------------------------------------------------------ lookup: the sequence's own text


@triton.jit
def _occurrence(text, length, end, n, least, MOST: tl.constexpr, BLOCK: tl.constexpr):
    """The latest position in a text of this length that follows the longest of the last MOST … least of the n tokens
    before `end`: the length of the match, and the position; 0, 0 if there is none."""
    best = tl.zeros((BLOCK,), tl.int64)
    for start in range(0, length, BLOCK):
        p = start + tl.arange(0, BLOCK)  # the token at p would be the first of the draft
        run = tl.full((BLOCK,), 1, tl.int32)
        match = tl.zeros((BLOCK,), tl.int32)
        for back in tl.static_range(1, MOST + 1):
            ok = (p < length) & (p >= back)
            own = tl.load(text + p - back, mask=ok, other=-1)
            run = run & (ok & (own == tl.load(end - back, mask=n >= back, other=-2))).to(tl.int32)
            match += run
        best = tl.maximum(best, tl.where(match >= least, match.to(tl.int64) * 4294967296 + p, 0))
    top = tl.max(best, 0)
    return (top // 4294967296).to(tl.int32), (top % 4294967296).to(tl.int32)


@triton.jit
def _look_up(
    numbers, tokens, draft, parents, lines, sources, source_lengths, length, source_length, least,
    MOST: tl.constexpr, BLOCK: tl.constexpr, SOURCED: tl.constexpr,
):  # fmt: skip
    """What stands where `_occurrence` found the end of the text is the draft: in the text, or, after a longer match, in
    its source."""
    i = tl.program_id(0)
    line = tl.load(lines + i).to(tl.int64)
    n, text = _get(numbers, line, _LENGTH).to(tl.int32), tokens + line * length
    drafts = (_get(numbers, line, _LIVE) > 0) & (_get(numbers, line, _HELD).to(tl.int32) == n - 1)
    if drafts:
        match, at = _occurrence(text, n, text + n, n, least, MOST, BLOCK)
        # At the end of the text the copy continues into itself: after "abab" comes "abab".
        j = tl.arange(0, _DRAFT)
        found = tl.load(text + at + j % (n - at))
        count = tl.full((), _DRAFT, tl.int32)
        if SOURCED:
            ids, last = sources + line * source_length, tl.load(source_lengths + line)
            longer, at = _occurrence(ids, last, text + n, n, least, MOST, BLOCK)
            better = longer > match
            found = tl.where(better, tl.load(ids + at + j, mask=better & (at + j < last), other=0), found)
            count = tl.where(better, tl.minimum(last - at, _DRAFT), count)
            match = tl.maximum(match, longer)
        if match > 0:
            tl.store(draft + line * _DRAFT + j, found)
            tl.store(parents + line * _DRAFT + j, j - 1)
            _set(numbers, line, _DRAFTED, count)
            _set(numbers, line, _SOURCE, tl.full((), _LOOKUP, tl.int32))
            _set(numbers, line, _MATCH, match)


def look_up(
    numbers: Tensor, tokens: Tensor, draft: Tensor, parents: Tensor, lines: Tensor, least: int, most: int,
    sources: tuple[Tensor, Tensor] | None = None,
) -> None:  # fmt: skip
    """Draft what followed the latest earlier occurrence of the last tokens, as the drafter `ngram` does.

    sources: ids [lines, length] and lengths [lines] of the texts that answers are made from.
    """
    ids, lengths = sources or (tokens, lines)
    launch: Any = _look_up[(lines.shape[0],)]
    launch(
        numbers, tokens, draft, parents, lines, ids, lengths, tokens.shape[1], ids.shape[1], least,
        MOST=most, BLOCK=1024, SOURCED=sources is not None, num_warps=4,
    )  # fmt: skip


# ------------------------------------------------------------ chains of a draft model


@triton.jit
def _lay_out_chain(
    numbers, floats, tokens, table, lines, feeds, budgets,
    first_tokens, first_positions, first_slots, positions, slots, info, drafts,
    seed, position, temperature, top_k, top_p, min_p,
    batch, length, padding, PASSES: tl.constexpr, AGAIN: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Pass 0 reads a sequence's last AGAIN tokens, pass j the token that pass j - 1 chose."""
    i, j = tl.program_id(0), tl.arange(0, WIDTH)
    line = tl.load(lines + i).to(tl.int64)
    n, held = _get(numbers, line, _LENGTH).to(tl.int32), _get(numbers, line, _HELD).to(tl.int32)
    limit, feed = _get(numbers, line, _LIMIT).to(tl.int32), tl.load(feeds + i)
    budget = tl.minimum(tl.minimum(tl.load(budgets + i), PASSES), limit - n - 1)
    ready = (_get(numbers, line, _LIVE) > 0) & (held + feed >= n) & (budget > 0)
    read = held if AGAIN == 1 else _get(numbers, line, _READ).to(tl.int32)
    ready = ready & (read >= n - AGAIN)
    budget = tl.where(ready, budget, 0)
    tl.store(drafts + i, budget)
    last = tl.arange(0, AGAIN)
    place = n - AGAIN + last
    exists = ready & (place >= 0)
    at = line * length + place
    token = tl.load(tokens + at, mask=exists, other=0)
    tl.store(first_tokens + AGAIN * i + last, token.to(tl.int64))
    tl.store(first_positions + AGAIN * i + last, tl.where(exists, place, 0).to(tl.int64))
    slot = tl.load(table + at, mask=exists, other=0)
    tl.store(first_slots + AGAIN * i + last, tl.where(exists, slot, padding).to(tl.int64))
    first = tl.minimum(n, AGAIN)  # rows of pass 0: a text may be a single token
    inside, real = j < PASSES, (j >= 1) & (j < budget)
    at = j * batch + i
    tl.store(positions + at, tl.where(real, n - 1 + j, 0).to(tl.int64), mask=inside)
    slot = tl.load(table + line * length + n - 1 + j, mask=real, other=0)
    tl.store(slots + at, tl.where(real, slot, padding).to(tl.int64), mask=inside)
    block = info + at * 8
    tl.store(block, tl.where(j == 0, AGAIN * (i + 1) - first, i), mask=inside)
    tl.store(block + 1, tl.where(j == 0, tl.where(ready, first, 0), real.to(tl.int32)), mask=inside)
    tl.store(block + 2, tl.zeros((WIDTH,), tl.int32) + line.to(tl.int32), mask=inside)
    tl.store(block + 3, tl.zeros((WIDTH,), tl.int32) + length, mask=inside)
    tl.store(block + 4, tl.where(j == 0, n + 1 - first, n + j), mask=inside)
    tl.store(position + at, (n + j).to(tl.int64), mask=inside)
    at_line = line * _COLUMNS
    tl.store(seed + i, tl.load(numbers + at_line + _SEED))
    tl.store(top_k + i, tl.load(numbers + at_line + _TOP_K))
    tl.store(temperature + i, tl.load(floats + at_line + _TEMPERATURE))
    tl.store(top_p + i, tl.load(floats + at_line + _TOP_P))
    tl.store(min_p + i, tl.load(floats + at_line + _MIN_P))


def lay_out_chain(
    numbers: Tensor, tokens: Tensor, table: Tensor, inputs: dict[str, Tensor], out: dict[str, Tensor], padding: int
) -> None:
    """The rows of the K passes that draft a chain after each sequence.

    out: first_tokens, first_positions, first_slots [again * B] int64; positions, slots [K, B] int64; info [K, B, 8];
    drafts [B] int32, tokens that each sequence is to get; the fields of `sampling.Laws` [B], position [K, B].
    """
    passes, batch = out["positions"].shape
    launch: Any = _lay_out_chain[(batch,)]
    names = ("first_tokens", "first_positions", "first_slots", "positions", "slots", "info", "drafts")
    laws = ("seed", "position", "temperature", "top_k", "top_p", "min_p")
    launch(
        numbers, numbers.view(out["temperature"].dtype), tokens, table,
        inputs["lines"], inputs["feeds"], inputs["asks"],
        *(out[name] for name in names), *(out[name] for name in laws), batch, tokens.shape[1], padding,
        PASSES=passes, AGAIN=out["first_tokens"].shape[0] // batch, WIDTH=triton.next_power_of_2(passes),
        num_warps=1,
    )  # fmt: skip


@triton.jit
def _lay_out_behind(
    numbers, floats, lines, drafts, positions, info, seed, position, temperature, top_k, top_p, min_p,
    batch, PASSES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Pass j >= 1 of a head's chain: one row behind the committed ones, which sees j drafted rows in its lane."""
    i, j = tl.program_id(0), tl.arange(0, WIDTH)
    line, count = tl.load(lines + i).to(tl.int64), tl.load(drafts + i)
    n, inside, at = _get(numbers, line, _LENGTH).to(tl.int32), j < PASSES, j * batch + i
    real = (j >= 1) & (j < count)
    tl.store(positions + at, tl.where(real, n - 2 + j, 0).to(tl.int64), mask=inside)
    block = info + at * 8
    tl.store(block, tl.zeros((WIDTH,), tl.int32) + i, mask=inside)
    tl.store(block + 1, real.to(tl.int32), mask=inside)
    tl.store(block + 2, tl.zeros((WIDTH,), tl.int32) + line.to(tl.int32), mask=inside)
    tl.store(block + 3, tl.zeros((WIDTH,), tl.int32) + n - 1, mask=inside)
    tl.store(block + 4, n - 1 + j, mask=inside)
    tl.store(position + at, (n + j).to(tl.int64), mask=inside)
    at_line = line * _COLUMNS
    tl.store(seed + i, tl.load(numbers + at_line + _SEED))
    tl.store(top_k + i, tl.load(numbers + at_line + _TOP_K))
    tl.store(temperature + i, tl.load(floats + at_line + _TEMPERATURE))
    tl.store(top_p + i, tl.load(floats + at_line + _TOP_P))
    tl.store(min_p + i, tl.load(floats + at_line + _MIN_P))


def lay_out_behind(numbers: Tensor, lines: Tensor, drafts: Tensor, out: dict[str, Tensor]) -> None:
    """The rows of a head's later passes, whose keys are committed rows and then the sequence's own lane of slots.

    out: positions [K, B] int64, info [K, B, 8] int32, the fields of `sampling.Laws` [B], position [K, B].
    """
    passes, batch = out["later_positions"].shape
    launch: Any = _lay_out_behind[(batch,)]
    laws = (out[name] for name in ("seed", "position", "temperature", "top_k", "top_p", "min_p"))
    launch(
        numbers, numbers.view(out["temperature"].dtype), lines, drafts, out["later_positions"], out["later_info"],
        *laws, batch, PASSES=passes, WIDTH=triton.next_power_of_2(passes), num_warps=1,
    )  # fmt: skip


@triton.jit
def _keep_chain(numbers, draft, lines, drafts, drafted, batch, source, PASSES: tl.constexpr, WIDTH: tl.constexpr):
    i, j = tl.program_id(0), tl.arange(0, WIDTH)
    count = tl.load(drafts + i)
    if count > 0:
        line = tl.load(lines + i).to(tl.int64)
        token = tl.load(drafted + j * batch + i, mask=j < PASSES, other=0)
        tl.store(draft + line * _DRAFT + j, token.to(tl.int32), mask=j < count)
        _set(numbers, line, _DRAFTED, count)
        _set(numbers, line, _SOURCE, tl.full((), 0, tl.int32) + source)


def keep_chain(numbers: Tensor, draft: Tensor, lines: Tensor, drafts: Tensor, drafted: Tensor, source: int) -> None:
    """Drafted tokens [K, B] int64 become the sequences' drafts, drafts[i] of each."""
    passes, batch = drafted.shape
    launch: Any = _keep_chain[(batch,)]
    width = triton.next_power_of_2(passes)
    launch(numbers, draft, lines, drafts, drafted, batch, source, PASSES=passes, WIDTH=width, num_warps=1)


@triton.jit
def _keep_tree(numbers, draft, parents, kept, lines, drafts, tokens, above, survival, NODES: tl.constexpr, source):
    i, j = tl.program_id(0), tl.arange(0, _DRAFT)
    claim = tl.load(survival + i * NODES + j, mask=j < NODES, other=0.0)
    count = tl.minimum(tl.load(drafts + i), tl.sum((claim > 0).to(tl.int32), 0))
    if count > 0:
        line = tl.load(lines + i).to(tl.int64)
        tl.store(draft + line * _DRAFT + j, tl.load(tokens + i * NODES + j, mask=j < NODES, other=0).to(tl.int32))
        parent = tl.load(above + i * NODES + j, mask=j < NODES, other=-1)
        tl.store(parents + line * _DRAFT + j, parent.to(tl.int32))
        tl.store(kept + line * _DRAFT + j, claim.to(tl.float32))
        _set(numbers, line, _DRAFTED, count)
        _set(numbers, line, _SOURCE, tl.full((), 0, tl.int32) + source)


def keep_tree(
    numbers: Tensor, draft: Tensor, parents: Tensor, survival: Tensor, lines: Tensor, drafts: Tensor,
    nodes: tuple[Tensor, ...], source: int,
) -> None:  # fmt: skip
    """Trees become the sequences' drafts, the first drafts[i] nodes of each.

    nodes: tokens, parents int64 and survival float64, [B, M] each, best first; one with survival 0 is left out.
    """
    launch: Any = _keep_tree[(lines.shape[0],)]
    lists = (numbers, draft, parents, survival, lines, drafts)
    launch(*lists, *nodes, NODES=nodes[0].shape[1], source=source, num_warps=1)


@triton.jit
def _lay_out_levels(
    numbers, floats, lines, positions, info, keys, temperature, batch, length,
    LEVELS: tl.constexpr, BRANCHES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Level s of a head's tree: BRANCHES rows for each sequence, which see the committed rows and s drafted ones."""
    i, j = tl.program_id(0), tl.arange(0, WIDTH)
    line = tl.load(lines + i).to(tl.int64)
    n = _get(numbers, line, _LENGTH).to(tl.int32)
    tl.store(temperature + i, tl.load(floats + line * _COLUMNS + _TEMPERATURE))
    seed = tl.load(numbers + line * _COLUMNS + _SEED)
    for s in range(LEVELS):
        key = _key(seed, (n + s).to(tl.int64))
        tl.store(keys + s * batch + i, key.to(tl.int64, bitcast=True))
        at, inside = (s * batch + i) * BRANCHES + j, j < BRANCHES
        reach = tl.minimum(tl.maximum(n - 2 + s, 0), length - 1)
        tl.store(positions + at, tl.zeros((WIDTH,), tl.int64) + reach, mask=inside)
        tl.store(info + at * 8, i * BRANCHES + j, mask=inside)
        tl.store(info + at * 8 + 1, tl.zeros((WIDTH,), tl.int32) + (n > 1).to(tl.int32), mask=inside)
        tl.store(info + at * 8 + 2, tl.zeros((WIDTH,), tl.int32) + line.to(tl.int32), mask=inside)
        tl.store(info + at * 8 + 3, tl.zeros((WIDTH,), tl.int32) + n - 1, mask=inside)
        tl.store(info + at * 8 + 4, tl.zeros((WIDTH,), tl.int32) + tl.minimum(n - 1 + s, length), mask=inside)


def lay_out_levels(numbers: Tensor, lines: Tensor, out: dict[str, Tensor], length: int) -> None:
    """The rows of a head's tree. out: later_positions [D, B * w] int64, later_info [D, B * w, 8] int32, key [D, B]
    int64 (`engine.sampling.key`), temperature [B] float64."""
    levels, batch = out["key"].shape
    branches = out["later_positions"].shape[1] // batch
    launch: Any = _lay_out_levels[(batch,)]
    launch(
        numbers, numbers.view(out["temperature"].dtype), lines, out["later_positions"], out["later_info"], out["key"],
        out["temperature"], batch, length,
        LEVELS=levels, BRANCHES=branches, WIDTH=triton.next_power_of_2(branches), num_warps=1,
    )  # fmt: skip


@triton.jit
def _unread(numbers, lines, budgets, batch, rows, every, LAST: tl.constexpr, FEATURES: tl.constexpr):
    """Of sequences `every` [B]: tokens, tokens read, rows of this pass, whether these are all that it lacks.

    The first sequences have the room. Slots of a sequence without a budget may not be reserved yet.
    """
    ok = every < batch
    at = tl.load(lines + every, mask=ok, other=0).to(tl.int64) * _COLUMNS
    n = tl.load(numbers + at + _LENGTH, mask=ok, other=0).to(tl.int32)
    read = tl.load(numbers + at + _READ, mask=ok, other=0).to(tl.int32)
    asks = ok & (tl.load(budgets + every, mask=ok, other=0) > 0) & (tl.load(numbers + at + _LIVE, mask=ok, other=0) > 0)
    if FEATURES:  # the target has left them where it has read
        asks = asks & (tl.load(numbers + at + _HELD, mask=ok, other=0).to(tl.int32) >= n - 1)
    late = tl.where(asks, tl.maximum(n - LAST - read, 0), 0)
    before = tl.minimum(tl.cumsum(late, 0) - late, rows)
    size = tl.minimum(late, rows - before)
    return n, read, size, asks & (size == late)


@triton.jit
def _lay_out_reading(
    numbers, tokens, table, lines, budgets, out_tokens, positions, slots, info, want,
    batch, rows, blocks, length, padding, per_block,
    BATCH: tl.constexpr, WIDTH: tl.constexpr, LAST: tl.constexpr, SHIFT: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
    """As `_lay_out`, for what a drafter has not read: positions READ … LENGTH - LAST - 1, each with the token SHIFT
    places further."""
    i = tl.program_id(0)
    every = tl.arange(0, BATCH)
    _, read, size, _ = _unread(numbers, lines, budgets, batch, rows, every, LAST, FEATURES)
    groups = (size + per_block - 1) // per_block
    own = every == i
    first, first_block = tl.sum(tl.where(every < i, size, 0), 0), tl.sum(tl.where(every < i, groups, 0), 0)
    j = tl.arange(0, WIDTH)
    if i == batch:
        for start in range(first, rows, WIDTH):
            row = start + j
            tl.store(out_tokens + row, tl.zeros((WIDTH,), tl.int64), mask=row < rows)
            tl.store(positions + row, tl.zeros((WIDTH,), tl.int64), mask=row < rows)
            tl.store(slots + row, tl.zeros((WIDTH,), tl.int64) + padding, mask=row < rows)
        for start in range(first_block, blocks, WIDTH):
            tl.store(info + (start + j) * 8 + 1, tl.zeros((WIDTH,), tl.int32), mask=start + j < blocks)
    else:
        count, held = tl.sum(tl.where(own, size, 0), 0), tl.sum(tl.where(own, read, 0), 0)
        line = tl.load(lines + i).to(tl.int64)
        if FEATURES:
            tl.store(want + i, tl.maximum(first + count - 1, 0).to(tl.int64))
        for start in range(0, count, WIDTH):
            r = start + j
            token = tl.load(tokens + line * length + held + r + SHIFT, mask=r < count, other=0)
            tl.store(out_tokens + first + r, token.to(tl.int64), mask=r < count)
            tl.store(positions + first + r, (held + r).to(tl.int64), mask=r < count)
            slot = tl.load(table + line * length + held + r, mask=r < count, other=0)
            tl.store(slots + first + r, slot.to(tl.int64), mask=r < count)
        for start in range(0, (count + per_block - 1) // per_block, WIDTH):
            b = start + j
            at_block, ok = info + (first_block + b) * 8, b * per_block < count
            tl.store(at_block, first + b * per_block, mask=ok)
            tl.store(at_block + 1, tl.minimum(count - b * per_block, per_block), mask=ok)
            tl.store(at_block + 2, tl.zeros((WIDTH,), tl.int32) + line.to(tl.int32), mask=ok)
            tl.store(at_block + 3, tl.zeros((WIDTH,), tl.int32) + length, mask=ok)
            tl.store(at_block + 4, held + b * per_block + 1, mask=ok)


@triton.jit
def _advance_reading(
    numbers, lines, budgets, drafts, batch, rows, most,
    BATCH: tl.constexpr, LAST: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
    """READ moves on by the rows that were laid out; drafts [B]: tokens that each sequence can get after them."""
    every = tl.arange(0, BATCH)
    n, read, size, complete = _unread(numbers, lines, budgets, batch, rows, every, LAST, FEATURES)
    at = tl.load(lines + every, mask=every < batch, other=0).to(tl.int64) * _COLUMNS
    limit = tl.load(numbers + at + _LIMIT, mask=every < batch, other=0).to(tl.int32)
    budget = tl.load(budgets + every, mask=every < batch, other=0)
    count = tl.minimum(tl.minimum(budget, most), limit - n - 1)
    if FEATURES:
        tl.store(drafts + every, tl.where(complete & (size > 0), tl.maximum(count, 0), 0), mask=every < batch)
    tl.store(numbers + at + _READ, (read + size).to(tl.int64), mask=(every < batch) & (size > 0))


def lay_out_reading(
    numbers: Tensor, tokens: Tensor, table: Tensor, inputs: dict[str, Tensor], out: dict[str, Tensor],
    padding: int, per_block: int, last: int = 2, shift: int = 0, most: int = 0,
) -> None:  # fmt: skip
    """The rows [T] with which a drafter's plane catches up with the sequences, and its new READ numbers.

    last: so many of the last positions are left out; shift: the token of a row is that many places further. With `out`
    of a head's first pass, want [B] int64 is each sequence's last row, and drafts [B] int32 are the tokens, `most` at
    most, that it can get: none where some of its rows had no room or no feature yet.
    """
    lines, budgets, rows = inputs["lines"], inputs["asks"], out["tokens"].shape[0]
    batch, features = lines.shape[0], "want" in out
    size = triton.next_power_of_2(batch)
    launch: Any = _lay_out_reading[(batch + 1,)]
    launch(
        numbers, tokens, table, lines, budgets, out["tokens"], out["positions"], out["slots"], out["info"],
        out.get("want", lines), batch, rows, out["info"].shape[0], tokens.shape[1], padding, per_block,
        BATCH=size, WIDTH=64, LAST=last, SHIFT=shift, FEATURES=features, num_warps=2,
    )  # fmt: skip
    advance: Any = _advance_reading[(1,)]
    drafts = out.get("drafts", lines)
    advance(numbers, lines, budgets, drafts, batch, rows, most, BATCH=size, LAST=last, FEATURES=features, num_warps=1)
