"""The operations of a pass between its products, one kernel each: norms, rope, K/V stores, token lookup.

Promise: a row's result is the same bits whichever rows share the call: every row (or head of a row) is one program, and
the parts of an unsummed product are added in their order. It knows rows and planes, not layers.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import fused
from .fused import load_squares, packed_index, row_scale as scale_of, sum_of_sixteen
from .launching import begin, launch_options
from .matmul import Parts


@triton.jit
def _sum_parts(
    parts, bias, row_scale, row, rows, width, columns, ok,
    PARTS: tl.constexpr, BIASED: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    value = tl.load(parts + row * width + columns, mask=ok, other=0.0)
    for part in tl.static_range(1, PARTS):
        value += tl.load(parts + (part * rows.to(tl.int64) + row) * width + columns, mask=ok, other=0.0)
    if SCALED:
        value *= tl.load(row_scale + row)
    if BIASED:
        value += tl.load(bias + columns, mask=ok, other=0.0).to(tl.float32)
    return value


@triton.jit
def _embed(
    tokens, table, positions, added, out, width, scale, POSITIONED: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, WIDE)
    ok = i < width
    value = tl.load(table + tl.load(tokens + row) * width + i, mask=ok, other=0.0).to(tl.float32) * scale
    if POSITIONED:
        value += tl.load(added + tl.load(positions + row) * width + i, mask=ok, other=0.0)
    tl.store(out + row * width + i, value, mask=ok)


def embed(tokens: Tensor, table: Tensor, scale: float, positions: Tensor | None, added: Tensor | None) -> Tensor:
    """table[tokens] * scale + added[positions], [T, H] float32. tokens, positions [T] int64; tables [·, H]."""
    rows, width = tokens.shape[0], table.shape[1]
    out = torch.empty((rows, width), dtype=torch.float32, device=table.device)
    launch: Any = _embed[(rows,)]
    launch(
        tokens, table, tokens if positions is None else positions, out if added is None else added, out, width, scale,
        POSITIONED=added is not None, WIDE=triton.next_power_of_2(width), num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["rows"])  # the same code for any number of rows
def _add_norm(
    x, parts, bias, weight, out, rows, width, eps,
    PARTS: tl.constexpr, BIASED: tl.constexpr, WIDE: tl.constexpr, LAYER: tl.constexpr, STREAM: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, WIDE)
    ok = i < width
    gain = tl.load(weight + i, mask=ok, other=0.0)
    begin(PDL)
    value = tl.load(x + row * width + i, mask=ok, other=0.0)
    if PARTS > 0:
        value += _sum_parts(parts, bias, x, row, rows, width, i, ok, PARTS, BIASED, False)
        if not STREAM:
            tl.store(x + row * width + i, value, mask=ok)
    if LAYER:
        value = tl.where(ok, value - tl.sum(value, 0) / width, 0.0)
    scale = tl.rsqrt(tl.sum(value * value, 0) / width + eps)
    value = value * scale * gain
    if LAYER:
        value += tl.load(weight + width + i, mask=ok, other=0.0)
    if STREAM:
        tl.store(x + row * width + i, value, mask=ok)
    tl.store(out + row * width + i, value.to(out.dtype.element_ty), mask=ok)


def add_norm(
    x: Tensor, delta: Parts | None, weight: Tensor, eps: float, dtype: torch.dtype, stream: bool = False
) -> Tensor:
    """x [T, H] float32 += delta in place; returns the norm of x [T, H] of `dtype`: rms_norm(x) * weight [H], or the
    layer norm with gain and bias [2, H]. stream: x becomes its norm."""
    rows, width = x.shape
    out = torch.empty((rows, width), dtype=dtype, device=x.device)
    parts, bias, constants = _operands(x, delta)
    constants |= {"LAYER": weight.dim() == 2, "STREAM": stream}
    launch: Any = _add_norm[(rows,)]
    launch(x, parts, bias, weight, out, rows, width, eps, **constants, **launch_options("norm", rows), num_warps=8)
    return out


def _operands(x: Tensor, delta: Parts | None) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Parts, bias and constants of a kernel over x [T, H]; x stands in for what the kernel is compiled not to read."""
    parts, bias = (None, None) if delta is None else (delta.parts, delta.bias)
    constants = {"PARTS": 0 if parts is None else parts.shape[0], "BIASED": bias is not None}
    constants["WIDE"] = triton.next_power_of_2(x.shape[1])
    return x if parts is None else parts, x if bias is None else bias, constants


