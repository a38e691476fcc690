"""Matrix products whose rows do not depend on their neighbours.

On a CPU with oneDNN the weight is packed once, and a row's result is the same bits for every row count from two
upwards (a one-row product takes another kernel). Fewer than four rows are padded to four, which is also faster: the
kernels for two rows read a weight more slowly. On a GPU the kernels are our own (`kernels.matmul`). `F.linear` gives
no such promise; it runs float64, other devices, and machines without oneDNN. `exact` tells whether the promise holds.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..models.config import SILU
from . import ops

MIN_ROWS = 4  # of a packed product; fewer are padded


class Linear:
    """y = x Wᵀ + b. x [T, in] -> [T, out] in the weight's dtype."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self.bias = bias
        self.exact = packs(weight)
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None) if self.exact else weight

    def __call__(self, x: Tensor) -> Tensor:
        if not self.exact:
            return F.linear(x, self.weight, self.bias)
        rows = x.shape[0]
        if rows < MIN_ROWS:
            x = torch.cat([x, x.new_zeros(MIN_ROWS - rows, self.in_features)])
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return y[:rows] if rows < MIN_ROWS else y

    def gated(self, x: Tensor, activation: str = SILU) -> Tensor:
        """activation(gate) * up [T, out / 2]: the first half of the outputs is the gate."""
        return ops.gate_mul(self(x), activation)


def linear(weight: Tensor, bias: Tensor | None = None, int8: bool = False) -> Any:
    """The product with this weight for its device. int8: round the weight, on a GPU only."""
    if not ops.on_gpu(weight):
        return Linear(weight, bias)
    from .cuda.kernels.matmul import Product

    return Product(weight, bias, int8)


def summed(parts: Any) -> Tensor:
    """A product's result [T, out]; GPU kernels return it as unsummed `Parts`."""
    total: Tensor = parts if isinstance(parts, Tensor) else parts.total()
    return total


def packs(weight: Tensor) -> bool:
    """Whether oneDNN can pack this weight on this machine."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32
