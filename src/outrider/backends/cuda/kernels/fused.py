"""Products of up to sixteen rows together with what comes after them: rope and K/V stores, residual sums, activations.

Promise: the bits are those of `matmul.product` with the same parts followed by the kernels of `elementwise`, for every
number of rows. A small pass is bound by latency, not by arithmetic. So a weight goes straight from memory to the
registers in which a matrix instruction wants it, eight bytes a thread: no shared memory, no barrier before the end. The
first weights are requested before the kernel waits for the one before it (programmatic dependent launch), so that
memory is busy while rows are handed over. Only then may the next kernel start: what it reads before its own wait was
written two kernels earlier.

A thread is an element of one-dimensional tensors here, and a warp is 32 of them: `_multiply` is the matrix instruction
of a warp. Its sixteen outputs are two groups of eight that lie `second` rows of the weight apart: neighbours, the two
halves of a rotated head, or gate and up.

An RMS norm is applied in two parts: products read the stream times the norm's gain, and their sums are multiplied by
1 / rms(stream), which depends on the row alone. Whoever writes the stream adds up its squares, sixteen outputs at a
time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....models.config import GELU, SILU
from .launching import EMULATED, begin, launch_options
from .matmul import STEP

MOST_ROWS = 16
DTYPE = torch.float16 if EMULATED else torch.bfloat16  # of weights and rows; triton's interpreter lacks bfloat16
GROUP = 16  # outputs of one matrix instruction, and of one sum of squares
DEPTH = 12  # matrix instructions whose weights a thread requests at once
GATE_WARPS, GATE_DEPTH = 4, 8  # of gate and up, where each warp has sums of its own
SLICED_GATES = 2048  # the most outputs for which the warps of a program share a sum of gate and up


@triton.jit
def _half(words, place: tl.constexpr, dtype: tl.constexpr):
    return ((words >> (16 * place)) & 0xFFFF).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)


@triton.jit
def _emulated(first, second, x, c0, c1, c2, c3, WARPS: tl.constexpr, DTYPE: tl.constexpr):
    """`_multiply` for triton's interpreter, in float32."""
    for e in tl.static_range(4):
        column = tl.reshape(_half(x, e, DTYPE), (WARPS, 1, 8, 4))
        one = tl.sum(tl.reshape(_half(first, e, DTYPE), (WARPS, 8, 1, 4)) * column, 3)  # [WARPS, 8, 8]
        two = tl.sum(tl.reshape(_half(second, e, DTYPE), (WARPS, 8, 1, 4)) * column, 3)
        a0, a1 = tl.split(tl.reshape(one, (WARPS * 32, 2)))
        a2, a3 = tl.split(tl.reshape(two, (WARPS * 32, 2)))
        c0, c1, c2, c3 = c0 + a0, c1 + a1, c2 + a2, c3 + a3
    return c0, c1, c2, c3


@triton.jit
def _multiply(first, second, x, c0, c1, c2, c3, WARPS: tl.constexpr, DTYPE: tl.constexpr, EMULATED: tl.constexpr):
    """c += w xᵀ for a warp's sixteen outputs, eight rows and sixteen inputs.

    Lane 4g + t has inputs 4t to 4t + 3 of outputs g and 8 + g (`first`, `second`) and of row g (`x`), four halves in a
    word, and the sums of rows 2t and 2t + 1 for both outputs.
    """
    if EMULATED:
        return _emulated(first, second, x, c0, c1, c2, c3, WARPS, DTYPE)
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 a<4>, b<2>;
        mov.b64 {a0, a2}, $4;
        mov.b64 {a1, a3}, $5;
        mov.b64 {b0, b1}, $6;
        mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32
            {$0, $1, $2, $3}, {a0, a1, a2, a3}, {b0, b1}, {$7, $8, $9, $10};
        }""",
        "=f,=f,=f,=f,l,l,l,f,f,f,f", [first, second, x, c0, c1, c2, c3],
        dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def _word(pointer, ok, EVEN: tl.constexpr, EMULATED: tl.constexpr):
    """Weights that are read once: past the first-level cache, which keeps the rows. A row of weights continues in the
    next loads of the same thread: 256 bytes of it come to the second-level cache at once."""
    if EMULATED:
        return tl.load(pointer, mask=ok, other=0)
    if EVEN:
        return tl.inline_asm_elementwise(
            "ld.global.L1::no_allocate.L2::256B.b64 $0, [$1];", "=l,l", [pointer.to(tl.int64)],
            dtype=tl.int64, is_pure=False, pack=1,
        )  # fmt: skip
    return tl.inline_asm_elementwise(
        """{
        .reg .pred p;
        setp.ne.b32 p, $2, 0;
        mov.b64 $0, 0;
        @p ld.global.L1::no_allocate.L2::256B.b64 $0, [$1];
        }""",
        "=l,l,r", [pointer.to(tl.int64), ok.to(tl.int32)], dtype=tl.int64, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _weights(w, second, k, end, DEPTH: tl.constexpr, EVEN: tl.constexpr, EMULATED: tl.constexpr):
    """A thread's words for the next matrix instructions. w [T]: pointers, `second` words apart; k: inputs so far."""
    found = ()
    for i in tl.static_range(DEPTH):
        ok = k + 16 * i < end
        one, two = _word(w + 4 * i, ok, EVEN, EMULATED), _word(w + second + 4 * i, ok, EVEN, EMULATED)
        found += (one, two)  # type: ignore[assignment]
    return found


