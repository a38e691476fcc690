"""Sampling on the GPU: the next token of many rows at once, the one that `engine.sampling.choose` takes.

Promise: a row's choice is a pure function of its logits and its sampling parameters. It does not depend on other rows,
the batch size or the order of threads: noise is hashed as in `engine.sampling`, floats are reduced in an order that
only the vocabulary size decides, and what torch sums is integers, whose sums do not depend on the order. Nothing here
waits for the device or reads its values on the host, so a call can be captured in a CUDA graph.

It knows temperature, top-k, top-p, min-p and a seed; it knows no bias, penalties, bans or sequences.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....engine import sampling

BLOCK = 1024  # ids per program: enough programs to fill a GPU with a single row


@dataclass(frozen=True)
class Laws:
    """Each row's sampling parameters. A captured graph reads the values that these tensors hold when it is replayed."""

    seed: Tensor  # [R] int64
    position: Tensor  # [R] int64, of the token to be chosen: `sampling.key`'s position
    temperature: Tensor  # [R] float64, 0 is greedy
    top_k: Tensor  # [R] int64, 0 is off
    top_p: Tensor  # [R] float64, 1 is off
    min_p: Tensor  # [R] float64, 0 is off


def choose(logits: Tensor, laws: Laws, filtered: bool, block: int = BLOCK) -> tuple[Tensor, Tensor, Tensor]:
    """Each row's choice [R] int64, highest raw logit [R] float32, and confidence in the choice [R] float32.

    logits [R, V] float32, rows at any stride. Without `filtered`, top-k, top-p and min-p are ignored. The highest logit
    is NaN if any logit of the row is, and -inf if no token can be chosen; the choice is then arbitrary, but a valid id.
    Confidence is the chosen token's softmax among the noised scores, as `engine.sampling.ranked` reports it.
    """
    rows, vocabulary = logits.shape
    if logits.dtype != torch.float32 or logits.stride(-1) != 1:
        raise ValueError(f"logits must be float32 with contiguous rows, not {logits.dtype}, strides {logits.stride()}")
    blocks, device = -(-vocabulary // block), logits.device
    best = torch.empty(rows, blocks, dtype=torch.float64, device=device)  # [R, blocks] highest noised score
    ids = torch.empty(rows, blocks, dtype=torch.int32, device=device)  # [R, blocks] the first id that has it
    highs = torch.empty(rows, blocks, dtype=torch.float32, device=device)  # [R, blocks] highest raw logit
    mass = torch.empty(rows, blocks, dtype=torch.float32, device=device)  # [R, blocks] sum of exp(noised - best)
    choices = torch.empty(rows, dtype=torch.int64, device=device)  # [R]
    highest = torch.empty(rows, dtype=torch.float32, device=device)  # [R]
    confidence = torch.empty(rows, dtype=torch.float32, device=device)  # [R]
    # [R] and [R]; without a filter the kernel does not read them, so any pointers will do
    floor, tie = floors(logits, laws) if filtered else (laws.temperature, laws.seed)
    law = (laws.seed, laws.position, laws.temperature, floor, tie)
    partial = (best, ids, highs, mass)
    # Fusing multiply-adds could differ between the filtered and the unfiltered kernel, and a row's bits must not depend
    # on whether another row has a filter.
    exact: Any = {"enable_fp_fusion": False}
    _choose_in_block[(rows, blocks)](logits, logits.stride(0), *law, *partial, vocabulary, filtered, block, **exact)
    _merge_blocks[(rows,)](*partial, choices, highest, confidence, blocks, triton.next_power_of_2(blocks), **exact)
    return choices, highest, confidence


def floors(logits: Tensor, laws: Laws) -> tuple[Tensor, Tensor]:
    """The bounds of each row's candidates: floor [R] float64, tie [R] int64. logits [R, V].

    A token is a candidate if its score is above the floor, or equal to it with an id of at most the tie. All three
    filters keep the best scores, so together they are as strict as the strictest.
    """
    vocabulary = logits.shape[-1]
    divisor = torch.where(laws.temperature > 0, laws.temperature, 1.0)[:, None]  # [R, 1] float64
    # Dividing keeps the order, so float32 is sorted, at half the cost. Only the sorted values are used, because the
    # order of equal scores says nothing about ids.
    ordered = torch.sort(logits, dim=-1, descending=True).values.double() / divisor  # [R, V] scores, best first
    limited = (laws.top_k > 0) & (laws.top_k < vocabulary)  # [R] bool
    last = torch.where(limited, laws.top_k - 1, 0)[:, None]  # [R, 1] index of the k-th best
    floor = torch.where(limited, ordered.gather(1, last)[:, 0], -math.inf)  # [R] float64
    tie = torch.full_like(laws.top_k, vocabulary)  # [R] int64: all equal scores count
    nucleus, nucleus_tie = _nucleus(logits.double() / divisor, ordered, floor, laws.top_p)  # [R] and [R]
    narrowed = laws.top_p < 1  # [R] bool
    floor, tie = torch.where(narrowed, nucleus, floor), torch.where(narrowed, nucleus_tie, tie)
    least = torch.where(laws.min_p > 0, ordered[:, 0] + torch.log(laws.min_p), -math.inf)  # [R] float64
    tie = torch.where(least > floor, vocabulary, tie)
    floor = torch.maximum(least, floor)
    return torch.where(laws.temperature > 0, floor, -math.inf), tie


def _nucleus(scores: Tensor, ordered: Tensor, floor: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """The smallest set with a share of top_p of the mass at or above the floor: its least score [R], the last id [R].

    scores [R, V] by id; ordered [R, V] best first; floor [R] float64; top_p [R] float64.

    Mass is counted in integers, because a scan of floats rounds in an order that depends on the batch (torch scans one
    row differently from two). A unit is 2^-44 of the likeliest token at V = 256k, far below the precision of float32
    logits. Only where equal weights meet top_p to the last bit (9 of 10 equal tokens at 0.9) may `engine.sampling`,
    whose float sum falls short there, keep one token more.
    """
    vocabulary = scores.shape[-1]
    unit = 2.0 ** (62 - (vocabulary - 1).bit_length())  # so that V tokens of weight 1 do not overflow
    behind = torch.where(ordered == ordered[:, :1], 0.0, ordered - ordered[:, :1])  # [R, V]; inf - inf is NaN
    weight = torch.where(ordered >= floor[:, None], torch.exp(behind), 0.0)  # [R, V] in [0, 1]
    mass = (weight * unit).round().long().cumsum(-1)  # [R, V] int64, cumulative
    needed = mass[:, -1:].double() * top_p[:, None]  # [R, 1]
    enough = ((mass.double() < needed).sum(-1, keepdim=True) + 1).clamp(max=vocabulary)  # [R, 1] size of the set
    least = ordered.gather(1, enough - 1)  # [R, 1] score of the last one
    equals = enough - (ordered > least).sum(-1, keepdim=True)  # [R, 1] of the set with that score: the lowest ids
    seen = (scores == least).cumsum(-1, dtype=torch.int32)  # [R, V]
    return least[:, 0], (seen < equals).sum(-1)


# ------------------------------------------------------------ kernels

_STEP = tl.constexpr(sampling._STEP)  # the hash of `engine.sampling`
_MIX_0, _MIX_1 = tl.constexpr(sampling._MIX[0]), tl.constexpr(sampling._MIX[1])
_PURPOSE, _ROUND = tl.constexpr(sampling.CHOICE), tl.constexpr(0)


@triton.jit
def _mix(z):
    """splitmix64's finaliser. z uint64 of any shape: unsigned, so that shifts are logical and products wrap."""
    z = (z ^ (z >> 30)) * _MIX_0
    z = (z ^ (z >> 27)) * _MIX_1
    return z ^ (z >> 31)


@triton.jit
def _key(seed, position):
    """`sampling.key(seed, position, CHOICE)`. Both int64 -> uint64."""
    state = _mix((seed.to(tl.uint64) ^ _PURPOSE) + _STEP)
    state = _mix((state ^ _ROUND) + _STEP)
    return _mix((state ^ position.to(tl.uint64)) + _STEP)


@triton.jit
def _gumbel(key, tokens):
    """`sampling.gumbel`. key uint64, tokens [BLOCK] -> [BLOCK] float64."""
    bits = _mix(tokens.to(tl.uint64) * _STEP + key) >> 32  # [BLOCK]
    return -tl.log(-tl.log((bits.to(tl.float64) + 0.5) / 4294967296.0))


@triton.jit
def _highest(values):
    """The largest of [N] float32, NaN if one of them is: the hardware's maximum ignores NaN."""
    has_nan = tl.max((values != values).to(tl.int32), 0)
    return tl.where(has_nan > 0, float("nan"), tl.max(values, 0))


@triton.jit
def _choose_in_block(
    logits, stride,  # [R, V] float32, and from row to row
    seed, position, temperature, floor, tie,  # [R] as in `Laws` and `floors`; floor and tie are read if FILTERED
    best, ids, highs, mass,  # [R, blocks] out, as in `choose`
    vocabulary, FILTERED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One block of one row: its best noised score, the first id that has it, and its mass in the softmax."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    tokens = block * BLOCK + tl.arange(0, BLOCK)  # [BLOCK] int32
    raw = tl.load(logits + row * stride + tokens, mask=tokens < vocabulary, other=-float("inf"))  # [BLOCK]
    row_temperature = tl.load(temperature + row)
    scores = raw.to(tl.float64)  # [BLOCK]
    if row_temperature > 0:
        scores = scores / row_temperature
    kept = raw == raw  # [BLOCK] NaN is never chosen: the highest logit reports it
    if FILTERED:
        least = tl.load(floor + row)
        kept = kept & ((scores > least) | ((scores == least) & (tokens <= tl.load(tie + row))))
    if row_temperature > 0:
        scores += _gumbel(_key(tl.load(seed + row), tl.load(position + row)), tokens)
    scores = tl.where(kept, scores, -float("inf"))
    top = tl.max(scores, 0)
    behind = tl.where(scores == top, 0.0, scores - top).to(tl.float32)  # [BLOCK]; inf - inf is NaN
    share = tl.where(scores > -float("inf"), tl.exp(behind), 0.0)  # [BLOCK]
    at = row * tl.num_programs(1) + block
    tl.store(best + at, top)
    tl.store(ids + at, tl.min(tl.where(scores == top, tokens, vocabulary), 0))
    tl.store(highs + at, _highest(raw))
    tl.store(mass + at, tl.sum(share, 0))


@triton.jit
def _merge_blocks(
    best, ids, highs, mass,  # [R, blocks] from `_choose_in_block`
    choices, highest, confidence,  # [R] out
    blocks, WIDTH: tl.constexpr,
):  # fmt: skip
    """One row from its blocks, always reduced in the same order: WIDTH depends on the vocabulary alone."""
    row, block = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    at, inside = row * blocks + block, block < blocks  # [WIDTH]
    scores = tl.load(best + at, mask=inside, other=-float("inf"))  # [WIDTH]
    first = tl.load(ids + at, mask=inside, other=2147483647)  # [WIDTH]
    raw = tl.load(highs + at, mask=inside, other=-float("inf"))  # [WIDTH]
    share = tl.load(mass + at, mask=inside, other=0.0)  # [WIDTH]
    top = tl.max(scores, 0)
    behind = tl.where(scores == top, 0.0, scores - top).to(tl.float32)  # [WIDTH]
    total = tl.sum(share * tl.exp(behind), 0)
    tl.store(choices + row, tl.min(tl.where(scores == top, first, 2147483647), 0).to(tl.int64))
    tl.store(highest + row, _highest(raw))
    tl.store(confidence + row, tl.where(total > 0, 1.0 / total, 0.0))  # no mass if no token can be chosen
