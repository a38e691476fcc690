"""Matrix products of many rows: the tiles of prompts.

Promise: a row's result is the same bits as that of `matmul.product` for a few rows. An element's sum takes its inputs
in the same order, is cut where the weight's tiling cuts it, and the parts are added from the first to the last; tiles,
warps and the order of programs change no bit. The parts are added here, so that a prompt's results are written once.
What is read comes through tensor descriptors (TMA on Hopper and newer), without an address for every element.
It knows weights and rows; it does not know layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ....models.config import GELU, SILU

OUTSIDE, REGISTERS, MEMORY = range(3)  # where the parts of a sum are added: by whoever reads them; here, in …


@dataclass(frozen=True)
class Tiles:
    """How a product of many rows is divided. Nothing of this changes a bit of the sum."""

    rows: int
    outputs: int
    adds: int = OUTSIDE
    stages: int = 3
    warps: int = 8
    left: bool = False  # the weight is the left factor
    step: int = 64  # inputs of one step
    group: int = 8  # tiles of rows that are computed one after the other with the same weights


MANY_ROWS = 256  # from here on a product is work; below, it is reading the weight


def tiles_for(x: Tensor, w: Tensor, splits: int, gated: bool) -> Tiles | None:
    """The tiles of this product; None: it has few rows, or numbers that these kernels do not multiply."""
    aligned = all(each.stride(0) * each.element_size() % 16 == 0 and each.data_ptr() % 16 == 0 for each in (x, w))
    if x.shape[0] < MANY_ROWS or not x.is_cuda or x.element_size() != 2 or not aligned:
        return None
    return tiles_of(gated)


def tiles_of(gated: bool) -> Tiles:
    return Tiles(128, 128, OUTSIDE) if gated else Tiles(128, 128, REGISTERS)


@triton.jit
def _chain(x, w, row, o, up, start, split, ROWS: tl.constexpr, OUTS: tl.constexpr, STEP: tl.constexpr,
           GATED: tl.constexpr, LEFT: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """One part of the sums of a tile, and of the one that is `up` outputs further."""
    if LEFT:
        total = tl.zeros((OUTS, ROWS), tl.float32)
        other = tl.zeros((OUTS, ROWS), tl.float32)
    else:
        total = tl.zeros((ROWS, OUTS), tl.float32)
        other = tl.zeros((ROWS, OUTS), tl.float32)
    for at in range(start, start + split, STEP):
        inputs = x.load([row, at])  # [ROWS, STEP]
        block = w.load([o, at]).to(inputs.dtype)  # [OUTS, STEP]
        if LEFT:
            total = tl.dot(block, inputs.T, total, input_precision=PRECISION)
        else:
            total = tl.dot(inputs, block.T, total, input_precision=PRECISION)
        if GATED:
            block = w.load([up + o, at]).to(inputs.dtype)
            if LEFT:
                other = tl.dot(block, inputs.T, other, input_precision=PRECISION)
            else:
                other = tl.dot(inputs, block.T, other, input_precision=PRECISION)
    return total, other


@triton.jit(do_not_specialize=["rows", "parts"])  # the same code for any number of rows
def _wide(
    x, w, scale, out, rows, outs, split, parts,
    ROWS: tl.constexpr, OUTS: tl.constexpr, STEP: tl.constexpr, ADDS: tl.constexpr,
    GROUP: tl.constexpr, GATED: tl.constexpr, GELU: tl.constexpr, SCALED: tl.constexpr, LEFT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """As `matmul._product`. `parts` of the sum, of `split` inputs each, are added here; ADDS 0: one program each."""
    tile, high = tl.program_id(0), tl.cdiv(rows, ROWS)
    across = GROUP * tl.cdiv(outs, OUTS)
    first = tile // across * GROUP
    some = tl.minimum(high - first, GROUP)  # tiles of rows of this group
    row = (first + tile % across % some) * ROWS
    o = tile % across // some * OUTS
    part = tl.program_id(1)
    if LEFT:
        r_at, o_at = row + tl.arange(0, ROWS)[None, :], o + tl.arange(0, OUTS)[:, None]
    else:
        r_at, o_at = row + tl.arange(0, ROWS)[:, None], o + tl.arange(0, OUTS)[None, :]
    ok = (r_at < rows) & (o_at < outs)
    target = out + (part.to(tl.int64) * rows + r_at) * outs + o_at
    total, other = _chain(x, w, row, o, outs, part * split, split, ROWS, OUTS, STEP, GATED, LEFT, PRECISION)
    if SCALED:
        total *= tl.load(scale + o_at, mask=o_at < outs, other=0.0)
        if GATED:
            other *= tl.load(scale + outs + o_at, mask=o_at < outs, other=0.0)
    if GATED:
        steepness = total
        if GELU:
            steepness = 1.5957691216057308 * (total + 0.044715 * total * total * total)
        total = total / (1.0 + tl.exp(-steepness)) * other
    if ADDS > 0:
        for each in range(1, parts):
            if ADDS == 2:
                tl.store(target, total, mask=ok)
            more, _ = _chain(x, w, row, o, outs, each * split, split, ROWS, OUTS, STEP, False, LEFT, PRECISION)
            if SCALED:
                more *= tl.load(scale + o_at, mask=o_at < outs, other=0.0)
            if ADDS == 2:
                tl.debug_barrier()  # written by another thread, where the compiler has moved values
                total = tl.load(target, mask=ok, other=0.0)
            total += more
    tl.store(target, total.to(out.dtype.element_ty), mask=ok)


@triton.jit
def _store(out, total, row, o, rows, outs, ROWS: tl.constexpr, OUTS: tl.constexpr):
    r_at, o_at = row + tl.arange(0, ROWS)[:, None], o + tl.arange(0, OUTS)[None, :]
    ok = (r_at < rows) & (o_at < outs)
    tl.store(out + r_at.to(tl.int64) * outs + o_at, total.to(out.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=["rows"])
def _persistent(
    x, w, scale, out, rows, outs, split, programs,
    ROWS: tl.constexpr, OUTS: tl.constexpr, STEP: tl.constexpr, GROUP: tl.constexpr, GATED: tl.constexpr,
    GELU: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    high = tl.cdiv(rows, ROWS)
    across = GROUP * tl.cdiv(outs, OUTS)
    for tile in tl.range(tl.program_id(0), high * tl.cdiv(outs, OUTS), programs, flatten=True):
        first = tile // across * GROUP
        some = tl.minimum(high - first, GROUP)  # tiles of rows of this group
        row = (first + tile % across % some) * ROWS
        o = tile % across // some * OUTS
        total = tl.zeros((ROWS, OUTS), tl.float32)
        other = tl.zeros((ROWS, OUTS), tl.float32)
        for at in range(0, split, STEP):
            inputs = x.load([row, at])  # [ROWS, STEP]
            total = tl.dot(inputs, w.load([o, at]).T, total, input_precision=PRECISION)
            if GATED:
                other = tl.dot(inputs, w.load([outs + o, at]).T, other, input_precision=PRECISION)
        if GATED:
            steepness = total
            if GELU:
                steepness = 1.5957691216057308 * (total + 0.044715 * total * total * total)
            total = total / (1.0 + tl.exp(-steepness)) * other
        if OUTS > 128 and not GATED:  # in halves: what moves values between threads needs memory beside the stages
            HALF: tl.constexpr = OUTS // 2
            halves = tl.permute(tl.reshape(total, (ROWS, 2, HALF)), (0, 2, 1))
            left, right = tl.split(halves)
            _store(out, left, row, o, rows, outs, ROWS, HALF)
            _store(out, right, row, o + HALF, rows, outs, ROWS, HALF)
        else:
            _store(out, total, row, o, rows, outs, ROWS, OUTS)


def wide_product(
    x: Tensor, w: Tensor, splits: int, split: int, tiles: Tiles, scale: Tensor | None = None, gated: bool = False,
    activation: str = SILU,
) -> Tensor:  # fmt: skip
    """As `matmul.product`, for a sum in `splits` parts of `split` inputs: [S, T, out] float32, where S is 1 if they
    are added here; gated [T, out] in x's type."""
    rows, outs = x.shape[0], w.shape[0] // (1 + gated)
    parts = 1 if tiles.adds else splits
    shape, dtype = ((rows, outs), x.dtype) if gated else ((parts, rows, outs), torch.float32)
    out = torch.empty(shape, dtype=dtype, device=x.device)
    grid = (triton.cdiv(rows, tiles.rows) * triton.cdiv(outs, tiles.outputs), parts)
    _wide[grid](
        TensorDescriptor.from_tensor(x, [tiles.rows, tiles.step]),
        TensorDescriptor.from_tensor(w, [tiles.outputs, tiles.step]),
        x if scale is None else scale, out, rows, outs, split, splits,
        ROWS=tiles.rows, OUTS=tiles.outputs, STEP=tiles.step, ADDS=tiles.adds, GROUP=tiles.group,
        GATED=gated, GELU=activation == GELU, SCALED=scale is not None, LEFT=tiles.left, PRECISION="ieee",
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    return out


def persistent(x: Tensor, w: Tensor, tiles: Tiles, gated: bool = False, activation: str = SILU) -> Tensor:
    rows, outs = x.shape[0], w.shape[0] // (1 + gated)
    shape, dtype = ((rows, outs), x.dtype) if gated else ((1, rows, outs), torch.float32)
    out = torch.empty(shape, dtype=dtype, device=x.device)
    programs = torch.cuda.get_device_properties(x.device).multi_processor_count
    grid = (min(programs, triton.cdiv(rows, tiles.rows) * triton.cdiv(outs, tiles.outputs)),)
    _persistent[grid](
        TensorDescriptor.from_tensor(x, [tiles.rows, tiles.step]),
        TensorDescriptor.from_tensor(w, [tiles.outputs, tiles.step]),
        x, out, rows, outs, triton.cdiv(x.shape[1], tiles.step) * tiles.step, grid[0],
        ROWS=tiles.rows, OUTS=tiles.outputs, STEP=tiles.step, GROUP=tiles.group, GATED=gated,
        GELU=activation == GELU, PRECISION="ieee", num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    return out
