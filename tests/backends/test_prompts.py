"""Kernels for prompts: many rows have the bits of a few, in products and in attention.

Without a GPU they run in triton's interpreter, with sums in the order of tensor cores.
"""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from outrider.backends.cuda.kernels import attention, matmul, wide
from outrider.backends.cuda.kernels.attention import Blocks, Scratch
from outrider.backends.cuda.kernels.matmul import Tiling
from outrider.backends.cuda.kernels.wide import Tiles
from outrider.models.config import GELU, SILU

from support.kernels import DEVICE, GPU, HALF, ordered_products as ordered_products

pytestmark = pytest.mark.usefixtures("ordered_products")


def normal(*shape: int, dtype: torch.dtype = HALF) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


# ------------------------------------------------------------ products


def wide_parts(x: Tensor, w: Tensor, splits: int, tiles: Tiles, **more: object) -> Tensor:
    return wide.wide_product(x, w, splits, matmul.split_of(x.shape[1], splits), tiles, **more)  # type: ignore[arg-type]


KINDS = [Tiles(64, 64, warps=4), Tiles(64, 64, False, warps=4), Tiles(128, 128, registers=128)]


@pytest.mark.parametrize("tiles", KINDS, ids=["added", "parts", "large"])
@pytest.mark.parametrize(("rows", "outs", "ins", "splits"), [(70, 72, 192, 3), (130, 128, 136, 2), (64, 64, 64, 1)])
def test_a_product_of_many_rows_has_the_bits_of_a_few(
    rows: int, outs: int, ins: int, splits: int, tiles: Tiles
) -> None:
    x, w = normal(rows, ins), normal(outs, ins)
    many = matmul.Parts(wide_parts(x, w, splits, tiles)).total()
    for start in (0, rows - 16):
        few = matmul.product(x[start : start + 16].contiguous(), w, Tiling(64, splits))
        assert torch.equal(matmul.Parts(few).total(), many[start : start + 16])


@pytest.mark.parametrize("activation", [SILU, GELU])
def test_a_gated_product_of_many_rows_has_the_bits_of_a_few(activation: str) -> None:
    x, w = normal(70, 136), normal(2 * 72, 136)
    many = wide_parts(x, w, 1, Tiles(64, 64, warps=4), gated=True, activation=activation)
    few = matmul.product(x[50:].contiguous(), w, Tiling(64, 1), None, True, activation)
    assert torch.equal(few, many[50:])


def test_eight_bits_of_many_rows() -> None:
    x, scale = normal(70, 128), torch.rand(64, device=DEVICE) + 0.5
    w = torch.randint(-127, 128, (64, 128), dtype=torch.int8, device=DEVICE)
    many = wide_parts(x, w, 2, Tiles(64, 64, warps=4), scale=scale)[0]
    few = matmul.Parts(matmul.product(x[:16].contiguous(), w, Tiling(64, 2), scale)).total()
    assert torch.equal(few, many[:16])


