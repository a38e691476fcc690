"""GPU kernels against float64 on random shapes, lengths and trees with poisoned padding; and their row invariance.

Without a GPU the kernels run in triton's interpreter, if triton is installed.
"""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from outrider.backends import ops
from outrider.backends.cuda.kernels import attention, elementwise, matmul
from outrider.backends.cuda.kernels.attention import Blocks, Scratch
from outrider.backends.cuda.kernels.matmul import Parts, Tiling
from outrider.models.config import GELU, SILU

from support.kernels import DEVICE, GPU, HALF, row_invariant

DTYPES = [HALF, torch.float32]
CLOSE = {HALF: 1.2e-2, torch.float32: 1e-5}


def error(ours: Tensor, exact: Tensor) -> float:
    return float((ours.double().cpu() - exact).norm() / exact.norm().clamp(min=1e-30))


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


# ------------------------------------------------------------ products


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "outs", "ins", "splits"), [(1, 64, 64, 1), (3, 100, 192, 3), (19, 70, 136, 2)])
def test_a_product_is_the_exact_one_rounded(rows: int, outs: int, ins: int, splits: int, dtype: torch.dtype) -> None:
    x, w, bias = normal(rows, ins, dtype=dtype), normal(outs, ins, dtype=dtype), normal(outs, dtype=dtype)
    ours = Parts(matmul.product(x, w, Tiling(64, splits)), bias).total()
    assert error(ours, x.double().cpu() @ w.double().cpu().T + bias.double().cpu()) < 1e-5


@pytest.mark.parametrize(("dtype", "activation"), [(HALF, SILU), (torch.float32, SILU), (HALF, GELU)])
def test_a_gated_product(dtype: torch.dtype, activation: str) -> None:
    x, w = normal(5, 128, dtype=dtype), normal(2 * 70, 128, dtype=dtype) / 11
    both = x.double().cpu() @ w.double().cpu().T
    exact = ops.gated(both[:, :70], both[:, 70:], activation)
    assert error(matmul.product(x, w, Tiling(64, 1), None, True, activation), exact) < CLOSE[dtype]


@pytest.mark.parametrize("biased", [False, True])
def test_a_gated_layer_with_and_without_bias(biased: bool) -> None:
    up, bias, x = normal(2 * 70, 128, dtype=HALF) / 11, normal(2 * 70, dtype=HALF), normal(3, 128, dtype=HALF)
    both = x.double().cpu() @ up.double().cpu().T + (bias.double().cpu() if biased else 0)
    exact = torch.nn.functional.silu(both[:, :70]) * both[:, 70:]
    assert error(matmul.Product(up, bias if biased else None).gated(x), exact) < CLOSE[HALF]


def test_weights_in_eight_bits() -> None:
    x, scale = normal(5, 128, dtype=HALF), torch.rand(70, device=DEVICE) + 0.5
    w = torch.randint(-127, 128, (70, 128), dtype=torch.int8, device=DEVICE)
    ours = matmul.product(x, w, Tiling(64, 2), scale).sum(0)
    exact = x.double().cpu() @ w.double().cpu().T * scale.double().cpu()
    assert error(ours, exact) < 1e-5


@row_invariant
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("gated", [False, True])
def test_a_row_of_a_product_is_the_same_alone_and_among_many(splits: int, gated: bool) -> None:
    many = 600 if GPU else 140
    x, w = normal(many, 192, dtype=HALF), normal(128, 192, dtype=HALF)

    def run(rows: Tensor) -> Tensor:
        if gated:
            return matmul.product(rows, w, Tiling(64, 1), gated=True)
        return matmul.product(rows, w, Tiling(64, splits)).transpose(0, 1)

    whole = run(x)
    for n in (1, 2, 7, 16, 17, 33, 64, 65, 129, *((200, 257, 512) if GPU else ())):
        start = random.randrange(many - n + 1)
        assert torch.equal(run(x[start : start + n].contiguous()), whole[start : start + n]), n


