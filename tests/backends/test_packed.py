"""Products with quantised weights on a GPU, against the formats' definitions; their row invariance; whole decoders.

Without a GPU the kernels run in triton's interpreter, if triton is installed.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from outrider.backends import ops
from outrider.backends.cuda.kernels import packed
from outrider.backends.cuda.kernels.packed import PackedProduct, Tiling, packed_product
from outrider.backends.cuda.packing import PackedTransformer, grouped_kind, pack_blocks, pack_groups
from outrider.backends.transformer import Transformer
from outrider.models.config import GELU, SILU
from outrider.models.precision import GGUF, INT4
from outrider.models.quantised import Grouped

from support.decoders import Bench, device_logits
from support.kernels import DEVICE, GPU, HALF, row_invariant
from support.random_blocks import RandomBlocks, block_config, floats, random_blocks

KINDS = ("Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")


def error(ours: Tensor, exact: Tensor) -> float:
    return float((ours.double().cpu() - exact).norm() / exact.norm().clamp(min=1e-30))


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def blocks(kind: str, outputs: int, inputs: int, seed: int = 1) -> tuple[Any, Tensor]:
    """A weight as the kernel reads it, and its values in float64 by the gguf package."""
    raw = random_blocks(kind, outputs, inputs, seed)
    return pack_blocks(raw.to(DEVICE), kind, torch.float32), floats(raw, kind).double()  # triton's kernels


# ------------------------------------------------------------ GGUF's blocks


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "outs", "ins"), [(2, 35, 256), pytest.param(3, 70, 512, marks=pytest.mark.slow)])
def test_a_product_with_blocks_is_the_exact_one(kind: str, rows: int, outs: int, ins: int) -> None:
    w, values = blocks(kind, outs, ins)
    x = normal(rows, ins)
    assert error(PackedProduct([w])(x).total(), x.double().cpu() @ values.T) < 3e-6
    half = x.to(HALF)
    rounded = values.to(HALF).double()  # as a product of floats would read them
    assert error(PackedProduct([w])(half).total(), half.double().cpu() @ rounded.T) < 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_packing_loses_no_bit(kind: str) -> None:
    """Unit vectors give each weight alone; in float32 only the last bits of its two terms are rounded."""
    w, values = blocks(kind, 32, 256)
    unit = torch.eye(256, device=DEVICE)[:: 5 if not GPU else 1].contiguous()
    ours = PackedProduct([w])(unit).total().double().cpu().T
    chosen = values[:, :: 5 if not GPU else 1]
    assert float((ours - chosen).abs().max()) < 2e-6 * float(values.abs().max())


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
@pytest.mark.parametrize("ins", [32, 288, 576])
def test_inputs_that_do_not_fill_a_step(kind: str, ins: int) -> None:
    w, values = blocks(kind, 20, ins)
    x = normal(2, ins)
    assert error(PackedProduct([w])(x).total(), x.double().cpu() @ values.T) < 3e-6


@pytest.mark.parametrize(("kind", "activation"), [("Q4_K", SILU), ("Q6_K", SILU), ("Q4_1", GELU)])
@pytest.mark.parametrize("biased", [False, True])
def test_a_gated_product(kind: str, activation: str, biased: bool) -> None:
    w, values = blocks(kind, 2 * 35, 256)
    x, bias = normal(3, 256), normal(70)
    both = x.double().cpu() @ values.T + (bias.double().cpu() if biased else 0)
    exact = ops.gated(both[:, :35], both[:, 35:], activation)
    assert error(PackedProduct([w], bias if biased else None).gated(x, activation), exact) < 3e-5


def test_weights_of_several_kinds_side_by_side() -> None:
    """As in Q4_K_M files, whose v has other blocks than q and k; neighbours of one kind become one weight."""
    parts = [blocks("Q4_K", 40, 512, 1), blocks("Q4_K", 8, 512, 2), blocks("Q6_K", 8, 512, 3)]
    product, x, bias = PackedProduct([w for w, _ in parts], normal(56)), normal(3, 512), None
    assert [w.kind for w in product.weights] == ["Q4_K", "Q6_K"]
    bias = product.bias
    assert bias is not None
    exact = torch.cat([x.double().cpu() @ values.T for _, values in parts], 1) + bias.double().cpu()
    assert error(product(x).total(), exact) < 3e-6
    assert error(product.gated(x), ops.gated(exact[:, :28], exact[:, 28:], SILU)) < 3e-5


def test_parts_of_a_sum_cover_it() -> None:
    """Any number of parts, also more than there are steps."""
    w, values = blocks("Q4_K", 16, 3 * 256)
    x = normal(2, 768)
    for parts in (2, 5):
        out = torch.full((parts, 2, 16), float("nan"), device=DEVICE)
        packed_product(x, w, Tiling(), out)
        assert error(out.sum(0), x.double().cpu() @ values.T) < 3e-6


@row_invariant
@pytest.mark.parametrize("kind", KINDS if GPU else ("Q4_K", "Q6_K"))
@pytest.mark.parametrize("gated", [False, True])
def test_a_row_is_the_same_alone_and_among_many(kind: str, gated: bool) -> None:
    many = 300 if GPU else 70
    w, _ = blocks(kind, 64, 512)
    x, product = normal(many, 512, dtype=HALF), PackedProduct([w])

    def run(rows: Tensor) -> Tensor:
        return product.gated(rows) if gated else product(rows).parts.transpose(0, 1)

    whole = run(x)
    for n in (1, 2, 16, 17, 64, *((7, 33, 65, 129, 257) if GPU else ())):
        start = random.randrange(many - n + 1)
        assert torch.equal(run(x[start : start + n].contiguous()), whole[start : start + n]), n


# ------------------------------------------------------------ groups


def groups(outs: int, ins: int, group: int, form: str, seed: int = 1) -> tuple[Grouped, Tensor]:
    """Random fields, and their values by the definition (field - zero) * scale."""
    draw = np.random.default_rng(seed)
    count, index = -(-ins // group), np.arange(ins) // group
    scale = torch.from_numpy(draw.uniform(0.01, 0.1, (outs, count)).astype(np.float32))
    scale = scale.to({"int4": torch.float16, "int4b": torch.bfloat16}.get(form[:5].strip(), torch.float32))
    steps = scale.double().numpy()[:, index]
    if form == "fp8":
        raw = draw.integers(0, 256, (outs, ins), dtype=np.uint8)
        raw[(raw & 127) == 127] = 0
        values = torch.from_numpy(raw).view(torch.float8_e4m3fn)
        return Grouped(values, scale, None, group), torch.from_numpy(values.double().numpy() * steps)
    if form == "int8":
        whole = draw.integers(-128, 128, (outs, ins), dtype=np.int8)
        return Grouped(torch.from_numpy(whole), scale, None, group), torch.from_numpy(whole * steps)
    fields = draw.integers(0, 16, (outs, ins), dtype=np.uint8)
    zero = draw.integers(0, 16, (outs, count)) if form.endswith("zero") else np.full((outs, count), 8)
    exact = (fields.astype(np.float64) - zero[:, index]) * steps
    given = torch.from_numpy(zero) if form.endswith("zero") else None
    return Grouped(torch.from_numpy(fields), scale, given, group, 4), torch.from_numpy(exact)


@pytest.mark.parametrize("form", ["int4", "int4 zero", "int4b zero", "int8", "fp8"])
@pytest.mark.parametrize(("ins", "group"), [(512, 128), (256, 32), (320, 320), (224, 64), (800, 512)])
def test_a_product_with_groups_is_the_exact_one(form: str, ins: int, group: int) -> None:
    w, values = groups(37, ins, group, form)
    assert torch.allclose(w.floats(torch.float64), values, rtol=1e-6)
    x, product = normal(3, ins), PackedProduct([pack_groups(w.to(DEVICE), torch.float32)])
    assert product.weights[0].kind == grouped_kind(w)
    assert error(product(x).total(), x.double().cpu() @ values.T) < 3e-6


def test_inputs_in_another_order() -> None:
    """desc_act: columns are sorted by their group."""
    w, values = groups(12, 256, 64, "int4 zero")
    order = torch.randperm(256)
    x = normal(2, 256)
    product = PackedProduct([pack_groups(w.to(DEVICE), torch.float32)], order=order.to(DEVICE))
    assert error(product(x).total(), x.double().cpu()[:, order] @ values.T) < 3e-6
    assert error(product.gated(x), ops.gated(*(x.double().cpu()[:, order] @ values.T).chunk(2, 1), SILU)) < 3e-5


def test_what_the_kernel_has_no_scheme_for() -> None:
    w, _ = groups(4, 96, 48, "int4")  # groups of 48 inputs are no multiple of a plane
    assert grouped_kind(w) == ""
    assert grouped_kind(Grouped(w.values, w.scale.float() / 3, None, 96, 4)) == ""


# ------------------------------------------------------------ decoders


@pytest.mark.slow  # in the interpreter
@pytest.mark.parametrize("kinds", [("Q4_K", "Q6_K"), KINDS[:3]])
def test_a_decoder_with_a_files_own_blocks(kinds: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    config = block_config(tied=False, qkv_bias=True)
    weights = RandomBlocks(config, *kinds)
    wanted = Bench(Transformer(config, weights, torch.float32), list(range(5))).logits()
    if not GPU:
        monkeypatch.setattr(ops, "on_gpu", lambda tensor: True)
    model = PackedTransformer(config, weights, GGUF, DEVICE, 64, torch.float32)
    assert model.precision == GGUF
    assert "own precision (gguf)" in model.description
    torch.testing.assert_close(device_logits(model, list(range(5)), 0, 2, 5), wanted, rtol=2e-4, atol=2e-4)


class SomeGrouped:
    """A model's weights of which only some are quantised."""

    def __init__(self, config: Any) -> None:
        self.source = RandomBlocks(config, "Q4_0")

    def grouped(self, name: str) -> Grouped | None:
        if "mlp" not in name:
            return None
        outs, ins = self.source._shapes._shape(name)
        return groups(outs, ins, 48 if "down" in name else 64, "int4 zero", sum(map(ord, name)))[0]

    def has(self, name: str) -> bool:
        return self.source.has(name)

    def get(self, name: str, dtype: torch.dtype) -> Tensor:
        weight = self.grouped(name)
        return self.source.get(name, dtype) if weight is None else weight.floats(dtype)


def test_what_is_not_packed_is_dequantised_and_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    config = block_config(qkv_bias=True, layers=1)
    weights = SomeGrouped(config)
    wanted = Bench(Transformer(config, weights, torch.float32), list(range(3))).logits()
    if not GPU:
        monkeypatch.setattr(ops, "on_gpu", lambda tensor: True)
    model = PackedTransformer(config, weights, INT4, DEVICE, 64, torch.float32)
    torch.testing.assert_close(device_logits(model, list(range(3)), 0, 3), wanted, rtol=2e-4, atol=2e-4)
    assert isinstance(model.layers[0].gate_up, PackedProduct)
    assert "layers.0.qkv and 2 more have no kernel" in model.description


def test_every_kind_has_a_scheme() -> None:
    assert set(KINDS) < packed.SCHEMES.keys()


def test_a_gate_with_another_activation_is_not_fused() -> None:
    """It was computed as silu."""
    w, values = blocks("Q4_0", 2 * 16, 256)
    x = normal(3, 256)
    gate, up = (x.double().cpu() @ values.T).chunk(2, 1)
    assert error(PackedProduct([w]).gated(x, "relu"), gate.clamp(min=0) * up) < 3e-6
