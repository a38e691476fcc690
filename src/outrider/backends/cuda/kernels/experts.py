"""Products of rows with the weights of one expert each.

Promise: a row's result is the same bits whichever rows share the call: one program computes some outputs of one row,
and adds up its inputs in a fixed order. Rows of one expert read its weights from the cache. It knows rows and weights.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ... import ops
from .matmul import activated

_OUTPUTS, _STEP = 32, 128


@triton.jit
def _expert_product(
    x, rows, experts, w, bias, out, outs, ins,
    OUTS: tl.constexpr, STEP: tl.constexpr, GATED: tl.constexpr, KIND: tl.constexpr, BIASED: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0).to(tl.int64)
    o = tl.program_id(1) * OUTS + tl.arange(0, OUTS)
    i = tl.arange(0, STEP)
    row, expert = tl.load(rows + pair), tl.load(experts + pair)
    first = w + expert.to(tl.int64) * outs * ins * (2 if GATED else 1)
    total = tl.zeros((OUTS,), tl.float32)
    other = tl.zeros((OUTS,), tl.float32)
    for at in range(0, ins, STEP):
        left = at + i < ins
        ok = (o < outs)[:, None] & left[None, :]
        values = tl.load(x + row * ins + at + i, mask=left, other=0.0).to(tl.float32)
        where = o[:, None].to(tl.int64) * ins + at + i[None, :]
        block = tl.load(first + where, mask=ok, other=0.0).to(tl.float32)
        total += tl.sum(block * values[None, :], 1)
        if GATED:
            block = tl.load(first + outs.to(tl.int64) * ins + where, mask=ok, other=0.0).to(tl.float32)
            other += tl.sum(block * values[None, :], 1)
    if BIASED:
        where = bias + expert.to(tl.int64) * outs * (2 if GATED else 1) + o
        total += tl.load(where, mask=o < outs, other=0.0).to(tl.float32)
        if GATED:
            other += tl.load(where + outs, mask=o < outs, other=0.0).to(tl.float32)
    if GATED:
        total = activated(total, other, KIND)
    tl.store(out + pair * outs + o, total.to(out.dtype.element_ty), mask=o < outs)


def expert_product(
    x: Tensor, rows: Tensor, experts: Tensor, w: Tensor, bias: Tensor | None = None, activation: str = ""
) -> Tensor:
    """x[rows[p]] w[experts[p]]ᵀ for every pair p: x [T, in], rows and experts [P], w [E, out, in] -> [P, out] float32.

    bias [E, out].
    With an activation, w [E, 2 out, in] has the gate's rows, then those of `up`: activation(gate) * up in x's type.
    """
    gated = bool(activation)
    outs, ins, pairs = w.shape[1] // (1 + gated), w.shape[2], rows.shape[0]
    out = torch.empty((pairs, outs), dtype=x.dtype if gated else torch.float32, device=x.device)
    launch: Any = _expert_product[(pairs, triton.cdiv(outs, _OUTPUTS))]
    kind = ops.ACTIVATIONS.index(activation) if gated else 0
    constants = {"OUTS": _OUTPUTS, "STEP": _STEP, "GATED": gated, "KIND": kind, "BIASED": bias is not None}
    launch(x, rows, experts, w, w if bias is None else bias, out, outs, ins, **constants, num_warps=4)
    return out
