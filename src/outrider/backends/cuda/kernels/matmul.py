"""Matrix products on a GPU whose rows do not depend on the other rows.

Promise: a row's result is the same bits in a pass of one row and in a pass of hundreds. Every element is one sum over
the inputs in a fixed order: tensor cores take the inputs sixteen at a time, front to back, and where a sum is split
between programs, the split depends on the weight's shape alone. The parts stay unsummed (`Parts`): the kernel that
reads them adds them up in order, which costs nothing there and saves a launch.
cuBLAS changes its kernel, and with it the order of a sum, with the number of rows (at 16 or 64 of them on an H200).
The weight is the left factor, so that one to sixteen rows are one narrow tile and the weight is read once.
It knows weights and rows; it does not know layers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....models.config import GELU, SILU
from ... import ops
from .. import compiling
from .launching import begin, launch_options
from .wide import tiles_for, tiles_of, wide_product

STEP = 64  # inputs of one step of a sum
AHEAD = 8  # steps whose weights a product that starts early requests before it waits
ROW_TILES = (16, 32, 64, 128, 256)
_STAGES = {128: 3, 256: 4}  # of wide tiles, limited by registers and shared memory


@dataclass(frozen=True)
class Parts:
    """An unsummed result: its value is the sum over the first dimension, in order, times the scale, plus the bias."""

    parts: Tensor  # [S, T, out] float32
    bias: Tensor | None = None  # [out]
    scale: Tensor | None = None  # [T] float32

    def __getitem__(self, rows: Tensor) -> Parts:
        return Parts(self.parts[:, rows], self.bias, None if self.scale is None else self.scale[rows])

    def total(self) -> Tensor:
        """[T, out] float32."""
        total = self.parts[0]
        for part in self.parts[1:]:
            total = total + part
        total = total if self.scale is None else total * self.scale[:, None]
        return total if self.bias is None else total + self.bias.float()


@dataclass(frozen=True)
class Tiling:
    """How one weight is divided into tiles. It does not depend on the rows of a pass."""

    outputs: int  # of a tile
    splits: int  # parts of the sum
    stages: int = 4
    warps: int = 4
    step: int = STEP


@triton.jit
def _chain(
    total, other, x_ptr, w_ptr, second, o_in, r_in, i, first, split, ins,
    STEP: tl.constexpr, EVEN: tl.constexpr, GATED: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Both sums after the inputs from `first` on. The gate's weights and those of `up` are `second` numbers apart."""
    for at in range(0, split, STEP):
        w_ok, x_ok = o_in, r_in
        if not EVEN:
            left = (first + at + i) < ins
            w_ok, x_ok = o_in & left[None, :], r_in & left[:, None]
        columns = tl.load(x_ptr + first + at, mask=x_ok, other=0.0)
        block = tl.load(w_ptr + first + at, mask=w_ok, other=0.0, eviction_policy="evict_first")
        total = tl.dot(block.to(DTYPE), columns, total, input_precision=PRECISION)
        if GATED:
            block = tl.load(w_ptr + second + first + at, mask=w_ok, other=0.0, eviction_policy="evict_first")
            other = tl.dot(block.to(DTYPE), columns, other, input_precision=PRECISION)
    return total, other


@triton.jit
def _prefetch(pointers):
    """Bring these lines to the second-level cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; // $0", "=r,l", [pointers.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit(do_not_specialize=["rows"])  # the same code for any number of rows
def _product(
    x, w, scale, row_scale, out, rows, outs, ins, split,
    OUTS: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr,
    EVEN: tl.constexpr, GATED: tl.constexpr, GELU: tl.constexpr, SCALED: tl.constexpr, ROW_SCALED: tl.constexpr,
    SLICES: tl.constexpr, PRECISION: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out[split, row, o] = sum over the split's inputs of w[o, i] x[row, i]; gated: silu(gate) * up.

    SLICES parts of a sum are added in one program.
    Both activations are g * sigmoid(s): s is g (silu), or twice gelu's inner polynomial.
    """
    o = tl.program_id(0).to(tl.int64) * OUTS + tl.arange(0, OUTS)
    r = tl.program_id(2).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    i = tl.arange(0, STEP)
    start = tl.program_id(1) * SLICES * split
    w_ptr = w + o[:, None] * ins + i[None, :]  # [OUTS, STEP]
    x_ptr = x + r[None, :] * ins + i[:, None]  # [STEP, ROWS]
    second = outs.to(tl.int64) * ins
    o_in, r_in = (o < outs)[:, None], (r < rows)[None, :]
    DTYPE: tl.constexpr = x.dtype.element_ty
    zero = tl.zeros((OUTS, ROWS), tl.float32)
    if AHEAD > 0:
        first = tl.minimum(start + STEP * tl.arange(0, AHEAD), ins - 1)
        line = w + tl.minimum(o, outs - 1)[:, None] * ins + first[None, :]
        _prefetch(line)
        if GATED:
            _prefetch(line + second)
    begin(PDL)
    total, other = _chain(
        zero, zero, x_ptr, w_ptr, second, o_in, r_in, i, start, split, ins, STEP, EVEN, GATED, DTYPE, PRECISION
    )
    for part in range(1, SLICES):
        more, further = _chain(
            zero, zero, x_ptr, w_ptr, second, o_in, r_in, i, start + part * split, split, ins,
            STEP, EVEN, GATED, DTYPE, PRECISION,
        )  # fmt: skip
        total += more
        other += further
    if SCALED:
        total *= tl.load(scale + o, mask=o < outs, other=0.0)[:, None]
        if GATED:
            other *= tl.load(scale + outs + o, mask=o < outs, other=0.0)[:, None]
    if ROW_SCALED:
        factor = tl.load(row_scale + r, mask=r < rows, other=0.0)[None, :]
        total *= factor
        if GATED:
            other *= factor
    if GATED:
        steepness = total
        if GELU:
            steepness = 1.5957691216057308 * (total + 0.044715 * total * total * total)
        total = total / (1.0 + tl.exp(-steepness)) * other
    target = out + tl.program_id(1).to(tl.int64) * rows * outs + r[None, :] * outs + o[:, None]
    tl.store(target, total.to(out.dtype.element_ty), mask=o_in & r_in)


