"""Layers in five kernels: the same numbers as in eight, which are those of float64; on a GPU the same bits.

Without a GPU the kernels run in triton's interpreter, whose sums have another order: where inputs are small integers
every order gives the same bits, and those are compared there too.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.backends import WHOLE, Part, ops
from outrider.backends.cuda import layers
from outrider.backends.cuda.kernels import attention, elementwise, fused
from outrider.backends.cuda.kernels.attention import Blocks
from outrider.backends.cuda.kernels.launching import begin
from outrider.backends.cuda.kernels.matmul import Parts, Tiling, product
from outrider.backends.rows import Rows
from outrider.backends.toy import RandomWeights
from outrider.backends.transformer import Transformer
from outrider.engine.cache import Cache
from outrider.models.config import GELU, RELU, SILU, ModelConfig

from support.kernels import DEVICE, GPU, HALF

ROWS = (1, 2, 8, 9, 16) if GPU else (1, 9)
CLOSE = {"rtol": 2e-2, "atol": 2e-2}  # in the interpreter
gpu_only = pytest.mark.skipif(not GPU, reason="a GPU's")


def whole_numbers(*shape: int) -> Tensor:
    return torch.randint(-3, 4, shape, device=DEVICE).to(HALF)


def drawn(*shape: int, dtype: torch.dtype = HALF) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def packed(x: Tensor) -> Tensor:
    """Rows in the order of `fused.packed_index`."""
    tiles, width = fused.tiles(x.shape[0]), x.shape[1]
    rows = torch.zeros(8 * tiles, width, dtype=x.dtype, device=x.device)
    rows[: x.shape[0]] = x
    parts = rows.view(tiles, 8, width // 32, 2, 4, 4)  # tile, row, inputs: 32, 16, 4, 1
    return parts.permute(2, 0, 1, 4, 3, 5).reshape(8 * tiles, width).contiguous()


def unpacked(x: Tensor, rows: int) -> Tensor:
    tiles, width = fused.tiles(rows), x.shape[1]
    parts = x.view(width // 32, tiles, 8, 4, 2, 4).permute(1, 2, 0, 4, 3, 5)
    return parts.reshape(8 * tiles, width)[:rows].contiguous()


def error(ours: Tensor, other: Tensor) -> float:
    return float((ours.double() - other.double()).norm() / other.double().norm().clamp(min=1e-30))


def same(ours: Tensor, other: Tensor, exactly: bool = False) -> bool:
    return torch.equal(ours, other) if exactly or GPU else torch.allclose(ours.float(), other.float(), **CLOSE)


@pytest.mark.parametrize(
    ("outs", "ins", "biased"),
    [(32, 576, True), *([(64, 192, False), (48, 1024, True), (4608, 2304, False)] if GPU else [])],
)
def test_a_product_added_to_the_stream(outs: int, ins: int, biased: bool) -> None:
    gain, slices = torch.full((outs,), 2.0, device=DEVICE), fused.slices(outs, ins)
    for make in (whole_numbers, drawn):
        w, bias = make(outs, ins), make(outs) if biased else None
        for rows in ROWS:
            x, stream = make(rows, ins), make(rows, outs).float()
            wide = stream.clone()
            out, squares = fused.added(packed(x), w, bias, slices, stream, gain)
            delta = Parts(product(x, w, Tiling(64, slices.parts)), bias)
            other, other_squares, _ = elementwise.add_gain(wide, delta, gain, 1e-5, HALF)
            exactly = make is whole_numbers
            assert same(stream, wide, exactly)
            assert same(unpacked(out, rows), other, exactly)
            assert same(squares / ins, other_squares / ins, exactly)
            summed = product(x, w, Tiling(64, slices.parts), summed=True)
            assert same(summed[0], Parts(delta.parts).total(), exactly)


@pytest.mark.parametrize(("outs", "ins", "activation"), [(32, 192, SILU), (32, 96, GELU)])
def test_gate_and_up(outs: int, ins: int, activation: str) -> None:
    w, gain = drawn(2 * outs, ins) / ins**0.5, torch.rand(ins, device=DEVICE)
    for rows in ROWS:
        stream = drawn(rows, ins, dtype=torch.float32)
        h, squares, scale = elementwise.add_gain(stream, None, gain, 1e-5, HALF)
        for slices in (fused.gate_slices(outs, ins), fused.gate_slices(1 << 16, ins)):
            ours = unpacked(fused.activated(packed(h), squares, 1e-5, w, slices, activation), rows)
            wide = product(h, w, Tiling(64, slices.parts), None, True, activation, scale)
            assert same(ours, wide)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(2, 1, 16), *([(3, 1, 64), (2, 2, 16), (4, 2, 128)] if GPU else [])]
)
def test_q_k_and_v(heads: int, kv_heads: int, dim: int, biased: bool) -> None:
    ins, outs = 128, (heads + 2 * kv_heads) * dim
    w, bias = drawn(outs, ins) / ins**0.5, drawn(outs) if biased else None
    angles = torch.rand(40, dim // 2, device=DEVICE)
    cos, sin, gain, slices = angles.cos(), angles.sin(), torch.rand(ins, device=DEVICE), fused.slices(outs, ins)
    for rows in ROWS:
        stream, positions = drawn(rows, ins, dtype=torch.float32), torch.randperm(40, device=DEVICE)[:rows]
        slots = torch.randperm(20, device=DEVICE)[:rows]
        h, squares, scale = elementwise.add_gain(stream, None, gain, 1e-5, HALF)
        planes = [torch.full((20, kv_heads, dim), float("nan"), device=DEVICE, dtype=HALF) for _ in range(4)]
        q = fused.rotated(packed(h), squares, 1e-5, w, bias, slices, cos, sin, positions, slots, *planes[:2], heads)
        parts = Parts(product(h, w, Tiling(64, slices.parts)), bias, scale)
        other = elementwise.rope_store(parts, cos[positions], sin[positions], *planes[2:], slots, heads, kv_heads)
        assert same(q, other)
        for ours, wide in zip(planes[:2], planes[2:], strict=True):
            assert same(ours[slots], wide[slots])
            assert torch.equal(ours.isnan(), wide.isnan()), "another slot was written"


# ------------------------------------------------------------ whole layers


CONFIG = ModelConfig(
    architecture="llama", vocab_size=48, hidden_size=32, intermediate_size=64, layers=2, heads=2, kv_heads=1,
    head_dim=16, norm_eps=1e-6, rope_theta=10_000.0, tied=False, context_length=128, eos_ids=frozenset({0}),
)  # fmt: skip


class Scene:
    """A small model and one sequence in the slots of its positions."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(ops, "on_gpu", lambda tensor: True)
        self.model = Transformer(CONFIG, RandomWeights(CONFIG, 1), HALF, DEVICE)
        assert layers.suits(self.model)
        self.fused = layers.FusedLayers(self.model)
        self.plane = Cache(64, 1, 64, DEVICE).add_plane(*self.model.plane_shape._replace(dtype=HALF))
        self.scratch = attention.Scratch(64, 2, 16, 64, DEVICE)
        self.tokens = torch.arange(40, device=DEVICE) * 7 % 48

    def run(self, sizes: list[int], fused: bool, part: Part = WHOLE, taps: tuple[int, ...] = ()) -> list[Tensor]:
        """Logits, K/V and tapped layers of passes of so many rows, one after the other."""
        self.model.fused = self.fused if fused else None
        found, hidden, start = [], [], 0
        for n in sizes:
            output = self.model.forward(self.rows(start, n), self.plane, part, taps=taps)
            found.append(output.logits)
            hidden += [output.hidden[layer] for layer in taps]
            start += n
        written = range(CONFIG.layers if part.stop is None else part.stop)
        planes = [plane[:start].clone() for i in written for plane in (self.plane.k[i], self.plane.v[i])]
        return [torch.cat(found), *planes, *([torch.cat(hidden)] if hidden else [])]

    def rows(self, start: int, count: int) -> Rows:
        table = torch.arange(64, dtype=torch.int32, device=DEVICE)[None]
        info = [[i, min(8, count - i), 0, 64, start + i + 1, 0, 0, 0] for i in range(0, count, 8)]
        tail = torch.zeros(len(info), 16, dtype=torch.int32, device=DEVICE)
        blocks = Blocks(torch.tensor(info, dtype=torch.int32, device=DEVICE), tail, table, self.scratch)
        at = torch.arange(start, start + count, device=DEVICE)
        want = torch.arange(count, device=DEVICE)
        return Rows(self.tokens[at].clone(), at, at.clone(), at, at, table, None, want, blocks=blocks)