@triton.jit(do_not_specialize=["rows"])
def _add_gain(
    x, parts, bias, tokens, table, factor, weight, out, squares, row_scale, rows, width, eps,
    PARTS: tl.constexpr, BIASED: tl.constexpr, WIDE: tl.constexpr, GROUPS: tl.constexpr, TILES: tl.constexpr,
    EMBEDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, WIDE)
    ok = i < width
    gain = tl.load(weight + i, mask=ok, other=0.0)
    begin(PDL)
    if EMBEDS:
        value = tl.load(table + tl.load(tokens + row) * width + i, mask=ok, other=0.0).to(tl.float32) * factor
        tl.store(x + row * width + i, value, mask=ok)
    else:
        value = tl.load(x + row * width + i, mask=ok, other=0.0)
    if PARTS > 0:
        value += _sum_parts(parts, bias, x, row, rows, width, i, ok, PARTS, BIASED, False)
        tl.store(x + row * width + i, value, mask=ok)
    at = row * width + i
    if TILES > 0:
        at = packed_index(row, i, TILES)
    tl.store(out + at, (value * gain).to(out.dtype.element_ty), mask=ok)
    group = tl.arange(0, WIDE // 16)
    sums = sum_of_sixteen(tl.reshape(value * value, (WIDE // 16, 16)), WIDE // 16)
    tl.store(squares + row * GROUPS + group, sums, mask=group < GROUPS)
    tl.debug_barrier()  # the program's own stores are read again, in the order of the other kernels that read them
    one = row + tl.arange(0, 1)
    scale = scale_of(load_squares(squares, one, rows, GROUPS), width, eps, GROUPS, 1)
    tl.store(row_scale + one, scale)


Gained = tuple[Tensor, Tensor, Tensor]  # stream * gain [T, H], squares [T, H / 16], 1 / rms [T]


def add_gain(
    x: Tensor, delta: Parts | None, weight: Tensor, eps: float, dtype: torch.dtype, packs: bool = False
) -> Gained:
    """x [T, H] float32 += delta in place; returns x * weight [T, H] of `dtype`, x's squares by groups of sixteen
    [T, H / 16], and 1 / rms(x) [T]: an RMS norm in two parts, as `fused` reads it. packs: the rows are packed.
    """
    return _gained(x, delta, (x, x, 1.0), False, weight, eps, dtype, packs)


def embed_gain(
    tokens: Tensor, table: Tensor, factor: float, weight: Tensor, eps: float, packs: bool
) -> tuple[Tensor, Gained]:
    """The stream of these tokens [T, H] float32, rows of table [V, H] times the factor, and what `add_gain` returns."""
    x = torch.empty((tokens.shape[0], table.shape[1]), dtype=torch.float32, device=table.device)
    return x, _gained(x, None, (tokens, table, factor), True, weight, eps, table.dtype, packs)


def _gained(
    x: Tensor, delta: Parts | None, lookup: tuple[Tensor, Tensor, float], embeds: bool, weight: Tensor, eps: float,
    dtype: torch.dtype, packs: bool,
) -> Gained:  # fmt: skip
    rows, width = x.shape
    tiles = fused.tiles(rows) if packs else 0
    out = torch.empty((8 * tiles if packs else rows, width), dtype=dtype, device=x.device)
    squares, scale = x.new_empty((rows, width // 16)), x.new_empty((rows,))
    parts, bias, constants = _operands(x, delta)
    launch: Any = _add_gain[(rows,)]
    launch(
        x, parts, bias, *lookup, weight, out, squares, scale, rows, width, eps, **constants,
        GROUPS=width // 16, TILES=tiles, EMBEDS=embeds, **launch_options("norm", rows),
        num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip
    return out, squares, scale


@triton.jit(do_not_specialize=["rows"])
def _keep_stream(
    x, parts, bias, kept, slots, rows, width,
    PARTS: tl.constexpr, BIASED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, WIDE)
    ok = i < width
    value = tl.load(x + row * width + i, mask=ok, other=0.0)
    if PARTS > 0:
        value += _sum_parts(parts, bias, x, row, rows, width, i, ok, PARTS, BIASED, False)
        tl.store(x + row * width + i, value, mask=ok)
    slot = tl.load(slots + row).to(tl.int64)
    tl.store(kept + slot * width + i, value.to(kept.dtype.element_ty), mask=ok)


def keep_stream(x: Tensor, delta: Parts | None, kept: Tensor, slots: Tensor) -> None:
    """x [T, H] float32 += delta in place, as in `add_norm`; then kept[slots] = x. kept [S, H], slots [T]."""
    rows, width = x.shape
    parts, bias, constants = _operands(x, delta)
    launch: Any = _keep_stream[(rows,)]
    launch(x, parts, bias, kept, slots, rows, width, **constants, num_warps=8)


@triton.jit(do_not_specialize=["rows"])
def _rope_store(
    parts, bias, row_scale, cos, sin, q, k_plane, v_plane, slots, q_norm, k_norm, rows, eps,
    PARTS: tl.constexpr, BIASED: tl.constexpr, SCALED: tl.constexpr, NORMED: tl.constexpr,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, ROTARY: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One head of one row. Dimensions i and i + ROTARY/2 are rotated together, for i < ROTARY/2."""
    begin(PDL)
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d = tl.arange(0, DIM_PAD)
    ok = d < DIM
    width: tl.constexpr = (HEADS + 2 * KV_HEADS) * DIM
    value = _sum_parts(parts, bias, row_scale, row, rows, width, head * DIM + d, ok, PARTS, BIASED, SCALED)
    if (NORMED or ROTARY > 0) and head < HEADS + KV_HEADS:
        HALF: tl.constexpr = ROTARY // 2
        partner = tl.where(d < HALF, d + HALF, tl.where(d < ROTARY, d - HALF, d))
        other = _sum_parts(parts, bias, row_scale, row, rows, width, head * DIM + partner, ok, PARTS, BIASED, SCALED)
        if NORMED:
            gains = q_norm if head < HEADS else k_norm
            scale = tl.rsqrt(tl.sum(value * value, 0) / DIM + eps)
            value = value * scale * tl.load(gains + d, mask=ok, other=0.0)
            other = other * scale * tl.load(gains + partner, mask=ok, other=0.0)
        if ROTARY > 0:
            rotated = d < ROTARY
            angle = row * HALF + tl.where(d < HALF, d, d - HALF)
            c = tl.load(cos + angle, mask=rotated, other=1.0)
            s = tl.load(sin + angle, mask=rotated, other=0.0)
            value = tl.where(rotated, value * c + tl.where(d < HALF, -other, other) * s, value)
    if head < HEADS:
        tl.store(q + (row * HEADS + head) * DIM + d, value.to(q.dtype.element_ty), mask=ok)
    else:
        slot = tl.load(slots + row).to(tl.int64)
        if head < HEADS + KV_HEADS:
            at = (slot * KV_HEADS + head - HEADS) * DIM + d
            tl.store(k_plane + at, value.to(k_plane.dtype.element_ty), mask=ok)
        else:
            at = (slot * KV_HEADS + head - HEADS - KV_HEADS) * DIM + d
            tl.store(v_plane + at, value.to(v_plane.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=["rows"])
def _rope_store_heads(
    parts, bias, row_scale, cos, sin, q, k_plane, v_plane, slots, rows,
    PARTS: tl.constexpr, BIASED: tl.constexpr, SCALED: tl.constexpr,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, ROTARY: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """The same for GROUP heads of one row, without norms: every element is computed alone, so its bits are the same."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1) * GROUP + tl.arange(0, GROUP)[:, None]
    d = tl.arange(0, DIM_PAD)[None, :]
    HALF: tl.constexpr = ROTARY // 2
    width: tl.constexpr = (HEADS + 2 * KV_HEADS) * DIM
    ok = (d < DIM) & (head < HEADS + 2 * KV_HEADS)
    value = _sum_parts(parts, bias, row_scale, row, rows, width, head * DIM + d, ok, PARTS, BIASED, SCALED)
    if ROTARY > 0:
        rotated = ok & (d < ROTARY) & (head < HEADS + KV_HEADS)
        partner = head * DIM + tl.where(d < HALF, d + HALF, d - HALF)
        other = _sum_parts(parts, bias, row_scale, row, rows, width, partner, rotated, PARTS, BIASED, SCALED)
        angle = row * HALF + tl.where(d < HALF, d, d - HALF)
        c = tl.load(cos + angle, mask=d < ROTARY, other=1.0)
        s = tl.load(sin + angle, mask=d < ROTARY, other=0.0)
        value = tl.where(rotated, value * c + tl.where(d < HALF, -other, other) * s, value)
    tl.store(q + (row * HEADS + head) * DIM + d, value.to(q.dtype.element_ty), mask=ok & (head < HEADS))
    if KV_HEADS > 0:
        slot = tl.load(slots + row).to(tl.int64)
        k, v = head - HEADS, head - HEADS - KV_HEADS
        is_key, is_value = ok & (k >= 0) & (k < KV_HEADS), ok & (v >= 0)
        tl.store(k_plane + (slot * KV_HEADS + k) * DIM + d, value.to(k_plane.dtype.element_ty), mask=is_key)
        tl.store(v_plane + (slot * KV_HEADS + v) * DIM + d, value.to(v_plane.dtype.element_ty), mask=is_value)


MANY_ROWS, GROUP = 64, 16  # from so many rows on, a program has so many heads: one each took 150 µs for 2,048 rows


def rope_store(
    qkv: Parts, cos: Tensor, sin: Tensor, k_plane: Tensor, v_plane: Tensor, slots: Tensor, heads: int, kv_heads: int,
    norms: tuple[Tensor, Tensor, float] | None = None,
) -> Tensor:  # fmt: skip
    """Apply rope to q and k, store k and v in their slots; returns q [T, heads, d] in the planes' type.

    cos, sin [T, r/2] contiguous; slots [T]; planes [S, kv_heads, d] contiguous.
    """
    rows, dim = qkv.parts.shape[1], k_plane.shape[2]
    q = torch.empty((rows, heads, dim), dtype=k_plane.dtype, device=k_plane.device)
    operands = (
        qkv.parts, cos if qkv.bias is None else qkv.bias, cos if qkv.scale is None else qkv.scale,
        cos, sin, q, k_plane, v_plane, slots,
    )  # fmt: skip
    constants = {"PARTS": qkv.parts.shape[0], "BIASED": qkv.bias is not None, "SCALED": qkv.scale is not None}
    constants |= {"HEADS": heads, "KV_HEADS": kv_heads, "DIM": dim, "DIM_PAD": triton.next_power_of_2(dim)}
    constants |= {"ROTARY": 2 * cos.shape[1]}
    launch: Any
    if rows >= MANY_ROWS and norms is None:
        launch = _rope_store_heads[(rows, triton.cdiv(heads + 2 * kv_heads, GROUP))]
        launch(*operands, rows, **constants, GROUP=GROUP, num_warps=4, enable_fp_fusion=False)
        return q
    q_norm, k_norm, eps = norms or (cos, cos, 0.0)
    launch = _rope_store[(rows, heads + 2 * kv_heads)]
    launch(
        *operands, q_norm, k_norm, rows, eps, **constants, NORMED=norms is not None, **launch_options("rope", rows),
        num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
    return q


def heads_of(q: Parts, k_plane: Tensor, v_plane: Tensor, heads: int) -> Tensor:
    """An unsummed product as queries [T, heads, d] in the planes' type, as `rope_store` makes them, not rotated."""
    none = q.parts[0, :, :0]
    return rope_store(q, none, none, k_plane, v_plane, none, heads, 0)


@triton.jit
def _start_pass(tokens, drafted, out, index, slot, table, rows, updates, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(tokens + i, mask=i < rows, other=0)
    read = tl.load(drafted - 1 - token, mask=(i < rows) & (token < 0), other=0)
    tl.store(out + i, tl.where(token < 0, read, token), mask=i < rows)
    target = tl.load(index + i, mask=i < updates, other=-1)
    tl.store(table + target, tl.load(slot + i, mask=i < updates, other=0), mask=target >= 0)


def start_pass(tokens: Tensor, drafted: Tensor, index: Tensor, slot: Tensor, table: Tensor) -> Tensor:
    """tokens [T] int64 with -1 - i replaced by drafted[i]. Also table.flat[index[j]] = slot[j] where index[j] >= 0."""
    out = torch.empty_like(tokens)  # [T]
    launch: Any = _start_pass[(triton.cdiv(max(tokens.shape[0], index.shape[0]), 256),)]
    launch(tokens, drafted, out, index, slot, table, tokens.shape[0], index.shape[0], BLOCK=256)
    return out
