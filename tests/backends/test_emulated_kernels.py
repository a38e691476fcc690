"""Kernels in CUDA C++, run on a CPU: the right numbers, and a row's own, whatever else is in the pass."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.backends.cuda import layers, packing
from outrider.backends.cuda.kernels import attend_few, attention, elementwise, fields, fused
from outrider.backends.cuda.kernels.attention import Blocks, Scratch
from outrider.backends.cuda.kernels.fields import Normed, Tiled
from outrider.backends.cuda.kernels.packed import PackedProduct
from outrider.backends.rows import Rows
from outrider.engine.cache import Cache
from outrider.models.config import SILU, ModelConfig
from outrider.models.quantised import Grouped

from support import cuda_threads
from support.kernels import GPU

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(GPU or not cuda_threads.available(), reason="a C++ compiler's, without a GPU"),
]
EPS = 1e-6


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("emulated")


@pytest.fixture(autouse=True)
def _emulated(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Instead of NVRTC's kernels."""

    def of_fields(variant: fields.Variant, device: torch.device) -> cuda_threads.Kernel:
        return cuda_threads.kernel(folder, "fields.cu", variant.name, variant.options)

    def of_attention(shape: attend_few.Heads, tiles: int, device: torch.device) -> cuda_threads.Kernel:
        return cuda_threads.kernel(folder, "attend_few.cu", "attend", shape.options(tiles), 2 * shape.dim)

    monkeypatch.setattr(fields, "compiled", of_fields)
    monkeypatch.setattr(attend_few, "compiled", of_attention)
    torch.manual_seed(1)


