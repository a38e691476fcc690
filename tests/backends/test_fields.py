"""Weights as `fields.cu` reads them: no bit is lost, and a sum is divided by the weight's shape alone.

The kernels themselves need a GPU; `values` reads a layout as they do, lane by lane.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from outrider.backends.cuda import nvrtc
from outrider.backends.cuda.kernels import fields
from outrider.backends.cuda.kernels.fields import BLOCK, KINDS, STEP, Tiled, division, tiled
from outrider.backends.cuda.kernels.launching import EARLY, LAUNCH
from outrider.backends.cuda.kernels.packed import PackedProduct
from outrider.backends.cuda.packing import _UNPACK, pack_blocks, pack_groups
from outrider.models.quantised import Grouped

from support.kernels import DEVICE, GPU
from support.random_blocks import floats, random_blocks

BLOCKS = tuple(kind for kind in KINDS if kind in _UNPACK)


def halves(words: Tensor) -> Tensor:
    """The low halves of words as float16."""
    return words.to(torch.int16).view(torch.float16).double()


def signed(words: Tensor) -> Tensor:
    return words.long() & 0xFFFFFFFF


def lane_fields(w: Tiled) -> Tensor:
    """[N, K], by the places that the source gives for the registers of each lane."""
    tiles, blocks = w.words.shape[:2]
    found = torch.zeros(tiles, 16, blocks, BLOCK, dtype=torch.long)
    words, high = signed(w.words), None if w.high is None else signed(w.high)
    for lane in range(32):
        for k in range(4):
            for i in range(4):
                for h in range(2):
                    field = (words[:, :, lane, k] >> (4 * i + 16 * h)) & 15
                    if w.kind == "Q5_K" and high is not None:
                        field |= ((high[:, :, lane, 0] >> (4 * k + i + 16 * h)) & 1) << 4
                    if w.kind == "Q6_K" and high is not None:
                        field |= ((high[:, :, lane, k // 2] >> (2 * (4 * (k % 2) + i) + 16 * h)) & 3) << 4
                    j, run = 2 * (i // 2) + h, lane % 4
                    at = 16 * k + 4 * run + j if w.each > 8 else 32 * (k // 2) + 8 * run + 4 * (k % 2) + j
                    found[:, lane // 4 + 8 * (i % 2), :, at] = field
    return found.flatten(2).flatten(0, 1)


def spread(w: Tiled, of_step: Tensor) -> Tensor:
    """[tiles, steps, 16, scales] -> [N, K]"""
    by_output = of_step.transpose(1, 2).flatten(0, 1).flatten(1)
    return by_output.repeat_interleave(STEP // w.each, 1)[:, : w.inputs]


def byte(words: Tensor, q: range) -> Tensor:
    """Bytes of words [..., 4]."""
    return torch.stack([(signed(words)[..., i // 4] >> (8 * (i % 4))) & 255 for i in q], -1).double()


def values(w: Tiled) -> Tensor:
    """[N, K] float64: the numbers that the kernel multiplies with."""
    q, s = lane_fields(w).double(), w.scales
    if w.kind in ("Q4_K", "Q5_K"):
        assert w.factors is not None
        scale = halves(w.factors)[..., None] * byte(s, range(8))
        least = -halves(w.factors >> 16)[..., None] * byte(s, range(8, 16))
        made = spread(w, scale) * q + spread(w, least)
    elif w.kind == "Q6_K":
        assert w.factors is not None
        made = spread(w, halves(w.factors)[..., None] * (byte(s, range(16)) - 128)) * (q - 32)
    elif w.kind == "Q4_0":
        made = spread(w, halves(torch.stack([s, s >> 16], -1).flatten(-2))) * (q - 8)
    elif w.kind == "Q4_1":
        made = spread(w, halves(s)) * q + spread(w, halves(s >> 16))
    else:
        scale = halves(s) if w.kind == "int4" else (s.int() << 16).view(torch.float32).double()
        made = spread(w, scale) * (q - spread(w, (signed(s) >> 16).double()))
    return made[: w.outputs]


def laid_out(kind: str, outputs: int, inputs: int) -> tuple[Tiled, Tensor]:
    """A random weight of GGUF's blocks, and its values by the gguf package."""
    from outrider.backends.cuda import packing

    raw = random_blocks(kind, outputs, inputs, outputs)
    blocks = raw.view(outputs, -1, packing._BLOCK[kind][1])
    parts, info = _UNPACK[kind](blocks)
    words = packing.SCHEMES[kind]
    steps = -(-inputs // words.step)
    info = torch.nn.functional.pad(info.flatten(1), (0, 4 * steps * words.infos - info.flatten(1).shape[1]))
    return tiled(kind, parts.flatten(1), info.contiguous().view(torch.int32)), floats(raw, kind).double()


@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize("outputs", [16, 37])
def test_blocks_keep_every_number(kind: str, outputs: int) -> None:
    inputs = 320 if kind in ("Q4_0", "Q4_1") else 512  # 320: the last step is not whole
    w, exact = laid_out(kind, outputs, inputs)
    torch.testing.assert_close(values(w), exact, rtol=2e-7, atol=1e-9)  # the package's own arithmetic is in float32


@pytest.mark.parametrize(("group", "each"), [(32, 8), (64, 4), (128, 2), (256, 1), (512, 1)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_groups_keep_every_number(group: int, each: int, dtype: torch.dtype) -> None:
    dice = torch.Generator().manual_seed(group)
    drawn = torch.randint(0, 16, (40, 512), generator=dice, dtype=torch.uint8)
    scale = torch.rand((40, 512 // group), generator=dice).to(dtype)
    zero = torch.randint(0, 16, scale.shape, generator=dice)
    word = (scale.view(torch.int16).int() & 0xFFFF) | (zero.int() << 16)
    w = tiled("int4" if dtype == torch.float16 else "int4b", drawn, word, group)
    assert w.each == each
    expected = Grouped(drawn, scale, zero, group, 4).floats(torch.float64)
    torch.testing.assert_close(values(w), expected, rtol=0, atol=0)


def test_weights_side_by_side_are_one() -> None:
    first, second = (laid_out("Q4_K", n, 256) for n in (32, 16))
    both = first[0].joined(second[0])
    assert both.outputs == 48
    torch.testing.assert_close(values(both), torch.cat([values(first[0]), values(second[0])]))
    assert not laid_out("Q4_K", 37, 256)[0].joins(first[0])  # a tile cannot have outputs of two weights


@given(st.integers(1, 10_000), st.integers(1, 400), st.integers(1, 200))
def test_a_division_covers_every_step_once(tiles: int, steps: int, processors: int) -> None:
    shape = division(tiles, steps, processors)
    split = -(-steps // shape.parts)
    taken = [
        part * split + step
        for part in range(shape.parts)
        for slice_ in range(shape.slices)
        for step in range(slice_, min(split, steps - part * split), shape.slices)
    ]
    assert sorted(taken) == list(range(steps))
    assert 1 <= shape.slices <= 8
    assert division(tiles, steps, processors, shape.parts).parts == shape.parts


def test_what_has_no_layout() -> None:
    assert all((fields.fits("Q4_K", 256), fields.fits("int4", 512, 128), fields.fits("int4", 512, 512)))
    assert not fields.fits("Q8_0", 256)
    assert not fields.fits("Q4_0", 96)  # no whole block of 64
    assert not fields.fits("int4", 576, 96)


def test_kernels_are_compiled_on_gpus_alone() -> None:
    assert not nvrtc.available(torch.device("cpu"))
    w, _ = laid_out("Q4_0", 16, 256)
    assert not isinstance(pack_blocks(random_blocks("Q4_0", 16, 256, 1), "Q4_0"), Tiled)
    options = fields.variant_for(w, 3, division(1, 1, 132), False, "silu").options
    assert {"-DKIND=0", "-DNT=1", "-DSLICES=1"} <= set(options)


# ------------------------------------------------------------ on a GPU


def weight(kind: str, outputs: int, inputs: int) -> tuple[Any, Tensor]:
    if kind in BLOCKS:
        raw = random_blocks(kind, outputs, inputs, 5)
        return pack_blocks(raw.to(DEVICE), kind), floats(raw, kind).double()
    drawn = torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8)
    scale = (torch.rand(outputs, inputs // 128) * 0.05 + 0.01).to(torch.float16 if kind == "int4" else torch.bfloat16)
    grouped = Grouped(drawn, scale, torch.randint(0, 16, scale.shape), 128, 4)
    return pack_groups(grouped.to(torch.device(DEVICE))), grouped.floats(torch.float64)


@pytest.mark.skipif(not GPU, reason="the kernels are CUDA C++")
@pytest.mark.parametrize("kind", KINDS)
def test_products_are_exact_and_rows_do_not_depend_on_each_other(kind: str) -> None:
    w, exact = weight(kind, 96, 1792)
    assert isinstance(w, Tiled)
    product, x = PackedProduct([w]), torch.randn(130, 1792, device=DEVICE).bfloat16()
    expected = x.double().cpu() @ exact.T
    error = (product(x).total().double().cpu() - expected).norm() / expected.norm()
    assert error < 1e-6
    for work in (lambda rows: product(rows).total(), product.gated):
        for n in (1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 33, 64, 65):
            assert torch.equal(work(x[40 : 40 + n].contiguous()), work(x)[40 : 40 + n])
    gate, up = expected.chunk(2, 1)
    gated = product.gated(x).double().cpu()
    assert (gated - gate * torch.sigmoid(gate) * up).norm() < 5e-3 * gated.norm()


@pytest.mark.skipif(not GPU, reason="the kernels are CUDA C++")
def test_a_kernel_that_starts_early_waits_for_its_rows() -> None:
    """A chain of products in a graph, each of which reads what the one before it wrote."""
    w, _ = weight("Q4_K", 2048, 2048)
    product = PackedProduct([w])
    x = torch.randn(3, 2048, device=DEVICE).bfloat16()

    def chain(early: frozenset[str]) -> Tensor:
        LAUNCH.early = early
        h = x
        for _ in range(24):
            h = torch.nn.functional.normalize(product(h).total()).bfloat16()
        return h

    try:
        expected = chain(frozenset())
        chain(EARLY)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            recorded = chain(EARLY)
        for _ in range(50):
            graph.replay()
            assert torch.equal(recorded, expected)
    finally:
        LAUNCH.early = EARLY
