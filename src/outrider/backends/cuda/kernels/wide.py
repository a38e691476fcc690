"""Matrix products of many rows: the tiles of prompts.

Promise: a row's result is the same bits as that of `matmul.product` for a few rows. An element's sum takes its inputs
in the same order, is cut where the weight's tiling cuts it, and the parts are added from the first to the last; tiles,
warps and the order of programs change no bit. The parts are added here, so that a prompt's results are written once.
What is read comes through tensor descriptors (TMA on Hopper and newer), without an address for every element.
It knows weights and rows; it does not know layers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ....models.config import GELU, SILU


@dataclass(frozen=True)
class Tiles:
    """How a product of many rows is divided. Nothing of this changes a bit of the sum."""

    rows: int
    outputs: int
    added: bool = True  # the parts of a sum are added here; else by whoever reads them
    stages: int = 3
    warps: int = 8
    registers: int | None = None  # of a thread, at most: fewer let two programs share a processor
    step: int = 64  # inputs of one step
    group: int = 8  # tiles of rows that are computed one after the other with the same weights


MANY_ROWS = 256  # from here on a product is work; below, it is reading the weight
TOGETHER = 2  # programs that share a processor
LARGE_MEMORY = 220_000  # bytes of shared memory that these tiles need: Hopper and the large Blackwells


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes of a GPU's shared memory that one program may use."""
    if device.type != "cuda":
        return 0  # triton's interpreter
    return int(getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 0))


def tiles_for(x: Tensor, w: Tensor, splits: int, gated: bool, processors: int) -> Tiles | None:
    """The tiles of this product; None: it has few rows, or numbers that these kernels do not multiply.

    Where there are fewer tiles than the processors can hold, each part of a sum has programs of its own.
    """
    aligned = all(
        each.stride(1) == 1 and each.stride(0) * each.element_size() % 16 == 0 and each.data_ptr() % 16 == 0
        for each in (x, w)
    )
    if x.shape[0] < MANY_ROWS or x.element_size() != 2 or not aligned or (gated and splits > 1):
        return None
    if shared_memory(x.device) < LARGE_MEMORY:
        return None
    tiles = tiles_of(gated, converted=w.dtype != x.dtype)
    count = triton.cdiv(x.shape[0], tiles.rows) * triton.cdiv(w.shape[0] // (1 + gated), tiles.outputs)
    return replace(tiles, added=gated or count >= TOGETHER * processors)


def tiles_of(gated: bool, converted: bool = False) -> Tiles:
    """converted: the weight becomes the rows' type on the way."""
    return Tiles(128, 128) if gated or converted else Tiles(128, 128, registers=128)


@triton.jit
def _scaled(total, scale, row_scale, r_at, o_at, rows, outs, SCALED: tl.constexpr, ROW_SCALED: tl.constexpr):
    if SCALED:
        total *= tl.load(scale + o_at, mask=o_at < outs, other=0.0)
    if ROW_SCALED:
        total *= tl.load(row_scale + r_at, mask=r_at < rows, other=0.0)
    return total


@triton.jit(do_not_specialize=["rows", "parts"])  # the same code for any number of rows
def _wide(
    x, w, scale, row_scale, out, rows, outs, split, parts,
    ROWS: tl.constexpr, OUTS: tl.constexpr, STEP: tl.constexpr, GROUP: tl.constexpr, ADDED: tl.constexpr,
    GATED: tl.constexpr, GELU: tl.constexpr, SCALED: tl.constexpr, ROW_SCALED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """As `matmul._product`. ADDED: all `parts` of the sum, of `split` inputs each; else part program_id(1)."""
    tile, high = tl.program_id(0), tl.cdiv(rows, ROWS)
    across = GROUP * tl.cdiv(outs, OUTS)
    first = tile // across * GROUP
    some = tl.minimum(high - first, GROUP)  # tiles of rows of this group
    row = (first + tile % across % some) * ROWS
    o = tile % across // some * OUTS
    r_at, o_at = row + tl.arange(0, ROWS)[:, None], o + tl.arange(0, OUTS)[None, :]
    part = tl.program_id(1)
    total = tl.zeros((ROWS, OUTS), tl.float32)
    if GATED:
        other = tl.zeros((ROWS, OUTS), tl.float32)
        for at in range(0, split, STEP):
            inputs = x.load([row, at])  # [ROWS, STEP]
            total = tl.dot(inputs, w.load([o, at]).to(inputs.dtype).T, total, input_precision=PRECISION)
            other = tl.dot(inputs, w.load([outs + o, at]).to(inputs.dtype).T, other, input_precision=PRECISION)
        total = _scaled(total, scale, row_scale, r_at, o_at, rows, outs, SCALED, ROW_SCALED)
        other = _scaled(other, scale + outs, row_scale, r_at, o_at, rows, outs, SCALED, ROW_SCALED)
        steepness = total
        if GELU:
            steepness = 1.5957691216057308 * (total + 0.044715 * total * total * total)
        total = total / (1.0 + tl.exp(-steepness)) * other
    elif not ADDED:
        for at in range(part * split, part * split + split, STEP):
            inputs = x.load([row, at])
            total = tl.dot(inputs, w.load([o, at]).to(inputs.dtype).T, total, input_precision=PRECISION)
        total = _scaled(total, scale, row_scale, r_at, o_at, rows, outs, SCALED, ROW_SCALED)
    else:
        for each in range(parts):
            more = tl.zeros((ROWS, OUTS), tl.float32)
            for at in range(each * split, each * split + split, STEP):
                inputs = x.load([row, at])
                more = tl.dot(inputs, w.load([o, at]).to(inputs.dtype).T, more, input_precision=PRECISION)
            total += _scaled(more, scale, row_scale, r_at, o_at, rows, outs, SCALED, ROW_SCALED)
    target = out + (part.to(tl.int64) * rows + r_at) * outs + o_at
    tl.store(target, total.to(out.dtype.element_ty), mask=(r_at < rows) & (o_at < outs))


def wide_product(
    x: Tensor, w: Tensor, splits: int, split: int, tiles: Tiles, scale: Tensor | None = None, gated: bool = False,
    activation: str = SILU, row_scale: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """As `matmul.product`, for a sum in `splits` parts of `split` inputs: [S, T, out] float32, where S is 1 if they
    are added here; gated [T, out] in x's type."""
    rows, outs = x.shape[0], w.shape[0] // (1 + gated)
    parts = 1 if tiles.added else splits
    shape, dtype = ((rows, outs), x.dtype) if gated else ((parts, rows, outs), torch.float32)
    out = torch.empty(shape, dtype=dtype, device=x.device)
    grid = (triton.cdiv(rows, tiles.rows) * triton.cdiv(outs, tiles.outputs), parts)
    step = tiles.step if split % tiles.step == 0 else 64
    _wide[grid](
        TensorDescriptor.from_tensor(x, [tiles.rows, step]), TensorDescriptor.from_tensor(w, [tiles.outputs, step]),
        x if scale is None else scale, x if row_scale is None else row_scale, out, rows, outs, split, splits,
        ROWS=tiles.rows, OUTS=tiles.outputs, STEP=step, GROUP=tiles.group, ADDED=tiles.added and splits > 1,
        GATED=gated, GELU=activation == GELU, SCALED=scale is not None, ROW_SCALED=row_scale is not None,
        PRECISION="ieee",
        num_warps=tiles.warps, num_stages=tiles.stages, maxnreg=tiles.registers, enable_fp_fusion=False,
    )  # fmt: skip
    return out
