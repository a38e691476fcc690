"""Bias, penalties and bans on the device: what `engine.sampling.adjust` makes of logits, and the counts that it needs.

A line's counts say how often each token was emitted, and whether the prompt has it; its bias is what is added to each
token's logit. A drafted row has the tokens on its path besides: they are counted where the row is adjusted.

Promise: a row's adjusted logits have the bits that the host computes for the same tokens; rows of sequences without
adjustments are copied. It knows neither guides nor bans of several tokens nor functions of a request.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from .rounds import (
    _COLUMNS,
    _DRAFT,
    _ENDS,
    _LENGTH,
    _MOST_ENDS,
    ADJUSTS,
    FREQUENCY,
    MIN_LENGTH,
    PRESENCE,
    REPETITION,
    _get,
)

PROMPT = 1 << 24  # in a count: the prompt has the token
BLOCK = 1024  # ids per program

_PROMPT = tl.constexpr(PROMPT)
_REPETITION, _PRESENCE, _FREQUENCY = (tl.constexpr(c) for c in (REPETITION, PRESENCE, FREQUENCY))
_MIN_LENGTH, _ADJUSTS = tl.constexpr(MIN_LENGTH), tl.constexpr(ADJUSTS)


@triton.jit
def _adjust(
    logits, stride, out, owner, node, position, numbers, floats, draft, parents, counts, bias, vocabulary,
    TREE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocabulary
    value = tl.load(logits + row * stride + token, mask=inside, other=0.0)  # [BLOCK]
    line = tl.load(owner + row).to(tl.int64)
    adjusts = line >= 0
    adjusts = adjusts & (tl.load(numbers + line * _COLUMNS + _ADJUSTS, mask=adjusts, other=0) > 0)
    if adjusts:
        added = tl.load(bias + line * vocabulary + token, mask=inside, other=0.0)
        value = tl.where(added != 0, value + added, value)
        count = tl.load(counts + line * vocabulary + token, mask=inside, other=0)
        up = tl.load(node + row)
        while up >= 0:  # what is drafted before this row's choice
            count += (token == tl.load(draft + line * _DRAFT + up)).to(tl.int32)
            if TREE:
                up = tl.load(parents + line * _DRAFT + up)
            else:
                up -= 1
        repetition = tl.zeros((BLOCK,), tl.float32) + _get(floats, line, _REPETITION).to(tl.float32)
        penalised = tl.where(value > 0, tl.div_rn(value, repetition), value * repetition)
        value = tl.where(count > 0, penalised, value)
        emitted = count & (_PROMPT - 1)
        frequency = _get(floats, line, _FREQUENCY).to(tl.float32) * emitted.to(tl.float32)
        value = tl.where(emitted > 0, value - (_get(floats, line, _PRESENCE).to(tl.float32) + frequency), value)
        if tl.load(position + row) < _get(numbers, line, _MIN_LENGTH):
            for e in tl.static_range(_MOST_ENDS):
                value = tl.where(token == _get(numbers, line, _ENDS + e), -float("inf"), value)
    tl.store(out + row * vocabulary + token, value, mask=inside)


def adjust(
    logits: Tensor, out: Tensor, rows: dict[str, Tensor], numbers: Tensor, draft: Tensor, parents: Tensor,
    counts: Tensor, bias: Tensor, tree: bool,
) -> None:  # fmt: skip
    """Write the logits [R, V] as each row's sequence adjusts them to `out` [R, V].

    rows: owner, node [R] int32 and position [R] int64, of `rounds.lay_out`. counts [lines, V] int32; bias [lines, V].
    """
    count, vocabulary = out.shape
    launch: Any = _adjust[(count, triton.cdiv(vocabulary, BLOCK))]
    launch(
        logits, logits.stride(0), out, rows["owner"], rows["node"], rows["position"],
        numbers, numbers.view(rows["temperature"].dtype), draft, parents, counts, bias, vocabulary,
        TREE=tree, BLOCK=BLOCK, enable_fp_fusion=False,
    )  # fmt: skip


@triton.jit
def _count(numbers, tokens, lines, plan, counts, length, vocabulary, WIDTH: tl.constexpr):
    i, j = tl.program_id(0), tl.arange(0, WIDTH)
    line = tl.load(lines + i).to(tl.int64)
    before, after = tl.load(plan + i * 8), _get(numbers, line, _LENGTH).to(tl.int32)
    if _get(numbers, line, _ADJUSTS) > 0:
        new = before + j < after
        token = tl.load(tokens + line * length + before + j, mask=new, other=0)
        tl.atomic_add(counts + line * vocabulary + token, tl.full((WIDTH,), 1, tl.int32), mask=new)


def count(numbers: Tensor, tokens: Tensor, lines: Tensor, plan: Tensor, counts: Tensor) -> None:
    """Count what a round has appended: after `rounds.settle`. plan [B, 8] of `rounds.lay_out`."""
    launch: Any = _count[(lines.shape[0],)]
    launch(numbers, tokens, lines, plan, counts, tokens.shape[1], counts.shape[1], WIDTH=128, num_warps=1)
