"""Matrix products with weights of four to eight bits, which become floats in registers.

Promise: as in `matmul`, a row's result is the same bits in a pass of one row and in a pass of hundreds: one sum over
the inputs in a fixed order, split by the weight's shape alone. A weight's value is the file's own: scale * field +
offset in float32, rounded once to the type of the rows, which is what a product of floats reads too.

A step of a sum takes `planes` groups of `plane` inputs each. Word c of an output's step holds one field of every
plane: its input c. So a tile of words, shifted and masked, is a tile of one plane's weights, whose inputs lie side by
side and share one scale per output; no value moves between threads. A field goes into a float's mantissa beside the
exponent of 1.0: it is 1 + field / 2^n, without a conversion. Each warp of a program takes every n-th step of the sum (a
slice), because a processor needs many warps to hide their waiting; the slices are added in a fixed order at the end.
It knows weights and rows; it does not know layers, and of file formats only where scales are (`packing` fills them in).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....models.config import GELU, SILU
from . import fields
from .fields import Tiled
from .matmul import Parts, activate, processors

WORD = 32  # bits


@dataclass(frozen=True)
class Scheme:
    """Where the bits and the scales of a kind of weight are."""

    bits: int  # of a field within a word
    extra: int  # high bits of a field, in a second tensor
    plane: int  # inputs that share a scale, or some of them
    infos: int  # words of scales for each step of an output; 0: one for each group of inputs
    scales: int  # how they are read, see `_scale`

    @property
    def planes(self) -> int:
        return WORD // self.bits

    def high_place(self, j: int) -> int:
        """The lowest of a second tensor's bits that belong to plane j: two neighbours are four apart."""
        return (j // 2) * self.extra + (j // 4) * 4 * (self.extra - 1) + (j % 2) * 4

    @property
    def step(self) -> int:
        return self.planes * self.plane


SCHEMES = {
    "Q4_0": Scheme(4, 0, 32, 4, 0),
    "Q8_0": Scheme(8, 0, 32, 2, 0),
    "Q4_1": Scheme(4, 0, 32, 8, 1),
    "Q4_K": Scheme(4, 0, 32, 5, 2),
    "Q5_K": Scheme(4, 1, 32, 5, 2),
    "Q6_K": Scheme(4, 2, 16, 3, 3),
    "int4": Scheme(4, 0, 32, 0, 4),  # a group has a scale in float16 and a whole zero point
    "int4b": Scheme(4, 0, 32, 0, 5),  # the same with a scale in bfloat16
    "int8": Scheme(8, 0, 32, 0, 6),  # a group has a scale in float32; fields are stored + 128
    "fp8": Scheme(8, 0, 32, 0, 7),  # e4m3; a group has a scale in float32
}


@dataclass(frozen=True)
class Tiling:
    """How a packed weight is divided into tiles; of what it computes, only `slices` and the parts change a bit.

    Neither depends on the rows of a pass. Fields are unpacked once for every tile of rows.
    """

    outputs: int = 32
    slices: int = 2  # of a sum within a program: a warp each, which take its steps in turn
    stages: int = 3
    rows: int = 16  # of the largest tile
    programs: float = 4.0  # for each processor, before a sum is split no further
    steps: int = 1  # of a slice, at least, where a sum is split into parts
    registers: int | None = None  # of a thread, at most: fewer let more programs share a processor


DEFAULT = Tiling()
ROW_TILES = (8, 16, 32, 64)


@dataclass(frozen=True)
class Packed:
    """One weight [N, K] as the kernel reads it. Inputs are padded to whole steps, with scales of zero."""

    kind: str
    words: Tensor  # [N, steps * plane] int32
    high: Tensor | None  # [N, steps * plane] uint8 (one bit of each plane) or int16 (two)
    info: Tensor  # [steps * infos or groups, N] int32
    inputs: int
    group: int = 0  # inputs of a group, where scales are by group

    @property
    def outputs(self) -> int:
        return self.words.shape[0]

    @property
    def steps(self) -> int:
        return self.words.shape[1] // SCHEMES[self.kind].plane

    def joins(self, other: Packed) -> bool:
        """Whether both can be one weight with the outputs of both."""
        return (self.kind, self.inputs, self.group) == (other.kind, other.inputs, other.group)

    def joined(self, *others: Packed) -> Packed:
        every = [self, *others]
        high = None if self.high is None else torch.cat([one.high for one in every if one.high is not None])
        words, info = torch.cat([one.words for one in every]), torch.cat([one.info for one in every], 1)
        return Packed(self.kind, words, high, info, self.inputs, self.group)


@triton.jit
def _half(word):
    """The low half of a word as a float16."""
    return word.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _info(info, row, columns, o, ok):
    """Words of scales [SLICES, OUTS]. row [SLICES]"""
    return tl.load(info + row.to(tl.int64)[:, None] * columns + o[None, :], mask=ok, other=0)


@triton.jit
def _one(scale):
    """The bits of 1.0, which the compiler does not know: it would spend two instructions on two constants."""
    return (scale * 0.0 + 1.0).to(tl.int32, bitcast=True)


@triton.jit
def _field(words, one, j: tl.constexpr, BITS: tl.constexpr, LOW: tl.constexpr):
    """The bits of 1.0 with field j of a word at bit LOW of the mantissa."""
    SHIFT: tl.constexpr = LOW - BITS * j
    bits = words << SHIFT if SHIFT >= 0 else words >> -SHIFT
    return (bits & (((1 << BITS) - 1) << LOW)) | one


@triton.jit
def _times_byte(factor, word, one, j: tl.constexpr, LESS: tl.constexpr):
    """factor * (byte j - LESS), rounded once: the byte is in the mantissa of 1 + byte / 256."""
    return _field(word, one, j, 8, 15).to(tl.float32, bitcast=True) * (factor * 256.0) - factor * (256.0 + LESS)


@triton.jit
def _scale(info, at, columns, o, ok, j: tl.constexpr, BITS: tl.constexpr, EXTRA: tl.constexpr, PLANE: tl.constexpr,
           INFOS: tl.constexpr, SCALES: tl.constexpr, STEP: tl.constexpr, GROUP: tl.constexpr):  # fmt: skip
    """Scale and offset [SLICES, OUTS] of plane j, and the bits of one: weights are scale * field + offset. at [SLICES]

    SCALES 2 and 3: for 1 + field / FULL instead of the field.
    """
    FULL: tl.constexpr = 1 << (BITS + EXTRA + (BITS if BITS == 4 and j % 2 == 0 else 0))  # see `_tile`
    row = at // STEP * INFOS
    if SCALES == 0:  # a float16 for each plane, two in a word; fields are stored + half their range
        scale = _half(_info(info, row + j // 2, columns, o, ok) >> (16 * (j % 2)))
        offset = scale * (-8.0 if STEP == 8 * PLANE else -128.0)
        one = _one(scale)
    elif SCALES == 1:  # a scale and an offset in float16
        word = _info(info, row + j, columns, o, ok)
        scale, offset = _half(word), _half(word >> 16)
        one = _one(scale)
    elif SCALES == 2:  # float16 scales of scales and of minima; then a byte for each scale and for each minimum
        both = _info(info, row, columns, o, ok)
        factor = _half(both)
        one = _one(factor)
        scale = _times_byte(factor * FULL, _info(info, row + 1 + j // 4, columns, o, ok), one, j % 4, 0)
        least = _times_byte(_half(both >> 16), _info(info, row + 3 + j // 4, columns, o, ok), one, j % 4, 0)
        offset = -least - scale
    elif SCALES == 3:  # a float16 scale of scales, then a byte + 128 for each scale; fields are stored + 32
        factor = _half(_info(info, row, columns, o, ok))
        one = _one(factor)
        scale = _times_byte(factor * FULL, _info(info, row + 1 + j // 4, columns, o, ok), one, j % 4, 128)
        offset = scale * (-1.0 - 32.0 / FULL)
    else:  # by groups
        word = _info(info, (at + j * PLANE) // GROUP, columns, o, ok)
        if SCALES == 4:
            scale = _half(word)
            offset = -scale * (word >> 16).to(tl.float32)
        elif SCALES == 5:
            scale = (word << 16).to(tl.float32, bitcast=True)
            offset = -scale * (word >> 16).to(tl.float32)
        else:
            scale = word.to(tl.float32, bitcast=True)
            offset = -128.0 * scale
        one = _one(scale)
    return scale, offset, one


@triton.jit
def _tile(words, high, scale, offset, one, j: tl.constexpr, BITS: tl.constexpr, EXTRA: tl.constexpr,
          SCALES: tl.constexpr):  # fmt: skip
    """The weights of plane j [SLICES, OUTS, PLANE] float32."""
    # Two neighbouring fields of four bits share a shift: the lower one is a smaller part of its float.
    LOW: tl.constexpr = 23 - BITS - EXTRA - (BITS if BITS == 4 and j % 2 == 0 else 0)
    FULL: tl.constexpr = 1 << (23 - LOW)
    if SCALES == 7:  # an e4m3's exponent is 120 less than a float's
        byte = words >> (8 * j)
        bits = ((byte & 128) << 24) | ((byte & 127) << 20)
        value = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36 * scale[:, :, None]
    else:
        bits = _field(words, one[:, :, None], j, BITS, LOW)
        if EXTRA:  # see `high_place`
            UP: tl.constexpr = LOW + BITS - ((j // 2) * EXTRA + (j // 4) * 4 * (EXTRA - 1) + (j % 2) * 4)
            tops = high << UP if UP >= 0 else high >> -UP
            bits ^= tops & (((1 << EXTRA) - 1) << (LOW + BITS))  # an "or" that the assembler does not reorder
        if SCALES != 2 and SCALES != 3:
            offset = offset - scale * FULL
            scale = scale * FULL
        value = bits.to(tl.float32, bitcast=True) * scale[:, :, None] + offset[:, :, None]
    return value


@triton.jit(do_not_specialize=["rows"])  # the same code for any number of rows
def _packed(
    x, words, high, info, out, rows, outs, ins, length, split, columns, stride, column,
    SLICES: tl.constexpr, OUTS: tl.constexpr, ROWS: tl.constexpr, BITS: tl.constexpr, EXTRA: tl.constexpr,
    PLANE: tl.constexpr, INFOS: tl.constexpr, SCALES: tl.constexpr, STEP: tl.constexpr, GROUP: tl.constexpr,
    SHARE: tl.constexpr, EVEN: tl.constexpr, WHOLE: tl.constexpr, GATED: tl.constexpr, GELU: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """out[part, row, column + o] = sum over the part's inputs of w[o, i] x[row, i]; gated: silu(gate) * up, unsplit.

    length and split: words of an output and of its part. Each of SLICES warps takes every SLICES-th step of the part;
    their sums are added at the end. SHARE planes have one scale. WHOLE: all slices of all parts have as many steps.
    """
    PLANES: tl.constexpr = STEP // PLANE
    # Tiles of rows are neighbours: all but the first find the weights in the cache.
    o = tl.program_id(1).to(tl.int64) * OUTS + tl.arange(0, OUTS)
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    c, slices = tl.arange(0, PLANE), tl.arange(0, SLICES)
    start = tl.program_id(2) * split
    stop = tl.minimum(start + split, length)
    ok, r_in = (o < outs)[None, :], (r < rows)[None, None, :]
    place = (o[None, :, None] * length + (slices * PLANE)[:, None, None]) + c[None, None, :]  # [SLICES, OUTS, PLANE]
    other_place = place + outs.to(tl.int64) * length
    inner = (slices * STEP)[:, None, None] + c[None, :, None]  # [SLICES, PLANE, 1]
    x_ptr = x + r[None, None, :] * ins + inner  # [SLICES, PLANE, ROWS]
    total = tl.zeros((SLICES, OUTS, ROWS), tl.float32)
    other = tl.zeros((SLICES, OUTS, ROWS), tl.float32)
    for first in range(start, stop, SLICES * PLANE):
        at = first * PLANES
        inside = ok
        if not WHOLE:
            inside = ok & ((first + slices * PLANE) < stop)[:, None]
        w_ok = inside[:, :, None]
        tile = tl.load(words + place + first, mask=w_ok, other=0, eviction_policy="evict_first")
        tops = tile
        if EXTRA:
            tops = tl.load(high + place + first, mask=w_ok, other=0, eviction_policy="evict_first").to(tl.int32)
        if GATED:
            pair = tl.load(words + other_place + first, mask=w_ok, other=0, eviction_policy="evict_first")
            pair_tops = pair
            if EXTRA:
                pair_tops = tl.load(high + other_place + first, mask=w_ok, other=0, eviction_policy="evict_first").to(
                    tl.int32
                )
        steps = at + slices * STEP  # [SLICES]
        for j in tl.static_range(PLANES):
            x_ok = r_in
            if not EVEN:
                x_ok = r_in & ((at + j * PLANE + inner) < ins)
            inputs = tl.load(x_ptr + at + j * PLANE, mask=x_ok, other=0.0)
            if j % SHARE == 0:
                scale, offset, one = _scale(
                    info, steps, columns, o, inside, j, BITS, EXTRA, PLANE, INFOS, SCALES, STEP, GROUP
                )
            block = _tile(tile, tops, scale, offset, one, j, BITS, EXTRA, SCALES)
            total = tl.dot(block.to(x.dtype.element_ty), inputs, total, input_precision=PRECISION)
            if GATED:
                if j % SHARE == 0:
                    up_scale, up_offset, up_one = _scale(
                        info, steps, columns, o + outs, inside, j, BITS, EXTRA, PLANE, INFOS, SCALES, STEP, GROUP
                    )
                block = _tile(pair, pair_tops, up_scale, up_offset, up_one, j, BITS, EXTRA, SCALES)
                other = tl.dot(block.to(x.dtype.element_ty), inputs, other, input_precision=PRECISION)
    sums = tl.sum(total, 0)  # [OUTS, ROWS]
    if GATED:
        steepness = sums
        if GELU:
            steepness = 1.5957691216057308 * (sums + 0.044715 * sums * sums * sums)
        sums = sums / (1.0 + tl.exp(-steepness)) * tl.sum(other, 0)
    target = out + tl.program_id(2).to(tl.int64) * rows * stride + r[None, :] * stride + column + o[:, None]
    tl.store(target, sums.to(out.dtype.element_ty), mask=(o < outs)[:, None] & (r < rows)[None, :])


def packed_product(
    x: Tensor, w: Packed, tiling: Tiling, out: Tensor, column: int = 0, gated: bool = False, activation: str = SILU
) -> None:
    """out[:, :, column : column + N] = parts of x wᵀ, for x [T, K] bfloat16 or float32 and out [S, T, ...] float32.

    gated: out [1, T, N / 2] = activation(gate) * up in x's type; w has the outputs of the gate, then those of `up`.
    """
    s, (rows, ins), outs = SCHEMES[w.kind], x.shape, w.outputs // (1 + gated)
    parts, group = out.shape[0], w.group or s.plane
    share = s.planes if group % s.step == 0 else group // s.plane if s.step % group == 0 else 1
    split = triton.cdiv(w.steps, parts)
    whole = w.steps % parts == 0 and split % tiling.slices == 0
    tile = next((n for n in ROW_TILES if n >= min(rows, tiling.rows)), ROW_TILES[-1])
    grid = (triton.cdiv(rows, tile), triton.cdiv(outs, tiling.outputs), parts)
    _packed[grid](
        x, w.words, w.words if w.high is None else w.high, w.info, out,
        rows, outs, ins, w.words.shape[1], split * s.plane, w.outputs, out.shape[2], column,
        SLICES=tiling.slices, OUTS=tiling.outputs, ROWS=tile, BITS=s.bits, EXTRA=s.extra, PLANE=s.plane,
        INFOS=s.infos, SCALES=s.scales, STEP=s.step, GROUP=group, SHARE=share,
        EVEN=whole and w.steps * s.step == ins, WHOLE=whole, GATED=gated, GELU=activation == GELU, PRECISION="ieee",
        num_warps=tiling.slices, num_stages=tiling.stages if tile < 32 else 2, maxnreg=tiling.registers,
    )  # fmt: skip


class PackedProduct:
    """y = x Wᵀ + b on a GPU, unsummed, of weights side by side that may be of several kinds."""

    exact = True  # rows do not depend on each other

    def __init__(self, weights: list[Packed | Tiled], bias: Tensor | None = None, order: Tensor | None = None) -> None:
        """order [K]: the inputs in the order in which the weights have them, if that is another one."""
        self.weights, self.bias, self.order = _merged(weights), bias, order
        self.in_features, self.out_features = weights[0].inputs, sum(w.outputs for w in weights)
        count = processors(weights[0].words.device)
        self.parts = splits(self.weights, count)
        self._slices = [_slices(w, count, self.parts) for w in self.weights]
        self._alone = _slices(self.weights[0], count, 1)  # where its parts are one, as those of a gate

    def __call__(self, x: Tensor) -> Parts:
        out = torch.empty((self.parts, x.shape[0], self.out_features), dtype=torch.float32, device=x.device)
        x, column = self._ordered(x), 0
        for w, slices in zip(self.weights, self._slices, strict=True):
            _multiply(x, w, out, slices, column)
            column += w.outputs
        return Parts(out, self.bias)

    def gated(self, x: Tensor, activation: str = SILU) -> Tensor:
        """activation(gate) * up [T, out / 2]: the first half of the outputs is the gate."""
        if self._fuses(activation):
            out = torch.empty((1, x.shape[0], self.out_features // 2), dtype=x.dtype, device=x.device)
            _multiply(self._ordered(x), self.weights[0], out, self._alone, 0, True, activation)
            return out[0]
        return activate(self(x), activation, True, x.dtype)

    def _fuses(self, activation: str | None) -> bool:
        """Whether one kernel computes a gate, its partner and this activation."""
        alone = self.bias is None and len(self.weights) == 1 and activation in (SILU, GELU)
        w = self.weights[0]
        return alone and (isinstance(w, Packed) or w.outputs % (2 * fields.TILE) == 0)

    def variants(self, activation: str | None) -> set[fields.Variant]:
        """The kernels that it needs, of those that are compiled at the start. activation: of a gate, if it is one."""
        found, gated = set(), self._fuses(activation)
        for w, slices in zip(self.weights, self._slices, strict=True):
            if isinstance(w, Tiled):
                shape = fields.Division(1, self._alone) if gated else fields.Division(self.parts, slices)
                tiles = (*fields.FEW, fields.MANY)
                found |= {fields.variant_for(w, rows, shape, gated, activation or SILU) for rows in tiles}
        return found

    def _ordered(self, x: Tensor) -> Tensor:
        return x if self.order is None else x[:, self.order].contiguous()


def _slices(w: Packed | Tiled, processors: int, parts: int) -> int:
    """Of each part of a sum, for `fields`."""
    return fields.division(w.words.shape[0], w.steps, processors, parts).slices if isinstance(w, Tiled) else 0


def _multiply(
    x: Tensor, w: Packed | Tiled, out: Tensor, slices: int, column: int, gated: bool = False, activation: str = SILU
) -> None:
    if isinstance(w, Tiled):
        fields.product(x, w, out, slices, column, gated, activation)
    else:
        packed_product(x, w, DEFAULT, out, column, gated, activation)


def _merged(weights: list[Packed | Tiled]) -> list[Packed | Tiled]:
    """Neighbours of one kind as one weight."""
    groups: list[list[Any]] = []
    each: Any
    for each in weights:
        joins = groups and type(groups[-1][0]) is type(each) and groups[-1][0].joins(each)
        groups[-1].append(each) if joins else groups.append([each])
    return [first.joined(*rest) if rest else first for first, *rest in groups]


def splits(weights: list[Packed | Tiled], processors: int) -> int:
    """As few parts of a sum as keep the memory busy, because the parts have to be added up."""
    packed = [w for w in weights if isinstance(w, Packed)]
    tiled = [w for w in weights if isinstance(w, Tiled)]
    most = [fields.division(w.words.shape[0], w.steps, processors).parts for w in tiled]
    if packed:
        tiles = sum(triton.cdiv(w.outputs, DEFAULT.outputs) for w in packed)
        steps = max(1, min(w.steps for w in packed) // (DEFAULT.slices * DEFAULT.steps))
        most.append(int(min(steps, triton.cdiv(int(DEFAULT.programs * processors), tiles))))
    return min(most)
