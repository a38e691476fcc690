"""Matrices of trained drafters in GGUF's blocks: four or eight bits for a weight, a scale for 32 or 256 of them.

`encode` rounds a matrix so that its products change least: each block's numbers by least squares, and, where the second
moments of the inputs are known, each rounding error made good by the columns that are not rounded yet (GPTQ). Rounding
alone costs a head a twentieth of its accepted tokens at four bits, this next to nothing (docs/log). Promise: a decoded
matrix is what the format says, bit for bit. It knows numbers, not what they are weights of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants
from torch import Tensor

from ..errors import ModelError

_RANGES = (1.05, 1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)  # shares that are tried: clipping the largest weight may pay
_ROWS = 4096  # encoded at once
_DAMPING = 0.05  # of each input's own moment: text that was not seen must not matter too much


def block_size(kind: str) -> tuple[int, int]:
    """Inputs and bytes of a block."""
    inputs, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    return int(inputs), int(size)


@dataclass(frozen=True)
class BlockTensor:
    """A matrix [N, K] in blocks; it has what readers of weights use of a tensor."""

    raw: Tensor  # [N, bytes] uint8, as in a GGUF file
    kind: str  # as GGUF names it

    @staticmethod
    def checked(raw: Tensor, kind: str, name: str) -> BlockTensor:
        """Of bytes from a file; raises for anything but whole blocks."""
        if raw.dtype is not torch.uint8 or raw.dim() != 2 or raw.shape[1] % block_size(kind)[1]:
            raise ModelError(f"{name} is not in whole blocks of {kind}; get the file again.")
        return BlockTensor(raw, kind)

    @property
    def shape(self) -> torch.Size:
        inputs, size = block_size(self.kind)
        return torch.Size((self.raw.shape[0], self.raw.shape[1] // size * inputs))

    def to(self, *where: Any) -> Tensor:
        """In floats, with the arguments of `Tensor.to`."""
        moved: Tensor = self.float().to(*where)
        return moved

    def float(self) -> Tensor:
        return torch.from_numpy(quants.dequantize(self.raw.numpy(), GGMLQuantizationType[self.kind]))


class UnreadBlocks(BlockTensor):
    """A matrix that is read when its bytes are used, if they ever are."""

    def __init__(self, read: Callable[[], Tensor], kind: str, shape: Iterable[int]) -> None:
        """read: gives the bytes [N, bytes]; shape: of the weights."""
        vars(self).update(kind=kind, _read=read, _shape=torch.Size(shape))

    @cached_property
    def raw(self) -> Tensor:
        raw: Tensor = vars(self)["_read"]()
        return raw

    @property
    def shape(self) -> torch.Size:
        shape: torch.Size = vars(self)["_shape"]
        return shape


class _Grid(NamedTuple):
    """The numbers that blocks can represent: step * q + start."""

    step: Tensor  # [N, 1] or [N, inputs]
    start: Tensor
    header: Tensor  # [N, bytes] uint8: what says so

    def nearest(self, w: Tensor, least: int, most: int) -> Tensor:
        return ((w - self.start) * _inverse(self.step)).round().clamp(least, most)


class _Format(NamedTuple):
    fit: Callable[[Tensor, Tensor], _Grid]  # of weights [N, inputs] and the importance of each input [inputs]
    pack: Callable[[Tensor], Tensor]  # q [N, inputs] -> bytes
    least: int  # q
    most: int


def encode(weight: Tensor, kind: str, moments: Tensor | None = None) -> BlockTensor:
    """Floats [N, K] in blocks; K must be whole ones. moments [K, K]: the mean of xᵀx over the inputs x, if known."""
    inputs, _ = block_size(kind)
    if weight.dim() != 2 or weight.shape[1] % inputs:
        shape = " x ".join(map(str, weight.shape))
        raise ModelError(f"A tensor of {shape} numbers is not in whole blocks of {inputs}, as {kind} needs.")
    weight, feedback, importance = weight.detach().float(), None, torch.ones(weight.shape[1], device=weight.device)
    if moments is not None:
        importance, feedback = moments.diagonal().float().clamp(min=1e-12), _feedback(moments).to(weight.device)
    parts = [_encode_rows(rows.clone(), kind, importance, feedback) for rows in weight.split(_ROWS)]
    return BlockTensor(torch.cat(parts).cpu().contiguous(), kind)


def narrowed(tensor: BlockTensor, kind: str) -> BlockTensor:
    """The same in blocks of this kind, once its bytes are used; itself where that saves nothing or does not fit."""
    (inputs, size), (old_inputs, old_size) = block_size(kind), block_size(tensor.kind)
    if tensor.shape[1] % inputs or size * old_inputs >= old_size * inputs:
        return tensor

    def read() -> Tensor:
        parts = tensor.raw.split(_ROWS)  # their floats take several times the memory
        return torch.cat([encode(BlockTensor(part, tensor.kind).float(), kind).raw for part in parts])

    return UnreadBlocks(read, kind, tensor.shape)


def _feedback(moments: Tensor) -> Tensor:
    """The upper Cholesky factor of the inverse moments [K, K]: row j says how later columns make good an error in j."""
    own = moments.diagonal().double()
    damped = moments.double() + torch.diag(_DAMPING * (own + own.median()) + 1e-9)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    upper: Tensor = torch.linalg.cholesky(inverse, upper=True).float()
    return upper


def _encode_rows(w: Tensor, kind: str, importance: Tensor, feedback: Tensor | None) -> Tensor:
    """[N, K] -> [N, bytes]. Columns of w that are not encoded yet change."""
    (n, _), format, parts = block_size(kind), FORMATS[kind], list[Tensor]()
    for block, weights in zip(w.split(n, 1), importance.split(n), strict=True):
        grid, at = format.fit(block, weights), len(parts) * n
        if feedback is None:
            q = grid.nearest(block, format.least, format.most)
        else:
            q, errors = _with_feedback(block, grid, format, feedback[at : at + n, at : at + n])
            w[:, at + n :] -= errors @ feedback[at : at + n, at + n :]
        parts.append(torch.cat([grid.header, format.pack(q)], 1))
    return torch.cat(parts, 1)


def _with_feedback(w: Tensor, grid: _Grid, format: _Format, feedback: Tensor) -> tuple[Tensor, Tensor]:
    """One block, column by column: q [N, n], and the errors [N, n] in units of `feedback`'s diagonal."""
    q, errors = torch.empty_like(w), torch.empty_like(w)
    steps, starts = grid.step.expand_as(w), grid.start.expand_as(w)
    for j in range(w.shape[1]):
        column = _Grid(steps[:, j], starts[:, j], grid.header)
        q[:, j] = column.nearest(w[:, j], format.least, format.most)
        errors[:, j] = (w[:, j] - column.step * q[:, j] - column.start) / feedback[j, j]
        w[:, j + 1 :] -= errors[:, j : j + 1] * feedback[j, j + 1 :]
    return q, errors


