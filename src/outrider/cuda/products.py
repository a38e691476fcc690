"""Matrix products on a GPU whose rows do not depend on their neighbours.

The promise: a row's result is the same bits in a pass of one row and in a pass of hundreds. Every element is one sum
over the inputs in a fixed order: tensor cores take the inputs sixteen at a time, front to back, and where a product is
split between several blocks of threads, the split depends on the weight's shape alone. The parts are left unsummed
(`Parts`): the operation that reads them adds them up in order, which costs nothing there and saves a kernel.

Why not cuBLAS: it takes another kernel, with another order, when the number of rows grows (from 64 on, on an H200).
The weight is the left factor, so that one to sixteen rows are one narrow tile and the weight streams through once.
It knows weights and rows; it does not know layers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

STEP = 64  # inputs of one step of a sum
ROW_TILES = (16, 32, 64, 128)


@dataclass(frozen=True)
class Parts:
    """An unsummed result: the sum over the first dimension, in order, plus the bias, is what is meant."""

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
    """How one weight is cut. Nothing here depends on the rows of a pass, except the width of a tile of rows."""

    outputs: int  # of a tile
    splits: int  # parts of the sum
    stages: int = 4
    warps: int = 4
    step: int = STEP


@dataclass(frozen=True)
class Gate:
    """silu(gate) * up that nobody has computed yet: the product that reads it does so on the way."""

    parts: Tensor  # [S, T, 2 in] float32: the gate, then what it lets through
    dtype: torch.dtype  # of the result


@triton.jit
def _gated(x, rows, ins, r, i, ok, PARTS: tl.constexpr):
    """silu(gate) * up at rows r [ROWS] and inputs i [STEP], from unsummed parts: [STEP, ROWS]."""
    at = x + r[None, :] * (2 * ins) + i[:, None]
    gate, up = tl.load(at, mask=ok, other=0.0), tl.load(at + ins, mask=ok, other=0.0)
    for _ in tl.static_range(1, PARTS):
        at += rows.to(tl.int64) * (2 * ins)
        gate += tl.load(at, mask=ok, other=0.0)
        up += tl.load(at + ins, mask=ok, other=0.0)
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit(do_not_specialize=["rows"])  # the same code for any number of them
def _product(
    x, w, scale, out, rows, outs, ins, split,
    OUTS: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr, EVEN: tl.constexpr,
    PARTS: tl.constexpr, GATED: tl.constexpr, SCALED: tl.constexpr, KIND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out[split, row, o] = sum over the split's inputs of w[o, i] x[row, i]; gated: silu(gate) * up, unsplit."""
    o = tl.program_id(0).to(tl.int64) * OUTS + tl.arange(0, OUTS)
    r = tl.program_id(2).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    i = tl.arange(0, STEP)
    start = tl.program_id(1) * split
    w_at = w + o[:, None] * ins + start + i[None, :]  # [OUTS, STEP]
    x_at = x + r[None, :] * ins + start + i[:, None]  # [STEP, ROWS]
    o_in, r_in = (o < outs)[:, None], (r < rows)[None, :]
    total = tl.zeros((OUTS, ROWS), tl.float32)
    other = tl.zeros((OUTS, ROWS), tl.float32)
    for at in range(0, split, STEP):
        w_ok, x_ok = o_in, r_in
        if not EVEN:
            left = (start + at + i) < ins
            w_ok, x_ok = o_in & left[None, :], r_in & left[:, None]
        if PARTS > 0:
            columns = _gated(x, rows, ins, r, start + at + i, x_ok, PARTS).to(KIND)
        else:
            columns = tl.load(x_at + at, mask=x_ok, other=0.0)
        block = tl.load(w_at + at, mask=w_ok, other=0.0, eviction_policy="evict_first")
        total = tl.dot(block.to(KIND), columns, total, input_precision=PRECISION)
        if GATED:
            block = tl.load(w_at + at + outs.to(tl.int64) * ins, mask=w_ok, other=0.0, eviction_policy="evict_first")
            other = tl.dot(block.to(KIND), columns, other, input_precision=PRECISION)
    if SCALED:
        total *= tl.load(scale + o, mask=o < outs, other=0.0)[:, None]
        if GATED:
            other *= tl.load(scale + outs + o, mask=o < outs, other=0.0)[:, None]
    if GATED:
        total = total / (1.0 + tl.exp(-total)) * other
    place = out + tl.program_id(1).to(tl.int64) * rows * outs + r[None, :] * outs + o[:, None]
    tl.store(place, total.to(out.dtype.element_ty), mask=o_in & r_in)


