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
from .wide import tiles_for, tiles_of, wide_product

STEP = 64  # inputs of one step of a sum
ROW_TILES = (16, 32, 64, 128, 256)
_STAGES = {128: 3, 256: 4}  # of wide tiles, limited by registers and shared memory


@dataclass(frozen=True)
class Parts:
    """An unsummed result: its value is the sum over the first dimension, in order, plus the bias."""

    parts: Tensor  # [S, T, out] float32
    bias: Tensor | None = None  # [out]

    def __getitem__(self, rows: Tensor) -> Parts:
        return Parts(self.parts[:, rows], self.bias)

    def total(self) -> Tensor:
        """[T, out] float32."""
        total = self.parts[0]
        for part in self.parts[1:]:
            total = total + part
        return total if self.bias is None else total + self.bias.float()


@dataclass(frozen=True)
class Tiling:
    """How one weight is divided into tiles. It does not depend on the rows of a pass."""

    outputs: int  # of a tile
    splits: int  # parts of the sum
    stages: int = 4
    warps: int = 4
    step: int = STEP


@triton.jit(do_not_specialize=["rows"])  # the same code for any number of rows
def _product(
    x, w, scale, out, rows, outs, ins, split,
    OUTS: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr,
    EVEN: tl.constexpr, GATED: tl.constexpr, GELU: tl.constexpr, SCALED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out[split, row, o] = sum over the split's inputs of w[o, i] x[row, i]; gated: silu(gate) * up, unsplit.

    Both activations are g * sigmoid(s): s is g (silu), or twice gelu's inner polynomial.
    """
    o = tl.program_id(0).to(tl.int64) * OUTS + tl.arange(0, OUTS)
    r = tl.program_id(2).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    i = tl.arange(0, STEP)
    start = tl.program_id(1) * split
    w_ptr = w + o[:, None] * ins + start + i[None, :]  # [OUTS, STEP]
    x_ptr = x + r[None, :] * ins + start + i[:, None]  # [STEP, ROWS]
    o_in, r_in = (o < outs)[:, None], (r < rows)[None, :]
    total = tl.zeros((OUTS, ROWS), tl.float32)
    other = tl.zeros((OUTS, ROWS), tl.float32)
    for at in range(0, split, STEP):
        w_ok, x_ok = o_in, r_in
        if not EVEN:
            left = (start + at + i) < ins
            w_ok, x_ok = o_in & left[None, :], r_in & left[:, None]
        columns = tl.load(x_ptr + at, mask=x_ok, other=0.0)
        block = tl.load(w_ptr + at, mask=w_ok, other=0.0, eviction_policy="evict_first")
        total = tl.dot(block.to(x.dtype.element_ty), columns, total, input_precision=PRECISION)
        if GATED:
            block = tl.load(w_ptr + at + outs.to(tl.int64) * ins, mask=w_ok, other=0.0, eviction_policy="evict_first")
            other = tl.dot(block.to(x.dtype.element_ty), columns, other, input_precision=PRECISION)
    if SCALED:
        total *= tl.load(scale + o, mask=o < outs, other=0.0)[:, None]
        if GATED:
            other *= tl.load(scale + outs + o, mask=o < outs, other=0.0)[:, None]
    if GATED:
        steepness = total
        if GELU:
            steepness = 1.5957691216057308 * (total + 0.044715 * total * total * total)
        total = total / (1.0 + tl.exp(-steepness)) * other
    target = out + tl.program_id(1).to(tl.int64) * rows * outs + r[None, :] * outs + o[:, None]
    tl.store(target, total.to(out.dtype.element_ty), mask=o_in & r_in)


def product(
    x: Tensor, w: Tensor, tiling: Tiling, scale: Tensor | None = None, gated: bool = False, activation: str = SILU
) -> Tensor:
    """Parts of x wᵀ [S, T, out] float32, for x [T, in] bfloat16 or float32 and w [out, in] of the same type or int8.

    gated: activation(gate) * up [T, out] in x's type, where w [2 out, in] has the rows of the gate, then those of `up`.
    Of many rows the parts are added already: S is 1.
    """
    (rows, ins), outs = x.shape, w.shape[0] // (1 + gated)
    split = split_of(ins, tiling.splits, tiling.step)
    if (tiles := tiles_for(x, w, tiling.splits, gated)) is not None and many_rows_are_exact(x.device):
        return wide_product(x, w, tiling.splits, split, tiles, scale, gated, activation)
    shape, dtype = ((rows, outs), x.dtype) if gated else ((tiling.splits, rows, outs), torch.float32)
    out = torch.empty(shape, dtype=dtype, device=x.device)
    tile = next((n for n in ROW_TILES if n >= rows), ROW_TILES[-1])
    grid = (triton.cdiv(outs, tiling.outputs), tiling.splits, triton.cdiv(rows, tile))
    _product[grid](
        x, w, x if scale is None else scale, out, rows, outs, ins, split,
        OUTS=tiling.outputs, ROWS=tile, STEP=tiling.step,
        EVEN=split * tiling.splits == ins, GATED=gated, GELU=activation == GELU, SCALED=scale is not None,
        PRECISION="ieee", enable_fp_fusion=False,
        num_warps=tiling.warps if tile < 256 else 8, num_stages=_STAGES.get(tile, tiling.stages),
    )  # fmt: skip
    return out


class Product:
    """y = x Wᵀ + b on a GPU, unsummed. With eight bits, each output's weights are int8 times one scale."""

    exact = True  # rows do not depend on each other

    def __init__(self, weight: Tensor, bias: Tensor | None = None, eight_bits: bool = False) -> None:
        self.out_features, self.in_features = weight.shape
        self.bias = bias
        self.scale: Tensor | None = None  # [out] float32
        self.weight = weight.contiguous()  # [out, in]
        if eight_bits:
            self.scale = weight.abs().amax(1).float().clamp(min=1e-12) / 127
            self.weight = torch.round(weight.float() / self.scale[:, None]).to(torch.int8)
        self.tiling = tiling(self.out_features, self.in_features, processors(weight.device))

    def __call__(self, x: Tensor) -> Parts:
        return Parts(product(x, self.weight, self.tiling, self.scale), self.bias)

    def first(self, x: Tensor, outputs: int) -> Tensor:
        """The first outputs only [T, outputs], summed."""
        return self(x).total()[:, :outputs]

    def gated(self, x: Tensor, activation: str = SILU) -> Tensor:
        """activation(gate) * up [T, out / 2]: the first half of the outputs is the gate."""
        if self.bias is None:
            return product(x, self.weight, replace(self.tiling, splits=1), self.scale, True, activation)
        gate, up = self(x).total().chunk(2, dim=1)
        return ops.gated(gate, up, activation).to(x.dtype)


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
def many_rows_are_exact(device: torch.device) -> bool:
    """Whether tiles of many rows give the bits of a few on this device, tried once with random numbers.

    Every element is the same sum in the same order; that the instructions for large tiles add alike is not documented.
    """
    few, dice = 16, torch.Generator(device).manual_seed(1)
    x, w = (torch.randn(n, 640, generator=dice, device=device).to(torch.bfloat16) for n in (few, 512))
    many, alike = x.repeat(10, 1), True
    for splits, gated, tiles in ((2, False, tiles_of(False)), (1, True, tiles_of(True))):
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