# ------------------------------------------------------------ formats


def _halves(x: Tensor) -> Tensor:
    """[N] -> [N, 2]: the bytes of 16-bit floats."""
    return x.half()[:, None].view(torch.uint8)


def _nibbles(q: Tensor) -> Tensor:
    """[..., 2n] numbers below 16 -> [..., n]: the first half is low."""
    low, high = q.to(torch.uint8).chunk(2, -1)
    return low | high << 4


def _inverse(d: Tensor) -> Tensor:
    return torch.where(d == 0, 0.0, 1 / d)


def _fit_q8_0(w: Tensor, importance: Tensor) -> _Grid:
    d = (w.abs().amax(1) / 127).half().float()
    return _Grid(d[:, None], torch.zeros_like(d)[:, None], _halves(d))


def _fit_q4_0(w: Tensor, importance: Tensor) -> _Grid:
    """w = d (q - 8); the largest weight decides which side has eight levels."""
    extreme = w.gather(1, w.abs().argmax(1, keepdim=True))[:, 0] / -8
    best, least = extreme, torch.full_like(extreme, torch.inf)
    for share in _RANGES:
        q = (w * _inverse(share * extreme)[:, None]).round().clamp(-8, 7)
        d = (importance * w * q).sum(1) * _inverse((importance * q * q).sum(1))
        error = (importance * (w - d[:, None] * q).square()).sum(1)
        best, least = torch.where(error < least, d, best), torch.minimum(error, least)
    d = best.half().float()
    return _Grid(d[:, None], torch.zeros_like(d)[:, None], _halves(d))