@pytest.mark.parametrize("gated", [False, True])
def test_a_layer_chooses_its_tiles_by_the_rows(gated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many rows take the large tiles, and have the bits of a few, which do not."""
    chosen: list[int] = []

    def tiles_for(x: Tensor, w: Tensor, splits: int, gated: bool, processors: int) -> Tiles | None:
        chosen.append(x.shape[0])
        return None if x.shape[0] < 64 else Tiles(64, 64, warps=4)

    monkeypatch.setattr(matmul, "tiles_for", tiles_for)
    monkeypatch.setattr(matmul, "many_rows_are_exact", lambda device: True)
    layer, x = matmul.Product(normal(64, 320)), normal(70, 320)
    assert layer.tiling.splits > 1
    few, many = (layer.gated(rows) if gated else layer(rows).total() for rows in (x[:4].contiguous(), x))
    assert chosen == [4, 70]
    assert torch.equal(few, many[:4])


@pytest.mark.skipif(not GPU, reason="needs a GPU")
def test_large_tiles_are_exact_on_this_gpu() -> None:
    assert matmul.many_rows_are_exact(torch.device("cuda", 0))


def test_which_products_have_large_tiles() -> None:
    x, w = normal(300, 128), normal(64, 128)
    if GPU:
        assert wide.tiles_for(x, w, 1, False, 8) is not None
        assert wide.tiles_for(x.float(), w.float(), 1, False, 8) is None
        assert wide.tiles_for(x[:, :100].contiguous(), w[:, :100].contiguous(), 1, False, 8) is None  # not aligned
    assert wide.tiles_for(x[:100], w, 1, False, 8) is None


# ------------------------------------------------------------ attention


class Prompts:
    """Sequences in scattered slots of poisoned planes; of each the last rows are computed."""

    def __init__(self, seed: int, shape: tuple[int, int, int], sizes: list[tuple[int, int]]) -> None:
        """sizes: rows and context of each sequence."""
        torch.manual_seed(seed)
        (self.heads, kv_heads, self.dim), free = shape, random.Random(seed).sample(range(900), 900)
        self.table = torch.full((len(sizes), 512), 1_000_000_000, dtype=torch.int32)  # an invalid slot
        self.per_block = attention.rows_per_block(self.heads, kv_heads)
        self.info: list[list[int]] = []
        self.k, self.v = (torch.full((900, kv_heads, self.dim), float("nan")).to(HALF) for _ in range(2))
        first = 0
        for line, (rows, context) in enumerate(sizes):
            slots = [free.pop() for _ in range(context)]
            self.table[line, :context] = torch.tensor(slots, dtype=torch.int32)
            for plane in (self.k, self.v):
                plane[slots] = torch.randn(context, kv_heads, self.dim).to(HALF)
            self.info += self.blocks(line, first, rows, context)
            first += rows
        self.q = torch.randn(first, self.heads, self.dim).to(HALF)

    def blocks(self, line: int, first: int, rows: int, context: int) -> list[list[int]]:
        starts = range(0, rows, self.per_block)
        sizes = [(i, min(self.per_block, rows - i)) for i in starts]
        return [[first + i, n, line, 512, context - rows + i + 1, 0, 0, 0] for i, n in sizes]

    def run(self, prompts: bool, window: int = 0, sinks: Tensor | None = None) -> Tensor:
        info = torch.tensor(self.info + 3 * [[0] * 8], dtype=torch.int32, device=DEVICE)
        tail = torch.full((1, 1), 1_000_000_000, dtype=torch.int32, device=DEVICE)
        kept = Scratch(8, self.heads, self.dim, 512, DEVICE)
        blocks = Blocks(info, tail, self.table.to(DEVICE), kept, prompts=prompts)
        planes = (self.q.to(DEVICE), self.k.to(DEVICE), self.v.to(DEVICE))
        out = attention.attend(*planes, blocks, self.dim**-0.5, window, 0.0, sinks)
        assert not kept.finished.any()
        return out


SCENES = [  # heads, key heads, dimension; rows and context of each sequence
    ((8, 1, 16), [(1, 130), (1, 5), (26, 150), (4, 4)]),  # decoding beside two prompts, of which one has just begun
    ((9, 3, 64), [(1, 400), (300, 420), (7, 300)]),
    ((4, 2, 32), [(64, 300)]),
]


@pytest.mark.parametrize(("shape", "sizes"), SCENES if GPU else SCENES[:1])
@pytest.mark.parametrize("window", [0, 40])
def test_a_prompts_tile_has_the_bits_of_single_blocks(
    shape: tuple[int, int, int], sizes: list[tuple[int, int]], window: int
) -> None:
    scene = Prompts(1, shape, sizes)
    sinks = torch.linspace(-2, 3, shape[0], device=DEVICE) if window else None
    many = scene.run(True, window, sinks)
    assert not bool(many.isnan().any())
    assert torch.equal(many, scene.run(False, window, sinks))


def test_tiles_take_what_they_can(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows of a prompt's aligned blocks; not those of decoding sequences, nor of groups of several sequences."""
    monkeypatch.setattr(attention, "tile_of", lambda dim, memory: attention.Tile(128, 4, 1))
    scene = Prompts(2, (8, 1, 16), [(2, 40), (36, 90), (1, 3)])  # two rows in a block, eight blocks in a tile
    alike = scene.run(False)

    class Nothing:
        def __getitem__(self, grid: object) -> object:
            return lambda *given, **constants: None

    monkeypatch.setattr(attention, "_attend", Nothing())
    monkeypatch.setattr(torch, "empty", lambda shape, **how: torch.full(shape, 7.0, **how))
    many = scene.run(True)
    computed = (many != 7.0).any(1)
    assert computed.tolist() == [False] * 16 + [True] * 16 + [False] * 7
    assert torch.equal(many[computed], alike[computed])
