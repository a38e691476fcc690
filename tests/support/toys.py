"""The toy in float32: its passes run in the C kernels, whose rows are exact and take a third of float64's time."""

from __future__ import annotations

import torch

from outrider.backends import toy as toys
from outrider.backends.transformer import Transformer


def toy(seed: int = 1, blur: float = 0.0, dtype: torch.dtype = torch.float32, layers: int = 3) -> Transformer:
    return toys.toy(seed, blur, dtype, layers)