def _fit_q4_1(w: Tensor, importance: Tensor) -> _Grid:
    d, m = (x.half().float() for x in _lines(w, importance))
    return _Grid(d[:, None], m[:, None], torch.cat([_halves(d), _halves(m)], 1))


def _fit_q4_k(w: Tensor, importance: Tensor) -> _Grid:
    """w = d scale q - dmin least: eight sub-blocks, with six bits for each scale and each least value."""
    steps, starts = _lines(w.view(-1, 8, 32), importance.view(8, 32), below_zero=True)  # [N, 8]
    d, dmin = ((x.amax(1) / 63).half().float() for x in (steps, -starts))  # [N]
    scale = (steps * _inverse(d)[:, None]).round().clamp(0, 63)
    least = (-starts * _inverse(dmin)[:, None]).round().clamp(0, 63)
    header = torch.cat([_halves(d), _halves(dmin), _six_bits(scale.to(torch.uint8), least.to(torch.uint8))], 1)
    step, start = (x.repeat_interleave(32, 1) for x in (d[:, None] * scale, -dmin[:, None] * least))  # [N, 256]
    return _Grid(step, start, header)


def _lines(w: Tensor, importance: Tensor, below_zero: bool = False) -> tuple[Tensor, Tensor]:
    """d and m [..] for which d q + m, 0 <= q < 16, is nearest to w [.., n]; `below_zero`: m is not positive."""
    low, high, total = w.amin(-1), w.amax(-1), importance.sum(-1)
    low = low.clamp(max=0) if below_zero else low
    d, m, least = (high - low) / 15, low, torch.full_like(low, torch.inf)
    for share in _RANGES:
        step, start = share * (high - low) / 15, low + (1 - share) / 2 * (high - low)
        start = start.clamp(max=0) if below_zero else start
        q = ((w - start[..., None]) * _inverse(step)[..., None]).round().clamp(0, 15)
        mean, centre = (importance * q).sum(-1) / total, (importance * w).sum(-1) / total
        away = importance * (q - mean[..., None])
        slope = (away * (w - centre[..., None])).sum(-1) * _inverse((away * (q - mean[..., None])).sum(-1))
        start = centre - slope * mean
        if below_zero:
            through_zero = (importance * q * w).sum(-1) * _inverse((importance * q * q).sum(-1))
            slope, start = torch.where(start > 0, through_zero, slope), start.clamp(max=0)
        error = (importance * (w - slope[..., None] * q - start[..., None]).square()).sum(-1)
        better = (error < least) & (slope > 0)
        d, m, least = (torch.where(better, new, old) for new, old in ((slope, d), (start, m), (error, least)))
    return d, m


def _six_bits(scale: Tensor, least: Tensor) -> Tensor:
    """[N, 8] twice -> [N, 12]: the last four of each have their upper two bits above the first four."""
    lower = scale[:, 4:] & 15 | (least[:, 4:] & 15) << 4
    first, second = (x[:, :4] | x[:, 4:] >> 4 << 6 for x in (scale, least))
    return torch.cat([first, second, lower], 1)


FORMATS = {  # that can be written; others are only read
    "Q8_0": _Format(_fit_q8_0, lambda q: q.to(torch.int8).view(torch.uint8), -127, 127),
    "Q4_1": _Format(_fit_q4_1, _nibbles, 0, 15),
    "Q4_0": _Format(_fit_q4_0, lambda q: _nibbles(q + 8), -8, 7),
    "Q4_K": _Format(_fit_q4_k, lambda q: _nibbles(q.view(-1, 4, 64)).flatten(1), 0, 15),
}
