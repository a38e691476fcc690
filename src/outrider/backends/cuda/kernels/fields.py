"""Weights of four to six bits laid out for `fields.cu`, and their products.

Promise: the layout loses no bit: fields, scales, minima and zero points are the file's own. A row's result is the same
bits in a pass of one row and in a pass of hundreds: how a sum is divided depends on the weight's shape alone. It knows
weights and rows; it does not know layers.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from ....models.config import GELU, SILU
from .. import nvrtc
from .launching import launch_options

KINDS = ("Q4_0", "Q4_1", "Q4_K", "Q5_K", "Q6_K", "int4", "int4b")  # in the order of the source's own
EXTRA = {"Q5_K": 1, "Q6_K": 2}  # bits of a field beyond four
TILE, BLOCK, STEP = 16, 64, 256  # outputs of a tile; inputs of a block and of a step
SLICES = (8, 7, 6, 5, 4)  # of a part of a sum: as many as warps that keep the memory busy
FEW, MANY = (8, 16), 32  # rows of a tile; of one whose warps share the rows
WARPS = 4  # of a program that shares its rows
THREE = 6  # the most warps of which three programs fit
PITCH = 36 * 16  # bytes between two rows in shared memory


@dataclass(frozen=True)
class Tiled:
    """One weight [N, K] as the kernel reads it. Outputs are padded to whole tiles with scales of zero."""

    kind: str
    words: Tensor  # [tiles, blocks, 32 lanes, 4] int32: a tile's fields of 16 inputs each
    high: Tensor | None  # [tiles, blocks, 32 lanes, EXTRA] int32
    scales: Tensor  # [tiles, steps, 16, words] int32
    factors: Tensor | None  # [tiles, steps, 16] int32, of nested scales
    outputs: int
    each: int  # scales of a step

    @property
    def inputs(self) -> int:
        return self.words.shape[1] * BLOCK

    @property
    def steps(self) -> int:
        return self.scales.shape[1]

    def joins(self, other: Tiled) -> bool:
        """Whether both can be one weight with the outputs of both."""
        alike = (self.kind, self.inputs, self.each) == (other.kind, other.inputs, other.each)
        return alike and self.outputs % TILE == 0

    def joined(self, *others: Tiled) -> Tiled:
        every = [self, *others]

        def cat(parts: list[Tensor | None]) -> Tensor | None:
            return None if parts[0] is None else torch.cat([part for part in parts if part is not None])

        high, factors = cat([one.high for one in every]), cat([one.factors for one in every])
        words, scales = torch.cat([one.words for one in every]), torch.cat([one.scales for one in every])
        return Tiled(self.kind, words, high, scales, factors, sum(one.outputs for one in every), self.each)


def fits(kind: str, inputs: int, group: int = 0) -> bool:
    """Whether there is a layout for a weight. group: inputs that share a scale, for int4."""
    if kind not in KINDS or inputs % BLOCK:
        return False
    return not kind.startswith("int4") or (group % STEP == 0 or (STEP % group == 0 and group >= 32))


def tiled(kind: str, fields: Tensor, info: Tensor, group: int = 0) -> Tiled:
    """fields [N, K] uint8; info [N, words] int32 as in `packing`: of every step, or of every group."""
    outputs, inputs = fields.shape
    steps, more = -(-inputs // STEP), -outputs % TILE
    scales, factors, each = _scales(kind, info, steps, group)
    fields = F.pad(fields, (0, 0, 0, more)).view(-1, TILE, inputs // BLOCK, BLOCK)
    places, shifts = _lanes(kind, fields.device)
    lanes = fields.transpose(1, 2).flatten(2)[:, :, places].unflatten(2, (32, 4, 8))  # [tiles, blocks, 32, 4, 8]
    low = torch.zeros(lanes.shape[:-1], dtype=torch.int32, device=fields.device)
    for i in range(8):
        low |= (lanes[..., i].int() & 15) << int(shifts[i])
    high, extra = None, EXTRA.get(kind, 0)
    if extra:
        each_word = 4 // extra  # instructions whose high bits share a word
        high = torch.zeros((*lanes.shape[:3], extra), dtype=torch.int32, device=fields.device)
        for k in range(4):
            for i in range(8):
                at = extra * (4 * (k % each_word) + i % 4) + 16 * (i // 4)
                high[..., k // each_word] |= (lanes[..., k, i].int() >> 4) << at
    outer = None if factors is None else _padded(factors, more)
    return Tiled(kind, low, high, _padded(scales, more), outer, outputs, each)


def _padded(words: Tensor, more: int) -> Tensor:
    """[N, steps, ...] -> [tiles, steps, 16, ...]"""
    words = torch.cat([words, words.new_zeros((more, *words.shape[1:]))])
    return words.view(-1, TILE, *words.shape[1:]).transpose(1, 2).contiguous()


def _scales(kind: str, info: Tensor, steps: int, group: int) -> tuple[Tensor, Tensor | None, int]:
    """Words of scales [N, steps, words], of their scales [N, steps], and scales of a step."""
    if kind in ("Q4_K", "Q5_K"):
        words = info.unflatten(1, (steps, 5))
        return words[:, :, 1:].contiguous(), words[:, :, 0].contiguous(), 8
    if kind == "Q6_K":  # two halves of a step, each with the scale of scales
        words = info.unflatten(1, (steps, 2, 3))
        return words[:, :, :, 1:].flatten(2).contiguous(), words[:, :, 0, 0].contiguous(), 16
    if kind in ("Q4_0", "Q4_1"):
        return info.unflatten(1, (steps, -1)).contiguous(), None, 8
    each = max(STEP // group, 1)
    if group > STEP:
        info = info.repeat_interleave(group // STEP, 1)
    info = F.pad(info, (0, max(0, steps * each - info.shape[1])))[:, : steps * each]
    return info.unflatten(1, (steps, each)).contiguous(), None, each


@cache
def _lanes(kind: str, device: torch.device) -> tuple[Tensor, list[int]]:
    """Where in a block [16 outputs, 64 inputs] the fields of each lane's four words are, and their shifts in a word."""
    lane = torch.arange(32, device=device)[:, None, None]
    k = torch.arange(4, device=device)[:, None]
    i = torch.arange(8, device=device)
    output = lane // 4 + 8 * (i % 2)
    j = 2 * (i % 4 // 2) + i // 4
    if kind == "Q6_K":  # a scale for every 16 inputs
        place = 16 * k + 4 * (lane % 4) + j
    else:
        place = 32 * (k // 2) + 8 * (lane % 4) + 4 * (k % 2) + j
    return (output * BLOCK + place).flatten(), [4 * (i % 4) + 16 * (i // 4) for i in range(8)]


# ------------------------------------------------------------ products


@dataclass(frozen=True)
class Division:
    """How a sum over the inputs is divided: into parts, and these into slices. It depends on a weight's shape alone."""

    parts: int
    slices: int


def division(tiles: int, steps: int, processors: int, parts: int | None = None) -> Division:
    """As few parts as give every processor work, because parts have to be added up; slices that leave no warp idle."""
    wanted = max(1, min(-(-3 * processors // tiles), steps // 6))  # a program has two tiles
    choices = [parts] if parts else range(wanted, min(wanted + 2, max(1, steps // 6)) + 1)
    shapes = [Division(n, slices) for n in choices for slices in (*SLICES, min(-(-steps // n), SLICES[0]))]

    def taken(shape: Division) -> int:
        """Steps that all warps wait for."""
        split = -(-steps // shape.parts)
        return shape.parts * -(-split // shape.slices) * shape.slices

    return min(shapes, key=lambda shape: (taken(shape), shape.parts, -shape.slices))


@dataclass(frozen=True)
class Variant:
    """What a kernel is compiled for."""

    kind: str
    each: int
    rows: int  # of its tile
    slices: int
    whole: bool
    gated: bool = False
    gelu: bool = False
    warps: int = 0  # of `fields_many`; 0: `fields_few`

    @property
    def name(self) -> str:
        return "fields_many" if self.warps else "fields_few"

    @property
    def options(self) -> tuple[str, ...]:
        values = {
            "KIND": KINDS.index(self.kind), "SCALES": self.each, "NT": self.rows // 8, "SLICES": self.slices,
            "WHOLE": int(self.whole), "GATED": int(self.gated), "GELU": int(self.gelu),
            "BLOCKS": self.programs,
        }  # fmt: skip
        values |= {"WARPS": self.warps} if self.warps else {}
        return tuple(f"-D{name}={value}" for name, value in values.items())

    @property
    def programs(self) -> int:
        """On a processor: as many as have registers there without spilling them."""
        if self.warps:
            return 1
        small = self.kind.startswith("int4") and self.each <= 2 and self.rows == FEW[0] and self.slices <= THREE
        return 3 if small else 2

    @property
    def shared(self) -> int:
        """Bytes of shared memory: two steps of rows."""
        return 2 * self.rows * PITCH if self.warps else 0


def variant_for(w: Tiled, rows: int, shape: Division, gated: bool, activation: str) -> Variant:
    """The kernel for so many rows. All of them give a row the same bits."""
    few = next((n for n in FEW if n >= rows), None)
    whole, gelu = w.words.shape[1] * BLOCK % STEP == 0, gated and activation == GELU
    return Variant(w.kind, w.each, few or MANY, shape.slices, whole, gated, gelu, warps=0 if few else WARPS)


@cache
def source() -> str:
    return nvrtc.source(Path(__file__).with_suffix(".cu"))


def compiled(variant: Variant, device: torch.device) -> nvrtc.Kernel:
    return nvrtc.kernel(source(), variant.name, variant.options, device, variant.shared)


def product(
    x: Tensor, w: Tiled, out: Tensor, slices: int, column: int = 0, gated: bool = False, activation: str = SILU
) -> None:
    """out[:, :, column : column + N] = parts of x wᵀ, for x [T, K] bfloat16 and out [S, T, ...] float32.

    gated: out [1, T, N / 2] = activation(gate) * up in bfloat16; w has the outputs of the gate, then those of `up`.
    """
    shape = Division(out.shape[0], slices)
    launch(variant_for(w, x.shape[0], shape, gated, activation), x, w, out, column)


def launch(variant: Variant, x: Tensor, w: Tiled, out: Tensor, column: int) -> None:
    rows, (parts, _, stride), tiles = x.shape[0], out.shape, w.words.shape[0]
    groups = -(-tiles // (2 * max(variant.warps, 1)))  # a warp has two tiles
    none, outs = w.words, w.outputs // (1 + variant.gated)
    compiled(variant, x.device)(
        (-(-rows // variant.rows), groups, parts), 32 * (variant.warps or variant.slices),
        [w.words, none if w.high is None else w.high, w.scales, none if w.factors is None else w.factors,
         x, out, rows, outs, tiles, w.words.shape[1], -(-w.steps // parts), stride, column],
        early="launch_pdl" in launch_options("product", rows),
    )  # fmt: skip


def prepare(variants: set[Variant], device: torch.device) -> None:
    """Compile these kernels, several at once."""
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda each: nvrtc.cubin(source(), each.options, nvrtc.architecture(device)), variants))