@triton.jit
def packed_index(row, k, TILES: tl.constexpr):
    """Where input k of a row is in a packed matrix of 8 TILES rows: what a warp reads for two matrix instructions lies
    together, eight numbers of each lane."""
    lane = row % 8 * 4 + k % 16 // 4
    return (((k // 32 * TILES + row // 8) * 32 + lane) * 2 + k % 32 // 16) * 4 + k % 4


@triton.jit
def _inputs(x, row, rows, k, end, DEPTH: tl.constexpr, EVEN: tl.constexpr, TILES: tl.constexpr):
    """A thread's words of packed rows for the next matrix instructions. x [T, 2]: pointers; eight rows at a time."""
    found = ()
    for i in tl.static_range(DEPTH // 2):
        for tile in tl.static_range(TILES):
            ok = row + 8 * tile < rows
            if not EVEN:
                ok = ok & (k + 32 * i < end)
            pair = tl.load(x + (i * TILES + tile) * 64, mask=ok[:, None], other=0)
            found += tl.split(pair)
    return found


@triton.jit
def _advance(
    weights, inputs, sums, DEPTH: tl.constexpr, TILES: tl.constexpr,
    WARPS: tl.constexpr, DTYPE: tl.constexpr, EMULATED: tl.constexpr,
):  # fmt: skip
    """The sums after the matrix instructions for which weights and inputs are here."""
    a0, a1, a2, a3, b0, b1, b2, b3 = sums
    for i in tl.static_range(DEPTH):
        one, two = weights[2 * i], weights[2 * i + 1]
        x = inputs[i // 2 * 2 * TILES + i % 2]
        a0, a1, a2, a3 = _multiply(one, two, x, a0, a1, a2, a3, WARPS, DTYPE, EMULATED)
        if TILES == 2:
            x = inputs[i // 2 * 2 * TILES + i % 2 + 2]
            b0, b1, b2, b3 = _multiply(one, two, x, b0, b1, b2, b3, WARPS, DTYPE, EMULATED)
    return a0, a1, a2, a3, b0, b1, b2, b3


@triton.jit
def _sums(
    weights, w, second, x, thread, rows, k, end, LENGTH: tl.constexpr, DEPTH: tl.constexpr, EVEN: tl.constexpr,
    WARPS: tl.constexpr, TILES: tl.constexpr, DTYPE: tl.constexpr, EMULATED: tl.constexpr,
):  # fmt: skip
    """Each warp's sums over its inputs, LENGTH matrix instructions in their order: those of `_multiply` for the first
    eight rows, then for the others.

    weights: the first ones; w [T]: pointers to a thread's first words; x: packed rows; k: a thread's first input; end:
    the first that none reads.
    """
    lane = thread % 32
    row = lane // 4
    x += (k * (2 * TILES) + 2 * lane)[:, None] + tl.arange(0, 2)[None, :]
    zero = (row * 0).to(tl.float32)
    sums = (zero, zero, zero, zero, zero, zero, zero, zero)
    inputs = _inputs(x, row, rows, k, end, DEPTH, EVEN, TILES)
    for _ in tl.range(0, LENGTH // DEPTH - 1, num_stages=1):
        w, x, k = w + 4 * DEPTH, x + 32 * TILES * DEPTH, k + 16 * DEPTH
        more = _weights(w, second, k, end, DEPTH, EVEN, EMULATED)
        further = _inputs(x, row, rows, k, end, DEPTH, EVEN, TILES)
        sums = _advance(weights, inputs, sums, DEPTH, TILES, WARPS, DTYPE, EMULATED)
        weights, inputs = more, further
    return _advance(weights, inputs, sums, DEPTH, TILES, WARPS, DTYPE, EMULATED)


@triton.jit
def _ordered(sums, WARPS: tl.constexpr):
    """The warps' sums, added in order: [16 rows, 16 outputs]."""
    a0, a1, a2, a3, b0, b1, b2, b3 = sums
    low = tl.join(tl.join(a0, a1), tl.join(a2, a3))  # [T, row, output]
    each = tl.join(low, tl.join(tl.join(b0, b1), tl.join(b2, b3)))
    each = tl.permute(tl.reshape(each, (WARPS, 8, 4, 2, 2, 2)), (5, 2, 3, 4, 1, 0))
    if WARPS == 8:
        even, odd = tl.split(tl.reshape(each, (16, 16, 2, 2, 2)))
        s04, s26 = tl.split(even)
        s15, s37 = tl.split(odd)
        s0, s4 = tl.split(s04)
        s1, s5 = tl.split(s15)
        s2, s6 = tl.split(s26)
        s3, s7 = tl.split(s37)
        total = s0 + s1 + s2 + s3 + s4 + s5 + s6 + s7
    else:
        even, odd = tl.split(tl.reshape(each, (16, 16, 2, 2)))
        s0, s2 = tl.split(even)
        s1, s3 = tl.split(odd)
        total = s0 + s1 + s2 + s3
    return total


@triton.jit
def sum_of_sixteen(value, ROWS: tl.constexpr):
    """[ROWS, 16] -> [ROWS], pairs first: the order is in the code, not in the layout of a kernel's registers."""
    first, second = tl.split(tl.reshape(value, (ROWS, 8, 2)))
    first, second = tl.split(tl.reshape(first + second, (ROWS, 4, 2)))
    first, second = tl.split(tl.reshape(first + second, (ROWS, 2, 2)))
    first, second = tl.split(first + second)
    return first + second


@triton.jit
def load_squares(squares, r, rows, GROUPS: tl.constexpr):
    """The squares of rows r, sixteen groups of outputs at a time, from [T, GROUPS]."""
    j = tl.arange(0, 16)
    found = ()
    for first in tl.static_range(0, GROUPS, 16):
        ok = (r < rows)[:, None] & (first + j < GROUPS)[None, :]
        found += (tl.load(squares + r[:, None] * GROUPS + first + j[None, :], mask=ok, other=0.0),)  # type: ignore[assignment]
    return found


@triton.jit
def row_scale(squares, width, eps, GROUPS: tl.constexpr, ROWS: tl.constexpr):
    """1 / rms of each row [ROWS]."""
    total = squares[0]
    for n in tl.static_range(1, (GROUPS + 15) // 16):
        total += squares[n]
    return tl.rsqrt(sum_of_sixteen(total, ROWS) / width + eps)


@triton.jit(do_not_specialize=["rows"])
def _rotated(
    x, squares, w, bias, cos, sin, positions, slots, q, k_plane, v_plane, rows, ins, split, eps,
    BIASED: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, GROUPS: tl.constexpr,
    LENGTH: tl.constexpr, DEPTH: tl.constexpr, EVEN: tl.constexpr, WARPS: tl.constexpr, TILES: tl.constexpr,
    DTYPE: tl.constexpr, EMULATED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """q, k and v of eight pairs of dimensions: i and i + DIM / 2 of one head."""
    HALF: tl.constexpr = DIM // 2
    head, start = tl.program_id(0) * 8 // HALF, tl.program_id(0) * 8 % HALF
    thread = tl.arange(0, 32 * WARPS)
    g, t, k = thread % 32 // 4, thread % 4, thread // 32 * split
    words = ins // 4
    r, i = tl.arange(0, 16), start + tl.arange(0, 8)
    here = r < rows
    both = here[:, None] & (i < HALF)[None, :]
    slot = tl.load(slots + r, mask=here, other=0, cache_modifier=".cg").to(tl.int64)
    angle = tl.load(positions + r, mask=here, other=0, cache_modifier=".cg")[:, None] * HALF + i[None, :]
    c, s = tl.load(cos + angle, mask=both, other=1.0), tl.load(sin + angle, mask=both, other=0.0)
    if BIASED:
        first_bias = tl.load(bias + head * DIM + i).to(tl.float32)
        second_bias = tl.load(bias + head * DIM + HALF + i).to(tl.float32)
    w += (head * DIM + start + g) * words + k // 4 + t
    weights = _weights(w, HALF * words, k, ins, DEPTH, EVEN, EMULATED)
    begin(PDL)
    each = load_squares(squares, r, rows, GROUPS)
    sums = _sums(weights, w, HALF * words, x, thread, rows, k, ins, LENGTH, DEPTH, EVEN, WARPS, TILES, DTYPE, EMULATED)
    total = _ordered(sums, WARPS) * row_scale(each, ins, eps, GROUPS, 16)[:, None]
    first, second = tl.split(tl.permute(tl.reshape(total, (16, 2, 8)), (0, 2, 1)))  # [16, 8] each
    if BIASED:
        first, second = first + first_bias[None, :], second + second_bias[None, :]
    turned, turned_second = first * c + (-second) * s, second * c + first * s
    turns = head < HEADS + KV_HEADS  # no branches: the compiler would move loads behind the wait
    first, second = tl.where(turns, turned, first), tl.where(turns, turned_second, second)
    target = tl.where(head < HEADS, q, tl.where(turns, k_plane, v_plane))
    index = tl.where(head < HEADS, r.to(tl.int64) * HEADS + head, slot * KV_HEADS + (head - HEADS) % KV_HEADS)
    target = target + index[:, None] * DIM + i[None, :]
    tl.store(target, first.to(q.dtype.element_ty), mask=both)
    tl.store(target + HALF, second.to(q.dtype.element_ty), mask=both)


@triton.jit(do_not_specialize=["rows"])
def _added(
    x, w, bias, stream, gain, out, squares, rows, outs, ins, split,
    BIASED: tl.constexpr, GAINED: tl.constexpr,
    LENGTH: tl.constexpr, DEPTH: tl.constexpr, EVEN: tl.constexpr, WARPS: tl.constexpr, TILES: tl.constexpr,
    DTYPE: tl.constexpr, EMULATED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """stream += x wᵀ + bias for sixteen outputs; then out = stream * gain, and the sum of the stream's squares."""
    group = tl.program_id(0)
    thread = tl.arange(0, 32 * WARPS)
    g, t, k = thread % 32 // 4, thread % 4, thread // 32 * split
    words = ins // 4
    r, o = tl.arange(0, 16), group * 16 + tl.arange(0, 16)
    at, ok = r[:, None] * outs + o[None, :], (r < rows)[:, None] & (o < outs)[None, :]
    value = tl.load(stream + at, mask=ok, other=0.0, cache_modifier=".cg")
    if BIASED:
        added = tl.load(bias + o).to(tl.float32)
    if GAINED:
        factor = tl.load(gain + o)
    w += (group * 16 + g) * words + k // 4 + t
    weights = _weights(w, 8 * words, k, ins, DEPTH, EVEN, EMULATED)
    begin(PDL)
    sums = _sums(weights, w, 8 * words, x, thread, rows, k, ins, LENGTH, DEPTH, EVEN, WARPS, TILES, DTYPE, EMULATED)
    total = _ordered(sums, WARPS)
    if BIASED:
        total += added[None, :]
    value += total
    tl.store(stream + at, value, mask=ok)
    if GAINED:
        packed = out + packed_index(r[:, None], o[None, :], TILES)
        tl.store(packed, (value * factor[None, :]).to(out.dtype.element_ty), mask=ok)
        tl.store(squares + r * (outs // 16) + group, sum_of_sixteen(value * value, 16), mask=r < rows)


@triton.jit
def _lanes(value, WARPS: tl.constexpr):
    """[8] by row -> [T] each: rows 2t and 2t + 1 of every thread."""
    even, odd = tl.split(tl.reshape(value, (1, 4, 2)))
    shape: tl.constexpr = (8 * WARPS, 4)
    return (
        tl.reshape(tl.broadcast_to(even, shape), (32 * WARPS,)),
        tl.reshape(tl.broadcast_to(odd, shape), (32 * WARPS,)),
    )


@triton.jit
def _gate(gate, up, scale, out, row, rows, outs, o, GELU: tl.constexpr, TILES: tl.constexpr):
    gate, up = gate * scale, up * scale
    steepness = gate
    if GELU:
        steepness = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    value = gate / (1.0 + tl.exp(-steepness)) * up
    packed = out + packed_index(row, o, TILES)
    tl.store(packed, value.to(out.dtype.element_ty), mask=(row < rows) & (o < outs))


@triton.jit(do_not_specialize=["rows"])
def _activated(
    x, squares, w, out, rows, outs, ins, split, eps,
    GELU: tl.constexpr, GROUPS: tl.constexpr, SLICED: tl.constexpr,
    LENGTH: tl.constexpr, DEPTH: tl.constexpr, EVEN: tl.constexpr, WARPS: tl.constexpr, TILES: tl.constexpr,
    DTYPE: tl.constexpr, EMULATED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """activation(gate) * up for eight outputs: of the program, or, unless SLICED, of each of its warps."""
    thread = tl.arange(0, 32 * WARPS)
    g, t, warp = thread % 32 // 4, thread % 4, thread // 32
    if SLICED:
        group, k = tl.program_id(0) + 0 * warp, warp * split
    else:
        group, k = tl.program_id(0) * WARPS + warp, 0 * warp
    o = group * 8 + g
    words = ins // 4
    w += tl.where(o < outs, o, 0) * words + k // 4 + t
    weights = _weights(w, outs * words, k, ins, DEPTH, EVEN, EMULATED)
    begin(PDL)
    each = load_squares(squares, tl.arange(0, 16), rows, GROUPS)
    sums = _sums(weights, w, outs * words, x, thread, rows, k, ins, LENGTH, DEPTH, EVEN, WARPS, TILES, DTYPE, EMULATED)
    scale = row_scale(each, ins, eps, GROUPS, 16)
    if SLICED:
        total = tl.permute(tl.reshape(_ordered(sums, WARPS), (16, 2, 8)), (0, 2, 1))
        gate, up = tl.split(total)  # [16, 8] each
        column = tl.program_id(0) * 8 + tl.arange(0, 8)
        _gate(gate, up, scale[:, None], out, tl.arange(0, 16)[:, None], rows, outs, column[None, :], GELU, TILES)
    else:
        a0, a1, a2, a3, b0, b1, b2, b3 = sums
        low, high = tl.split(tl.permute(tl.reshape(scale, (2, 8)), (1, 0)))
        if TILES == 2:
            even, odd = _lanes(high, WARPS)
            _gate(b0, b2, even, out, 2 * t + 8, rows, outs, o, GELU, TILES)
            _gate(b1, b3, odd, out, 2 * t + 9, rows, outs, o, GELU, TILES)
        even, odd = _lanes(low, WARPS)
        _gate(a0, a2, even, out, 2 * t, rows, outs, o, GELU, TILES)
        _gate(a1, a3, odd, out, 2 * t + 1, rows, outs, o, GELU, TILES)


# ------------------------------------------------------------ launches


@dataclass(frozen=True)
class Slices:
    """How the sum of one weight is divided: between the warps of a program, or between the parts of a wide product."""

    parts: int  # of a sum: one for each warp of a program, or one in all
    warps: int
    length: int  # matrix instructions of one warp
    depth: int  # of those, how many have their weights requested at once

    @property
    def split(self) -> int:
        """Inputs of a slice."""
        return 16 * self.length

    def even(self, ins: int) -> bool:
        """Whether every slice has inputs, and as many as the others."""
        return self.split * self.parts == ins


def depth_of(length: int, most: int) -> int:
    return max(n for n in range(2, most + 1, 2) if length % n == 0)


def tiles(rows: int) -> int:
    """Groups of eight rows that a matrix instruction takes."""
    return 1 if rows <= 8 else 2


def packed(rows: int, width: int, like: Tensor) -> Tensor:
    """Room for packed rows."""
    return torch.empty((8 * tiles(rows), width), dtype=like.dtype, device=like.device)


def slices(outs: int, ins: int) -> Slices:
    """Eight warps share a sum, four where there are programs for all processors anyway. The same for any rows."""
    return _sliced(8 if outs <= 132 * GROUP else 4, ins)


def gate_slices(outs: int, ins: int) -> Slices:
    """Gate and up of a small model are shared in the same way. In a large one each warp has sums of its own."""
    if outs <= SLICED_GATES:
        return _sliced(8, ins)
    return Slices(1, GATE_WARPS, ins // 16, depth_of(ins // 16, GATE_DEPTH))


def _sliced(warps: int, ins: int) -> Slices:
    length = triton.cdiv(triton.cdiv(ins, STEP), warps) * STEP // 16
    return Slices(warps, warps, length, depth_of(length, DEPTH))


def _constants(kernel: str, slices: Slices, rows: int) -> dict[str, Any]:
    """Constants of a launch and its options."""
    constants = {
        "LENGTH": slices.length, "DEPTH": slices.depth, "WARPS": slices.warps, "TILES": tiles(rows),
        "DTYPE": tl.float16 if EMULATED else tl.bfloat16, "EMULATED": EMULATED,
        "num_warps": slices.warps, "enable_fp_fusion": False,
    }  # fmt: skip
    return constants | launch_options(kernel)


def _words(tensor: Tensor) -> Tensor:
    """Four halves in each element."""
    return tensor.view(torch.int64)


def rotated(
    x: Tensor, squares: Tensor, eps: float, w: Tensor, bias: Tensor | None, slices: Slices,
    cos: Tensor, sin: Tensor, positions: Tensor, slots: Tensor, k_plane: Tensor, v_plane: Tensor, heads: int,
) -> Tensor:  # fmt: skip
    """q [T, heads, d] of packed rows x [T, H]; k and v go to their slots. cos, sin: of every position [L, d/2]."""
    rows, ins, (_, kv_heads, dim) = squares.shape[0], x.shape[1], k_plane.shape
    q = torch.empty((rows, heads, dim), dtype=k_plane.dtype, device=x.device)
    launch: Any = _rotated[((heads + 2 * kv_heads) * dim // GROUP,)]
    launch(
        _words(x), squares, _words(w), x if bias is None else bias, cos, sin, positions, slots, q, k_plane, v_plane,
        rows, ins, slices.split, eps,
        BIASED=bias is not None, HEADS=heads, KV_HEADS=kv_heads, DIM=dim, GROUPS=squares.shape[1],
        EVEN=slices.even(ins), **_constants("rotated", slices, rows),
    )  # fmt: skip
    return q


def added(
    x: Tensor, w: Tensor, bias: Tensor | None, slices: Slices, stream: Tensor, gain: Tensor | None
) -> tuple[Tensor, Tensor]:
    """stream [T, H] += x wᵀ + bias for packed rows x; returns stream * gain in x's type, packed, and its squares
    [T, H / 16]."""
    (rows, outs), ins = stream.shape, x.shape[1]
    out = packed(rows, outs, x)
    squares = torch.empty((rows, outs // GROUP), dtype=torch.float32, device=x.device)
    launch: Any = _added[(outs // GROUP,)]
    launch(
        _words(x), _words(w), x if bias is None else bias, stream, stream if gain is None else gain, out, squares,
        rows, outs, ins, slices.split, BIASED=bias is not None, GAINED=gain is not None,
        EVEN=slices.even(ins), **_constants("added", slices, rows),
    )  # fmt: skip
    return out, squares


def activated(
    x: Tensor, squares: Tensor, eps: float, w: Tensor, slices: Slices, activation: str = SILU
) -> Tensor:  # fmt: skip
    """activation(gate) * up [T, out] of rows x [T, H], both packed; w [2 out, H]: the gate's rows, then up's."""
    rows, ins, outs = squares.shape[0], x.shape[1], w.shape[0] // 2
    out = packed(rows, outs, x)
    sliced = slices.parts > 1
    launch: Any = _activated[(triton.cdiv(outs, 8 if sliced else 8 * slices.warps),)]
    launch(
        _words(x), squares, _words(w), out, rows, outs, ins, slices.split, eps,
        GELU=activation == GELU, GROUPS=squares.shape[1], SLICED=sliced, EVEN=slices.even(ins),
        **_constants("activated", slices, rows),
    )  # fmt: skip
    return out
