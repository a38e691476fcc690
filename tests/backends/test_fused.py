"""Layers in five kernels: the same numbers as in eight, which are those of float64; on a GPU the same bits.

Without a GPU the kernels run in triton's interpreter, whose sums have another order: where inputs are small integers
every order gives the same bits, and those are compared there too.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from outrider.backends.cuda import layers as fused_layers
from outrider.backends.cuda.kernels import elementwise, fused, launching
from outrider.backends.cuda.kernels.matmul import Parts, Tiling, product
from outrider.models.config import GELU, SILU

from support.kernels import DEVICE, GPU, HALF

ROWS = (1, 2, 8, 9, 16) if GPU else (1, 9)


def whole_numbers(*shape: int) -> Tensor:
    return torch.randint(-3, 4, shape, device=DEVICE).to(HALF)


def drawn(*shape: int, dtype: torch.dtype = HALF) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def same(ours: Tensor, other: Tensor, exactly: bool) -> bool:
    return torch.equal(ours, other) if exactly or GPU else torch.allclose(ours.float(), other.float(), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("integers", [True, False])
@pytest.mark.parametrize(("outs", "ins", "biased"), [(64, 192, False), (32, 576, True), (48, 1024, True)])
def test_a_product_added_to_the_stream(outs: int, ins: int, biased: bool, integers: bool) -> None:
    make = whole_numbers if integers else drawn
    w, bias, gain = make(outs, ins), make(outs) if biased else None, torch.ones(outs, device=DEVICE) * 2
    for rows in ROWS:
        x, stream = make(rows, ins), make(rows, outs).float()
        wide, slices = stream.clone(), fused.slices(outs, ins)
        out, squares = fused.added(x, w, bias, slices, stream, gain)
        delta = Parts(product(x, w, Tiling(64, slices.warps)), bias)
        other, other_squares, _ = elementwise.add_gain(wide, delta, gain, 1e-5, HALF)
        exact = make(0).double() if False else x.double().cpu() @ w.double().cpu().T
        assert same(stream, wide, integers) and same(out, other, integers)
        assert same(squares / ins, other_squares / ins, integers), "squares"
        total = exact + (0 if bias is None else bias.double().cpu())
        assert ((wide.double().cpu() - total - (stream - stream).double().cpu()).isfinite()).all()


@pytest.mark.parametrize("activation", [SILU, GELU])
@pytest.mark.parametrize(("outs", "ins"), [(64, 192), (40, 112)])
def test_gate_and_up(outs: int, ins: int, activation: str) -> None:
    w, gain = drawn(2 * outs, ins) / ins**0.5, torch.rand(ins, device=DEVICE)
    for rows in ROWS:
        stream = drawn(rows, ins, dtype=torch.float32)
        h, squares, scale = elementwise.add_gain(stream, None, gain, 1e-5, HALF)
        ours = fused.activated(h, squares, 1e-5, w, activation)
        wide = product(h, w, Tiling(64, 1), None, True, activation, scale)
        assert same(ours, wide, False)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(3, 1, 64), (2, 2, 16), (4, 2, 128)])
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
        q = fused.rotated(h, squares, 1e-5, w, bias, slices, cos, sin, positions, slots, *planes[:2], heads)
        parts = Parts(product(h, w, Tiling(64, slices.warps)), bias, scale)
        other = elementwise.rope_store(parts, cos[positions], sin[positions], *planes[2:], slots, heads, kv_heads)
        assert same(q, other, False)
        for ours, wide in zip(planes[:2], planes[2:], strict=True):
            assert same(ours[slots], wide[slots], False)
            assert torch.equal(ours.isnan(), wide.isnan()), "another slot was written"