def weight(kind: str, outputs: int, inputs: int) -> tuple[Tiled, Tensor]:
    """A random weight and its values."""
    if kind == "int4":
        drawn = torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8)
        scale, zero = (torch.rand(outputs, inputs // 128) * 0.05 + 0.01).half(), torch.full((outputs, inputs // 128), 7)
        info = (scale.view(torch.int16).int() & 0xFFFF) | (zero.int() << 16)
        return fields.tiled(kind, drawn, info, 128), Grouped(drawn, scale, zero, 128, 4).floats(torch.float64)
    raw = torch.randint(0, 256, (outputs, inputs // 256, 144), dtype=torch.uint8)
    raw[..., :4] = (torch.rand(outputs, inputs // 256, 2) * 1e-3).half().view(torch.uint8)
    parts, info = packing._UNPACK[kind](raw)
    made = fields.tiled(kind, parts.flatten(1), info.flatten(1).contiguous().view(torch.int32))
    both, info = raw[..., :4].view(torch.float16).double(), info.double()
    scales, least = (info[..., 4:12] * both[..., :1]), info[..., 12:20] * both[..., 1:]  # [N, U, 8]
    values = parts.double().view(*scales.shape, 32) * scales[..., None] - least[..., None]
    return made, values.view(outputs, inputs)


def slices(w: Tiled) -> int:
    return fields.whole(w.words.shape[0], w.steps, 8)


def squares_of(stream: Tensor) -> Tensor:
    """Sums of sixteen squares, neighbours first, as the kernels add them."""
    return tree((stream * stream).unflatten(1, (-1, 16)))


def tree(x: Tensor) -> Tensor:
    while x.shape[-1] > 1:
        x = x[..., ::2] + x[..., 1::2]
    return x[..., 0].contiguous()


def scale_of(squares: Tensor) -> Tensor:
    """1 / rms of each row, in the kernels' order."""
    groups = torch.nn.functional.pad(squares, (0, -squares.shape[1] % 16)).unflatten(1, (-1, 16))
    total = groups[:, 0]
    for i in range(1, groups.shape[1]):
        total = total + groups[:, i]
    return (1 / (tree(total) / (16 * squares.shape[1]) + EPS).sqrt()).contiguous()


def normed(rows: int, width: int) -> Normed:
    stream = torch.randn(rows, width)
    squares = squares_of(stream)
    return Normed((stream * (torch.rand(width) + 0.5)).bfloat16(), squares, scale_of(squares), EPS)


def some(x: Normed, first: int, end: int) -> Normed:
    scale = None if x.scale is None else x.scale[first:end]
    return Normed(x.h[first:end].contiguous(), x.squares[first:end].contiguous(), scale, x.eps)


def error(ours: Tensor, exact: Tensor) -> float:
    return float((ours.double() - exact.double()).norm() / exact.double().norm())


def alike(x: Normed, work: Callable[[Normed], Tensor]) -> Tensor:
    """The result for all rows, each of which has the same bits in smaller passes."""
    whole = work(x)
    assert torch.equal(torch.cat([work(some(x, 0, 1)), work(some(x, 1, 10)), work(some(x, 10, 20))]), whole)
    return whole


@pytest.mark.parametrize("kind", ["int4", "Q4_K"])
def test_gate_and_up_of_rows_that_are_not_normed_yet(kind: str) -> None:
    (w, values), x = weight(kind, 64, 768), normed(20, 768)
    assert x.scale is not None
    gate, up = ((x.h.double() @ values.T) * x.scale.double()[:, None]).chunk(2, 1)
    ours = alike(x, lambda rows: fields.gated(rows, w, slices(w), SILU))
    assert error(ours, torch.nn.functional.silu(gate) * up) < 4e-3


@pytest.mark.parametrize("biased", [False, True])
def test_a_product_added_to_the_stream(biased: bool) -> None:
    (w, values), x = weight("int4", 48, 512), torch.randn(11, 512).bfloat16()
    bias, gain, stream = torch.randn(48) if biased else None, torch.rand(48) + 0.5, torch.randn(11, 48)
    sums = torch.empty(1, 11, 48)
    fields.product(x, w, sums, slices(w))
    assert error(sums[0], x.double() @ values.T) < 1e-6
    expected = stream + (sums[0] if bias is None else sums[0] + bias)
    for rows in (3, 11):
        own = stream[:rows].clone()
        out, squares = fields.added(x[:rows].contiguous(), w, slices(w), bias, own, gain)
        assert torch.equal(own, expected[:rows])
        assert torch.equal(out, (own * gain).bfloat16())
        assert torch.equal(squares, squares_of(own))


@pytest.mark.parametrize("biased", [False, True])
def test_q_k_and_v_go_to_their_places(biased: bool) -> None:
    heads, kv_heads, dim = 2, 1, 64
    (w, _), x = weight("int4", (heads + 2 * kv_heads) * dim, 256), normed(11, 256)
    assert x.scale is not None
    bias = torch.randn(w.outputs) if biased else None
    angles, positions, slots = torch.rand(40, dim // 2), torch.randperm(40)[:11], torch.randperm(30)[:11]
    sums = torch.empty(1, 11, w.outputs)
    fields.product(x.h, w, sums, slices(w))
    values = sums[0] * x.scale[:, None]
    values = (values if bias is None else values + bias).view(11, -1, dim)
    c, s = angles.cos()[positions][:, None], angles.sin()[positions][:, None]
    first, second = values.chunk(2, -1)
    turned = torch.cat([first * c + (-second) * s, second * c + first * s], -1).bfloat16()
    for rows in (2, 11):
        planes = tuple(torch.full((30, kv_heads, dim), 7.0).bfloat16() for _ in range(2))
        q = torch.empty(rows, heads, dim).bfloat16()
        places, ropes = (positions[:rows], slots[:rows]), (angles.cos(), angles.sin())
        fields.rotated(some(x, 0, rows), w, slices(w), bias, ropes, places, (planes[0], planes[1]), q, 0)
        assert torch.equal(q, turned[:rows, :heads])
        assert torch.equal(planes[0][slots[:rows]], turned[:rows, heads : heads + kv_heads])
        assert torch.equal(planes[1][slots[:rows]], values[:rows, heads + kv_heads :].bfloat16())
        assert int((planes[0] != 7.0).any(-1).sum()) == rows * kv_heads, "another slot was written"


# ------------------------------------------------------------ whole layers

CONFIG = ModelConfig(
    architecture="llama", vocab_size=48, hidden_size=512, intermediate_size=768, layers=2, heads=4, kv_heads=2,
    head_dim=64, norm_eps=EPS, rope_theta=10_000.0, tied=False, context_length=128, eos_ids=frozenset({0}),
)  # fmt: skip


def product(outputs: list[int], inputs: int, biased: bool = False) -> PackedProduct:
    return PackedProduct(
        [weight("int4", n, inputs)[0] for n in outputs], torch.randn(sum(outputs)).bfloat16() if biased else None
    )


def layer() -> Any:
    c = CONFIG
    wide, narrow = c.heads * c.head_dim, c.kv_heads * c.head_dim
    return SimpleNamespace(
        attention_norm=torch.rand(c.hidden_size) + 0.5, mlp_norm=torch.rand(c.hidden_size) + 0.5,
        qkv=product([wide + narrow, narrow], c.hidden_size, True), out=product([c.hidden_size], wide),
        gate_up=product([2 * c.intermediate_size], c.hidden_size), down=product([c.hidden_size], c.intermediate_size),
        local=False, window=0, sinks=None, experts=None,
    )  # fmt: skip


def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """triton's interpreter has no bfloat16: what is between the products, in torch."""

    def add_gain(x: Tensor, delta: Any, gain: Tensor, eps: float, dtype: Any, packs: bool = False) -> Any:
        if delta is not None:
            x += delta.total()
        squares = squares_of(x)
        return (x * gain).to(dtype), squares, scale_of(squares)

    def rope_store(qkv: Any, cos: Tensor, sin: Tensor, k: Tensor, v: Tensor, slots: Tensor, heads: int, kv: int) -> Any:
        values = qkv.total().view(slots.shape[0], -1, k.shape[2])
        first, second = values.chunk(2, -1)
        c, s = cos[:, None], sin[:, None]
        turned = torch.cat([first * c + (-second) * s, second * c + first * s], -1).bfloat16()
        k[slots], v[slots] = turned[:, heads : heads + kv], values[:, heads + kv :].bfloat16()
        return turned[:, :heads].contiguous()

    def attend(q: Tensor, k: Tensor, v: Tensor, blocks: Any, scale: float, *others: Any) -> Tensor:
        found = []
        for row, position in enumerate(blocks):
            keys, values = (plane[: position + 1].double().repeat_interleave(2, 1) for plane in (k, v))
            shares = torch.softmax(torch.einsum("hd,khd->hk", q[row].double(), keys) * scale, -1)
            found.append(torch.einsum("hk,khd->hd", shares, values).flatten())
        return torch.stack(found).bfloat16()

    monkeypatch.setattr(elementwise, "add_gain", add_gain)
    monkeypatch.setattr(elementwise, "rope_store", rope_store)
    monkeypatch.setattr(attention, "attend", attend)


def test_passes_of_packed_layers_have_the_same_bits_whatever_their_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_ins(monkeypatch)
    monkeypatch.setattr(fields, "prepare", lambda variants, device: None)
    monkeypatch.setattr(fused, "DTYPE", torch.bfloat16)
    angles = torch.rand(64, CONFIG.head_dim // 2)
    embedding = torch.randn(48, CONFIG.hidden_size).bfloat16()
    model = SimpleNamespace(
        config=CONFIG, layers=[layer() for _ in range(CONFIG.layers)], ropes=[(angles.cos(), angles.sin())],
        embedding=embedding, scale_embedding=1.0, compute=torch.bfloat16,
    )  # fmt: skip
    assert layers.packed_suits(model)
    packed, first = layers.PackedLayers(model), torch.randn(18, CONFIG.hidden_size)
    assert packed.agrees()
    results = []
    for sizes in ([18], [1, 8, 9]):
        plane, start, streams = Cache(64, 1, 64, torch.device("cpu")).add_plane(2, 2, 64, torch.bfloat16), 0, []
        for n in sizes:
            at = torch.arange(start, start + n)
            rows = Rows(at, at, at, at, at, at, None, at, blocks=at.tolist())
            whole: Any = layers.Part()
            streams.append(packed.run(first[start : start + n].clone(), rows, plane, whole, lambda i, x: None))
            start += n
        results.append([torch.cat(streams), *(each[:18].clone() for each in (*plane.k, *plane.v))])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert bool(results[0][0].isfinite().all())


# ------------------------------------------------------------ attention


class Context:
    """Two sequences of different lengths whose last keys are in a tail, and a block of padding."""

    def __init__(self, heads: int, kv_heads: int, dim: int, rows: int, lengths: tuple[int, ...]) -> None:
        self.shape, self.rows, self.lengths = attend_few.Heads(heads, kv_heads, dim), rows, lengths
        self.group, slots, length = heads // kv_heads, 3000, 1536
        self.q = torch.randn(rows * len(lengths), heads, dim).bfloat16()
        self.k, self.v = (torch.randn(slots, kv_heads, dim).bfloat16() for _ in range(2))
        self.table = torch.stack([torch.randperm(slots)[:length] for _ in lengths]).int().contiguous()
        most, info, tails = attention.rows_per_block(heads, kv_heads), [], []
        for line, n in enumerate(lengths):
            for i in range(0, rows, most):
                base = max(n - 3, 0)
                info.append([line * rows + i, min(most, rows - i), line, base, n + i + 1, 0, 0, 0])
                tails.append(torch.randperm(slots)[:40].int())
        info.append([0] * 8)
        tails.append(torch.zeros(40, dtype=torch.int32))
        self.info, self.tails, self.spans = info, torch.stack(tails), length // 128

    def attend(self, splits: int, window: int = 0, scratch_rows: int = 64, tiles: int = 0) -> Tensor:
        """splits: programs of a context; tiles: of a packed result."""
        scratch = Scratch(scratch_rows, self.shape.heads, self.shape.dim, 1536, torch.device("cpu"))
        blocks = Blocks(torch.tensor(self.info).int(), self.tails, self.table, scratch)
        rows, width = self.q.shape[0], self.shape.heads * self.shape.dim
        out = torch.empty(8 * tiles or rows, width).bfloat16()
        scale = self.shape.dim**-0.5 * attention.LOG2_E
        attend_few.attend(self.q, self.k, self.v, blocks, scale, window, out, tiles, splits)
        assert not scratch.finished.any()
        if tiles:
            parts = out.view(width // 32, tiles, 8, 4, 2, 4).permute(1, 2, 0, 4, 3, 5)
            out = parts.reshape(8 * tiles, width)[:rows]
        return out.view_as(self.q)

    def exact(self, window: int = 0) -> Tensor:
        found = torch.zeros(self.q.shape, dtype=torch.float64)
        for block, (first, rows, line, base, keys, *_) in enumerate(self.info):
            for i in range(rows):
                p = torch.arange(max(keys + i - window, 0) if window else 0, keys + i)
                tail = self.tails[block][(p - base).clamp(0, 39)]
                slots = torch.where(p < base, self.table[line][p], tail).long()
                k, v = (plane[slots].double().repeat_interleave(self.group, 1) for plane in (self.k, self.v))
                scores = torch.einsum("hd,khd->hk", self.q[first + i].double(), k) * self.shape.dim**-0.5
                found[first + i] = torch.einsum("hk,khd->hd", torch.softmax(scores, -1), v)
        return found


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(3, 1, 64), (6, 2, 128)])
@pytest.mark.parametrize("lengths", [(2, 130), (600, 1100)])
def test_attention_of_a_few_rows(heads: int, kv_heads: int, dim: int, lengths: tuple[int, int]) -> None:
    context = Context(heads, kv_heads, dim, 3, lengths)
    alone = context.attend(1)
    assert error(alone, context.exact()) < 4e-3
    assert torch.equal(context.attend(3, tiles=1), alone)
    assert torch.equal(context.attend(3, scratch_rows=2), alone)  # no room for sums of the other rows


def test_a_window_hides_earlier_keys() -> None:
    context = Context(3, 1, 64, 7, (900,))
    assert error(context.attend(2, 300), context.exact(300)) < 4e-3