def test_which_models_suit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "on_gpu", lambda tensor: True)

    def suits(dtype: torch.dtype = HALF, **changes: Any) -> bool:
        config = replace(CONFIG, **changes)
        return layers.suits(Transformer(config, RandomWeights(config, 1), dtype, DEVICE))

    assert suits()
    assert suits(activation=GELU)
    assert not suits(torch.float32)
    for changes in (
        {"hidden_size": 24}, {"head_dim": 24}, {"intermediate_size": 48}, {"rotary_dim": 8}, {"residual_scale": 0.5},
        {"no_rope_layers": frozenset({1})}, {"activation": RELU}, {"gated": False},
    ):  # fmt: skip
        assert not suits(**changes), changes
    assert layers.pays(replace(CONFIG, hidden_size=1536, intermediate_size=8960))
    assert not layers.pays(replace(CONFIG, hidden_size=4608, intermediate_size=13824))


def test_passes_of_fused_layers_are_those_of_separate_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch)
    sizes = [[40], [16, 8, 1, 15], [1] * 40] if GPU else [[17], [9, 8]]
    separate = scene.run(sizes[0], False)
    for each in sizes:
        for ours, other in zip(scene.run(each, True), separate, strict=True):
            assert error(ours, other) < 2e-2
    if GPU:  # the interpreter adds in other orders
        assert scene.fused.agrees()
        first, *others = (scene.run(each, True) for each in sizes)
        assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


