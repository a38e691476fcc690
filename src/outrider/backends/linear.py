"""Matrix products whose rows do not depend on their neighbours.

On a CPU a float32 product is our own (`cpu/native/product.h`), and so is one in bfloat16 on processors for which oneDNN
has none, or none that is exact: the same bits for any number of rows. Otherwise oneDNN multiplies: the weight is packed
once, and a row's result is the same bits for every row count from two upwards (a one-row product takes another kernel).
That holds with AVX-512 and not with AMX, so it is tried once in a process. Fewer than four rows are padded to four,
which is also faster: the kernels for two rows read a weight more slowly. On a GPU the kernels are our own too
(`kernels.matmul`). `F.linear` gives no such promise; it runs float64, other devices, and machines without oneDNN and
without native kernels. `exact` tells whether the promise holds.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..models.config import SILU
from . import ops
from .cpu.memory import arena
from .cpu.native import COLUMNS, Kernels

MIN_ROWS = 4  # of a packed product; fewer are padded


class Linear:
    """y = x Wᵀ + b. x [T, in] -> [T, out] in the weight's dtype."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self.bias = bias
        self.exact = packs(weight)
        self.weight = _packed(weight) if self.exact else weight

    def __call__(self, x: Tensor) -> Tensor:
        if not self.exact:
            return F.linear(x, self.weight, self.bias)
        rows = x.shape[0]
        if rows < MIN_ROWS:
            x = torch.cat([x, x.new_zeros(MIN_ROWS - rows, self.in_features)])
        y = _multiply(x, self.weight, self.bias)
        return y[:rows] if rows < MIN_ROWS else y

    def gated(self, x: Tensor, activation: str = SILU) -> Tensor:
        """activation(gate) * up [T, out / 2]: the first half of the outputs is the gate."""
        return ops.gate_mul(self(x), activation)

    def first(self, x: Tensor, outputs: int) -> Tensor:
        """The first outputs only [T, outputs]."""
        return self(x)[:, :outputs]


class NativeLinear(Linear):
    """The same by native kernels, summed in float32, with weights in blocks of outputs."""

    exact = True

    def __init__(self, weight: Tensor, bias: Tensor | None, kernels: Kernels) -> None:
        self.out_features, self.in_features = weight.shape
        self.bias, self.kernels = None if bias is None else bias.float().contiguous(), kernels
        whole, blocks = self.out_features // COLUMNS, -(-self.out_features // COLUMNS)
        memory = arena(weight.element_size() * blocks * self.in_features * COLUMNS)
        self.weight = memory.view(weight.dtype).view(blocks, self.in_features, COLUMNS)
        self.weight[:whole] = weight[: whole * COLUMNS].reshape(whole, COLUMNS, self.in_features).transpose(1, 2)
        if blocks > whole:
            rest = F.pad(weight[whole * COLUMNS :], (0, 0, 0, -self.out_features % COLUMNS))
            self.weight[whole] = rest.T

    def __call__(self, x: Tensor) -> Tensor:
        return self.first(x, self.out_features)

    def first(self, x: Tensor, outputs: int) -> Tensor:
        """As in `Linear`; the other weights are not read."""
        x, rows, bf16 = x.float().contiguous(), x.shape[0], self.weight.dtype is torch.bfloat16
        out = torch.empty(rows, outputs)
        addresses = ops.addresses_of(x, self.weight, self.bias, out)
        self.kernels.product(*addresses, rows, outputs, self.in_features, bf16, torch.get_num_threads())
        return out.to(self.weight.dtype)


def linear(weight: Tensor, bias: Tensor | None = None, int8: bool = False) -> Any:
    """The product with this weight for its device. int8: round the weight, on a GPU only."""
    if not ops.on_gpu(weight):
        own = weight.dtype is torch.float32 or (weight.dtype is torch.bfloat16 and not packs(weight))
        kernels = ops._kernels() if own and weight.is_cpu else None
        return Linear(weight, bias) if kernels is None else NativeLinear(weight, bias, kernels)
    from .cuda.kernels.matmul import Product

    return Product(weight, bias, int8)


def summed(parts: Any) -> Tensor:
    """A product's result [T, out]; GPU kernels return it as unsummed `Parts`."""
    total: Tensor = parts if isinstance(parts, Tensor) else parts.total()
    return total


def packs(weight: Tensor) -> bool:
    """Whether oneDNN can pack this weight on this machine, with exact rows."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()) and _rows_are_exact()
    return weight.dtype == torch.float32


@functools.cache
def _rows_are_exact() -> bool:
    """Whether rows of oneDNN's bfloat16 products do not depend on their number, as it multiplies in this process.

    With AMX they do, from 33 rows on. `machine.prepare` rules that out, but not where the user has allowed AMX or
    somebody has multiplied before it ran.
    """
    rows, outs, ins = 64, 960, 576
    random = torch.Generator().manual_seed(1)
    x, weight = (torch.randn(n, ins, generator=random).bfloat16() for n in (rows, outs))
    product = _packed(weight)
    few = torch.cat([_multiply(part, product, None) for part in x.split(MIN_ROWS)])
    return torch.equal(_multiply(x, product, None), few)


def _packed(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
    return packed


def _multiply(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """x [T, in] -> [T, out]; at least MIN_ROWS rows."""
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return y