def product(x: Tensor | Gate, w: Tensor, tiling: Tiling, scale: Tensor | None = None) -> Tensor:
    """Parts of x wᵀ: x [T, in] bfloat16 (or float32), w [out, in] of the same type or int8 -> [S, T, out] float32."""
    rows, outs = x.parts.shape[1] if isinstance(x, Gate) else x.shape[0], w.shape[0]
    out = torch.empty((tiling.splits, rows, outs), dtype=torch.float32, device=w.device)
    _launch(x, w, scale, out, outs, tiling, gated=False)
    return out


def gated_product(x: Tensor, w: Tensor, tiling: Tiling, scale: Tensor | None = None) -> Tensor:
    """silu(gate) * up [T, out] in x's type, where w [2 out, in] holds the rows of the gate, then those of `up`."""
    out = torch.empty((x.shape[0], w.shape[0] // 2), dtype=x.dtype, device=x.device)
    _launch(x, w, scale, out, w.shape[0] // 2, tiling, gated=True)
    return out


_KINDS = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def _launch(
    x: Tensor | Gate, w: Tensor, scale: Tensor | None, out: Tensor, outs: int, tiling: Tiling, gated: bool
) -> None:
    rows, ins = out.shape[-2], w.shape[1]
    split = triton.cdiv(triton.cdiv(ins, tiling.step), tiling.splits) * tiling.step
    tile = next((n for n in ROW_TILES if n >= rows), ROW_TILES[-1])
    grid = (triton.cdiv(outs, tiling.outputs), tiling.splits, triton.cdiv(rows, tile))
    source = x.parts if isinstance(x, Gate) else x
    _product[grid](
        source, w, scale if scale is not None else source, out, rows, outs, ins, split,
        OUTS=tiling.outputs, ROWS=tile, STEP=tiling.step, EVEN=split * tiling.splits == ins,
        PARTS=x.parts.shape[0] if isinstance(x, Gate) else 0, GATED=gated, SCALED=scale is not None,
        KIND=_KINDS[x.dtype], PRECISION="ieee",
        num_warps=tiling.warps, num_stages=tiling.stages if tile < 128 else 3,
    )  # fmt: skip


class Product:
    """y = x Wᵀ + b on a GPU, unsummed. With eight bits, each output's weights are whole numbers times one scale."""

    exact = True  # row by row, always

    def __init__(self, weight: Tensor, bias: Tensor | None = None, eight_bits: bool = False) -> None:
        self.out_features, self.in_features = weight.shape
        self.bias = bias
        self.scale: Tensor | None = None  # [out] float32
        self.weight = weight.contiguous()  # [out, in]
        if eight_bits:
            self.scale = weight.abs().amax(1).float().clamp(min=1e-12) / 127
            self.weight = torch.round(weight.float() / self.scale[:, None]).to(torch.int8)
        self.tiling = tiling(self.out_features, self.in_features, processors(weight.device))

    def __call__(self, x: Tensor | Gate) -> Parts:
        return Parts(product(x, self.weight, self.tiling, self.scale), self.bias)

    def gated(self, x: Tensor) -> Tensor | Gate:
        """silu(gate) * up [T, out / 2]: the first half of the outputs is the gate.

        A wide product finishes it itself; a narrow one would leave most of the processors idle, so it is split like any
        other, and whoever reads the parts does the rest.
        """
        if self.bias is None and 2 * self.tiling.outputs * processors(self.weight.device) <= self.out_features:
            return gated_product(x, self.weight, replace(self.tiling, splits=1), self.scale)
        parts = self(x)
        return Gate(parts.parts if self.bias is None else parts.total()[None], x.dtype)


def tiling(outs: int, ins: int, processors: int) -> Tiling:
    """Enough blocks of threads to keep the memory busy, and no more parts than that: somebody has to add them up.

    Measured on an H200 for weights of 1 MB to 500 MB: three blocks for every two processors, or four steps each.
    """
    tiles, steps = triton.cdiv(outs, 64), triton.cdiv(ins, STEP)
    splits = (n for n in range(1, steps + 1) if steps % n == 0)
    return Tiling(64, next(n for n in splits if tiles * n >= 1.5 * processors or steps <= 4 * n), stages=5)


@cache
def processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 8  # triton's interpreter
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
