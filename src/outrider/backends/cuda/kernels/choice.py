"""Choices on the GPU: the next token of many rows at once, the one that `sampling.choose` would take.

The promise: a row's choice is a pure function of its logits and its law. It depends on no other row, on no batch size
and on no order of threads: noise is hashed as in `sampling`, floats are reduced in an order that the vocabulary alone
decides, and whatever torch sums for us is whole numbers, which come out the same in any order. Nothing here waits for
the device or looks at its values from the host, so a call can be captured in a CUDA graph.

It knows temperature, top-k, top-p, min-p and a seed. It knows no bias, no penalties, no bans and no sequences.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ....engine import sampling

try:
    import triton
    import triton.language as tl
except ImportError:  # the module can be looked at everywhere; only `choose` needs triton
    triton = tl = None

BLOCK = 1024  # ids that one program looks at; enough programs to fill a GPU from a single row


@dataclass(frozen=True)
class Laws:
    """How each row chooses. The tensors stay where they are between calls; a captured graph reads their values."""

    seed: Tensor  # [R] int64
    position: Tensor  # [R] int64, of the token to be chosen: `sampling.key`'s position
    temperature: Tensor  # [R] float64, 0 is greedy
    top_k: Tensor  # [R] int64, 0 is off
    top_p: Tensor  # [R] float64, 1 is off
    min_p: Tensor  # [R] float64, 0 is off


def choose(logits: Tensor, laws: Laws, filtered: bool, block: int = BLOCK) -> tuple[Tensor, Tensor, Tensor]:
    """Each row's choice [R] int64, highest raw logit [R] float32, and confidence in the choice [R] float32.

    logits [R, V] float32, rows at any stride. Without `filtered`, top-k, top-p and min-p are not looked at. The highest
    logit is NaN if any logit of the row is, and -inf if there is nothing to choose; the choice then means nothing, but
    is an id. Confidence is the chosen token's softmax among the noised scores, as `sampling.ranked` reports it.
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
    # [R] and [R]; any two pointers will do where the kernel is compiled not to read them
    floor, tie = floors(logits, laws) if filtered else (laws.temperature, laws.seed)
    law = (laws.seed, laws.position, laws.temperature, floor, tie)
    found = (best, ids, highs, mass)
    # Unfused: which product a compiler folds into which sum may differ between the two kinds of kernel, and a row
    # must not notice that another row has a filter.
    exact = {"enable_fp_fusion": False}
    _look[(rows, blocks)](logits, logits.stride(0), *law, *found, vocabulary, filtered, block, **exact)
    _join[(rows,)](*found, choices, highest, confidence, blocks, triton.next_power_of_2(blocks), **exact)
    return choices, highest, confidence


# ---------------------------------------------------------------- what top-k, top-p and min-p leave over


def floors(logits: Tensor, laws: Laws) -> tuple[Tensor, Tensor]:
    """Where each row's candidates begin: floor [R] float64, tie [R] int64. logits [R, V].

    A token is a candidate if its score is above the floor, or equal to it and its id at most the tie. All three filters
    keep the best scores, so together they are as strict as the strictest.
    """
    vocabulary = logits.shape[-1]
    divisor = torch.where(laws.temperature > 0, laws.temperature, 1.0)[:, None]  # [R, 1] float64
    # Dividing keeps the order, so float32 is sorted, at half the price. Only values are used: where equal scores lie
    # in the sorted row says nothing about ids.
    ordered = torch.sort(logits, dim=-1, descending=True).values.double() / divisor  # [R, V] scores, best first
    limited = (laws.top_k > 0) & (laws.top_k < vocabulary)  # [R] bool
    last = torch.where(limited, laws.top_k - 1, 0)[:, None]  # [R, 1] place of the k-th best
    floor = torch.where(limited, ordered.gather(1, last)[:, 0], -math.inf)  # [R] float64
    tie = torch.full_like(laws.top_k, vocabulary)  # [R] int64, every equal counts
    nucleus, nucleus_tie = _nucleus(logits.double() / divisor, ordered, floor, laws.top_p)  # [R] and [R]
    narrowed = laws.top_p < 1  # [R] bool
    floor, tie = torch.where(narrowed, nucleus, floor), torch.where(narrowed, nucleus_tie, tie)
    least = torch.where(laws.min_p > 0, ordered[:, 0] + torch.log(laws.min_p), -math.inf)  # [R] float64
    tie = torch.where(least > floor, vocabulary, tie)
    floor = torch.maximum(least, floor)
    return torch.where(laws.temperature > 0, floor, -math.inf), tie