# ------------------------------------------------------------ small operations


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("parts", [0, 1, 3])
def test_add_norm(parts: int, dtype: torch.dtype) -> None:
    x, weight, bias = normal(4, 100), normal(100), normal(100, dtype=dtype)
    delta = Parts(normal(parts, 4, 100), bias) if parts else None
    exact = x.double().cpu() + (0 if delta is None else delta.parts.double().cpu().sum(0) + bias.double().cpu())
    out = elementwise.add_norm(x, delta, weight, 1e-5, dtype)
    assert error(x, exact) < 1e-6
    normed = exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + 1e-5) * weight.double().cpu()
    assert error(out, normed) < CLOSE[dtype]


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("dim", "turning"), [(16, 16), (32, 16), (24, 24), (16, 0)])
def test_rope_store(dim: int, turning: int, normed: bool) -> None:
    from outrider.backends.ops import _rope_store_torch

    rows, heads, kv_heads = 5, 6, 2
    parts, bias = normal(2, rows, (heads + 2 * kv_heads) * dim), normal((heads + 2 * kv_heads) * dim)
    angles = torch.rand(rows, turning // 2, device=DEVICE)
    norms = (normal(dim), normal(dim), 1e-5) if normed else None
    slots = torch.tensor([3, 9, 1, 7, 0], device=DEVICE)
    planes = [torch.full((10, kv_heads, dim), float("nan"), device=DEVICE) for _ in range(4)]
    qkv, cos, sin = Parts(parts, bias), angles.cos(), angles.sin()
    q = elementwise.rope_store(qkv, cos, sin, *planes[:2], slots, heads, kv_heads, norms)
    cpu = [t.double().cpu() for t in (parts.sum(0) + bias, cos, sin, *planes[2:])]
    wide = None if norms is None else (norms[0].double().cpu(), norms[1].double().cpu(), 1e-5)
    exact = _rope_store_torch(*cpu, slots.cpu(), heads, kv_heads, wide)  # type: ignore[arg-type]
    assert error(q, exact) < 1e-5
    for ours, theirs in zip(planes[:2], cpu[3:], strict=True):
        assert error(ours[slots], theirs[slots.cpu()]) < 1e-5
        assert bool(ours[[2, 4, 5, 6, 8]].isnan().all()), "another slot was written"


@pytest.mark.parametrize(("heads", "kv_heads", "dim", "turning"), [(6, 2, 16, 16), (20, 5, 24, 16), (3, 0, 16, 0)])
def test_many_rows_are_rotated_as_few_are(heads: int, kv_heads: int, dim: int, turning: int) -> None:
    rows, width = 67, (heads + 2 * kv_heads) * dim
    parts, bias, scale = normal(2, rows, width), normal(width), normal(rows)
    angles, slots = torch.rand(rows, turning // 2, device=DEVICE), torch.randperm(rows, device=DEVICE)
    few, many = ([torch.full((rows, kv_heads, dim), 7.0, device=DEVICE).to(HALF) for _ in "kv"] for _ in range(2))
    turned = (angles.cos(), angles.sin())
    q = elementwise.rope_store(Parts(parts, bias, scale), *turned, *many, slots, heads, kv_heads)
    for at in range(0, rows, 40):
        piece = slice(at, at + 40)
        some = Parts(parts[:, piece].contiguous(), bias, scale[piece])
        each = [angle[piece].contiguous() for angle in turned]
        assert torch.equal(q[piece], elementwise.rope_store(some, *each, *few, slots[piece], heads, kv_heads))
    assert all(map(torch.equal, many, few))


# ------------------------------------------------------------ attention


class Scene:
    """Sequences in scattered slots of poisoned planes, each with pending rows and a drafted tree."""

    def __init__(self, seed: int, dtype: torch.dtype, heads: int, kv_heads: int, dim: int, trees: bool) -> None:
        chance = random.Random(seed)
        torch.manual_seed(seed)
        self.heads, self.kv_heads, self.dim, self.dtype = heads, kv_heads, dim, dtype
        lengths = [chance.choice([1, 5, 63, 128, 129, 200, 300]) for _ in range(3)]
        free = chance.sample(range(1500), 1500)
        self.table = torch.full((4, 512), 1_000_000_000, dtype=torch.int32)  # an invalid slot
        self.rows: list[tuple[int, int, list[int]]] = []  # line, keys from the table, slots of ancestors
        self.blocks: list[tuple[int, int, int, int, list[int]]] = []  # first, count, line, base, tail
        for line, n in enumerate(lengths):
            self.table[line, :n] = torch.tensor([free.pop() for _ in range(n)], dtype=torch.int32)
            pending = min(n, chance.choice([1, 1, 4]))
            self._sequence(chance, line, n, pending, [free.pop() for _ in range(chance.choice([0, 3, 7]))], trees)
        self.k = torch.full((1500, kv_heads, dim), float("nan")).to(dtype)
        self.v = self.k.clone()
        for _, slots in self.lists():
            self.k[slots] = torch.randn(len(slots), kv_heads, dim).to(dtype)
            self.v[slots] = torch.randn(len(slots), kv_heads, dim).to(dtype)
        self.q = torch.randn(len(self.rows), heads, dim).to(dtype)

    def _sequence(self, chance: random.Random, line: int, n: int, pending: int, nodes: list[int], trees: bool) -> None:
        together = attention.rows_per_block(self.heads, self.kv_heads)
        start = len(self.rows)
        self.rows += [(line, position + 1, []) for position in range(n - pending, n)]
        tails: list[list[int]] = []
        for node, slot in enumerate(nodes):
            parent = (chance.randrange(-1, node) if trees else node - 1) if node else -1
            tails.append([*(tails[parent] if parent >= 0 else []), slot])
            self.rows.append((line, n, tails[-1]))
        shared = len(self.rows) - start - (len(nodes) if trees else 0)
        for first in range(start, start + shared, together):
            count = min(together, start + shared - first)
            self.blocks.append((first, count, line, n, self.rows[first + count - 1][2]))
        if trees:
            self.blocks += [(start + shared + i, 1, line, n, tail) for i, tail in enumerate(tails)]

    def lists(self) -> list[tuple[int, list[int]]]:
        return [(t, [*self.table[line, :n].tolist(), *tail]) for t, (line, n, tail) in enumerate(self.rows)]

    def device_blocks(self, pad: int = 0, scratch_rows: int = 256) -> Blocks:
        depth = 8
        keys = [n + len(tail) for _, n, tail in self.rows]
        info = [[first, count, line, base, keys[first], 0, 0, 0] for first, count, line, base, _ in self.blocks]
        tails = [tail + [1_000_000_000] * (depth - len(tail)) for *_, tail in self.blocks]
        nothing = [0, 0, *[1_000_000_000] * 6]  # a block without rows may describe anything
        columns = ([*info, *[nothing] * pad], [*tails, *[[0] * depth] * pad])
        scratch = Scratch(scratch_rows, self.heads, self.dim, 512, DEVICE)
        scratch.sums.fill_(float("nan"))
        scratch.stats.fill_(float("nan"))
        return Blocks(
            *(torch.tensor(c, dtype=torch.int32, device=DEVICE) for c in columns), self.table.to(DEVICE), scratch
        )

    def run(self, blocks: Blocks, window: int, cap: float = 0.0, sinks: Tensor | None = None) -> Tensor:
        planes = self.k.to(DEVICE), self.v.to(DEVICE)
        out = attention.attend(self.q.to(DEVICE), *planes, blocks, self.dim**-0.5, window, cap, sinks)
        assert not blocks.scratch.finished.any()
        return out

    def exact(self, window: int, cap: float = 0.0, sinks: Tensor | None = None) -> Tensor:
        out = torch.empty(len(self.rows), self.heads, self.dim, dtype=torch.float64)
        for t, slots in self.lists():
            slots = slots[-window:] if window else slots
            group = self.heads // self.kv_heads
            k = self.k[slots].double().repeat_interleave(group, 1)  # [n, heads, d]
            v = self.v[slots].double().repeat_interleave(group, 1)
            scores = torch.einsum("hd,nhd->hn", self.q[t].double(), k) * self.dim**-0.5
            scores = cap * (scores / cap).tanh() if cap else scores
            if sinks is not None:
                scores = torch.cat([scores, sinks.double().cpu()[:, None]], 1)
            out[t] = torch.einsum("hn,nhd->hd", scores.softmax(-1)[:, : len(slots)], v)
        return out.flatten(1)


SHAPES = [(9, 3, 64), (4, 2, 8), (8, 1, 32), (3, 3, 24)]


# The interpreter is slow: there a small shape runs in both types, each of the others in one.
TYPED_SHAPES = [(s, t) for i, s in enumerate(SHAPES) for t in DTYPES if GPU or s == (4, 2, 8) or t is DTYPES[i // 2]]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("trees", [False, True])
@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.parametrize(("shape", "dtype"), TYPED_SHAPES)
def test_attention_is_the_exact_one_rounded(
    shape: tuple[int, int, int], window: int, trees: bool, dtype: torch.dtype
) -> None:
    for seed in range(6 if GPU else 1):
        scene = Scene(seed, dtype, *shape, trees)
        assert error(scene.run(scene.device_blocks(pad=3), window), scene.exact(window)) < CLOSE[dtype]


def test_more_heads_than_a_block_has_queries_share_a_key_head() -> None:
    """Heads beyond the sixteenth were left out."""
    scene = Scene(1, torch.float32, 20, 1, 8, False)
    assert error(scene.run(scene.device_blocks(), 0), scene.exact(0)) < CLOSE[torch.float32]


def test_limited_scores_and_sinks() -> None:
    scene, sinks = Scene(3, torch.float32, 4, 2, 8, True), torch.linspace(-2, 3, 4, device=DEVICE)
    for rows in (256, 1):  # merged by the last program, and in registers
        blocks = scene.device_blocks(scratch_rows=rows)
        assert error(scene.run(blocks, 40, 0.7, sinks), scene.exact(40, 0.7, sinks)) < CLOSE[torch.float32]


@row_invariant
@pytest.mark.parametrize("trees", [False, True])
def test_a_row_of_attention_is_the_same_alone_and_among_many(trees: bool) -> None:
    """Alone in its block, in a chain's block, merged by the last program or in registers: the same bits."""
    for seed in range(20 if GPU else 2):
        scene = Scene(seed, HALF, 9, 3, 64, trees)
        whole = scene.run(scene.device_blocks(), 0)
        assert torch.equal(scene.run(scene.device_blocks(scratch_rows=1), 0), whole), "registers"
        scene.blocks = [(t, 1, line, n, tail) for t, (line, n, tail) in enumerate(scene.rows)]
        assert torch.equal(scene.run(scene.device_blocks(), 0), whole), "one row in each block"