@pytest.mark.slow
def test_parts_of_a_model_and_tapped_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch)
    for part in (Part(skip_mlp=frozenset({0})), Part(skip_attention=frozenset({1})), Part(stop=1, head=False)):
        tapped = (0,) if part.stop == 1 else (0, 1)
        for ours, other in zip(scene.run([2], True, part, tapped), scene.run([2], False, part, tapped), strict=True):
            assert error(ours, other) < 2e-2


# ------------------------------------------------------------ programmatic dependent launch


@triton.jit
def _late(source, target, n, BLOCK: tl.constexpr):  # noqa: N803
    """Lets the next kernel start, sleeps, and only then writes what it reads."""
    begin(True)
    i = tl.arange(0, BLOCK)
    tl.inline_asm_elementwise("nanosleep.u32 900000; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    value = tl.load(source + i, mask=i < n, other=0.0)
    tl.store(target + i, value, mask=i < n)


def late(source: Tensor, target: Tensor) -> None:
    """target = source, late, by a kernel after which others may start early."""
    torch.cuda.synchronize()
    launch: Any = _late[(1,)]
    launch(source, target, source.numel(), BLOCK=1024, launch_pdl=True)


@gpu_only
@pytest.mark.parametrize("kernel", ["rotated", "added", "activated"])
def test_no_product_reads_before_the_last_kernel_has_written(kernel: str) -> None:
    heads, dim, ins, outs = 2, 64, 128, 256
    angles, w, square = torch.rand(40, dim // 2, device=DEVICE), drawn(outs, ins) / 11, drawn(ins, ins)
    stream, gain, at = (
        drawn(4, ins, dtype=torch.float32),
        torch.rand(ins, device=DEVICE),
        torch.arange(4, device=DEVICE),
    )
    source, squares, _ = elementwise.add_gain(stream.clone(), None, gain, 1e-5, HALF, packs=True)
    planes = [torch.zeros(20, 1, dim, device=DEVICE, dtype=HALF) for _ in range(2)]

    total = torch.empty_like(stream)

    def run(x: Tensor) -> list[Tensor]:
        """The results, without the rows that only fill a tile."""
        if kernel == "rotated":
            tables, slices = (angles.cos(), angles.sin()), fused.slices(outs, ins)
            return [fused.rotated(x, squares, 1e-5, w, None, slices, *tables, at, at, *planes, heads), *planes]
        if kernel == "activated":
            return [unpacked(fused.activated(x, squares, 1e-5, w, fused.gate_slices(outs // 2, ins)), 4)]
        out, of_stream = fused.added(x, square, None, fused.slices(ins, ins), total, gain)
        return [unpacked(out, 4), of_stream, total]

    total.copy_(stream)
    expected = [each.clone() for each in run(source)]
    total.copy_(stream)  # not between the late kernel and the other: what is not its last result is read early
    target = torch.full_like(source, 3.0)
    late(source, target)
    assert all(torch.equal(ours, other) for ours, other in zip(run(target), expected, strict=True))


@gpu_only
@pytest.mark.parametrize("context", [40, 200])
def test_attention_does_not_read_keys_before_the_last_kernel_has_written_them(context: int) -> None:
    rows, heads, dim = 4, 2, 64
    k, v, q = drawn(256, 1, dim), drawn(256, 1, dim), drawn(rows, heads, dim)
    table = torch.arange(256, dtype=torch.int32, device=DEVICE)[None]
    info = torch.tensor([[0, rows, 0, 256, context - rows + 1, 0, 0, 0]], dtype=torch.int32, device=DEVICE)
    tail = torch.zeros(1, 16, dtype=torch.int32, device=DEVICE)
    blocks = Blocks(info, tail, table, attention.Scratch(16, heads, dim, 256, DEVICE))
    new = slice(context - rows, context)
    source = k[new].clone()
    expected = attention.attend(q, k, v, blocks, dim**-0.5).clone()
    k[new] = 7.0
    late(source, k[new])
    assert torch.equal(attention.attend(q, k, v, blocks, dim**-0.5), expected)