def _nucleus(scores: Tensor, ordered: Tensor, floor: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """The smallest set with this much of the mass at or above the floor: its least score [R] and the last id [R] there.

    scores [R, V] by id; ordered [R, V] best first; floor [R] float64; top_p [R] float64.

    Mass is counted in whole numbers. A scan of floats would round in an order that hangs on the batch (torch scans one
    row in another way than two), and even on the moment. A unit is 2^-44 of the likeliest token at V = 256k: what gets
    lost is far less than what float32 logits have lost before. Only where equal weights meet top_p to the last bit (9
    of 10 equals at 0.9) may `sampling`, whose sum of tenths falls short there, keep one token more.
    """
    vocabulary = scores.shape[-1]
    unit = 2.0 ** (62 - (vocabulary - 1).bit_length())  # so that V tokens of weight 1 do not overflow
    behind = torch.where(ordered == ordered[:, :1], 0.0, ordered - ordered[:, :1])  # [R, V]; inf - inf is no number
    weight = torch.where(ordered >= floor[:, None], torch.exp(behind), 0.0)  # [R, V] in [0, 1]
    mass = (weight * unit).round().long().cumsum(-1)  # [R, V] int64, of the tokens up to here
    needed = mass[:, -1:].double() * top_p[:, None]  # [R, 1]
    enough = ((mass.double() < needed).sum(-1, keepdim=True) + 1).clamp(max=vocabulary)  # [R, 1] tokens in the set
    least = ordered.gather(1, enough - 1)  # [R, 1] score of the last one
    equals = enough - (ordered > least).sum(-1, keepdim=True)  # [R, 1] how many with that score: the lowest ids
    seen = (scores == least).cumsum(-1, dtype=torch.int32)  # [R, V]
    return least[:, 0], (seen < equals).sum(-1)


# ---------------------------------------------------------------- kernels


def _jit(kernel: Any) -> Any:
    return kernel if triton is None else triton.jit(kernel)


def _constant(word: int) -> Any:
    return word if tl is None else tl.constexpr(word)


_STEP = _constant(sampling._STEP)  # the hash is `sampling`'s, constants and all
_MIX_0, _MIX_1 = _constant(sampling._MIX[0]), _constant(sampling._MIX[1])
_PURPOSE, _ROUND = _constant(sampling.CHOICE), _constant(0)


@_jit
def _mix(z):
    """splitmix64's finish. z uint64 of any shape: unsigned, so that shifts are logical and products wrap."""
    z = (z ^ (z >> 30)) * _MIX_0
    z = (z ^ (z >> 27)) * _MIX_1
    return z ^ (z >> 31)


@_jit
def _key(seed, position):
    """`sampling.key(seed, position, CHOICE)`. Both int64 -> uint64."""
    state = _mix((seed.to(tl.uint64) ^ _PURPOSE) + _STEP)
    state = _mix((state ^ _ROUND) + _STEP)
    return _mix((state ^ position.to(tl.uint64)) + _STEP)


@_jit
def _gumbel(key, tokens):
    """`sampling.gumbel`. key uint64, tokens [BLOCK] -> [BLOCK] float64."""
    bits = _mix(tokens.to(tl.uint64) * _STEP + key) >> 32  # [BLOCK]
    return -tl.log(-tl.log((bits.to(tl.float64) + 0.5) / 4294967296.0))


@_jit
def _highest(values):
    """The largest of [N] float32, NaN if one of them is: the hardware's maximum would pass over it."""
    broken = tl.max((values != values).to(tl.int32), 0)
    return tl.where(broken > 0, float("nan"), tl.max(values, 0))


@_jit
def _look(
    logits,  # [R, V] float32
    stride,  # from row to row
    seed,  # [R] int64
    position,  # [R] int64
    temperature,  # [R] float64
    floor,  # [R] float64, read if FILTERED
    tie,  # [R] int64, read if FILTERED
    best,  # [R, blocks] float64, out
    ids,  # [R, blocks] int32, out
    highs,  # [R, blocks] float32, out
    mass,  # [R, blocks] float32, out
    vocabulary,
    FILTERED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One block of one row: its best noised score, who has it, and what it adds to the softmax."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    tokens = block * BLOCK + tl.arange(0, BLOCK)  # [BLOCK] int32
    raw = tl.load(logits + row * stride + tokens, mask=tokens < vocabulary, other=-float("inf"))  # [BLOCK]
    heat = tl.load(temperature + row)
    scores = raw.to(tl.float64)  # [BLOCK]
    if heat > 0:
        scores = scores / heat
    kept = raw == raw  # [BLOCK] NaN never wins: the caller hears of it by the highest logit
    if FILTERED:
        least = tl.load(floor + row)
        kept = kept & ((scores > least) | ((scores == least) & (tokens <= tl.load(tie + row))))
    if heat > 0:
        scores += _gumbel(_key(tl.load(seed + row), tl.load(position + row)), tokens)
    scores = tl.where(kept, scores, -float("inf"))
    leader = tl.max(scores, 0)
    behind = tl.where(scores == leader, 0.0, scores - leader).to(tl.float32)  # [BLOCK]; inf - inf is no number
    share = tl.where(scores > -float("inf"), tl.exp(behind), 0.0)  # [BLOCK]
    at = row * tl.num_programs(1) + block
    tl.store(best + at, leader)
    tl.store(ids + at, tl.min(tl.where(scores == leader, tokens, vocabulary), 0))
    tl.store(highs + at, _highest(raw))
    tl.store(mass + at, tl.sum(share, 0))


@_jit
def _join(
    best,  # [R, blocks] float64
    ids,  # [R, blocks] int32
    highs,  # [R, blocks] float32
    mass,  # [R, blocks] float32
    choices,  # [R] int64, out
    highest,  # [R] float32, out
    confidence,  # [R] float32, out
    blocks,
    WIDTH: tl.constexpr,
):
    """One row from its blocks, always reduced in the same order: WIDTH hangs on the vocabulary alone."""
    row, place = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    at, inside = row * blocks + place, place < blocks  # [WIDTH]
    scores = tl.load(best + at, mask=inside, other=-float("inf"))  # [WIDTH]
    first = tl.load(ids + at, mask=inside, other=2147483647)  # [WIDTH]
    raw = tl.load(highs + at, mask=inside, other=-float("inf"))  # [WIDTH]
    share = tl.load(mass + at, mask=inside, other=0.0)  # [WIDTH]
    leader = tl.max(scores, 0)
    behind = tl.where(scores == leader, 0.0, scores - leader).to(tl.float32)  # [WIDTH]
    total = tl.sum(share * tl.exp(behind), 0)
    tl.store(choices + row, tl.min(tl.where(scores == leader, first, 2147483647), 0).to(tl.int64))
    tl.store(highest + row, _highest(raw))
    tl.store(confidence + row, tl.where(total > 0, 1.0 / total, 0.0))  # no mass where nothing can be chosen
