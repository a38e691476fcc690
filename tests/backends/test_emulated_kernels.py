"""Kernels in CUDA C++, run on a CPU: the right numbers, and a row's own, whatever else is in the pass."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from outrider.backends.cuda import packing
from outrider.backends.cuda.kernels import attend_few, attention, fields
from outrider.backends.cuda.kernels.attention import Blocks, Scratch
from outrider.backends.cuda.kernels.fields import Tiled
from outrider.models.config import SILU
from outrider.models.quantised import Grouped

from support import cuda_threads
from support.kernels import GPU

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(GPU or not cuda_threads.available(), reason="a C++ compiler's, without a GPU"),
]


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
    return fields.division(w.words.shape[0], w.steps, 8, 1).slices


def error(ours: Tensor, exact: Tensor) -> float:
    return float((ours.double() - exact.double()).norm() / exact.double().norm())


def alike(x: Tensor, work: Callable[[Tensor], Tensor]) -> Tensor:
    """The result for all rows, each of which has the same bits in smaller passes."""
    whole = work(x)
    assert torch.equal(torch.cat([work(x[:1]), work(x[1:10]), work(x[10:20])]), whole)
    return whole


@pytest.mark.parametrize("kind", ["int4", "Q4_K"])
def test_a_product(kind: str) -> None:
    (w, values), x = weight(kind, 48, 768), torch.randn(20, 768).bfloat16()

    def work(rows: Tensor) -> Tensor:
        sums = torch.empty(2, rows.shape[0], 56)
        fields.product(rows.contiguous(), w, sums, 2, column=8)  # two parts of two slices, beside other outputs
        return sums.sum(0)[:, 8:]

    assert error(alike(x, work), x.double() @ values.T) < 1e-6


@pytest.mark.parametrize("kind", ["int4", "Q4_K"])
def test_gate_and_up(kind: str) -> None:
    (w, values), x = weight(kind, 64, 768), torch.randn(20, 768).bfloat16()

    def work(rows: Tensor) -> Tensor:
        out = torch.empty(1, rows.shape[0], 32).bfloat16()
        fields.product(rows.contiguous(), w, out, slices(w), gated=True, activation=SILU)
        return out[0]

    gate, up = (x.double() @ values.T).chunk(2, 1)
    assert error(alike(x, work), torch.nn.functional.silu(gate) * up) < 4e-3


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