def product(
    x: Tensor, w: Tensor, tiling: Tiling, scale: Tensor | None = None, gated: bool = False, activation: str = SILU,
    row_scale: Tensor | None = None, summed: bool = False, early: bool = False,
) -> Tensor:  # fmt: skip
    """Parts of x wᵀ [S, T, out] float32, for x [T, in] bfloat16 or float32 and w [out, in] of the same type or int8.

    gated: activation(gate) * up [T, out] in x's type, where w [2 out, in] has the rows of the gate, then those of `up`.
    summed: the parts are added up, in order: [1, T, out], unless `wide` leaves them apart; gated ones always are.
    scale [out] and row_scale [T] float32: factors of the sums. early: it follows a small kernel (`launching`).
    """
    (rows, ins), outs = x.shape, w.shape[0] // (1 + gated)
    split = split_of(ins, tiling.splits, tiling.step)
    if (tiles := tiles_for(x, w, tiling.splits, gated, processors(x.device))) is not None and many_rows_are_exact(
        x.device
    ):
        return wide_product(x, w, tiling.splits, split, tiles, scale, gated, activation, row_scale)
    slices = tiling.splits if gated or summed else 1
    shape, dtype = ((rows, outs), x.dtype) if gated else ((tiling.splits // slices, rows, outs), torch.float32)
    out = torch.empty(shape, dtype=dtype, device=x.device)
    tile = next((n for n in ROW_TILES if n >= rows), ROW_TILES[-1])
    if slices > 1:  # there are two sums at a time
        tile = min(tile, 64 if gated else 128)
    options = launch_options("product" if early else "", rows)
    grid = (triton.cdiv(outs, tiling.outputs), tiling.splits // slices, triton.cdiv(rows, tile))
    _product[grid](
        x, w, x if scale is None else scale, x if row_scale is None else row_scale, out, rows, outs, ins, split,
        OUTS=tiling.outputs, ROWS=tile, STEP=tiling.step,
        EVEN=split * tiling.splits == ins, GATED=gated, GELU=activation == GELU, SCALED=scale is not None,
        ROW_SCALED=row_scale is not None, SLICES=slices, PRECISION="ieee", enable_fp_fusion=False,
        AHEAD=AHEAD if "launch_pdl" in options else 0, **options,
        num_warps=tiling.warps if tile < 256 else 8, num_stages=_STAGES.get(tile, tiling.stages),
    )  # fmt: skip
    return out


@triton.jit
def activated(gate, up, KIND: tl.constexpr):
    """activation(gate) * up. KIND: as `ops.ACTIVATIONS` numbers them; mostly g * sigmoid(s), where s is g, twice
    gelu's inner polynomial, or gpt-oss's."""
    if KIND == 3:
        value = tl.maximum(gate, 0.0) * up
    elif KIND == 4:
        value = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476)) * up
    else:
        steepness = gate
        if KIND == 1:
            steepness = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        if KIND == 2:
            gate = tl.minimum(gate, 7.0)
            up = tl.minimum(tl.maximum(up, -7.0), 7.0) + 1.0
            steepness = 1.702 * gate
        value = gate / (1.0 + tl.exp(-steepness)) * up
    return value


@triton.jit(do_not_specialize=["rows"])
def _activate(
    parts, bias, out, rows, width,
    PARTS: tl.constexpr, BIASED: tl.constexpr, PAIRED: tl.constexpr, KIND: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    row, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    ok = i < width
    stride = width * 2 if PAIRED else width
    gate, up = tl.zeros((WIDE,), tl.float32), tl.full((WIDE,), 0.0 if PAIRED else 1.0, tl.float32)
    for part in tl.static_range(PARTS):
        at = parts + (part * rows.to(tl.int64) + row) * stride + i
        gate += tl.load(at, mask=ok, other=0.0)
        if PAIRED:
            up += tl.load(at + width, mask=ok, other=0.0)
    if BIASED:
        gate += tl.load(bias + i, mask=ok, other=0.0).to(tl.float32)
        if PAIRED:
            up += tl.load(bias + width + i, mask=ok, other=0.0).to(tl.float32)
    tl.store(out + row * width + i, activated(gate, up, KIND).to(out.dtype.element_ty), mask=ok)


def activate(x: Parts, activation: str, paired: bool, dtype: torch.dtype) -> Tensor:
    """activation(gate) * up [T, I] of `dtype` from unsummed [T, 2I], gate first; not paired: activation of [T, I]."""
    splits, rows, width = x.parts.shape
    width //= 1 + paired
    out = torch.empty((rows, width), dtype=dtype, device=x.parts.device)
    _activate[(rows, triton.cdiv(width, 1024))](
        x.parts, x.parts if x.bias is None else x.bias, out, rows, width,
        PARTS=splits, BIASED=x.bias is not None, PAIRED=paired, KIND=ops.ACTIVATIONS.index(activation), WIDE=1024,
        num_warps=4,
    )  # fmt: skip
    return out


class Product:
    """y = x Wᵀ + b on a GPU, unsummed. With eight bits, each output's weights are int8 times one scale."""

    exact = True  # rows do not depend on each other
    early = False  # whether it follows a small kernel (`launching`), as gate and up always do

    def __init__(self, weight: Tensor, bias: Tensor | None = None, eight_bits: bool = False) -> None:
        self.out_features, self.in_features = weight.shape
        self.bias = None if bias is None else bias.float()
        self.scale: Tensor | None = None  # [out] float32
        self.weight = weight.contiguous()  # [out, in]
        if eight_bits:
            self.scale = weight.abs().amax(1).float().clamp(min=1e-12) / 127
            self.weight = torch.round(weight.float() / self.scale[:, None]).to(torch.int8)
        self.tiling = tiling(self.out_features, self.in_features, processors(weight.device))

    def __call__(self, x: Tensor) -> Parts:
        return Parts(product(x, self.weight, self.tiling, self.scale, early=self.early), self.bias)

    def first(self, x: Tensor, outputs: int) -> Tensor:
        """The first outputs only [T, outputs], summed."""
        return self(x).total()[:, :outputs]

    def gated(self, x: Tensor, activation: str = SILU) -> Tensor:
        """activation(gate) * up [T, out / 2]: the first half of the outputs is the gate."""
        if self.bias is None and activation in (SILU, GELU):
            return product(x, self.weight, replace(self.tiling, splits=1), self.scale, True, activation, early=True)
        return activate(self(x), activation, True, x.dtype)


def tiling(outs: int, ins: int, processors: int) -> Tiling:
    """As few parts of a sum as keep the memory busy, because the parts have to be added up.

    Measured on an H200 for weights of 1 MB to 500 MB: three programs for every two processors, or four steps each.
    """
    tiles, steps = triton.cdiv(outs, 64), triton.cdiv(ins, STEP)
    splits = (n for n in range(1, steps + 1) if steps % n == 0)
    return Tiling(64, next(n for n in splits if tiles * n >= 1.5 * processors or steps <= 4 * n), stages=5)


def split_of(ins: int, splits: int, step: int = STEP) -> int:
    """Inputs of one part of a sum: whole steps."""
    return int(triton.cdiv(triton.cdiv(ins, step), splits) * step)


@cache
@compiling.live()
def many_rows_are_exact(device: torch.device) -> bool:
    """Whether tiles of many rows give the bits of a few on this device, tried once with random numbers.

    Every element is the same sum in the same order; that the instructions for large tiles add alike is not documented.
    """
    few, dice = 16, torch.Generator(device).manual_seed(1)
    x, w = (torch.randn(n, 640, generator=dice, device=device).to(torch.bfloat16) for n in (few, 512))
    many, alike = x.repeat(10, 1), True
    apart = replace(tiles_of(False), added=False)
    for splits, gated, tiles in ((2, False, tiles_of(False)), (2, False, apart), (1, True, tiles_of(True))):
        own = product(x, w, Tiling(64, splits), gated=gated)
        wide = wide_product(many, w, splits, split_of(640, splits), tiles, gated=gated)
        own, wide = (own, wide) if gated else (Parts(own).total(), Parts(wide).total())
        alike = alike and torch.equal(own.repeat(10, 1), wide)
    return alike


@cache
def processors(device: torch.device) -> int:
    """The number of multiprocessors of a GPU."""
    if device.type != "cuda":
        return 8  # triton's interpreter
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
